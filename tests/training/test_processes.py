"""Two processes on one CPU teach what one does; a killed one ends the run with a line and a checkpoint that it can go on from."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.ranks import run_ranks
from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.training import train

SCRIPT = Path(__file__).with_name("rank.py")


@pytest.fixture
def launched(saved_pipe, tmp_path):
    """Runs a config on so many processes: exit code and answer of each, None where a process left none."""

    def call(config, ranks: int, *options: str, dies: str | None = None) -> list[tuple[int, dict | None]]:
        told = tmp_path / f"{Path(config.output_dir).name}-{ranks}.json"
        told.write_text(json.dumps(config.to_dict()))
        answers = [tmp_path / f"{told.stem}-rank{rank}.json" for rank in range(ranks)]

        def words(rank: int) -> list[object]:
            last = [dies] if dies and rank == ranks - 1 else []
            return [saved_pipe, told, answers[rank], *options, *last]

        ended = run_ranks(SCRIPT, words, ranks)
        codes = [code for code, _ in ended]
        assert dies or codes == [0] * ranks, ended
        return [(code, json.loads(path.read_text()) if path.exists() else None) for code, path in zip(codes, answers, strict=True)]

    return call


OPTIONS = {"max_train_steps": 6, "gradient_accumulation_steps": 2, "mounts": ("input", "span", "value"), "bands": 2, "caption_dropout": 0.3}
OPTIONS |= {"attention_rank": 1, "feedforward_rank": 1, "share": "block", "validation_loss_steps": 3, "validation_loss_samples": 4}


def test_two_processes_teach_what_one_does(launched, config, tmp_path):
    """The same global batch: noise, timestep and caption belong to a sample's number, whoever takes it."""
    one, two = (
        config(**OPTIONS, train_batch_size=size, output_dir=str(tmp_path / name), collages=0) for size, name in ((4, "one"), (2, "two"))
    )
    ((_, single),) = launched(one, 1, "plain")
    (_, first), (_, second) = launched(two, 2, "plain")
    assert single and first and second and first == second and first["losses"] == pytest.approx(single["losses"], rel=1e-5)
    (mine, state), (theirs, other) = (load_checkpoint(tmp_path / name / "checkpoint-6") for name in ("one", "two"))
    assert set(mine) == set(theirs)
    for name in mine:
        largest = max(float(mine[name].abs().max()), 1e-6)
        torch.testing.assert_close(mine[name] / largest, theirs[name] / largest, rtol=1e-3, atol=1e-4)
    assert [step for step, _ in state["measured"]] == [3, 6]
    assert [loss for _, loss in other["measured"]] == pytest.approx([loss for _, loss in state["measured"]], rel=1e-5)
    assert len((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()) == 6
    Concept.load(tmp_path / "two" / "concept.safetensors")


@pytest.mark.slow
def test_with_the_quantiser_the_curves_lie_together(launched, config, tmp_path):
    options = {**OPTIONS, "max_train_steps": 12}
    one, two = (config(**options, train_batch_size=size, output_dir=str(tmp_path / name)) for size, name in ((4, "one"), (2, "two")))
    ((_, single),) = launched(one, 1)
    (_, first), _ = launched(two, 2)
    assert single and first and first["losses"] == pytest.approx(single["losses"], rel=0.01)


def test_a_killed_process_ends_the_run_with_a_line_and_a_checkpoint(launched, pipe, config, tmp_path):
    options = {"train_batch_size": 1, "lr_scheduler": "constant", "output_dir": str(tmp_path / "out"), "max_train_steps": 8}
    (code, told), (killed, nothing) = launched(config(**options, checkpointing_steps=2), 2, dies="dies=6")
    assert killed == -9 and nothing is None and code == 0 and told is not None
    assert told["error"].startswith("another process of this run has ended (") and "\n" not in told["error"]
    assert told["error"].endswith("the run stands at step 5: go on with --resume_from_checkpoint latest")
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [2, 4, 5]
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 5
    AcceleratorState._reset_state(reset_partial_state=True)
    result = train(pipe, config(**options, resume_from_checkpoint="latest"), progress=False)
    assert result.steps == 8 and result.losses[:5] == tuple(load_checkpoint(tmp_path / "out" / "checkpoint-5")[1]["losses"])


def test_a_process_whose_samples_read_no_row_goes_on_with_the_others(launched, config, tmp_path):
    """With rows in one band alone, one process of two never sees a timestep of it: its samples lie in the other half of the schedule."""
    options = {"max_train_steps": 3, "train_batch_size": 1, "mounts": ("context.0.key.2of2",), "share": "none", "caption_dropout": 0.0}
    two = config(**options, output_dir=str(tmp_path / "two"))
    (_, first), (_, second) = launched(two, 2)
    assert first and first == second and len(first["losses"]) == 3
    assert load_checkpoint(tmp_path / "two" / "checkpoint-3")[0]["master.rows"].abs().max() > 0


def test_a_batch_of_one_process_may_read_no_row_either(pipe, config):
    seen = []
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: seen.extend(args[1].tolist()))
    try:
        result = train(pipe, config(max_train_steps=6, train_batch_size=1, mounts=("context.0.key.2of2",)), progress=False)
    finally:
        handle.remove()
    assert result.steps == 6 and min(seen) < 500 <= max(seen)
