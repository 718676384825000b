"""A library's file as it was at one moment: what was written since changes nothing here. Imports numpy, concept_file and its neighbours.

The index is mapped, and read where it is looked at; files of concepts are read one by one, so that nothing of them stays in memory that was
not asked for.
"""

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiny_engram.concept_file import MAX_FILE
from tiny_engram.wording import shown

from .entry import Kind, LibraryEntry, LibraryError, Record
from .segment import Segment
from .sequences import hash_sequences, hash_windows, salt_of
from .state import START, Place, State, parse_state

__all__ = ["Snapshot"]


class Snapshot:
    """Open for reading, from several threads; its file is closed when nobody holds it.

    Attributes:
        path: of the library. state: what its header says. segments: of its index, in the order of adding.
    """

    def __init__(self, path: Path, before: "Snapshot | None" = None) -> None:
        """`before`: an earlier snapshot, whose segments are used again. Raises LibraryError for what is no sound library."""
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise LibraryError(f"{path}: is no regular file, expected a library of concepts")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
            about = os.fstat(self._file.fileno())
            self._inode = about.st_dev, about.st_ino
            self.state = self._read_state()
            self._map = memoryview(mmap.mmap(self._file.fileno(), self.state.end, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            if isinstance(error, LibraryError):
                raise
            way = "; make one with `tiny-engram library create`" if isinstance(error, FileNotFoundError) else ""
            raise LibraryError(f"{path}: cannot open the library ({getattr(error, 'strerror', None) or error}){way}") from error
        known = dict(zip(before.state.places, before.segments, strict=True)) if before and before._inode == self._inode else {}
        self.segments = [known.get(place) or self._segment(place) for place in self.state.places]

    def _read_state(self) -> State:
        number = self._file.fileno()
        try:
            return parse_state(self.path, os.pread(number, START, 0), os.fstat(number).st_size)
        except LibraryError:  # it may have been read just while both slots were written, one after the other
            return parse_state(self.path, os.pread(number, START, 0), os.fstat(number).st_size)

    def _segment(self, place: Place) -> Segment:
        return Segment.read(self._map[place.offset : place.offset + place.nbytes], str(self.path))

    def is_current(self) -> bool:
        """Is the file at the path this one, in this state?"""
        try:
            about = os.stat(self.path)
            return (about.st_dev, about.st_ino) == self._inode and self._read_state().generation == self.state.generation
        except OSError:
            return False

    # -- what there is -------------------------------------------------------------------------------------------------------

    def _removed(self, entry: LibraryEntry) -> bool:
        return any(segment.holds_removal(entry.offset) for segment in self.segments)

    def find(self, name: str) -> LibraryEntry | None:
        """The concept of this name."""
        found = (entry for segment in reversed(self.segments) for entry in segment.named(name))
        return next((entry for entry in found if not self._removed(entry)), None)

    def entry(self, name: str) -> LibraryEntry:
        """The same. Raises LibraryError where there is none."""
        found = self.find(name)
        if found is None:
            raise LibraryError(f"{self.path}: holds no concept {shown(name)}, expected one of its {self.state.concepts:,}; list them")
        return found

    def entries(self) -> Iterator[LibraryEntry]:
        """All concepts, in the order of adding."""
        removed = np.concatenate([segment.arrays["removed"] for segment in self.segments] or [np.zeros(0, np.uint64)])
        for segment in self.segments:
            for k in np.flatnonzero(~np.isin(segment.arrays["offset"], removed)).tolist():
                yield segment.entry(k)

    @property
    def kinds(self) -> set[Kind]:
        """What concepts that were added, some of them perhaps removed since, were made for."""
        return {kind for segment in self.segments for kind in segment.kinds}

    # -- token sequences -----------------------------------------------------------------------------------------------------

    def spoken(self, role: str, fingerprint: str, ids: NDArray[np.int64]) -> list[tuple[LibraryEntry, tuple[int, ...]]]:
        """Concepts that have a sequence for this encoder's tokenizer that stands in the ids, int64 `[batch, time]`, with that sequence.

        Edges of words are not looked at.
        """
        lengths = sorted({length for segment in self.segments for length in segment.lengths})
        found: dict[tuple[int, tuple[int, ...]], LibraryEntry] = {}
        for length, hashes in hash_windows(ids, lengths, salt_of(role, fingerprint)):
            flat = hashes.reshape(-1)
            for segment in self.segments:
                for w, entry, sequence in segment.spoken(flat) if length in segment.lengths else ():
                    row, start = divmod(w, hashes.shape[1])
                    if tuple(ids[row, start : start + length].tolist()) == sequence and not self._removed(entry):
                        found[entry.offset, sequence] = entry
        return [(entry, sequence) for (_, sequence), entry in found.items()]

    def owner(self, record: Record) -> LibraryEntry | None:
        """A concept for the same encoders that has one of this one's sequences."""
        hashes = hash_sequences([ids for *_, ids in record.sequences], [salt_of(role, print_) for role, print_, _ in record.sequences])
        for segment in self.segments:
            for w, entry, sequence in segment.spoken(hashes):
                same = sequence == record.sequences[w][2] and entry.kind.roles == record.entry.kind.roles
                if same and not self._removed(entry):
                    return entry
        return None

    # -- bytes ---------------------------------------------------------------------------------------------------------------

    def read(self, entry: LibraryEntry) -> bytes:
        """A concept's file. Raises LibraryError where it is not what was added."""
        if not (entry.offset >= START and entry.nbytes <= MAX_FILE and entry.offset + entry.nbytes <= self.state.end):
            raise LibraryError(f"{self.path}: concept {shown(entry.name)} lies outside of the file; copy the library again")
        try:
            blob = os.pread(self._file.fileno(), entry.nbytes, entry.offset)
        except OSError as error:
            raise LibraryError(f"{self.path}: cannot be read ({error.strerror}); copy it from where it is sound") from error
        if len(blob) != entry.nbytes or hashlib.sha256(blob).digest() != entry.digest:
            raise LibraryError(
                f"{self.path}: concept {shown(entry.name)} is not what was added (its SHA-256 differs); copy the library again, "
                "or remove that concept and add it again"
            )
        return blob

    def check_index(self) -> None:
        """All of the index is as it was written. Raises LibraryError."""
        for place, segment in zip(self.state.places, self.segments, strict=True):
            if hashlib.sha256(self._map[place.offset : place.offset + place.nbytes]).digest() != place.digest:
                raise LibraryError(f"{self.path}: its index at byte {place.offset} is not what was written; copy the library again")
            segment.check()

    def named(self, names: Sequence[str]) -> list[LibraryEntry]:
        """The concepts of several names. Raises LibraryError for the first that is not there, or is given twice."""
        entries = [self.entry(name) for name in names]
        for k, name in enumerate(names):
            if name in names[:k]:
                raise LibraryError(f"{self.path}: concept {shown(name)} is given twice, expected once")
        return entries
