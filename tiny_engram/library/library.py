"""ConceptLibrary: what users call. Imports concept, concept_file, sources, files and its neighbours."""

import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically
from tiny_engram.sources import Source, source_bytes
from tiny_engram.wording import counted, shown

from .entry import Kind, LibraryEntry, LibraryError, Record
from .snapshot import Snapshot
from .writer import Progress, Writer, create

__all__ = ["ConceptLibrary"]

MOST_NAME = 512  # bytes
NOT_IN_NAMES = ("Cc", "Cs", "Zl", "Zp")  # control signs, halves of signs, ends of lines
MOST_TOKENS = 65_535


class ConceptLibrary:
    """Concepts in one file, by name, in the order of adding.

    It shows the file as it was when it was opened, or when a change was last made, or tried, through this object; `refresh` looks again.
    Any number of processes may read; one at a time may write, and others wait for it. A change is there whole or not at all, whenever the
    process ends. Of a concept, what was asked for is read, and checked by its SHA-256.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """Made by `create` and `open`."""
        self._path = snapshot.path
        self._now: Snapshot | None = snapshot

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "ConceptLibrary":
        """A new, empty library. Raises LibraryError if anything is at the path."""
        create(Path(os.path.abspath(path)))
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "ConceptLibrary":
        """Raises LibraryError for what is no sound library of a known version."""
        return cls(Snapshot(Path(os.path.realpath(path))))

    @property
    def path(self) -> Path:
        """Of the file, links followed."""
        return self._path

    @property
    def _snapshot(self) -> Snapshot:
        if self._now is None:
            raise LibraryError(f"{self._path}: this library was closed, expected an open one; ConceptLibrary.open(path) opens it")
        return self._now

    def close(self) -> None:
        """Let the file go; concepts that were read stay."""
        self._now = None

    def __enter__(self) -> "ConceptLibrary":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._now is None:
            return f"ConceptLibrary({str(self._path)!r}, closed)"
        state = self._now.state
        return f"ConceptLibrary({str(self._path)!r}, {counted(state.concepts, 'concept')}, {state.end:,} bytes)"

    # -- reading -------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._snapshot.state.concepts

    def __iter__(self) -> Iterator[LibraryEntry]:
        """Name, trigger, bytes and more of each concept, in the order of adding."""
        return self._snapshot.entries()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._snapshot.find(name) is not None

    def list(self) -> list[LibraryEntry]:
        """The same at once."""
        return [*self]

    def entry(self, name: str) -> LibraryEntry:
        """What the index says of one concept. Raises LibraryError for an unknown name."""
        return self._snapshot.entry(name)

    def read(self, name: str) -> bytes:
        """A concept's file, byte for byte as it was added. Raises LibraryError for an unknown name, or if it is not what was added."""
        return self._snapshot.read(self._snapshot.entry(name))

    def get(self, name: str) -> Concept:
        """A concept, bit-equal to what was added. Raises as `read` does."""
        return Concept.from_bytes(self.read(name), f"{self._path}#{name}")

    def export(self, name: str, path: str | os.PathLike[str]) -> Path:
        """Write a concept's file, byte for byte as it was added, over what is there. Raises as `read` does, or if it cannot be written."""
        blob, target = self.read(name), Path(path)
        try:
            return write_atomically(target, blob)
        except OSError as error:
            raise LibraryError(f"{target}: cannot write the concept ({error.strerror or error}); choose another folder") from error

    def verify(self, name: str | None = None, progress: Progress | None = None) -> int:
        """Compare a concept's bytes with the SHA-256 of the index, and read it; without a name all concepts' bytes, and the index's own.

        Returns how many concepts were compared. Raises LibraryError for the first that is not what was added.
        """
        if name is not None:
            self.get(name)
            return 1
        snapshot, done = self._snapshot, 0
        snapshot.check_index()
        for entry in snapshot.entries():
            snapshot.read(entry)
            done += 1
            if progress is not None:
                progress(done, snapshot.state.concepts)
        if done != snapshot.state.concepts:
            raise LibraryError(f"{self._path}: its index has {done} concepts, expected {snapshot.state.concepts}; copy the library again")
        return done

    def refresh(self) -> bool:
        """Show the file as it is now; was it changed by others? Raises as `open` does."""
        if self._snapshot.is_current():
            return False
        self._now = Snapshot(self._path, self._snapshot)
        return True

    @property
    def kinds(self) -> set[Kind]:
        """What its concepts were made for: base, and by role width and tokenizer."""
        return self._snapshot.kinds

    def spoken(self, role: str, fingerprint: str, ids: NDArray[np.int64]) -> "list[tuple[LibraryEntry, tuple[int, ...]]]":
        """Concepts of which a token sequence stands in ids of this encoder's tokenizer, int64 `[batch, time]`, each with that sequence."""
        return self._snapshot.spoken(role, fingerprint, ids)

    @contextmanager
    def _writing(self) -> Iterator[Writer]:
        """Nobody else changes it meanwhile; afterwards this object shows the file as it is then, whether it was changed or not."""
        with Writer(self._path, self._snapshot) as writer:
            try:
                yield writer
            finally:
                self._now = writer.snapshot

    # -- changing ------------------------------------------------------------------------------------------------------------

    def add(self, concept: Source, name: str | None = None) -> str:
        """Add one concept; returns the name it goes by here.

        Args:
            concept: a Concept, or where its file is: whatever `load_concept` takes.
            name: the name here; None takes the concept's own.

        Raises:
            LibraryError: name taken, a token sequence of another concept for the same encoders, disk full, no permission; nothing is
                changed then. TinyEngramError: no concept.
        """
        return self._add([(concept, name)], None)[0]

    def add_many(self, concepts: Iterable[Source | tuple[Source, str]], progress: Progress | None = None) -> "list[str]":
        """Add many in one change, all or none; returns their names here.

        Args:
            concepts: each as `add` takes it, alone or with its name here.
            progress: told (how many were written, how many there are, None where that is not known).

        Raises as `add` does.
        """
        total = len(concepts) if isinstance(concepts, (list, tuple)) else None
        return self._add((each if isinstance(each, tuple) else (each, None) for each in concepts), progress, total)

    def _add(self, concepts: Iterable[tuple[Source, str | None]], progress: Progress | None, total: int | None = None) -> "list[str]":
        with self._writing() as writer:
            records: list[Record] = []
            names: set[str] = set()
            spoken: dict[object, str] = {}
            for source, name in concepts:
                blob, where = (source.to_bytes(), source.name) if isinstance(source, Concept) else source_bytes(source)
                concept = Concept.from_bytes(blob, where)
                name = _checked(concept.name if name is None else name)
                if name in names or writer.snapshot.find(name) is not None:
                    raise LibraryError(f"{self._path}: concept {shown(name)} is in it already; give another name, or remove that one first")
                record = _record(concept, name, blob, writer.append(blob))
                owner = writer.snapshot.owner(record)
                keys = [(record.entry.kind.roles, *sequence) for sequence in record.sequences]
                taken = owner.name if owner is not None else next((spoken[key] for key in keys if key in spoken), None)
                if taken is not None:
                    raise LibraryError(
                        f"{self._path}: trigger {shown(concept.trigger)} of concept {shown(name)} has token ids that {shown(taken)} has "
                        "for the same encoders; remove that one first, or keep the two in libraries of their own"
                    )
                names.add(name)
                spoken.update((key, name) for key in keys)
                records.append(record)
                if progress is not None:
                    progress(len(records), total)
            if records:
                writer.commit(records)
        return [record.entry.name for record in records]

    def remove(self, *names: str) -> None:
        """Remove concepts, all or none; `compact` gives their space back. Raises LibraryError for an unknown name."""
        with self._writing() as writer:
            entries = writer.snapshot.named(names)
            if entries:
                writer.commit((), entries)

    def compact(self, progress: Progress | None = None) -> int:
        """Write the file anew without what was removed; returns how many bytes that saved. Processes that read keep the old file until
        they refresh.

        Raises LibraryError, and changes nothing: disk full, no permission for the folder, or a concept is not what was added.
        """
        with self._writing() as writer:
            before = writer.snapshot.state.end
            writer.compact(progress)
        return before - writer.snapshot.state.end


def _checked(name: object) -> str:
    sound = isinstance(name, str) and name.strip() and not any(unicodedata.category(sign) in NOT_IN_NAMES for sign in name)
    if not isinstance(name, str) or not sound or len(name.encode()) > MOST_NAME:
        raise LibraryError(f"name of a concept is {shown(name)}, expected one line of text, at most {MOST_NAME} bytes; give name=")
    return name


def _record(concept: Concept, name: str, blob: bytes, offset: int) -> Record:
    sequences = [(role, place.fingerprint, variant.ids) for role, place in concept.roles.items() for variant in place.variants]
    for role, _, ids in sequences:
        if not 0 < len(ids) <= MOST_TOKENS or not all(0 <= token < 2**31 for token in ids):
            raise TinyEngramError(f"concept {shown(name)} has a sequence of {len(ids)} tokens at {role}, expected token ids; make it again")
    trigger = concept.trigger.replace("\0", "")
    return Record(LibraryEntry(name, trigger, Kind.of(concept), len(blob), offset, hashlib.sha256(blob).digest()), tuple(sequences))
