"""A denoiser in parts over two processes of one CPU teaches the same rows, and is whole again afterwards."""

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import train

SCRIPT = Path(__file__).with_name("shard_rank.py")
MOUNTS = {"mounts": ("input", "span", "value"), "bands": 2, "caption_dropout": 0.3, "share": "block", "attention_rank": 1}
MOUNTS |= {"feedforward_rank": 1, "max_train_steps": 4, "train_batch_size": 2, "lr_scheduler": "constant"}
LOOKED = {"validation_steps": 2, "validation_prompts": ("a {trigger}",), "validation_seeds": (3,), "checkpointing_steps": 2}
LOOKED |= {"validation_loss_steps": 2, "validation_loss_samples": 2}


@pytest.fixture
def launched(saved_pipe, tmp_path, monkeypatch):
    """Runs configs one after the other on two processes: exit code and answer of each."""

    def call(configs, last: tuple[str, ...] = (), *, parts: bool = True, script: Path = SCRIPT) -> list[tuple[int, dict | None]]:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", str(parts).lower())
        monkeypatch.setenv("FSDP_VERSION", "2")
        told = tmp_path / "told.json"
        told.write_text(json.dumps([config.to_dict() for config in configs] if script == SCRIPT else configs[0].to_dict()))
        answers = [told.with_suffix(f".{rank}.json") for rank in range(2)]
        ended = run_ranks(script, lambda rank: [saved_pipe, told, answers[rank], *(last if rank else ())], 2, seconds=90)
        for code, text in ended:
            assert last or code == 0, text
        return [(code, json.loads(path.read_text()) if path.exists() else None) for (code, _), path in zip(ended, answers, strict=True)]

    return call


def test_the_same_rows_as_with_the_whole_and_the_base_is_put_back(launched, config, tmp_path):
    """With mounts at all places and maps, pictures, checkpoints and losses on the way; twice on one pipeline, then with rows in one band
    alone, of which one process of two needs no gradient at all."""

    def configs(name: str):
        first = config(**MOUNTS, **LOOKED, output_dir=str(tmp_path / name))
        again = config(**MOUNTS, gradient_checkpointing=True, output_dir=str(tmp_path / f"{name}-again"))
        return first, again

    band = config(max_train_steps=3, train_batch_size=1, mounts=("context.0.key.2of2",), output_dir=str(tmp_path / "band"))
    (_, parts), (_, other) = launched([*configs("parts"), band])
    assert parts and other and "error" not in parts, parts
    assert parts["losses"] == other["losses"] and parts["changed"] == other["changed"] == []
    (_, whole), _ = launched(configs("whole"), parts=False)
    assert whole and "error" not in whole, whole
    for end, mine, theirs in zip(("", "-again"), parts["losses"], whole["losses"], strict=False):
        assert mine == pytest.approx(theirs, rel=1e-5)
        (values, state), (expected, wanted) = (load_checkpoint(tmp_path / f"{name}{end}" / "checkpoint-4") for name in ("parts", "whole"))
        for name in expected:
            largest = max(float(expected[name].abs().max()), 1e-6)
            torch.testing.assert_close(values[name] / largest, expected[name] / largest, rtol=1e-3, atol=1e-4)
        assert [loss for _, loss in state["measured"]] == pytest.approx([loss for _, loss in wanted["measured"]], rel=1e-5)
    assert parts["drawn"] == pytest.approx(whole["drawn"], rel=1e-6)
    assert len(parts["losses"][2]) == 3
    assert [step for step, _ in list_checkpoints(tmp_path / "parts")] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "parts").rglob("step-*.png")) == ["step-2.png", "step-4.png"]
    # between its blocks a process has its half, and what does not divide
    assert whole["held"] == whole["whole"] == parts["whole"] and parts["held"] <= 0.55 * parts["whole"]


def test_an_interrupted_process_leaves_a_checkpoint_and_a_base_that_says_so(launched, config, tmp_path):
    options = {"train_batch_size": 1, "lr_scheduler": "constant", "max_train_steps": 8, "checkpointing_steps": 2}
    (code, told), (_, last) = launched([config(**options)], ("interrupt=6",))
    assert code == 0 and last and last["error"] == "interrupted" and last["call"].endswith("load the pipeline again")
    assert told and told["error"].startswith("another process of this run has ended (")
    assert told["error"].endswith("the run stands at step 5: go on with --resume_from_checkpoint latest")
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [2, 4, 5]


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_a_line_and_a_checkpoint(launched, config, tmp_path):
    options = {"train_batch_size": 1, "lr_scheduler": "constant", "max_train_steps": 8, "checkpointing_steps": 2}
    (code, told), (killed, nothing) = launched([config(**options)], ("dies=6",), script=SCRIPT.with_name("rank.py"))
    assert killed == -9 and nothing is None and code == 0 and told is not None
    assert told["error"].endswith("the run stands at step 5: go on with --resume_from_checkpoint latest")
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [2, 4, 5]


def test_deepspeed_is_refused(pipe, config, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(TinyEngramError, match="launch with --use_fsdp to shard the frozen denoiser"):
        train(pipe, config(), progress=False)
