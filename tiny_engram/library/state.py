"""The first two pages of a library's file, which say what of the rest counts. Imports files and errors.

Each page is a slot: magic, version, generation, where the committed bytes end, the list of index segments, a checksum. A change is written
behind the end, flushed, and then becomes true by one slot, the one that holds the older generation; the other one stays as it was. A slot
that was torn fails its checksum, and the other one counts.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from .entry import LibraryError

__all__ = ["ALIGN", "MOST_SEGMENTS", "START", "Place", "State", "is_library", "pack_state", "padded", "parse_state", "slot_of"]

MAGIC = b"ENGRAMS\n"
VERSION = 1
SLOT = 4096
START = 2 * SLOT  # where the first concept may begin
ALIGN = 64
_HEAD = struct.Struct("<8sIIQQQQ")
_PLACE = struct.Struct("<QQQ32s")
_DIGEST = 32
MOST_SEGMENTS = (SLOT - _HEAD.size - _DIGEST) // _PLACE.size


@dataclass(frozen=True, slots=True)
class Place:
    """An index segment in the file: its bytes, how many entries and removals it holds, and its SHA-256."""

    offset: int
    nbytes: int
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class State:
    """What counts: `end` is where the committed bytes end, `concepts` how many there are, `nbytes` what their files take in all."""

    generation: int = 0
    end: int = START
    concepts: int = 0
    nbytes: int = 0
    places: tuple[Place, ...] = ()


def padded(size: int) -> int:
    """Up to where the next thing in the file may begin."""
    return -(-size // ALIGN) * ALIGN


def slot_of(generation: int) -> int:
    """Where in the file a generation's slot begins."""
    return generation % 2 * SLOT


def pack_state(state: State) -> bytes:
    """The bytes of one slot."""
    assert len(state.places) <= MOST_SEGMENTS
    head = _HEAD.pack(MAGIC, VERSION, len(state.places), state.generation, state.end, state.concepts, state.nbytes)
    body = head + b"".join(_PLACE.pack(place.offset, place.nbytes, place.count, place.digest) for place in state.places)
    body = body.ljust(SLOT - _DIGEST, b"\0")
    return body + hashlib.sha256(body).digest()


def is_library(path: str | os.PathLike[str]) -> bool:
    """Does a file begin as a library does? False where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(SLOT + len(MAGIC)) if os.path.isfile(path) else b""
    except (OSError, ValueError):
        return False
    return MAGIC in (head[: len(MAGIC)], head[SLOT:])


def parse_state(path: Path, head: bytes, size: int) -> State:
    """The state of a file of `size` bytes whose first are `head`. Raises LibraryError for what is no sound library of a known version."""
    slots = [head[at : at + SLOT] for at in (0, SLOT)]
    ours = [slot for slot in slots if slot[: len(MAGIC)] == MAGIC]
    if not ours:
        raise LibraryError(f"{path}: is no library of concepts, expected a file of `tiny-engram library create`")
    sound = [slot for slot in ours if len(slot) == SLOT and hashlib.sha256(slot[:-_DIGEST]).digest() == slot[-_DIGEST:]]
    versions = {_HEAD.unpack_from(slot)[1] for slot in sound or [slot.ljust(SLOT, b"\0") for slot in ours]}
    if versions != {VERSION}:
        raise LibraryError(f"{path}: format version {max(versions)} of a library, expected {VERSION}; update tiny-engram")
    if not sound:
        raise LibraryError(f"{path}: neither of its two headers is sound; copy the library again")
    states = [_parsed(path, slot, size) for slot in sound]
    return max(states, key=lambda state: state.generation)


def _parsed(path: Path, slot: bytes, size: int) -> State:
    _, _, count, generation, end, concepts, nbytes = _HEAD.unpack_from(slot)
    if end > size or end < START:
        raise LibraryError(f"{path}: {size} bytes, expected {end}: truncated; copy the library again")
    if count > MOST_SEGMENTS or nbytes > end:
        raise LibraryError(f"{path}: its header says {count} segments and {nbytes} bytes of concepts; copy the library again")
    places = []
    for k in range(count):
        place = Place(*_PLACE.unpack_from(slot, _HEAD.size + k * _PLACE.size))
        if not (place.offset >= START and place.offset % ALIGN == 0 and place.offset + place.nbytes <= end):
            raise LibraryError(f"{path}: an index segment lies at {place.offset}, {place.nbytes} bytes, in {end}; copy the library again")
        places.append(place)
    return State(generation, end, concepts, nbytes, tuple(places))
