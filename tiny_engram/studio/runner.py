"""One job's process at a time, the others in their order: what starts, stops, resumes and finishes jobs. May import jobs, presets, library.

The runner keeps nothing that is not on disk: a new one, after the app was killed, finds all jobs as they are, puts what was finished into
the library (once: the concept has the job's id), and makes what was interrupted resumable.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_engram
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.job_folder import CANCEL, LOG, PAUSE, PROCESS, Job, JobState, checkpoint_step, hold, plain_message, stopped_at
from tiny_engram.studio.jobs import JobStore, Taught
from tiny_engram.studio.library import Library
from tiny_engram.studio.presets import DEFAULT_PRESET, Estimate, check_fields, estimate, fields_of, measure
from tiny_engram.studio.worker import APP_GONE, process_started
from tiny_engram.studio.workspace import read_json

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

TICK, IDLE = 0.1, 1.0  # seconds between looks: at a process, and at an empty queue
# A worker stops by itself within a step; one that does not is killed, which costs the steps since its last checkpoint.
CANCEL_SECONDS = 20.0
ORPHAN_SECONDS = 30.0
MOST_LOG = 2**20


class Runner:
    """Supervises the jobs of a store. All methods may be called from any thread; errors are StudioErrors.

    States, and what moves a job from one to the next:
        queued -> running (its turn), paused (`pause`), cancelled (`cancel`)
        running -> pausing (`pause`), cancelling (`cancel`), done, failed (an error, told in `message`), interrupted (app or process ended)
        pausing -> paused, done (if it was at its last step); cancelling -> cancelled
        paused, interrupted, failed, cancelled -> queued (`resume`, from the last checkpoint); paused, interrupted, failed -> cancelled
    """

    def __init__(
        self,
        store: JobStore,
        library: Library,
        *,
        model: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Recover what an earlier app left, and start.

        model, dtype, device: what teaching processes load, as `load_pipeline` takes them. threads: of their CPU work; None takes half of
        the cores, so that pictures can be drawn meanwhile.
        """
        self.store, self.library = store, library
        self.model = str(Path(model).resolve()) if model is not None and Path(model).exists() else model
        self.dtype, self.device = dtype, device
        self.threads = threads or max(1, (os.cpu_count() or 2) // 2)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closing = False
        self._child: tuple[str, subprocess.Popen[bytes]] | None = None
        self._cancelled_at: float | None = None
        self._orphans: dict[str, float] = {}
        with self._lock:
            self._recover()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    # -- what users ask ---------------------------------------------------------------------------------------------------------

    def submit(
        self,
        pictures: Sequence[Taught],
        trigger: str,
        *,
        aliases: Sequence[str] = (),
        name: str | None = None,
        class_word: str | None = None,
        preset: str = DEFAULT_PRESET,
        options: dict[str, Any] | None = None,
    ) -> str:
        """Queue a job with copies of its pictures; returns its id. Raises StudioError for what `JobStore.create` refuses."""
        self._open()
        job = self.store.create(
            pictures,
            trigger,
            aliases=aliases,
            name=name,
            class_word=class_word,
            preset=preset,
            options=options,
            model=self.model,
            threads=self.threads,
        )
        self._wake.set()
        return job.id

    def pause(self, id: str) -> JobState:
        """Stop it at a checkpoint of its present step; it keeps all it has learnt."""
        with self._lock:
            state = self.store.state(id)
            if state.state == "queued":
                message = stopped_at("paused", state.step, state.steps)
                return self.store.write(dataclasses.replace(state, state="paused", message=message, place=0))
            self._need(state, state.can_pause, "paused")
            return self._ask(id, PAUSE)

    def resume(self, id: str) -> JobState:
        """Queue it again, to go on from its last checkpoint."""
        self._open()
        with self._lock:
            state = self.store.state(id)
            self._need(state, state.can_resume, "resumed")
            job = self.store.job(id)
            if job.model != self.model:
                raise StudioError(f"the job teaches {_model(job.model)}, this Studio runs {_model(self.model)}; start one with that model")
            state = self.store.enqueue(id, "" if state.step == 0 else f"goes on from step {state.step} of {job.steps}")
        self._wake.set()
        return state

    def cancel(self, id: str) -> JobState:
        """Stop it; its checkpoints stay until it is deleted, and it could be resumed."""
        with self._lock:
            state = self.store.state(id)
            self._need(state, state.can_cancel, "cancelled")
            if state.busy:
                self._cancelled_at = time.monotonic()
                return self._ask(id, CANCEL)
            message = stopped_at("cancelled", state.step, state.steps)
            return self.store.write(dataclasses.replace(state, state="cancelled", message=message, place=0))

    def delete(self, id: str) -> None:
        """Take it away with its pictures and checkpoints. What it put into the library stays there."""
        with self._lock:
            state = self.store.state(id)
            self._need(state, state.can_delete, "deleted")
            self.store.delete(id)

    def states(self) -> list[JobState]:
        """Of all jobs as they are on disk, those that joined the queue last first."""
        return self.store.states()

    def estimate(self, preset: str, pictures: int, options: dict[str, Any] | None = None) -> Estimate:
        """How long a job would take here; measured by finished jobs of this model and as many threads, where there are some."""
        fields = check_fields(fields_of(preset) | dict(options or {}))
        found = []
        for state in self.store.states():
            if state.state == "done" and state.step_seconds:
                with contextlib.suppress(StudioError):
                    job = self.store.job(state.id)
                    if (job.model, job.threads) == (self.model, self.threads):
                        found.append((job.fields, state.step_seconds))
        return estimate(fields, pictures, measure(found), embedded=self.model is None)

    def close(self) -> None:
        """Stop the running job at a checkpoint (it is "interrupted" then) and end; once is enough."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join()
        with self._lock:
            if self._child is not None:
                _, child = self._child
                assert child.stdin is not None
                child.stdin.close()  # which tells it
                try:
                    child.wait(ORPHAN_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                self._reap()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._closing:
            raise StudioError("the Studio is closing; start it again")

    @staticmethod
    def _need(state: JobState, possible: bool, what: str) -> None:
        if not possible:
            out = "wait until it has stopped, or cancel it first" if state.busy else "reload the page to see what it can do"
            raise StudioError(f"the job is {state.state}, so it cannot be {what}; {out}")

    def _ask(self, id: str, what: str) -> JobState:
        try:
            (self.store.folder(id) / what).touch()
        except OSError as error:
            raise StudioError(f"the job cannot be stopped ({error.strerror}); free space in the Studio's folder") from error
        return self.store.state(id)

    # -- the supervisor ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                with self._lock:
                    self._tick()
                    pause = TICK if self._child is not None or self._orphans else IDLE
            except Exception:  # a full disk, say: the next round may find it better, and jobs must not wait for ever
                logger.exception("jobs: this round failed, trying again")
                pause = 2.0
            self._wake.wait(pause)
            self._wake.clear()

    def _tick(self) -> None:
        if self._child is not None:
            if self._child[1].poll() is None:
                if self._cancelled_at is not None and time.monotonic() - self._cancelled_at > CANCEL_SECONDS:
                    self._child[1].kill()
                return
            self._reap()
        self._end_orphans()
        if self._orphans or self._closing:
            return
        waiting = [state for state in self.store.states() if state.place == 1]
        if waiting:
            self._start(waiting[0])

    def _start(self, state: JobState) -> None:
        folder = self.store.folder(state.id)
        try:
            job = self.store.job(state.id)
        except StudioError as error:
            self.store.write(dataclasses.replace(state, state="failed", message=str(error)))
            return
        lock = hold(folder)
        if lock is None:  # it has written its last state, and has not ended yet
            self._orphans[job.id] = time.monotonic() + ORPHAN_SECONDS
            return
        os.close(lock)
        if job.model != self.model:
            told = f"waits for a Studio with {_model(job.model)}; this one runs {_model(self.model)}"
            self.store.write(dataclasses.replace(state, state="paused", message=told))
            return
        for left in (PAUSE, CANCEL, PROCESS):
            (folder / left).unlink(missing_ok=True)
        self._cancelled_at = None
        # Before the process is there: a kill in between leaves a job that is "running" without one, which recovery knows.
        begun = dataclasses.replace(state, state="running", steps=job.steps, message="starting", seconds_left=None, finished=False)
        self.store.write(begun)
        try:
            self._child = (job.id, self._spawn(folder, job))
        except OSError as error:
            told = f"its process cannot be started ({error.strerror or type(error).__name__}); resume it later"
            self.store.write(dataclasses.replace(state, state="failed", message=told))

    def _spawn(self, folder: Path, job: Job) -> "subprocess.Popen[bytes]":
        # -P: a job's folder, or wherever the app was started, is no place to import from
        command = [sys.executable, "-P", "-m", "tiny_engram.studio.worker", str(folder), "--tied", "--threads", str(job.threads)]
        for option, value in (("--dtype", self.dtype), ("--model", job.model), ("--device", self.device)):
            command += [option, value] if value else []
        home = str(Path(tiny_engram.__file__).absolute().parents[1])
        places = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
        log = folder / LOG
        mode = "ab" if log.exists() and log.stat().st_size < MOST_LOG else "wb"
        with log.open(mode) as out:
            # A session of its own: Ctrl-C in the app's terminal is for the app, whose end the worker sees at its standard input.
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True)

    def _reap(self) -> None:
        """Settle the job whose process has ended. The child is kept until that is on disk."""
        assert self._child is not None
        id, child = self._child
        if child.stdin is not None:
            child.stdin.close()
        self._settle(id, child.returncode)
        self._child = None

    def _settle(self, id: str, code: int | None = None) -> None:
        """The state of a job on which no process works any more; code: what its process ended with, None where that is not known."""
        try:
            folder, state = self.store.folder(id), self.store.state(id)
        except StudioError:  # deleted, between its last state and the end of its process
            return
        if state.finished and state.state == "running":
            self._finish(state)
        elif state.busy:
            cancelled = (folder / CANCEL).exists()
            code = None if code == APP_GONE else code
            crashed = code is not None and code > 0 and not cancelled
            why = "the Studio ended" if code is None else f"its process ended with {'signal' if code < 0 else 'code'} {abs(code)}"
            name = "cancelled" if cancelled else "failed" if crashed else "interrupted"
            message = stopped_at("cancelled" if cancelled else why, checkpoint_step(folder), state.steps)
            if crashed:
                message += f"; {LOG} in its folder says more"
            self.store.write(dataclasses.replace(state, state=name, step=checkpoint_step(folder), seconds_left=None, message=message))
        for left in (PAUSE, CANCEL, PROCESS):
            (folder / left).unlink(missing_ok=True)

    def _finish(self, state: JobState) -> None:
        try:
            # The job's id is the concept's: however often this is done, there is one.
            concept_id = self.library.add(Concept.load(self.store.concept_path(state.id)), id=state.id)
            change: dict[str, Any] = {"state": "done", "concept_id": concept_id, "message": "in the library"}
        except TinyEngramError as error:
            told = f"taught, but not in the library ({plain_message(error)}); resume it to try again"
            change = {"state": "failed", "message": told}
        self.store.write(dataclasses.replace(state, finished=False, seconds_left=None, **change))

    # -- after a kill -----------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Settle jobs whose app is gone; one whose process still lives (it is stopping) is looked at again by the supervisor."""
        for state in self.store.states():
            if not state.busy:
                continue
            lock = hold(self.store.folder(state.id))
            if lock is None:
                self._orphans[state.id] = time.monotonic() + ORPHAN_SECONDS
                continue
            try:
                self._settle(state.id)
            except StudioError as error:  # a full disk shall not keep the app from starting
                logger.warning("job %s: %s", state.id, error)
                self._orphans[state.id] = time.monotonic() + ORPHAN_SECONDS
            finally:
                os.close(lock)

    def _end_orphans(self) -> None:
        for id, until in list(self._orphans.items()):
            if id not in {state.id for state in self.store.states()}:
                del self._orphans[id]
                continue
            lock = hold(self.store.folder(id))
            if lock is not None:
                try:
                    self._settle(id)
                finally:
                    os.close(lock)
                del self._orphans[id]
            elif time.monotonic() > until:
                self._orphans[id] = time.monotonic() + ORPHAN_SECONDS
                _kill(self.store.folder(id))


def _kill(folder: Path) -> None:
    """End the process that works on a job, if it is the one that wrote so: numbers of processes are used again."""
    with contextlib.suppress(StudioError, OSError, TypeError, ValueError, KeyError, AttributeError):
        told = read_json(folder / PROCESS)
        if told["started"] is not None and process_started(told["pid"]) == told["started"]:
            os.kill(told["pid"], signal.SIGKILL)


def _model(model: str | None) -> str:
    return "the embedded base" if model is None else f"the model {Path(model).name!r}"
