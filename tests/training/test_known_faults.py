"""Kinds of fault that users of other trainers reported, each over the whole kind: schedules that start anew, decay that reaches others,
limits that several processes keep at once."""

import json

import pytest
import torch

from tests.training.test_processes import launched  # noqa: F401
from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.run_config import SCHEDULES
from tiny_engram.training import train


@pytest.fixture
def rates(pipe, config, tmp_path):
    """The rate of each step of a run, as its metrics tell."""

    def taught(name: str, **changes) -> list[float]:
        train(pipe, config(output_dir=str(tmp_path / name), **changes), progress=False)
        return [json.loads(line)["lr"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return taught


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_starts_anew_on_resume(pipe, config, tmp_path, rates, schedule):
    options = {"lr_scheduler": schedule, "lr_warmup_steps": 2, "lr_num_cycles": 2, "max_train_steps": 6, "checkpointing_steps": 3}
    whole = rates("whole", **options)

    def stop(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    cut = config(output_dir=str(tmp_path / "cut"), **options)
    with pytest.raises(KeyboardInterrupt):
        train(pipe, cut, progress=False, on_step=stop)
    assert rates("cut", **options, resume_from_checkpoint="latest") == whole == [cut.learning_rate * cut.rate(step) for step in range(6)]
    (one, _), (two, _) = (load_checkpoint(tmp_path / name / "checkpoint-6") for name in ("whole", "cut"))
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["adamw", "prodigy"])
def test_no_decay_reaches_another_concept(tiny, pipe, adapter, config, folder, optimizer):
    """Of one that is loaded beside, called by the very captions, with rows and maps everywhere."""
    (folder / "0.txt").write_text("a {trigger} beside a bolo")
    other = tiny.concept(adapter, "bolo", config=config(mounts=("span", "value"), attention_rank=1, feedforward_rank=1).concept_config)
    tables = {role: {**place.mounts} for role, place in other.roles.items()}
    before = [rows.payload.clone() for place in tables.values() for rows in place.values()]
    adapter.load_concept(other)
    drawn = tiny.picture(pipe, "a bolo")
    options = {"mounts": ("span", "value"), "attention_rank": 1, "feedforward_rank": 1, "learning_rate": 0.5}
    train(pipe, config(optimizer=optimizer, adam_weight_decay=0.9, row_weight_decay=0.9, **options), progress=False)
    after = [rows.payload for place in adapter.concept("bolo").roles.values() for rows in place.mounts.values()]
    assert all(map(torch.equal, before, after)) and torch.equal(tiny.picture(pipe, "a bolo"), drawn)


def test_the_limit_is_kept_by_one_process_alone(launched, config, tmp_path):  # noqa: F811
    """Two that delete the same folders race; what is no checkpoint survives both."""
    odd = ("checkpoint-abc", "checkpoint-7.old")
    for name in odd:
        (tmp_path / "out" / name).mkdir(parents=True)
    told = config(train_batch_size=1, max_train_steps=6, checkpointing_steps=1, checkpoints_total_limit=1)
    (_, first), (_, second) = launched(told, 2)
    assert first and first == second and first["steps"] == 6
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [6] and load_checkpoint(tmp_path / "out" / "checkpoint-6")
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert left == {"checkpoint-6", *odd}
