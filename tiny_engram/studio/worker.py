"""The process that teaches one job: `python -m tiny_engram.studio.worker JOB_FOLDER [--model MODEL]`.

It holds the job's lock while it lives, and is the only writer of the job's state then. A kill at any moment leaves a job that goes on
from its last checkpoint. May import training and pipelines, and of the Studio job_folder, errors and workspace.
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import select
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError, without_folder
from tiny_engram.studio.job_folder import (
    CANCEL,
    PAUSE,
    PROCESS,
    Job,
    JobState,
    Progress,
    checkpoint_step,
    hold,
    plain_message,
    progress_lines,
    read_job,
    read_progress,
    read_state,
    stopped_at,
    write_state,
)
from tiny_engram.studio.workspace import write_bytes, write_json

__all__ = ["Stop", "main", "process_started", "teach"]

logger = logging.getLogger(__name__)

BETWEEN_WRITES = 0.25  # seconds
ORPHAN_SECONDS = 20.0  # within which a worker whose app is gone must be gone too
RECENT = 25
APP_GONE = 4  # exit code


class Stop:
    """Whether the run shall stop, and why: files that the runner writes, a closed pipe, a signal.

    `check` is asked between steps, where a checkpoint can be made. Before there are steps (a model loads, companions are drawn) nothing is
    lost by an end at once: `watch` then writes the job's state and ends the process. It raises nothing in the main thread, since an
    exception within an import leaves libraries half there.

    Attributes:
        orphaned: the app is gone. guard: held by whoever writes the job's state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orphaned = False
        self.guard = threading.RLock()
        self._stepping = False

    def check(self) -> str | None:
        """The state to end in, or None to go on."""
        if (self.folder / CANCEL).exists():
            return "cancelled"
        if (self.folder / PAUSE).exists():
            return "paused"
        return "interrupted" if self.orphaned else None

    def stepping(self) -> None:
        """From now on the main thread asks, or has come to its end."""
        with self.guard:
            self._stepping = True

    def watch(self, tied: bool) -> None:
        """Start looking in a thread. tied: the end of standard input says that the app is gone."""
        threading.Thread(target=self._watch, args=(tied,), daemon=True).start()

    def _watch(self, tied: bool) -> None:
        while True:
            if tied and not self.orphaned:
                select.select([0], [], [], BETWEEN_WRITES)
                if _ended():
                    self.orphaned = True
                    gone = threading.Timer(ORPHAN_SECONDS, os._exit, (APP_GONE,))
                    gone.daemon = True
                    gone.start()
            else:
                time.sleep(BETWEEN_WRITES)
            asked = self.check()
            with self.guard:
                if asked and not self._stepping:
                    self._leave(asked)

    def _leave(self, asked: str) -> None:
        try:
            state = read_state(self.folder)
            write_state(self.folder, dataclasses.replace(state, seconds_left=None, **_stopped(self.folder, asked, state.steps)))
        finally:
            os._exit(0)  # where the state could not be written, the runner sees that

    def on_signal(self, *_: object) -> None:
        """SIGTERM or SIGINT: as if the app were gone."""
        self.orphaned = True


def _stopped(folder: Path, asked: str, steps: int) -> dict[str, Any]:
    """What the state of a stopped job says."""
    step, why = checkpoint_step(folder), "the Studio ended" if asked == "interrupted" else asked
    return {"state": asked, "step": step, "message": stopped_at(why, step, steps)}


class _Reporter:
    """Writes what is seen of a run: state.json and progress.jsonl, at most four times a second, and sample pictures."""

    def __init__(self, folder: Path, job: Job, stop: Stop) -> None:
        self.folder, self.stop = folder, stop
        try:
            before = read_state(folder)
        except StudioError:
            before = JobState(id=job.id, state="queued")
        self.state = JobState(id=job.id, state="running", steps=job.steps, queued=before.queued)
        self._waiting: list[Progress] = []
        self._losses: list[float] = []
        self._first: tuple[int, float] | None = None
        self._last = 0.0
        self._durations: list[float] = []
        self._written = self._began = time.monotonic()
        self._before = 0.0

    def say(self, message: str) -> None:
        """What goes on before the first step."""
        self.state = dataclasses.replace(self.state, message=message)
        self._write()

    def begin(self, step: int, losses: Sequence[float]) -> None:
        """Progress as the checkpoint at `step` has it: a kill may have lost lines before it, and left lines of steps after it."""
        known = {entry.step: entry.seconds for entry in read_progress(self.folder)}
        entries = [Progress(i, loss, known.get(i)) for i, loss in enumerate(losses[:step], 1)]
        write_bytes(self.folder / "progress.jsonl", progress_lines(entries))
        self._before = max((entry.seconds or 0.0 for entry in entries), default=0.0)
        self._losses = list(losses[:step])[-RECENT:]
        self.state = dataclasses.replace(self.state, step=step, seconds=self._before, loss=self._mean())
        self._began = time.monotonic()

    def _mean(self) -> float | None:
        return sum(self._losses) / len(self._losses) if self._losses else None

    def on_step(self, step: int, loss: float) -> None:
        """As `train` calls it. Raises KeyboardInterrupt where the run shall stop."""
        self.stop.stepping()
        now = time.monotonic()
        seconds = self._before + now - self._began
        self._losses = [*self._losses, loss][-RECENT:]
        self._waiting.append(Progress(step, loss, round(seconds, 3)))
        if self._first is None:
            self._first = (step, now)
        else:
            self._durations = [*self._durations, now - self._last][-RECENT:]
        self._last = now
        each = (now - self._first[1]) / (step - self._first[0]) if step > self._first[0] else None
        self.state = dataclasses.replace(
            self.state,
            step=step,
            loss=self._mean(),
            seconds=seconds,
            message="teaching",
            # the median knows nothing of the samples and checkpoints between steps; what is left of the run does
            step_seconds=statistics.median(self._durations) if self._durations else None,
            seconds_left=None if each is None else each * (self.state.steps - step),
        )
        last = step >= self.state.steps
        asked = None if last else self.stop.check()
        if last or asked or now - self._written >= BETWEEN_WRITES:
            self.flush()
        if asked:
            raise KeyboardInterrupt

    def flush(self) -> None:
        """Pictures, lines and state, to disk. A full disk stops no teaching: checkpoints say so where it matters."""
        take_samples(self.folder)
        try:
            if self._waiting:
                with (self.folder / "progress.jsonl").open("ab") as file:
                    file.write(progress_lines(self._waiting))
                self._waiting = []
        except OSError as error:
            logger.warning("progress cannot be written: %s", error)
        self._write()
        self._written = time.monotonic()

    def _write(self) -> None:
        try:
            with self.stop.guard:
                write_state(self.folder, self.state)
        except StudioError as error:
            logger.warning("%s", error)

    def end(self, **changes: Any) -> JobState:
        """The last state that this process writes; here a full disk is an error (StudioError)."""
        self.stop.stepping()
        self.flush()
        self.state = dataclasses.replace(self.state, seconds_left=None, **changes)
        write_state(self.folder, self.state)
        return self.state


def take_samples(folder: Path) -> None:
    """Move the pictures that were drawn to samples/step_NNNNNN.png."""
    for path in (folder / "output" / "validation").glob("step-*.png"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal():
            with contextlib.suppress(OSError):
                path.replace(folder / "samples" / f"step_{int(number):06d}.png")


def newest_checkpoint(output: Path) -> tuple[Path, int, tuple[float, ...]] | None:
    """(folder, step, losses) of the newest checkpoint that can be read; damaged ones are put aside, so that they cost steps and no job."""
    from tiny_engram.checkpoints import CheckpointError, list_checkpoints, load_checkpoint

    for step, path in reversed(list_checkpoints(output)):
        try:
            _, state = load_checkpoint(path)
            return path, step, tuple(float(loss) for loss in state["losses"])
        except CheckpointError as error:
            logger.warning("%s", error)
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    return None


def _sweep(folder: Path) -> None:
    """What a killed process left half-written. Only who holds the lock may do so."""
    for left in [*folder.glob(".*.tmp"), *(folder / "output").rglob(".*.tmp"), *(folder / "samples").glob(".*.tmp")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    for part in ("output", "samples"):
        (folder / part).mkdir(exist_ok=True)


def teach(folder: Path, load: Callable[[], Any], stop: Stop) -> JobState:
    """Teach the job of a folder, from its last checkpoint if it has one, until it is done or told to stop.

    Returns its last state. load: gives the pipeline. The caller holds the job's lock. Raises StudioError: a job that cannot be read, a
    state that cannot be written.
    """
    job = read_job(folder)
    _sweep(folder)
    reporter = _Reporter(folder, job, stop)
    try:
        reporter.say("loading the model")
        pipe = load()
        from tiny_engram.training import train

        found = newest_checkpoint(folder / "output")
        reporter.begin(*(found[1:] if found else (0, ())))
        config = job.train_config(folder, found[0] if found else None)
        reporter.say("drawing other things to show beside the subject" if config.collages else "reading the pictures")
        train(pipe, config, progress=False, on_step=reporter.on_step)
        return reporter.end(finished=True, message="putting the concept into the library")
    except KeyboardInterrupt:
        return reporter.end(**_stopped(folder, stop.check() or "interrupted", job.steps))
    except TinyEngramError as error:
        return reporter.end(state="failed", message=plain_message(without_folder(error, folder, "job")))
    except Exception as error:  # whatever a library raises is told in a line; the log has the rest
        traceback.print_exc()
        return reporter.end(state="failed", message=f"{type(error).__name__}: {plain_message(without_folder(error, folder, 'job'))}")


def process_started(pid: int) -> int | None:
    """When a process began, in the system's ticks: with its number this names it for good. None where it has ended or cannot be told."""
    try:
        # the name in brackets may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _ended() -> bool:
    """Has standard input come to its end?"""
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the job's state says how it ended; 2: it cannot be read or written; 3: another process works
    on it; 4: the app was gone before it began."""
    parser = argparse.ArgumentParser(prog="tiny_engram.studio.worker", description="Teach one job of the Studio.")
    parser.add_argument("folder", type=Path, help="the job's folder")
    parser.add_argument("--model", help="diffusers folder or hub id (default: the embedded base)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--device", help="cuda, cpu, ... (default: CUDA if there is one)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: torch's own choice)")
    parser.add_argument("--nice", type=int, default=10, help="added to the process's niceness")
    parser.add_argument("--tied", action="store_true", help="stop at a checkpoint when standard input ends: the app is gone")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    folder = args.folder.resolve()
    # the app looks at the lock for a moment now and then
    if not folder.is_dir() or hold(folder, wait=5.0) is None:
        print(f"{folder.name}: no such job, or another process works on it", file=sys.stderr)
        return 3
    if args.tied and _ended():
        return APP_GONE  # the app that wanted this is gone, and the next one may have settled the job already
    stop = Stop(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.on_signal)
    try:
        write_json(folder / PROCESS, {"pid": os.getpid(), "started": process_started(os.getpid())})
        with contextlib.suppress(OSError):
            os.nice(args.nice)
        stop.watch(args.tied)

        def load() -> Any:
            import torch

            from tiny_engram.pipelines.loaders import load_pipeline

            if args.threads > 0:
                torch.set_num_threads(args.threads)
            return load_pipeline(args.model, dtype=args.dtype, device=args.device)

        state = teach(folder, load, stop)
        logger.info("%s at step %d of %d", "finished" if state.finished else state.state, state.step, state.steps)
        return 0
    except TinyEngramError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # all is on disk: what the libraries do at their end only keeps others waiting
