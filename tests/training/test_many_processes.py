"""Runs over many concepts that are killed at any moment, or that several processes share."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.concept import Concept

WORDS = ("zqx", "vortex cat", "bolo")
HERE = Path(__file__).parent


@pytest.fixture
def concepts(config, tmp_path):
    def make(below: str, count: int, **changes):
        return [config(**changes, trigger=word, seed=k, output_dir=str(tmp_path / below / word)) for k, word in enumerate(WORDS[:count])]

    return make


@pytest.fixture
def killer(saved_pipe):
    """Runs configs in a process of its own, killed after some seconds; returns how it ended."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "killed_runs.py"), str(saved_pipe)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    asked, answers = process.stdin, process.stdout
    assert asked is not None and answers is not None

    def call(configs, seconds: float | None) -> int:
        print(json.dumps({"config": [config.to_dict() for config in configs], "seconds": seconds}), file=asked, flush=True)
        return json.loads(answers.readline())["code"]

    yield call
    asked.close()
    process.wait(timeout=60)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_the_same_command_goes_on_after_a_kill(killer, concepts, kills):
    """Two of the three share batches. Checkpoints of all steps, so that every moment of a step is one of a file too."""
    options = {"max_train_steps": 10 * kills, "checkpointing_steps": 1, "checkpoints_total_limit": 2, "validation_loss_steps": 4}
    options |= {"validation_loss_samples": 2}
    configs, moments = concepts("out", 3, **options), random.Random(kills)
    codes = [killer(configs, moments.uniform(0.5, 1.5)) for _ in range(kills)]
    assert set(codes) <= {0, -signal.SIGKILL} and -signal.SIGKILL in codes
    for config in configs:
        for step, folder in list_checkpoints(Path(config.output_dir)):
            tensors, state = load_checkpoint(folder)
            assert tensors and state["step"] == len(state["losses"]) == step
    assert killer(configs, None) == 0
    whole = concepts("whole", 3, **options)
    assert killer(whole, None) == 0
    for one, other in zip(configs, whole, strict=True):
        assert Concept.load(one.concept_path).recipe["step"] == 10 * kills
        (_, mine), (_, theirs) = (list_checkpoints(Path(config.output_dir))[-1] for config in (one, other))
        # batches of other sizes round in other ways
        assert load_checkpoint(mine)[1]["losses"] == pytest.approx(load_checkpoint(theirs)[1]["losses"], rel=0.01)
        out = Path(one.output_dir)
        assert len((out / "metrics.jsonl").read_text().splitlines()) == 10 * kills and not list(out.rglob(".*.tmp"))


def test_two_processes_teach_two_concepts_as_one_does(saved_pipe, concepts, tmp_path):
    """With rows that the samples of one process never read, for which the other may not wait."""
    options = {"max_train_steps": 3, "mounts": ("span", "context.0.key.2of2"), "share": "none"}
    answers = []
    for ranks, size in ((1, 4), (2, 2)):
        told = tmp_path / f"{ranks}.json"
        told.write_text(json.dumps([c.to_dict() for c in concepts(f"of-{ranks}", 2, train_batch_size=size, **options)]))
        ended = run_ranks(HERE / "rank.py", lambda rank, told=told: [saved_pipe, told, told.with_suffix(f".{rank}"), "plain"], ranks)
        assert [code for code, _ in ended] == [0] * ranks, ended
        answers.append([json.loads(told.with_suffix(f".{rank}").read_text())["concepts"] for rank in range(ranks)])
    ((single,), (first, second)) = answers
    assert first == second and [each["error"] for each in first] == [None, None]
    for one, other in zip(single, first, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for word in WORDS[:2]:
        mine, theirs = (load_checkpoint(tmp_path / f"of-{ranks}" / word / "checkpoint-3")[0] for ranks in (1, 2))
        largest = float(mine["master.rows"].abs().max())
        torch.testing.assert_close(mine["master.rows"] / largest, theirs["master.rows"] / largest, rtol=1e-3, atol=1e-4)
