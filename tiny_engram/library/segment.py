"""One piece of a library's index: arrays in the file, mapped, never changed. Imports numpy and its neighbours.

A segment is 6 counts (uint64) and arrays behind each other, each at a multiple of 8 bytes: by entry in the order of adding where its file
lies, its length, SHA-256, kind and texts; hashes of the names, ascending, and whose they are; hashes of all token sequences, ascending,
whose they are and their ids; the offsets of concepts that were removed; texts; and kinds as JSON. Lengths are checked when it is opened,
values when they are used.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .entry import Kind, LibraryEntry, LibraryError, Record
from .sequences import hash_sequences, salt_of

__all__ = ["Segment", "name_hash"]

COUNTS = ("entries", "removals", "sequences", "ids", "text_bytes", "kind_bytes")
# name, type, which count gives its length, what is added to it, and width
ARRAYS: tuple[tuple[str, str, str, int, int], ...] = (
    ("offset", "<u8", "entries", 0, 1),
    ("nbytes", "<u8", "entries", 0, 1),
    ("text_at", "<u8", "entries", 1, 1),
    ("digest", "u1", "entries", 0, 32),
    ("kind", "<u4", "entries", 0, 1),
    ("name_hash", "<u8", "entries", 0, 1),
    ("name_entry", "<u4", "entries", 0, 1),
    ("sequence_hash", "<u8", "sequences", 0, 1),
    ("sequence_at", "<u8", "sequences", 0, 1),
    ("sequence_entry", "<u4", "sequences", 0, 1),
    ("sequence_length", "<u2", "sequences", 0, 1),
    ("ids", "<i4", "ids", 0, 1),
    ("removed", "<u8", "removals", 0, 1),
    ("text", "u1", "text_bytes", 0, 1),
    ("kinds", "u1", "kind_bytes", 0, 1),
)
_MOST_SPARSE = 1 << 26  # slots of the table that says which hashes may be here
Arrays = dict[str, NDArray[Any]]


def name_hash(name: str) -> int:
    """64 bits of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=8).digest(), "little")


def _step(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class Segment:
    """The arrays of one segment, by name in `arrays`, and `kinds`, what its concepts were made for."""

    def __init__(self, arrays: Arrays, where: str) -> None:
        self.arrays, self._where = arrays, where
        try:
            listed = json.loads(bytes(arrays["kinds"]).decode() or "[]")
            self.kinds = [Kind(str(base), tuple((str(r), int(w), str(f)) for r, w, f in roles), bool(at)) for base, roles, at in listed]
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged("kinds are no JSON") from error

    def _damaged(self, what: str) -> LibraryError:
        return LibraryError(f"{self._where}: its index is damaged ({what}); copy the library again")

    def __len__(self) -> int:
        return len(self.arrays["offset"])

    # -- bytes ---------------------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, view: memoryview, where: str) -> "Segment":
        """From its bytes, which are not copied. Raises LibraryError where counts and length do not fit."""
        arrays: Arrays = {}
        head = bytes(view[: 8 * len(COUNTS)]).ljust(8 * len(COUNTS), b"\xff")  # too many, where there are none
        known: dict[str, int] = dict(zip(COUNTS, np.frombuffer(head, dtype="<u8").tolist(), strict=True))
        at = 8 * len(COUNTS)
        for name, dtype, count, more, width in ARRAYS:
            length = known[count] + more  # python's integers: no sum of them can overflow
            nbytes = length * width * np.dtype(dtype).itemsize
            if at + nbytes > len(view):
                raise LibraryError(f"{where}: an index segment of {len(view)} bytes is too short for its {name}; copy the library again")
            found = np.frombuffer(view[at : at + nbytes], dtype=dtype)
            arrays[name] = found.reshape(-1, width) if width > 1 else found
            at += _step(nbytes)
        return cls(arrays, where)

    def pack(self) -> bytes:
        """Its bytes."""
        sizes = {count: len(self.arrays[name]) - more for name, _, count, more, _ in ARRAYS}
        parts = [np.array([sizes[name] for name in COUNTS], dtype="<u8").tobytes()]
        for name, dtype, *_ in ARRAYS:
            blob = np.ascontiguousarray(self.arrays[name], dtype=dtype).tobytes()
            parts.append(blob.ljust(_step(len(blob)), b"\0"))
        return b"".join(parts)

    # -- making --------------------------------------------------------------------------------------------------------------

    @classmethod
    def build(cls, records: Sequence[Record], removed: Sequence[int] = ()) -> "Segment":
        """A segment of new concepts, and of the offsets of removed ones."""
        entries = [record.entry for record in records]
        kinds = {kind: k for k, kind in enumerate(dict.fromkeys(entry.kind for entry in entries))}
        texts = [f"{entry.name}\0{entry.trigger}".encode(errors="replace") for entry in entries]
        flat = [(k, *sequence) for k, record in enumerate(records) for sequence in record.sequences]
        salts = {(role, fingerprint): salt_of(role, fingerprint) for _, role, fingerprint, _ in flat}
        ids = [found for *_, found in flat]
        lengths = np.array([len(found) for found in ids], dtype=np.int64)
        return cls._ordered(
            {
                "offset": np.array([entry.offset for entry in entries], dtype=np.uint64),
                "nbytes": np.array([entry.nbytes for entry in entries], dtype=np.uint64),
                "text_at": np.cumsum([0, *map(len, texts)], dtype=np.uint64),
                "digest": np.frombuffer(b"".join(entry.digest for entry in entries), dtype=np.uint8).reshape(-1, 32),
                "kind": np.array([kinds[entry.kind] for entry in entries], dtype=np.uint32),
                "name_hash": np.array([name_hash(entry.name) for entry in entries], dtype=np.uint64),
                "name_entry": np.arange(len(entries), dtype=np.uint32),
                "sequence_hash": hash_sequences(ids, [salts[role, fingerprint] for _, role, fingerprint, _ in flat]),
                "sequence_at": (np.cumsum(lengths) - lengths).astype(np.uint64),
                "sequence_entry": np.array([k for k, *_ in flat], dtype=np.uint32),
                "sequence_length": lengths.astype(np.uint16),
                "ids": np.array([i for found in ids for i in found], dtype=np.int32),
                "removed": np.array(sorted(removed), dtype=np.uint64),
                "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
                "kinds": _kinds_json(kinds),
            }
        )

    @classmethod
    def merged(cls, segments: Sequence["Segment"], *, oldest: bool, where: str) -> "Segment":
        """One segment in the place of several that stand behind each other; with `oldest`, no removal concerns an earlier one."""
        removed = np.concatenate([segment.arrays["removed"] for segment in segments])
        kinds = {kind: k for k, kind in enumerate(dict.fromkeys(kind for segment in segments for kind in segment.kinds))}
        parts, first = [], 0
        for segment in segments:
            alive = np.flatnonzero(~np.isin(segment.arrays["offset"], removed))
            parts.append(segment._part(alive, first, np.array([kinds[kind] for kind in segment.kinds], dtype=np.uint32)))
            first += len(alive)
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        text_length, sequence_length = arrays.pop("text_length"), arrays["sequence_length"].astype(np.uint64)
        arrays["text_at"] = np.concatenate([np.zeros(1, np.uint64), np.cumsum(text_length, dtype=np.uint64)])
        arrays["sequence_at"] = np.cumsum(sequence_length, dtype=np.uint64) - sequence_length
        here = np.concatenate([segment.arrays["offset"] for segment in segments])
        arrays["removed"] = removed[:0] if oldest else np.sort(removed[~np.isin(removed, here)])
        arrays["kinds"] = _kinds_json(kinds)
        return cls._ordered(arrays, where)

    def _part(self, alive: NDArray[np.int64], first: int, kinds: NDArray[np.uint32]) -> Arrays:
        """The arrays of these entries, renumbered to begin with `first`, before they are put in order."""
        self.check()
        arrays = self.arrays
        new = np.full(len(self), -1, dtype=np.int64)
        new[alive] = np.arange(first, first + len(alive))
        named, spoken = (np.flatnonzero(new[arrays[name].astype(np.int64)] >= 0) for name in ("name_entry", "sequence_entry"))
        start, length = arrays["text_at"][:-1].astype(np.int64), np.diff(arrays["text_at"].astype(np.int64))
        at, count = arrays["sequence_at"].astype(np.int64), arrays["sequence_length"].astype(np.int64)
        return {
            **{name: arrays[name][alive] for name in ("offset", "nbytes", "digest")},
            "kind": kinds[arrays["kind"][alive]] if len(alive) else kinds[:0],
            "name_hash": arrays["name_hash"][named],
            "name_entry": new[arrays["name_entry"][named].astype(np.int64)].astype(np.uint32),
            "sequence_hash": arrays["sequence_hash"][spoken],
            "sequence_entry": new[arrays["sequence_entry"][spoken].astype(np.int64)].astype(np.uint32),
            "sequence_length": arrays["sequence_length"][spoken],
            "ids": _ragged(arrays["ids"], at[spoken], count[spoken]),
            "text": _ragged(arrays["text"], start[alive], length[alive]),
            "text_length": length[alive].astype(np.uint64),
        }

    @classmethod
    def _ordered(cls, arrays: Arrays, where: str = "index") -> "Segment":
        """Names and sequences by their hashes; what belongs to them follows."""
        by_name = np.argsort(arrays["name_hash"], kind="stable")
        by_sequence = np.argsort(arrays["sequence_hash"], kind="stable")
        for name in ("name_hash", "name_entry"):
            arrays[name] = arrays[name][by_name]
        for name in ("sequence_hash", "sequence_at", "sequence_entry", "sequence_length"):
            arrays[name] = arrays[name][by_sequence]
        return cls(arrays, where)

    def check(self) -> None:
        """All values are in range. Raises LibraryError."""
        arrays, count = self.arrays, len(self)
        text_at = arrays["text_at"].astype(np.int64)
        ends = arrays["sequence_at"].astype(np.float64) + arrays["sequence_length"]
        sound = {
            "texts": text_at[0] == 0 and bool((np.diff(text_at) >= 0).all()) and text_at[-1] <= len(arrays["text"]),
            "kinds": not count or int(arrays["kind"].max()) < len(self.kinds),
            "names": not count or int(arrays["name_entry"].max()) < count,
            "sequences": not len(ends) or (int(arrays["sequence_entry"].max()) < count and ends.max() <= len(arrays["ids"])),
        }
        for what, ok in sound.items():
            if not ok:
                raise self._damaged(f"{what} out of range")

    # -- reading -------------------------------------------------------------------------------------------------------------

    def entry(self, k: int) -> LibraryEntry:
        """The k-th concept that was added here. Raises LibraryError for values out of range."""
        arrays = self.arrays
        if not 0 <= k < len(self):
            raise self._damaged(f"entry {k} of {len(self)}")
        start, stop, kind = int(arrays["text_at"][k]), int(arrays["text_at"][k + 1]), int(arrays["kind"][k])
        if not start <= stop <= len(arrays["text"]) or kind >= len(self.kinds):
            raise self._damaged(f"entry {k} points outside")
        try:
            name, _, trigger = bytes(arrays["text"][start:stop]).decode().partition("\0")
        except UnicodeDecodeError as error:
            raise self._damaged(f"the name of entry {k}") from error
        offset, nbytes = int(arrays["offset"][k]), int(arrays["nbytes"][k])
        return LibraryEntry(name, trigger, self.kinds[kind], nbytes, offset, bytes(arrays["digest"][k]))

    def named(self, name: str) -> Iterator[LibraryEntry]:
        """Concepts that were added under this name, whether they were removed since or not."""
        for k in _equal(self.arrays["name_hash"], np.uint64(name_hash(name))):
            entry = self.entry(int(self.arrays["name_entry"][k]))
            if entry.name == name:
                yield entry

    def holds_removal(self, offset: int) -> bool:
        """Was the concept at this offset removed by a change that this segment holds?"""
        return len(_equal(self.arrays["removed"], np.uint64(offset))) > 0

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the sequences, ascending."""
        return np.flatnonzero(np.bincount(self.arrays["sequence_length"])).tolist()

    @cached_property
    def _sparse(self) -> NDArray[np.bool_]:
        """Which hashes may be here, by their low bits: most windows of a prompt need no search."""
        count = len(self.arrays["sequence_hash"])
        table = np.zeros(min(1 << max(10, math.ceil(math.log2(8 * count + 1))), _MOST_SPARSE), dtype=bool)
        table[self.arrays["sequence_hash"] & np.uint64(len(table) - 1)] = True
        return table

    def spoken(self, hashes: NDArray[np.uint64]) -> list[tuple[int, LibraryEntry, tuple[int, ...]]]:
        """(index among the hashes, concept, ids) of each sequence with such a hash; the ids are to be compared."""
        if not len(self.arrays["sequence_hash"]):
            return []
        found = []
        for w in np.flatnonzero(self._sparse[hashes & np.uint64(len(self._sparse) - 1)]).tolist():
            for k in _equal(self.arrays["sequence_hash"], hashes[w]):
                start, length = int(self.arrays["sequence_at"][k]), int(self.arrays["sequence_length"][k])
                entry = self.entry(int(self.arrays["sequence_entry"][k]))
                found.append((w, entry, tuple(self.arrays["ids"][start : start + length].tolist())))
        return found


def _kinds_json(kinds: dict[Kind, int]) -> NDArray[np.uint8]:
    text = json.dumps([[kind.base, kind.roles, kind.denoiser] for kind in kinds], separators=(",", ":"))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _equal(ascending: NDArray[Any], value: np.uint64) -> range:
    """The places of a value."""
    return range(*(int(np.searchsorted(ascending, value, side=side)) for side in ("left", "right")))


def _ragged(data: NDArray[Any], start: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[Any]:
    """Pieces of an array, one behind the other."""
    before = np.cumsum(length) - length
    return data[np.repeat(start - before, length) + np.arange(int(length.sum()))]
