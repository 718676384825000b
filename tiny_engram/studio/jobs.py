"""All jobs of a workspace: made, listed, read and taken away. What one job's folder holds, and who writes what in it: `job_folder`.

May import job_folder, presets, workspace, errors, and the data of training.
"""

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError, without_folder
from tiny_engram.studio.job_folder import STATES, Job, JobState, Progress, plain_message, read_job, read_progress, read_state, write_state
from tiny_engram.studio.presets import DEFAULT_PRESET, check_fields, fields_of
from tiny_engram.studio.workspace import check_id, new_id, write_bytes, write_json
from tiny_engram.training.data import scan_folder

__all__ = ["STATES", "Job", "JobState", "JobStore", "Progress", "Taught"]

MOST_TEXT, MOST_ALIASES, MOST_CAPTION = 200, 16, 1000
MOST_PICTURES = 256
MOST_QUOTED = 60  # characters of a caption that an error repeats: the reason comes after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """A picture to teach from: the file of the server that holds it, and its caption; "" takes the built-in ones."""

    path: Path
    caption: str = ""


class JobStore:
    """All jobs of a workspace. Reads come from disk alone, so that a reloaded page, or a restarted app, shows what there is.

    Threads may share it. Only `Runner` writes states through it.
    """

    def __init__(self, workspace: Any) -> None:
        """workspace: a Workspace, or whatever has the folder `jobs`."""
        self.root = Path(workspace.jobs)
        self._lock = threading.RLock()
        for left in self.root.glob(".*.tmp"):  # a job that was being made, or taken away
            shutil.rmtree(left, ignore_errors=True)

    # -- making ---------------------------------------------------------------------------------------------------------------

    def create(
        self,
        pictures: Sequence[Taught],
        trigger: str,
        *,
        aliases: Sequence[str] = (),
        name: str | None = None,
        class_word: str | None = None,
        preset: str = DEFAULT_PRESET,
        options: dict[str, Any] | None = None,
        model: str | None = None,
        threads: int = 1,
    ) -> Job:
        """A job with copies of its pictures, queued last; there whole or not at all.

        options: TrainConfig's fields that differ from the preset's. Raises StudioError: no pictures, a caption without the trigger, a
        value out of bounds, no room.
        """
        trigger, spellings = _text("trigger", trigger), tuple(_text("alias", alias) for alias in aliases)
        if len(spellings) > MOST_ALIASES:
            raise StudioError(f"{len(spellings)} aliases, expected at most {MOST_ALIASES}; remove some")
        if not 1 <= len(pictures) <= MOST_PICTURES:
            raise StudioError(f"{len(pictures)} pictures, expected 1 to {MOST_PICTURES}; " + ("remove some" if pictures else "add some"))
        fields = check_fields(fields_of(preset) | dict(options or {}))
        job = Job(
            id=new_id(),
            trigger=trigger,
            aliases=spellings,
            name=trigger if not name or not name.strip() else _text("name", name),
            class_word=None if not class_word or not class_word.strip() else _text("class word", class_word),
            preset=preset,
            model=model,
            threads=threads,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            pictures=len(pictures),
            fields=fields,
        )
        made = self.root / f".{job.id}.tmp"
        try:
            _fill(made, job, pictures)
            with self._lock:
                write_state(made, JobState(id=job.id, state="queued", steps=job.steps, queued=self._ticket()))
                made.rename(self.root / job.id)
        except StudioError:
            raise
        except TinyEngramError as error:
            raise StudioError(plain_message(without_folder(error, made / "pictures", "pictures"))) from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StudioError(f"cannot save the job ({reason}); free space in the Studio's folder, or add the pictures again") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return job

    def _ticket(self) -> int:
        """Later than every ticket there is, whatever the clock does."""
        return max([time.time_ns(), *(state.queued + 1 for state in self.states())])

    # -- reading --------------------------------------------------------------------------------------------------------------

    def folder(self, id: str) -> Path:
        """Of a job that is there. Raises StudioError for any other id."""
        folder = self.root / check_id("job", id)
        if not folder.is_dir():
            raise StudioError(f"no job {id!r}; reload the page and choose one that is listed")
        return folder

    def job(self, id: str) -> Job:
        """Raises StudioError: not there, or damaged."""
        return read_job(self.folder(id))

    def state(self, id: str) -> JobState:
        """Of one job, with its place in the queue. Raises StudioError: no such job."""
        folder = self.folder(id)
        state = self._one(folder)
        if state is not None and state.state == "queued":
            state = next((one for one in self._placed() if one.id == folder.name), None)
        if state is None:
            raise StudioError(f"no job {id!r}; reload the page and choose one that is listed")
        return state

    def states(self) -> list[JobState]:
        """Of all jobs, those that joined the queue last first. One whose files are damaged is "failed", and says so."""
        return self._placed()

    def _placed(self) -> list[JobState]:
        ids = [p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith(".")] if self.root.is_dir() else []
        found = [state for id in ids if (state := self._one(self.root / id)) is not None]
        waiting = [state.id for state in sorted(found, key=lambda s: (s.queued, s.id)) if state.state == "queued"]
        placed = [dataclasses.replace(s, place=waiting.index(s.id) + 1) if s.state == "queued" else s for s in found]
        return sorted(placed, key=lambda s: (s.queued, s.id), reverse=True)

    @staticmethod
    def _one(folder: Path) -> JobState | None:
        try:
            return read_state(folder)
        except (StudioError, TypeError) as error:
            if not folder.is_dir():  # deleted in this moment
                return None
            return JobState(id=folder.name, state="failed", message=plain_message(error))

    def progress(self, id: str) -> list[Progress]:
        """One entry a step, in order."""
        return read_progress(self.folder(id))

    def samples(self, id: str) -> list[tuple[int, Path]]:
        """(step, PNG) of the pictures drawn so far, in order."""
        found = (self.folder(id) / "samples").glob("step_*.png")
        return sorted((int(p.stem.removeprefix("step_")), p) for p in found if p.stem.removeprefix("step_").isdecimal())

    def pictures(self, id: str) -> list[Taught]:
        """What it is taught from: the job's own copies, with their captions."""
        folder = self.folder(id) / "pictures"
        captions: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").split("\n"):
                if line.strip():
                    row = json.loads(line)
                    captions[row["file_name"]] = row["text"]
        return [Taught(path=path, caption=captions.get(path.name, "")) for path in sorted(folder.glob("*.png"))]

    def concept_path(self, id: str) -> Path:
        """The finished concept, where there is one."""
        return self.folder(id) / "output" / "concept.safetensors"

    # -- changing -------------------------------------------------------------------------------------------------------------

    def write(self, state: JobState) -> JobState:
        """Put a state on disk; for a job on which no process works. Raises StudioError."""
        with self._lock:
            write_state(self.folder(state.id), state)
        return state

    def enqueue(self, id: str, message: str = "") -> JobState:
        """Last in the queue, with what it has."""
        with self._lock:
            state = self.state(id)
            job = self.job(id)
            # a job that failed may have been made without a readable state
            return self.write(dataclasses.replace(state, state="queued", steps=job.steps, queued=self._ticket(), message=message, place=0))

    def delete(self, id: str) -> None:
        """Take a job away, with its pictures and checkpoints; a concept in the library stays. For a job on which no process works."""
        with self._lock:
            folder = self.folder(id)
            gone = self.root / f".{folder.name}.tmp"
            try:
                folder.rename(gone)  # at once, so that a kill leaves no half of it
            except OSError as error:
                raise StudioError(f"the job cannot be deleted ({error.strerror or type(error).__name__}); try again") from error
            shutil.rmtree(gone, ignore_errors=True)


def _text(what: str, given: Any) -> str:
    text = " ".join(given.split()) if isinstance(given, str) else ""
    if not text or len(text) > MOST_TEXT:
        shown, out = (f"{len(text)} characters long", "write a shorter one") if text else ("empty", "write one")
        raise StudioError(f"the {what} is {shown}, expected 1 to {MOST_TEXT} characters; {out}")
    return text


def _fill(made: Path, job: Job, pictures: Sequence[Taught]) -> None:
    """Pictures, captions and job.json, all checked as the teaching process will. Raises TinyEngramError, OSError."""
    taught = made / "pictures"
    taught.mkdir(parents=True)
    for part in ("samples", "output"):
        (made / part).mkdir()
    rows = []
    for number, picture in enumerate(pictures):
        name = f"{number:04d}.png"
        write_bytes(taught / name, Path(picture.path).read_bytes())
        caption = " ".join(picture.caption.split())
        if len(caption) > MOST_CAPTION:
            raise StudioError(f"the caption of picture {number + 1} has {len(caption)} characters, expected at most {MOST_CAPTION}; cut it")
        spellings = (job.trigger, *job.aliases)
        if caption and "{trigger}" not in caption and not any(s.lower() in caption.lower() for s in spellings):
            shown = caption if len(caption) <= MOST_QUOTED else caption[: MOST_QUOTED - 3] + "..."
            raise StudioError(
                f"the caption of picture {number + 1}, {shown!r}, does not hold the trigger {job.trigger!r}; "
                "write {trigger} where the subject is named, or leave the caption empty"
            )
        rows += [json.dumps({"file_name": name, "text": caption}, ensure_ascii=False)] if caption else []
    if rows:
        write_bytes(taught / "metadata.jsonl", ("\n".join(rows) + "\n").encode())
    config = job.train_config(made)
    scan_folder(taught, (job.trigger, *job.aliases), templates=config.caption_template)
    write_json(made / "job.json", dataclasses.asdict(job))
