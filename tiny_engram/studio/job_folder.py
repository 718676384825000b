"""One job's folder, as the app and the process that teaches it both see it: what was asked for, how far it is, who works on it.

jobs/ID holds job.json and pictures/ (written once), state.json, progress.jsonl, samples/, output/ (checkpoints and the concept) and
worker.log. state.json has one writer at a time: the process that holds the job's lock while one does, else the runner. What is asked of
a running process are files beside it, `pause` and `cancel`. May import workspace, errors and TrainConfig.
"""

import dataclasses
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.workspace import read_json, write_json
from tiny_engram.training.config import TrainConfig

__all__ = [
    "BUSY",
    "CANCEL",
    "LOG",
    "PAUSE",
    "PROCESS",
    "STATES",
    "Job",
    "JobState",
    "Progress",
    "checkpoint_step",
    "hold",
    "plain_message",
    "progress_lines",
    "read_job",
    "read_progress",
    "read_state",
    "stopped_at",
    "write_state",
]

STATES = ("queued", "running", "pausing", "paused", "cancelling", "cancelled", "done", "failed", "interrupted")
RESUMABLE = ("paused", "interrupted", "failed", "cancelled")
BUSY = ("running", "pausing", "cancelling")
PAUSE, CANCEL, LOCK, PROCESS, LOG = "pause", "cancel", "lock", "process.json", "worker.log"

# A path of the server in a message: what stands before its last part goes.
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"`:,;()]+/)+")


def plain_message(error: BaseException | str) -> str:
    """An error on one line, bounded, without folders of the server."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _FOLDERS.sub("", text)[:600]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked for, as job.json holds it; never changed.

    Attributes:
        fields: TrainConfig's by name, as JSON, without folders: these are the job's own, wherever it is moved.
        model, threads: what the teaching process loads (None: the embedded base) and how many threads it takes. They stay the job's
            own, so that what is resumed has the bits of what was not stopped.
        created: ISO date and time, UTC. pictures: how many.
    """

    id: str
    trigger: str
    aliases: tuple[str, ...]
    name: str
    class_word: str | None
    preset: str
    model: str | None
    threads: int
    created: str
    pictures: int
    fields: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps from its start to its end."""
        return int(self.fields["max_train_steps"])

    def train_config(self, folder: Path, resume_from: Path | None = None) -> TrainConfig:
        """What `train` is told; `folder` is the job's. Raises ConfigError where a field makes no sense."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in self.fields.items()}
        return TrainConfig(
            **fields,
            trigger=self.trigger,
            aliases=self.aliases,
            name=self.name,
            class_word=self.class_word,
            train_data_dir=str(folder / "pictures"),
            output_dir=str(folder / "output"),
            resume_from_checkpoint=None if resume_from is None else str(resume_from),
            report_to="none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """How far a job is.

    Attributes:
        state: one of STATES. step, steps: done and in all. loss: mean of the last 25 steps, None before the first.
        seconds: of teaching so far, without pauses. seconds_left: None until it can be told.
        message: one line for people. concept_id: of the concept in the library, once it is done.
        step_seconds: of one step, the median of the last ones. queued: when it joined the queue (ns; the order). place: 1 for the next in
            the queue, 0 for a job that does not wait. finished: taught, and not yet in the library.
    """

    id: str
    state: str
    step: int = 0
    steps: int = 0
    loss: float | None = None
    seconds: float = 0.0
    seconds_left: float | None = None
    message: str = ""
    concept_id: str | None = None
    step_seconds: float | None = None
    queued: int = 0
    place: int = 0
    finished: bool = False

    @property
    def busy(self) -> bool:
        """Does a process work on it?"""
        return self.state in BUSY

    @property
    def can_pause(self) -> bool:
        return self.state in ("queued", "running")

    @property
    def can_resume(self) -> bool:
        return self.state in RESUMABLE

    @property
    def can_cancel(self) -> bool:
        return self.state in ("queued", "running", "pausing", "paused", "interrupted", "failed")

    @property
    def can_delete(self) -> bool:
        return not self.busy


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: its number from 1, its loss (None where it was no number), seconds of teaching until then (None where unknown)."""

    step: int
    loss: float | None
    seconds: float | None


def read_job(folder: Path) -> Job:
    """Of a job's folder. Raises StudioError: missing or damaged."""
    told = read_json(folder / "job.json")
    try:
        job = Job(**{**told, "id": folder.name, "aliases": tuple(told["aliases"])})
        job.train_config(folder)
        return job
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise StudioError("job.json: damaged, expected what a job is made of; delete the job and start it again") from error


def write_state(folder: Path, state: JobState) -> None:
    """Whole or not at all. `place` is not kept: it depends on others. Raises StudioError (disk full, ...)."""
    kept = dataclasses.asdict(dataclasses.replace(state, place=0))
    write_json(folder / "state.json", {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in kept.items()})


def read_state(folder: Path) -> JobState:
    """What state.json says, with what is asked of the process. Raises StudioError: missing or damaged."""
    told = read_json(folder / "state.json")
    fields = {field.name for field in dataclasses.fields(JobState)}
    if not isinstance(told, dict) or told.get("state") not in STATES:
        raise StudioError("state.json: damaged, expected the state of a job; resume the job, or delete it")
    state = JobState(**{**{k: v for k, v in told.items() if k in fields}, "id": folder.name})
    if state.state == "running" and not state.finished:
        for asked, name in ((CANCEL, "cancelling"), (PAUSE, "pausing")):
            if (folder / asked).exists():
                return dataclasses.replace(state, state=name)
    return state


def hold(folder: Path, *, wait: float = 0.0) -> int | None:
    """Take the lock of the process that works on a job: a file descriptor, or None where another process has it.

    It is given back by os.close, or by the end of the process, however it comes. wait: seconds.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() >= until:
                os.close(handle)
                return None
        time.sleep(0.02)


def checkpoint_step(folder: Path) -> int:
    """Steps that are safe on disk, 0 where there are none; as `checkpoints` tells whole checkpoints from others, without torch."""
    numbers = (path.parent.name.removeprefix("checkpoint-") for path in (folder / "output").glob("checkpoint-*/state.json"))
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=0)


def read_progress(folder: Path) -> list[Progress]:
    """Of a job's folder; a line that a kill cut off is passed over, and of a step taught twice the last line holds."""
    found: dict[int, Progress] = {}
    try:
        lines = (folder / "progress.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    for line in lines:
        try:
            step, loss, seconds = json.loads(line)
            found[int(step)] = Progress(int(step), None if loss is None else float(loss), None if seconds is None else float(seconds))
        except (ValueError, TypeError, RecursionError):
            continue
    return [found[step] for step in sorted(found)]


def progress_lines(entries: Sequence[Progress]) -> bytes:
    """Lines of progress.jsonl: [step, loss, seconds]."""
    rows = ([e.step, None if e.loss is None or not math.isfinite(e.loss) else e.loss, e.seconds] for e in entries)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def stopped_at(what: str, step: int, steps: int) -> str:
    """What a stopped job says: why, and where it would go on."""
    if step == 0:
        return f"{what}; if resumed, it begins anew"
    return f"{what}; {'if resumed, it ' if what == 'cancelled' else ''}goes on from step {step} of {steps}"
