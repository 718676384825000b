"""Files that are no library, are cut short, come from the future or were tampered with: one line each, never another concept."""

import hashlib
import os
import random
import struct

import pytest

from tiny_engram.library import ConceptLibrary, LibraryError
from tiny_engram.library.state import pack_state, parse_state


def read_all(path) -> dict[str, bytes]:
    library = ConceptLibrary.open(path)
    found = {entry.name: library.read(entry.name) for entry in library}
    library.verify()
    return found


def resealed(blob: bytearray, at: int) -> bytes:
    """With a slot whose checksum is right."""
    blob[at + 4064 : at + 4096] = hashlib.sha256(blob[at : at + 4064]).digest()
    return bytes(blob)


def test_what_is_no_library(tmp_path, maker):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    maker(0).save(tmp_path / "concept.safetensors")
    for name, says in (
        ("pipe", "is no regular file"),
        ("", "is no regular file"),
        ("empty", "is no library of concepts, expected a file of `tiny-engram library create`"),
        ("concept.safetensors", "is no library of concepts"),
    ):
        with pytest.raises(LibraryError, match=says) as raised:
            ConceptLibrary.open(tmp_path / name)
        assert str(raised.value).count("\n") == 0


def test_cut_short(library):
    whole = library.path.read_bytes()
    for size in (1, 7, 8, 100, 4095, 4096, 5000, 8191, 8192, 8193, len(whole) // 2, len(whole) - 4000, len(whole) - 1):
        library.path.write_bytes(whole[:size])
        with pytest.raises(LibraryError) as raised:
            ConceptLibrary.open(library.path)
        assert str(raised.value).count("\n") == 0
    library.path.write_bytes(whole + b"more, of a writer that ended")
    assert len(read_all(library.path)) == 12


def test_one_slot_is_enough(library, maker):
    """The older one holds what was before the last change."""
    whole = library.path.read_bytes()
    newest = library._snapshot.state.generation % 2
    for slot, count in ((newest, 11), (1 - newest, 12)):
        blob = bytearray(whole)
        blob[4096 * slot + 100] ^= 1
        library.path.write_bytes(blob)
        assert len(read_all(library.path)) == count
    blob[4096 * newest + 100] ^= 1
    library.path.write_bytes(blob)
    with pytest.raises(LibraryError, match="neither of its two headers is sound"):
        ConceptLibrary.open(library.path)


def test_newer_versions_are_refused(library):
    whole = library.path.read_bytes()
    for slots in ((0, 1), (library._snapshot.state.generation % 2,)):
        blob = bytearray(whole)
        for slot in slots:
            struct.pack_into("<I", blob, 4096 * slot + 8, 2)
            blob = bytearray(resealed(blob, 4096 * slot))
        library.path.write_bytes(blob)
        with pytest.raises(LibraryError, match="format version 2 of a library, expected 1; update tiny-engram"):
            ConceptLibrary.open(library.path)
    library.path.write_bytes(b"ENGRAMS\n" + struct.pack("<I", 9) + bytes(10_000))
    with pytest.raises(LibraryError, match="format version 9"):
        ConceptLibrary.open(library.path)


def test_hostile_headers(library):
    """Numbers without bounds, under a checksum that is right."""
    whole = library.path.read_bytes()
    at = 4096 * (library._snapshot.state.generation % 2)
    for field, values in (
        (12, (72, 2**32 - 1)),  # segments
        (24, (0, 8191, len(whole) + 1, 2**63, 2**64 - 1)),  # end
        (40, (2**64 - 1,)),  # bytes of concepts
        (48, (0, 64, 8193, 2**64 - 64)),  # the first segment's place
        (56, (2**63, 2**64 - 1, 0, 40)),  # and length
    ):
        for value in values:
            blob = bytearray(whole)
            struct.pack_into("<I" if field == 12 else "<Q", blob, at + field, value)
            library.path.write_bytes(resealed(blob, at))
            with pytest.raises(LibraryError) as raised:
                read_all(library.path)
            assert str(raised.value).count("\n") == 0
    place = parse_state(library.path, whole[:8192], len(whole)).places[0]
    for count in range(6):  # of the segment's arrays
        for value in (2**61, 2**64 - 1, 2**32):
            blob = bytearray(whole)
            struct.pack_into("<Q", blob, place.offset + 8 * count, value)
            library.path.write_bytes(blob)
            with pytest.raises(LibraryError, match="too short for its"):
                ConceptLibrary.open(library.path)


def test_any_byte_changed(library):
    """Each is found, in the slot that counts, the index or a concept, or changes nothing at all; nothing but our error is raised."""
    whole = library.path.read_bytes()
    right, draw = read_all(library.path), random.Random(0)
    older = right.keys() - {[*right][-1]}
    state = library._snapshot.state
    places = [place.offset + draw.randrange(place.nbytes) for place in state.places for _ in range(60)]
    places += [draw.randrange(8192, len(whole)) for _ in range(200)] + [draw.randrange(8192) for _ in range(100)]
    refused = 0
    for at in places:
        blob = bytearray(whole)
        blob[at] ^= 1 << draw.randrange(8)
        library.path.write_bytes(blob)
        try:
            found = read_all(library.path)
        except LibraryError as error:
            assert str(error).count("\n") == 0
            refused += 1
        else:
            assert found == right or (at < 8192 and found.keys() == older), at
    assert refused > 200


def test_index_values_without_bounds(library):
    """An index under a digest that is right points anywhere: one line, or what is asked for by name."""
    whole, draw = library.path.read_bytes(), random.Random(1)
    state = library._snapshot.state
    at = 4096 * (state.generation % 2)
    assert whole[at : at + 4096] == pack_state(state)
    names = [entry.name for entry in library]
    raised = 0
    for _ in range(300):
        k = draw.randrange(len(state.places))
        place = state.places[k]
        blob = bytearray(whole)
        where = place.offset + 48 + 4 * draw.randrange((place.nbytes - 48) // 4)
        blob[where : where + 4] = draw.choice((b"\xff" * 4, b"\xff\xff\xff\x7f", draw.randbytes(4), bytes(4)))
        struct.pack_into("<32s", blob, at + 48 + 56 * k + 24, hashlib.sha256(blob[place.offset : place.offset + place.nbytes]).digest())
        library.path.write_bytes(resealed(blob, at))
        try:
            opened = ConceptLibrary.open(library.path)
            for name in names:
                assert name not in opened or len(opened.read(name)) > 1000
            opened.verify()
            opened.compact()
        except LibraryError as error:
            assert str(error).count("\n") == 0
            raised += 1
    assert raised > 100


def test_a_damaged_concept_is_never_given(library, maker, tmp_path):
    entry = library.entry(maker(6).name)
    blob = bytearray(library.path.read_bytes())
    blob[entry.offset + entry.nbytes - 5] ^= 4
    library.path.write_bytes(blob)
    library = ConceptLibrary.open(library.path)
    for action in (
        lambda: library.get(entry.name),
        lambda: library.verify(entry.name),
        library.verify,
        library.compact,
        lambda: library.export(entry.name, tmp_path / "out.safetensors"),
    ):
        with pytest.raises(LibraryError, match=f"concept '{entry.name}' is not what was added .its SHA-256 differs"):
            action()
    assert not (tmp_path / "out.safetensors").exists() and library.path.read_bytes() == bytes(blob)
    assert library.verify(maker(7).name) == 1
    library.remove(entry.name)
    library.add(maker(6))
    assert library.verify() == 12 and library.compact() > 0
