"""Changes a library: one writer at a time, and every moment leaves the old state or the new one. Imports numpy, files and its neighbours.

New bytes go behind the committed end, which no reader looks at, and are flushed; then one slot of the header makes them true. The index of
a change is a segment of its own. Where seven segments of a size have come together, the next change writes one in their place, so a
concept's part of the index is written about once for each power of eight of the library.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from tiny_engram.files import sync_folder

from .entry import LibraryEntry, LibraryError, Record
from .segment import Segment
from .snapshot import Snapshot
from .state import MOST_SEGMENTS, START, Place, State, pack_state, padded, slot_of

__all__ = ["Progress", "Writer", "create"]

_log = logging.getLogger(__name__)
SECONDS = 30.0  # a change takes milliseconds, one of many concepts seconds
_SAID_AFTER = 2.0
_FEW = 7  # segments of a size beside each other
Progress = Callable[[int, int | None], object]


def create(path: Path) -> None:
    """Make an empty library. Raises LibraryError if anything is at the path."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".tmp", dir=path.parent)
        try:
            _write(handle, pack_state(State()), 0)
            _write(handle, pack_state(State(generation=1)), slot_of(1))
            os.fchmod(handle, 0o666 & ~_umask())
            os.fsync(handle)
        finally:
            os.close(handle)
        os.link(temporary, path)  # unlike a rename it never takes the place of a file
        sync_folder(path.parent)
    except FileExistsError as error:
        raise LibraryError(f"{path}: is there already, expected a new name; open it, or remove it first") from error
    except OSError as error:
        raise LibraryError(f"{path}: cannot make a library ({error.strerror or error}); free space or choose another folder") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(handle: int, blob: bytes, at: int) -> None:
    view = memoryview(blob)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done


def _size_class(count: int) -> int:
    return max(count, 1).bit_length() // 3


class Writer:
    """Inside, nobody else changes the library.

    Attributes:
        snapshot: the library as it is; the new one after a change.
    """

    def __init__(self, path: Path, before: Snapshot | None = None, *, seconds: float = SECONDS) -> None:
        self._path, self._before, self._seconds = path, before, seconds

    def __enter__(self) -> "Writer":
        """Raises LibraryError: not open to us for writing, another writer for so many seconds, or no sound library."""
        try:
            self.handle = self._locked()
        except OSError as error:
            raise LibraryError(
                f"{self._path}: cannot be changed ({error.strerror or error}); it can be read, copy it to a place that can be written to"
            ) from error
        try:
            self.snapshot = Snapshot(self._path, self._before)
        except BaseException:
            os.close(self.handle)
            raise
        self._end = padded(self.snapshot.state.end)
        self._decided = False  # a header that says something new is being written, or another file is in the place of this one
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # what was not committed gives its space back; no reader has it
        if not self._decided:
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, self.snapshot.state.end)
        os.close(self.handle)
        if isinstance(error, OSError):
            self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        state = (
            "the change may be in it or not, look before you repeat it"
            if self._decided
            else "it is as it was; free space or choose another disk"
        )
        raise LibraryError(f"{self._path}: cannot be changed ({error.strerror or error}), {state}") from error

    def _locked(self) -> int:
        began, said = time.monotonic(), False
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever had it may have put a compacted file in its place.
                if os.path.samestat(os.fstat(handle), os.stat(self._path)):
                    return handle
                os.close(handle)
                continue
            except BlockingIOError:
                os.close(handle)
            except BaseException:
                os.close(handle)
                raise
            waited = time.monotonic() - began
            if waited > self._seconds:
                raise LibraryError(f"{self._path}: another process has been changing it for {waited:.0f} s; stop it, or try again later")
            if waited > _SAID_AFTER and not said:
                _log.warning("%s: another process changes it; waiting for up to %.0f s", self._path, self._seconds)
                said = True
            time.sleep(0.01)

    def append(self, blob: bytes) -> int:
        """Write behind the end; where it begins. Nothing of it counts before `commit`."""
        at = self._end
        _write(self.handle, blob, at)
        self._end = padded(at + len(blob))
        return at

    def commit(self, records: Sequence[Record], removed: Sequence[LibraryEntry] = ()) -> None:
        """Add these, whose files were appended, and remove those."""
        old, new = self.snapshot.state, Segment.build(records, [entry.offset for entry in removed])
        kept, tail = self._to_merge(len(records) + len(removed))
        if tail:
            new = Segment.merged([*self.snapshot.segments[kept:], new], oldest=not kept, where=str(self._path))
        blob, end_of = new.pack(), self._end
        self.append(blob)
        place = Place(end_of, len(blob), len(new) + len(new.arrays["removed"]), hashlib.sha256(blob).digest())
        state = State(
            old.generation + 1,
            end_of + len(blob),
            old.concepts + len(records) - len(removed),
            old.nbytes + sum(record.entry.nbytes for record in records) - sum(entry.nbytes for entry in removed),
            (*old.places[:kept], place),
        )
        os.fsync(self.handle)
        self._decided = True
        _write(self.handle, pack_state(state), slot_of(state.generation))
        os.fsync(self.handle)
        self.snapshot = Snapshot(self._path, self.snapshot)
        self._end, self._decided = padded(state.end), False

    def _to_merge(self, count: int) -> tuple[int, int]:
        """How many segments stay, and how many of those behind them go into the new one."""
        places, tail = self.snapshot.state.places, 0
        while True:
            size = _size_class(count + sum(place.count for place in places[len(places) - tail :]))
            run = 0
            for place in reversed(places):
                if _size_class(place.count) > size:
                    break
                run += 1
            if run < _FEW or run <= tail:
                break
            tail = run
        if len(places) - tail >= MOST_SEGMENTS:
            tail = len(places)
        return len(places) - tail, tail

    def compact(self, progress: Progress | None = None) -> None:
        """Put a file in the place of this one that holds the present concepts alone, and one index; who has it open keeps the old one.

        Raises LibraryError, and changes nothing, if a concept is not what was added.
        """
        # One name, which is ours while we hold the lock: what a process left there that was killed goes.
        beside: Path | None = self._path.parent / f".{self._path.name}.compacting"
        try:
            beside.unlink(missing_ok=True)
            handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)  # from the moment that it is the library
                self._copy(handle, progress)
                os.fchmod(handle, stat.S_IMODE(os.fstat(self.handle).st_mode))
                os.fsync(handle)
                os.replace(beside, self._path)
                beside, self._decided = None, True
                sync_folder(self._path.parent)
                self.snapshot = Snapshot(self._path)
            finally:
                os.close(handle)
        finally:
            if beside is not None:
                with contextlib.suppress(OSError):
                    beside.unlink()

    def _copy(self, handle: int, progress: Progress | None) -> None:
        old, offsets, total, at = self.snapshot, [], 0, START
        for entry in old.entries():
            blob = old.read(entry)
            _write(handle, blob, at)
            offsets.append(at)
            total, at = total + len(blob), padded(at + len(blob))
            if progress is not None:
                progress(len(offsets), old.state.concepts)
        # Sequences and names are taken over; the files alone lie elsewhere.
        index = Segment.merged(old.segments, oldest=True, where=str(self._path)) if old.segments else Segment.build(())
        index.arrays["offset"] = np.array(offsets, dtype=np.uint64)
        blob = index.pack() if offsets else b""
        _write(handle, blob, at)
        places = (Place(at, len(blob), len(index), hashlib.sha256(blob).digest()),) if offsets else ()
        state = State(old.state.generation + 1, at + len(blob), len(offsets), total, places)
        _write(handle, pack_state(replace(state, generation=state.generation - 1)), slot_of(state.generation - 1))
        _write(handle, pack_state(state), slot_of(state.generation))
