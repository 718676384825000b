"""The supervisor with real processes: one at a time, in order, paused, cancelled, killed, restarted; each concept in the library once."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.job_folder import CANCEL, LOG, PAUSE, hold
from tiny_engram.studio.jobs import JobStore
from tiny_engram.studio.library import Library
from tiny_engram.studio.runner import Runner
from tiny_engram.studio.worker import Stop, process_started, teach
from tiny_engram.studio.workspace import Workspace, read_json

# What an app does with jobs, in a process that a test can kill.
APP = """
import sys, time
from tiny_engram.studio.jobs import JobStore
from tiny_engram.studio.library import Library
from tiny_engram.studio.runner import Runner
from tiny_engram.studio.workspace import Workspace
workspace = Workspace.open(sys.argv[1])
runner = Runner(JobStore(workspace), Library(workspace), model=sys.argv[2] or None, threads=1)
print("ready", flush=True)
time.sleep(600)
"""


def until(store, id, *names, step=0, seconds=180):
    """The state of a job once it has one of these names and so many steps."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = store.state(id)
        if state.state in names and state.step >= step:
            return state
        if state.state == "failed":
            break
        time.sleep(0.05)
    log = store.folder(id) / LOG
    raise AssertionError(f"{store.state(id)}, expected {names}; {log.read_text() if log.exists() else 'no log'}")


def gone(pid: int, seconds: float = 5) -> bool:
    """Does the process end within these seconds?"""
    end = time.monotonic() + seconds
    while process_started(pid) is not None and time.monotonic() < end:
        time.sleep(0.02)
    return process_started(pid) is None


@contextmanager
def running(store, library, model=None):
    with Runner(store, library, model=model, threads=1) as runner:
        yield runner


@pytest.fixture
def finished(store, taught, few_steps, pipe):
    """finished(trigger) -> the id of a job that was taught in this process, with its concept not yet in the library."""

    def make(trigger: str = "zqx") -> str:
        id = store.create(taught, trigger, preset="quick", options=few_steps(max_train_steps=1)).id
        folder = store.folder(id)
        lock = hold(folder)
        assert lock is not None and teach(folder, lambda: pipe, Stop(folder)).finished
        os.close(lock)
        return id

    return make


# -- with processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_run_one_by_one_and_a_paused_one_lets_the_next_go(store, library, saved_pipe, taught, few_steps):
    with running(store, library, str(saved_pipe)) as runner:
        long = runner.submit(taught, "long", preset="quick", options=few_steps(max_train_steps=20_000))
        short, last = (runner.submit(taught, word, preset="quick", options=few_steps()) for word in ("short", "last"))
        assert [state.place for state in runner.states() if state.id in (short, last)] in ([3, 2], [2, 1])
        with pytest.raises(StudioError, match="the job is queued, so it cannot be resumed"):
            runner.resume(last)
        assert runner.pause(last).state == "paused", "one that waits is paused at once"
        state = until(store, long, "running", step=2)
        assert state.loss and state.message == "teaching" and store.state(short).place == 1
        pid = read_json(store.folder(long) / "process.json")["pid"]
        assert os.getpriority(os.PRIO_PROCESS, pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        for call, words in ((runner.delete, "cannot be deleted; wait until it has stopped"), (runner.resume, "cannot be resumed")):
            with pytest.raises(StudioError, match=words):
                call(long)
        assert runner.pause(long).state in ("pausing", "paused")
        paused = until(store, long, "paused", step=2)
        assert (store.folder(long) / "output" / f"checkpoint-{paused.step}").is_dir() and gone(pid)
        # The next one has its turn, and is cancelled while it still loads the model.
        until(store, short, "running")
        assert runner.cancel(short).state in ("cancelling", "cancelled")
        cancelled = until(store, short, "cancelled")
        assert cancelled.step == 0 and cancelled.can_resume
        runner.delete(short)
        assert {state.id for state in runner.states()} == {long, last} and library.cards() == []
        assert store.state(long) == paused, "nothing goes on by itself"
        runner.resume(long)
        until(store, long, "running")
    # Closed while it loads again: what was learnt is there.
    state = store.state(long)
    assert state.state == "interrupted" and state.step == paused.step and state.message.startswith("the Studio ended; goes on from step")
    assert not any((store.folder(id) / asked).exists() for id in (long, last) for asked in (PAUSE, CANCEL))


@pytest.mark.slow
def test_a_killed_app_restarts_with_everything_and_goes_on_to_the_same_bits(tmp_path, saved_pipe, taught, few_steps):
    """SIGKILL of the app while one job teaches and one waits, then of a worker; what was killed is resumed and equals what was not."""
    root = tmp_path / "studio"
    options = few_steps(max_train_steps=120, checkpointing_steps=10, checkpoints_total_limit=2, validation_steps=60)
    with Workspace.open(root) as workspace:
        store = JobStore(workspace)
        first = store.create(taught, "zqx", preset="quick", options=options, model=str(saved_pipe)).id
        second = store.create(taught, "bolo", preset="quick", options=options, model=str(saved_pipe)).id
    app = subprocess.Popen([sys.executable, "-c", APP, str(root), str(saved_pipe)], stdout=subprocess.PIPE)
    try:
        until(store, first, "running", step=2)
        worker = read_json(store.folder(first) / "process.json")["pid"]
    finally:
        app.kill()
        app.communicate()
    # At once, with the worker still at its last step: nobody else may write its job then.
    with Workspace.open(root) as workspace:
        store, library = JobStore(workspace), Library(workspace)
        with running(store, library, str(saved_pipe)) as runner:
            state = until(store, first, "interrupted", step=2)
            assert gone(worker), "the worker dies with its app"
            assert state.step < 120 and state.message == f"the Studio ended; goes on from step {state.step} of 120"
            assert len(store.progress(first)) == state.step
            # The one that waited has its turn without being asked, and loses its process.
            until(store, second, "running")
            while not (store.folder(second) / "process.json").exists():
                time.sleep(0.02)
            os.kill(read_json(store.folder(second) / "process.json")["pid"], signal.SIGKILL)
            lost = until(store, second, "interrupted")
            assert lost.message == "its process ended with signal 9; if resumed, it begins anew" and lost.can_resume
            runner.resume(first)
            done = until(store, first, "done")
            assert done.concept_id == first and done.step == 120 and done.seconds_left is None and not done.finished
            assert [(card.id, card.trigger) for card in library.cards()] == [(first, "zqx")]
            assert library.get(first).recipe["step"] == 120 and [step for step, _ in store.samples(first)] == [60, 120]
            assert runner.estimate("quick", 2).measured
            with pytest.raises(StudioError, match="the job is done, so it cannot be cancelled; reload the page"):
                runner.cancel(first)
        whole = store.folder(first).with_name("f" * 16)
        for part in ("output", "samples"):
            (whole / part).mkdir(parents=True)
        shutil.copytree(store.folder(first) / "pictures", whole / "pictures")
        shutil.copy(store.folder(first) / "job.json", whole)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert teach(whole, lambda: load_pipeline(str(saved_pipe)), Stop(whole)).finished
        torch.set_num_threads(threads)
        one, two = (load_checkpoint(folder / "output" / "checkpoint-120") for folder in (whole, store.folder(first)))
        assert one[1]["losses"] == two[1]["losses"] and all(torch.equal(one[0][name], two[0][name]) for name in one[0])
        store.delete(first)
        assert library.get(first).trigger == "zqx", "what a job put into the library stays there"


# -- what an earlier app left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the library has it", "after the library has it"])
def test_a_kill_between_teaching_and_the_library_gives_one_concept(workspace, store, finished, library, moment):
    id = finished()
    workspace.close()
    where = "real(self, concept, id=id)" if moment.startswith("after") else "None"
    code = (
        "import os, signal\nfrom tiny_engram.studio.library import Library\nreal = Library.add\n"
        f"def add(self, concept, *, id=None):\n    {where}\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Library.add = add\n{APP}"
    )
    assert subprocess.run([sys.executable, "-c", code, str(workspace.root), ""], check=False).returncode == -9
    assert store.state(id).state == "running"
    for _ in range(2):  # and a second start changes nothing
        with running(store, library):
            state = store.state(id)
            assert (state.state, state.concept_id, state.finished) == ("done", id, False)
            assert [(card.id, card.trigger) for card in library.cards()] == [(id, "zqx")]
    assert library.get(id).describe() == Concept.load(store.concept_path(id)).describe()


def test_what_is_deleted_from_the_library_does_not_come_back(store, finished, library):
    id = finished()
    with running(store, library):
        assert store.state(id).state == "done"
    library.delete(id)
    with running(store, library):
        assert store.state(id).state == "done" and library.cards() == []


def test_jobs_of_an_app_that_died_are_interrupted(store, taught, few_steps, library):
    ids = [store.create(taught, "zqx", options=few_steps()).id for _ in range(3)]
    for id, asked in zip(ids, (None, PAUSE, CANCEL), strict=True):
        store.write(dataclasses.replace(store.state(id), state="running", step=3))
        if asked:
            (store.folder(id) / asked).touch()
    with running(store, library):
        states = [store.state(id) for id in ids]
    assert [state.state for state in states] == ["interrupted", "interrupted", "cancelled"]
    assert all(state.step == 0 and state.can_resume for state in states), "no checkpoint, no steps"
    assert states[0].message == "the Studio ended; if resumed, it begins anew"


def test_a_process_that_does_not_end_is_ended(store, taught, few_steps, library, monkeypatch):
    """It holds the job's lock and has lost its app; only the very process that wrote its number there is killed."""
    monkeypatch.setattr("tiny_engram.studio.runner.ORPHAN_SECONDS", 0.3)
    id = store.create(taught, "zqx", options=few_steps()).id
    store.write(dataclasses.replace(store.state(id), state="running"))
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom tiny_engram.studio.job_folder import hold\n"
        "from tiny_engram.studio.worker import process_started\nfrom tiny_engram.studio.workspace import write_json\n"
        "folder = Path(sys.argv[1])\nhold(folder)\nstarted = process_started(os.getpid()) + int(sys.argv[2])\n"
        "write_json(folder / 'process.json', {'pid': os.getpid(), 'started': started})\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    folder = store.folder(id)
    for shift, dies in ((1, False), (0, True)):
        with subprocess.Popen([sys.executable, "-c", code, str(folder), str(shift)], stdout=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.readline()
            with running(store, library):
                if dies:
                    assert until(store, id, "interrupted").state == "interrupted" and process.wait(5) == -9
                else:
                    time.sleep(1.0)
                    assert process.poll() is None and store.state(id).state == "running"
            process.kill()


def test_a_process_that_cannot_work_fails_in_words(store, library, taught, few_steps, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with running(store, library) as runner:
        id = runner.submit(taught, "zqx", options=few_steps())
        with pytest.raises(AssertionError, match="failed"):
            until(store, id, "done")
        assert store.state(id).message == "its process ended with code 1; if resumed, it begins anew; worker.log in its folder says more"
        monkeypatch.setattr(sys, "executable", str(store.root / "nothing"))
        runner.resume(id)
        end = time.monotonic() + 20
        while "cannot be started" not in store.state(id).message and time.monotonic() < end:
            time.sleep(0.05)
        assert store.state(id).state == "failed" and str(store.root) not in store.state(id).message


def test_a_concept_that_cannot_be_kept_is_told_and_tried_again(store, library, finished):
    id = finished()
    blob = store.concept_path(id).read_bytes()
    store.concept_path(id).write_bytes(blob[:50])
    with running(store, library):
        state = store.state(id)
    assert state.state == "failed" and state.can_resume and "taught, but not in the library" in state.message
    assert str(store.root) not in state.message and library.cards() == []


def test_a_job_of_another_model_waits_for_it(store, library, taught, few_steps):
    other = store.create(taught, "zqx", options=few_steps(), model="/srv/models/other-sd").id
    with running(store, library) as runner:
        state = until(store, other, "paused")
        assert state.message == "waits for a Studio with the model 'other-sd'; this one runs the embedded base"
        with pytest.raises(StudioError, match="the job teaches the model 'other-sd', this Studio runs the embedded base"):
            runner.resume(other)
        assert runner.cancel(other).state == "cancelled"
        runner.delete(other)
        assert runner.states() == []
    with pytest.raises(StudioError, match="the Studio is closing"):
        runner.submit(taught, "zqx")


def test_the_supervisor_outlives_an_error(store, library, taught, few_steps, monkeypatch, caplog):
    with running(store, library, "some/model"):
        real, failed = store.states, threading.Event()

        def broken():
            if threading.current_thread().name == "jobs" and not failed.is_set():
                failed.set()
                raise OSError("disk on fire")
            return real()

        monkeypatch.setattr(store, "states", broken)
        assert failed.wait(10)
        other = store.create(taught, "zqx", options=few_steps(), model="other").id
        assert until(store, other, "paused").place == 0
    assert "this round failed" in caplog.text


@pytest.mark.parametrize("id", ["../..", "0" * 16, ""])
def test_ids_of_nobody(store, library, id):
    with running(store, library) as runner:
        for call in (runner.pause, runner.resume, runner.cancel, runner.delete):
            with pytest.raises(StudioError, match="^no job "):
                call(id)


def test_estimates_without_a_finished_job(store, library):
    with running(store, library) as runner:
        told = runner.estimate("quick", 5)
        assert not told.measured and told.seconds
        with pytest.raises(StudioError, match="max_train_steps is 0"):
            runner.estimate("quick", 5, {"max_train_steps": 0})
    with running(store, library, "some/model") as runner:
        assert runner.estimate("best", 5).seconds is None
