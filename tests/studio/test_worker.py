"""The process that teaches a job: what it writes, how it stops, that what goes on has the same bits, and that no kill loses a job."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.studio.job_folder import CANCEL, PAUSE, hold, read_state, stopped_at
from tiny_engram.studio.worker import Stop, main, newest_checkpoint, teach


class StopAt(Stop):
    """Asks for a stop, as the runner does, after so many steps of this process."""

    def __init__(self, folder: Path, file: str, steps: int) -> None:
        super().__init__(folder)
        self.file, self.left = file, steps

    def check(self):
        self.left -= 1
        if self.left == 0:
            (self.folder / self.file).touch()
        return super().check()


def equal(one: dict, two: dict) -> bool:
    def bits(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist()

    return set(one) == set(two) and all(bits(one[k]) == bits(two[k]) for k in one)


def same_work(one: Path, two: Path, steps: int) -> bool:
    """The last checkpoints and the concepts of two jobs hold the same bits, and their progress the same losses."""
    (first, told), (second, said) = (load_checkpoint(folder / "output" / f"checkpoint-{steps}") for folder in (one, two))
    files = [folder / "output" / "concept.safetensors" for folder in (one, two)]
    lines = [[json.loads(line)[:2] for line in (folder / "progress.jsonl").read_text().splitlines()] for folder in (one, two)]
    concepts = [Concept.load(file) for file in files]
    return (
        equal(first, second)
        and told["losses"] == said["losses"]
        and lines[0] == lines[1] == [[i, loss] for i, loss in enumerate(told["losses"], 1)]
        and equal(load_file(files[0]), load_file(files[1]))
        and concepts[0].describe() == concepts[1].describe()
        and concepts[0].thumbnail == concepts[1].thumbnail
    )


@pytest.fixture
def job(store, taught, few_steps):
    """job(**options) -> the folder of a new job."""
    return lambda **options: store.folder(store.create(taught, "zqx", preset="quick", options=few_steps(**options)).id)


def run(folder: Path, pipe, stop: Stop | None = None):
    """In this process, as `main` does."""
    for left in (PAUSE, CANCEL):
        (folder / left).unlink(missing_ok=True)
    lock = hold(folder)
    assert lock is not None
    try:
        return teach(folder, lambda: pipe, stop or Stop(folder))
    finally:
        os.close(lock)


# -- what it writes, and how it stops ------------------------------------------------------------------------------------------


def test_a_job_on_the_embedded_base(embedded, job, store):
    folder = job(validation_steps=2)
    state = run(folder, embedded)
    assert state.finished and state.step == state.steps == 4 and state.loss and state.seconds > 0 and state.step_seconds
    kept = store.state(folder.name)
    assert kept == dataclasses.replace(state, state="running", place=0) and not (folder / "output" / "concept.safetensors.tmp").exists()
    progress = store.progress(folder.name)
    assert [p.step for p in progress] == [1, 2, 3, 4] and all(p.loss and p.seconds for p in progress)
    assert [p.seconds for p in progress] == sorted(p.seconds for p in progress)
    samples = store.samples(folder.name)
    assert [step for step, _ in samples] == [2, 4]
    for _, path in samples:
        with Image.open(path) as picture:
            assert picture.size == (128, 128)
    concept = Concept.load(store.concept_path(folder.name))
    assert concept.trigger == concept.name == "zqx" and concept.recipe["step"] == 4 and concept.thumbnail and not concept.untrained


@pytest.mark.parametrize(("file", "name"), [(PAUSE, "paused"), (CANCEL, "cancelled")])
def test_what_goes_on_has_the_bits_of_what_was_not_stopped(pipe, job, file, name):
    """With the default recipe's collages too, which are drawn again; two stops, one of them between checkpoints, one on one."""
    options = {"max_train_steps": 5, "collages": 1, "collage_pictures": 1, "validation_steps": 2}
    whole, parts = job(**options), job(**options)
    run(whole, pipe)
    first = run(parts, pipe, StopAt(parts, file, 2))
    assert (first.state, first.step, first.message) == (name, 2, stopped_at(name, 2, 5)) and read_state(parts) == first
    assert not (parts / "output" / "concept.safetensors").exists()
    second = run(parts, pipe, StopAt(parts, file, 1))
    assert (second.state, second.step) == (name, 3) and second.seconds > first.seconds
    assert run(parts, pipe).finished
    assert same_work(whole, parts, 5)
    assert [p.name for p in sorted((parts / "samples").iterdir())] == ["step_000002.png", "step_000004.png"]
    for sample in (whole / "samples").iterdir():
        assert (parts / "samples" / sample.name).read_bytes() == sample.read_bytes()


def test_a_stop_that_comes_at_the_last_step_is_too_late(pipe, job):
    folder = job(max_train_steps=2)
    state = run(folder, pipe, StopAt(folder, PAUSE, 2))
    assert state.finished and state.step == 2


def test_progress_is_written_four_times_a_second_at_most(pipe, job, monkeypatch):
    from tiny_engram.studio import worker

    folder, written = job(max_train_steps=30), []
    real = worker.write_state
    monkeypatch.setattr(worker, "write_state", lambda *args: (written.append(args[1].step), real(*args)))
    state = run(folder, pipe)
    assert len([step for step in written if 0 < step < 30]) <= state.seconds / worker.BETWEEN_WRITES + 1
    assert len((folder / "progress.jsonl").read_text().splitlines()) == 30


def test_a_full_disk_while_teaching_costs_no_step(pipe, job, monkeypatch):
    from tiny_engram.studio import worker
    from tiny_engram.studio.errors import StudioError

    folder, real = job(max_train_steps=3), worker.write_state

    def full(folder, state):
        if 0 < state.step < 3:
            raise StudioError("cannot save (No space left on device)")
        real(folder, state)

    monkeypatch.setattr(worker, "write_state", full)
    monkeypatch.setattr(worker, "BETWEEN_WRITES", 0.0)
    assert run(folder, pipe).finished


def test_errors_become_a_line(pipe, job, store):
    folder = job()
    (folder / "pictures" / "0001.png").write_bytes(b"no picture")
    state = run(folder, pipe)
    assert state.state == "failed" and "0001.png: not a picture that can be read" in state.message
    assert "\n" not in state.message and str(store.root) not in state.message and read_state(folder) == state

    def broken():
        raise RuntimeError(f"{folder}/output: out of\nmemory")

    folder = job()
    state = teach(folder, broken, Stop(folder))
    assert state.state == "failed" and state.message == "RuntimeError: job/output: out of memory"


def test_a_trigger_that_cannot_be_taught_fails_in_words(pipe, store, taught, few_steps):
    folder = store.folder(store.create(taught[1:], "\u200b", options=few_steps()).id)
    state = run(folder, pipe)
    assert state.state == "failed" and state.message and "\n" not in state.message


def test_a_damaged_checkpoint_costs_steps_and_no_job(pipe, job):
    whole, hurt = job(max_train_steps=7), job(max_train_steps=7)
    run(whole, pipe)
    assert run(hurt, pipe, StopAt(hurt, PAUSE, 5)).step == 5
    tensors = hurt / "output" / "checkpoint-5" / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    (hurt / "progress.jsonl").write_bytes((hurt / "progress.jsonl").read_bytes() + b"[6, 0.")
    found = newest_checkpoint(hurt / "output")
    assert found and found[1] == 3 and len(found[2]) == 3
    assert run(hurt, pipe).finished and same_work(whole, hurt, 7)


def test_two_processes_never_work_on_one_job(job, capsys):
    folder = job()
    lock = hold(folder)
    assert lock is not None
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    from tiny_engram.studio import worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "hold", lambda folder, wait: hold(folder, wait=0.1))
        assert main([str(folder)]) == 3
    assert "another process works on it" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    os.close(lock)


# -- kills ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def killed(forked, saved_pipe):
    """killed(folder, at) -> (exit code, operations): teach in a process of its own, killed before its `at`-th file operation."""

    def ask(folder: Path, at: int = 0) -> tuple[int, int | None]:
        told = forked.ask(teach=str(folder), at=at, model=str(saved_pipe))
        return told["code"], told["operations"]

    return ask


def sweep(killed, job, points) -> None:
    """Kill at each point of a job, resume, and compare with the job that nobody killed."""
    options = {"max_train_steps": 3, "checkpointing_steps": 1, "checkpoints_total_limit": 2, "validation_steps": 2}
    whole, template = job(**options), job(**options)
    code, operations = killed(whole)
    assert code == 0 and operations and operations > 20 and read_state(whole).finished
    checked = 0
    for at in points(operations):
        folder = template.with_name(f"{at:016x}")
        shutil.copytree(template, folder)
        code, _ = killed(folder, at)
        if code == 0:  # the number of writes of state.json depends on time
            continue
        assert code == -9, at
        state, there = read_state(folder), newest_checkpoint(folder / "output")
        assert state.state in ("queued", "running"), at
        # A killed process is killed again at once, where it cleans up and takes up its checkpoint: nothing of it may be lost by that.
        assert killed(folder, 3)[0] == -9, at
        again = newest_checkpoint(folder / "output")
        assert (there and there[1]) == (again and again[1]), at
        assert killed(folder)[0] == 0 and read_state(folder).finished, at
        assert same_work(whole, folder, 3), at
        assert not [left for left in folder.rglob(".*") if left.name.endswith(".tmp")], at
        shutil.rmtree(folder)
        checked += 1
    assert checked >= 3


def test_a_kill_at_any_file_operation_loses_nothing(killed, job):
    """A few moments, spread over the run: in a checkpoint, while old ones are pruned, in the concept's file, in state and progress."""
    sweep(killed, job, lambda operations: range(2, operations, max(1, operations // 4)))


def test_a_kill_within_a_step_costs_the_steps_since_the_last_checkpoint(killed, job, store):
    """Within the sixth, with a checkpoint at the third; the lines of the steps that were lost are taught and told again."""
    options = {"max_train_steps": 7, "checkpointing_steps": 3}
    whole, folder = job(**options), job(**options)
    assert killed(whole)[0] == 0 and killed(folder, -6) == (-9, None)
    found = newest_checkpoint(folder / "output")
    assert found and found[1] == 3 and read_state(folder).state == "running"
    with (folder / "progress.jsonl").open("ab") as file:
        file.write(b"[4, 9.0, 9.0]\n[5, 9.0, 9.5]\n[6, 9")
    assert killed(folder)[0] == 0 and same_work(whole, folder, 7)
    assert [p.step for p in store.progress(folder.name)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_a_kill_at_every_file_operation_loses_nothing(killed, job):
    sweep(killed, job, lambda operations: range(1, operations + 1))


def test_a_process_whose_app_was_gone_before_it_began_touches_nothing(job):
    """The next app may have settled the job already; the runner's tests have standard input end while it teaches."""
    folder = job()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "tiny_engram.studio.worker", str(folder), "--tied"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 4, ended.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"} == before


@pytest.mark.slow
def test_sigterm_stops_it_at_a_checkpoint(saved_pipe, job):
    folder = job(max_train_steps=20_000, checkpointing_steps=0)
    command = [sys.executable, "-m", "tiny_engram.studio.worker", str(folder), "--model", str(saved_pipe), "--threads", "1"]
    with (folder / "worker.log").open("wb") as log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
        while read_state(folder).step < 2:
            assert process.poll() is None, (folder / "worker.log").read_text()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 0
    state = read_state(folder)
    assert state.state == "interrupted" and state.step >= 2 and (folder / "output" / f"checkpoint-{state.step}").is_dir()
    assert state.message == f"the Studio ended; goes on from step {state.step} of 20000"
