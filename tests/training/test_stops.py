"""Runs that are killed at any moment, that find no room on the disk or a clock that went back: nothing corrupt, nothing lost."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny_engram.checkpoints import list_checkpoints, load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import train
from tiny_engram.training.config import TrainConfig


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


@pytest.fixture
def killer(saved_pipe):
    """Runs a config in a process of its own, killed after some seconds; returns how it ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("killed_runs.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(saved_pipe)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    asked, answers = process.stdin, process.stdout
    assert asked is not None and answers is not None

    def call(config: TrainConfig, seconds: float | None) -> int:
        print(json.dumps({"config": config.to_dict(), "seconds": seconds}), file=asked, flush=True)
        return json.loads(answers.readline())["code"]

    yield call
    asked.close()
    process.wait(timeout=60)


def look_at(out: Path) -> int:
    """Everything that stands under its own name is whole; returns the step that a resume would begin at."""
    found = list_checkpoints(out)
    for step, folder in found:
        tensors, state = load_checkpoint(folder)
        assert state["step"] == len(state["losses"]) == step and tensors
        assert Concept.load(folder / "concept.safetensors").recipe["step"] == step and (folder / "config.yaml").stat().st_size > 100
    # nothing else passes for a checkpoint
    assert {p.name for p in out.glob("checkpoint-*")} == {folder.name for _, folder in found} | {"checkpoint-mine", "checkpoint-7.bak"}
    if (out / "best" / "concept.safetensors").exists():
        assert Concept.load(out / "best" / "concept.safetensors").recipe["validation_loss"] > 0
    if (out / "metrics.jsonl").exists():
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1)) and (not found or len(steps) >= found[-1][0])
    return found[-1][0] if found else 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(killer, config, tmp_path, kills):
    out, moments = tmp_path / "out", random.Random(kills)
    for odd in ("checkpoint-mine", "checkpoint-7.bak"):
        (out / odd).mkdir(parents=True)
    options = {"max_train_steps": 20 * kills, "checkpointing_steps": 1, "validation_loss_steps": 4, "validation_loss_samples": 2}
    options |= {"lr_scheduler": "cosine", "seed": 1, "checkpoints_total_limit": 2}
    going_on = config(**options, resume_from_checkpoint="latest")
    codes, steps = [], [0]
    for _ in range(kills):
        codes.append(killer(going_on, moments.uniform(0.3, 1.6)))
        steps.append(look_at(out))
        assert steps[-1] >= steps[-2]
    assert codes.count(-signal.SIGKILL) >= kills // 2 and set(codes) <= {0, -signal.SIGKILL} and steps[-1] > 0
    assert killer(going_on, None) == 0 and killer(config(**options, output_dir=str(tmp_path / "whole")), None) == 0
    assert look_at(out) == 20 * kills and not list(out.rglob(".*.tmp"))
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    last = f"checkpoint-{20 * kills}/state.safetensors"
    one, two = (load_checkpoint((folder / last).parent)[0] for folder in (out, tmp_path / "whole"))
    assert set(one) == set(two) and all(one[name].equal(two[name]) for name in one)


FULL = """
import json, resource, sys
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import TrainConfig, train

def fill(step, loss):
    if step == 3:  # from here on no file may grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

try:
    train(load_pipeline(sys.argv[1], device="cpu"), TrainConfig.from_dict(json.loads(sys.argv[2])), progress=False, on_step=fill)
except TinyEngramError as error:
    print(error)
"""


@pytest.mark.parametrize(("room", "words"), [(200, r"out/metrics\.jsonl: cannot write it \(File too large\) after step 4"),
                                             (2000, r"out/checkpoint-4: cannot write the checkpoint \(File too large\)")])  # fmt: skip
def test_a_disk_that_fills_up_is_one_line_and_the_run_goes_on_later(pipe, saved_pipe, config, tmp_path, room, words):
    options = {"max_train_steps": 6, "checkpointing_steps": 2, "checkpoints_total_limit": 1}
    whole = teach(pipe, config(**options, output_dir=str(tmp_path / "whole")))
    told = json.dumps(config(**options).to_dict())
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(saved_pipe), told, str(room)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    assert re.search(words, line) and ("free space" in line), line
    out = tmp_path / "out"
    assert [step for step, _ in list_checkpoints(out)] == [2] and not list(out.rglob(".*.tmp"))
    load_checkpoint(out / "checkpoint-2")
    resumed = teach(pipe, config(**options, resume_from_checkpoint="latest"))
    assert resumed.losses == whole.losses and (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_the_time_of_files_and_the_clock_decide_nothing(pipe, config, tmp_path, monkeypatch):
    whole = teach(pipe, config(max_train_steps=6, output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, config(max_train_steps=6, checkpointing_steps=1), on_step=stop_at(4))
    for step, folder in list_checkpoints(tmp_path / "out"):  # the oldest step is the newest file, in the future
        for path in (folder, *folder.iterdir()):
            os.utime(path, (4e9 - step * 1e6,) * 2)
    clock = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    resumed = teach(pipe, config(max_train_steps=6, checkpointing_steps=1, checkpoints_total_limit=2, resume_from_checkpoint="latest"))
    assert resumed.losses == whole.losses and resumed.seconds >= 0
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [5, 6]


def stop_at(last: int):
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    return on_step


def test_a_second_signal_waits_until_the_last_step_is_written(pipe, config, tmp_path, monkeypatch):
    from tiny_engram.training import run_files

    real = run_files.save_checkpoint

    def impatient(*args, **options):
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(run_files, "save_checkpoint", impatient)
        with pytest.raises(KeyboardInterrupt):
            teach(pipe, config(), on_step=stop_at(2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert load_checkpoint(tmp_path / "out" / "checkpoint-2")[1]["step"] == 2


def test_what_a_kill_left_half_written_is_swept_and_what_is_others_stays(pipe, config, tmp_path):
    out = tmp_path / "out"
    half = (".checkpoint-3.99.tmp", ".checkpoint-2.99.old.tmp")
    kept = ("checkpoint-x", ".checkpoint-4", "notes.tmp", ".mine.tmp", "checkpoint-1.tmp")
    for name in (*half, *kept):
        (out / name).mkdir(parents=True)
    (out / ".report.html.abc.tmp").write_text("half")
    teach(pipe, config(max_train_steps=1))
    names = {p.name for p in out.iterdir()}
    assert set(kept) < names and not names & {*half, ".report.html.abc.tmp"}


def test_a_folder_that_may_only_be_read(pipe, config, tmp_path, monkeypatch):
    """Whoever runs tests as root may write everywhere, so the system's answer is given by hand."""
    import errno
    import tempfile

    (tmp_path / "out").mkdir()

    def deny(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkstemp", deny)
    with pytest.raises(TinyEngramError, match=r"out: cannot write there \(Read-only file system\); choose another folder") as caught:
        teach(pipe, config())
    assert "\n" not in str(caught.value) and list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_may_not_be_searched(pipe, config, tmp_path, monkeypatch):
    """Nothing can be known of what is in it, not even whether the output folder is there."""
    import errno
    import tempfile

    closed, stat, make = tmp_path / "closed", os.stat, tempfile.mkstemp
    closed.mkdir()

    def deny(path, *args, **options):
        if str(path).startswith(f"{closed}{os.sep}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    def deny_new(*args, **options):
        if str(options["dir"]).startswith(str(closed)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return make(*args, **options)

    monkeypatch.setattr(os, "stat", deny)
    monkeypatch.setattr(tempfile, "mkstemp", deny_new)
    with pytest.raises(TinyEngramError, match=r"out: cannot write there \(Permission denied\); choose another folder") as caught:
        teach(pipe, config(output_dir=str(closed / "out")))
    monkeypatch.undo()
    assert "\n" not in str(caught.value) and list(closed.iterdir()) == []
