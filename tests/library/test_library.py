"""A library of concepts: what goes in comes out, bit for bit, whatever was added and removed around it."""

import random
import threading
import time

import numpy as np
import pytest

import tiny_engram
from tests.library.conftest import in_child, same
from tiny_engram.library import ConceptLibrary, LibraryError, is_library
from tiny_engram.sources import load_source


def names_of(library) -> list[str]:
    return [entry.name for entry in library]


def test_what_is_added_comes_back(library, maker, tmp_path):
    assert len(library) == 12 and names_of(library) == [maker(k).name for k in range(12)]
    for k in range(12):
        assert same(library.get(maker(k).name), maker(k)), k
    file, other, name = maker(20).save(tmp_path / "one.safetensors"), maker(24).save(tmp_path / "two.safetensors"), "\U0001f986 \u200d two"
    assert library.add(file) == maker(20).name and library.add(str(other), name) == name
    assert library.read(maker(20).name) == file.read_bytes()
    assert library.export(name, tmp_path / "out.safetensors").read_bytes() == other.read_bytes()
    entry, place = library.entry(name), maker(24).roles["clip_l"]
    assert (entry.trigger, entry.base, entry.nbytes) == (maker(24).trigger, "emoji-sd", other.stat().st_size)
    assert entry.kind.roles == (("clip_l", place.width, place.fingerprint),) and entry.kind.denoiser
    assert library.kinds == {entry.kind, library.entry(maker(0).name).kind} and not library.entry(maker(0).name).kind.denoiser
    assert library.verify() == 14 and library.verify(name) == 1
    assert "14 concepts" in repr(library) and name in library and "nobody" not in library and 3 not in library
    assert same(tiny_engram.ConceptLibrary.open(library.path).get(name), maker(24))


def test_concepts_are_sources(library, maker, adapter, tmp_path):
    name = maker(4).name
    assert same(load_source(f"{library.path}#{name}"), maker(4))
    assert adapter.load_concept(f"{library.path}#{name}") == name and same(adapter.concept(name), maker(4))
    with ConceptLibrary.create(tmp_path / "other.engrams") as other:
        assert other.add(f"{library.path}#{name}", "a # sign") == "a # sign"
        assert other.read("a # sign") == library.read(name) and same(load_source(f"{other.path}#a # sign"), maker(4))
    for wrong, says in (
        (library.path, "is a library of concepts, expected one of them; write '.*#NAME'"),
        (f"{library.path}#nobody", "holds no concept 'nobody', expected one of its 12"),
        (f"{tmp_path}/absent.engrams#zq", "does not exist"),
    ):
        with pytest.raises(tiny_engram.TinyEngramError, match=says):
            load_source(wrong)


def test_any_order_of_changes(tmp_path, maker):
    """Against a dictionary, over all numbers of segments and merges of them."""
    draw, library, model = random.Random(0), ConceptLibrary.create(tmp_path / "x.engrams"), {}
    segments = set()
    for step in range(160):
        free = [k for k in range(60) if maker(k).name not in model]
        act = draw.random()
        if (act < 0.5 and free) or not model:
            chosen = draw.sample(free, min(len(free), draw.choice((1, 1, 1, 4))))
            assert library.add_many([maker(k) for k in chosen]) == [maker(k).name for k in chosen]
            model |= {maker(k).name: k for k in chosen}
        elif act < 0.96:
            gone = draw.sample(list(model), min(len(model), draw.choice((1, 1, 3))))
            library.remove(*gone)
            for name in gone:
                del model[name]
        else:
            assert library.compact() >= 0
        segments.add(len(library._snapshot.segments))
        assert names_of(library) == list(model) and len(library) == len(model), step
        if step % 10 == 0:
            fresh = ConceptLibrary.open(library.path)
            assert names_of(fresh) == list(model) and fresh.verify() == len(model)
            assert all(fresh.get(name).recipe["step"] == k for name, k in model.items())
            assert not any(maker(k).name in fresh for k in range(60) if maker(k).name not in model)
    assert min(segments) <= 1 and 7 <= max(segments) <= 15
    library.remove(*model)
    assert library.compact() > 0 and len(library) == 0 and library.path.stat().st_size == 8192
    library.add(maker(0))
    assert same(library.get(maker(0).name), maker(0))


def test_index_is_written_seldom(tmp_path, maker):
    """A change writes its own part of the index; what merges rewrite is a small multiple of all of it."""
    library = ConceptLibrary.create(tmp_path / "x.engrams")
    written = []
    for k in range(60):
        before = library._snapshot.state.end
        library.add(maker(k))
        written.append(library._snapshot.state.end - before - library.entry(maker(k).name).nbytes)
    library.compact()
    whole = library._snapshot.state.places[0].nbytes
    # alone: six counts, and a part of its own; the median change writes no merge
    assert sorted(written)[30] < 1200 and sum(written) < 60 * 1200 + 4 * whole


def test_a_reader_keeps_its_view(library, maker):
    reader = ConceptLibrary.open(library.path)
    library.remove(maker(3).name)
    library.add(maker(30))
    assert len(reader) == 12 and maker(30).name not in reader and same(reader.get(maker(3).name), maker(3))
    library.compact()
    library.add(maker(31))
    assert same(reader.get(maker(3).name), maker(3)) and reader.verify() == 12
    assert reader.refresh() and not reader.refresh()
    assert names_of(reader) == names_of(library) and len(reader) == 13 and maker(3).name not in reader


def test_two_who_write(library, maker):
    """Each sees what the other did before its own change."""
    other = ConceptLibrary.open(library.path)
    library.add(maker(30))
    other.add(maker(31))
    library.remove(maker(31).name)
    other.compact()
    library.add(maker(32))
    assert names_of(library) == [maker(k).name for k in (*range(12), 30, 32)]
    for change in (lambda: other.add(maker(32)), lambda: other.remove(maker(31).name)):
        with pytest.raises(LibraryError):
            change()
    assert names_of(other) == names_of(library)


def test_writers_wait_for_each_other(library, maker):
    """Threads and processes add at once; nothing is lost."""

    def add(numbers):
        mine = ConceptLibrary.open(library.path)
        for k in numbers:
            mine.add(maker(k))

    threads = [threading.Thread(target=add, args=(range(20 + 5 * t, 25 + 5 * t),)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_child(lambda: add(range(40, 45))) == (0, None)
    library.refresh()
    assert sorted(names_of(library)) == sorted(maker(k).name for k in (*range(12), *range(20, 35), *range(40, 45)))
    assert library.verify() == 32


def test_a_writer_that_stays(library, maker, monkeypatch):
    from tiny_engram.library import writer

    monkeypatch.setattr(writer.Writer.__init__, "__kwdefaults__", {"seconds": 0.2})
    with writer.Writer(library.path):
        began = time.monotonic()
        with pytest.raises(LibraryError, match="another process has been changing it for 0 s; stop it, or try again later"):
            library.add(maker(30))
        assert 0.2 <= time.monotonic() - began < 5
        assert len(ConceptLibrary.open(library.path)) == 12  # who reads does not wait
    library.add(maker(30))


def test_all_or_none(library, maker, tmp_path):
    before = library.path.read_bytes()
    (tmp_path / "broken.safetensors").write_bytes(maker(31).to_bytes()[:300])
    told = []
    for batch, says in (
        ([maker(30), tmp_path / "broken.safetensors"], "broken.safetensors: not a sound safetensors file"),
        ([maker(30), maker(5)], f"concept '{maker(5).name}' is in it already; give another name"),
        ([maker(30), (maker(5), "five again")], f"has token ids that '{maker(5).name}' has for the same encoders"),
        ([maker(30), (maker(30), "thirty again")], f"has token ids that '{maker(30).name}' has for the same encoders"),
        ([maker(30), (maker(31), maker(30).name)], "is in it already"),
        ([(maker(30), "")], "name of a concept is '', expected one line of text"),
        ([(maker(30), "two\nlines")], "expected one line of text"),
        ([(maker(30), "x" * 600)], "at most 512 bytes"),
        ([maker(30), library.path], "is a library of concepts, expected one of them"),
        ([maker(30), 7], "a concept's source is '7'"),
    ):
        with pytest.raises(tiny_engram.TinyEngramError, match=says) as raised:
            library.add_many(batch, lambda done, total: told.append((done, total)))
        assert "\n" not in str(raised.value) and library.path.read_bytes() == before and len(library) == 12
    with pytest.raises(LibraryError, match="holds no concept '..\\\\udc80'"):
        library.get("zq\udc80")
    with pytest.raises(LibraryError, match="holds no concept 'nobody'"):
        library.remove(maker(0).name, "nobody")
    with pytest.raises(LibraryError, match="is given twice"):
        library.remove(maker(0).name, maker(0).name)
    assert library.path.read_bytes() == before
    told.clear()
    assert library.add_many((maker(k) for k in (30, 31)), lambda done, total: told.append((done, total))) == [
        maker(30).name,
        maker(31).name,
    ]
    assert told == [(1, None), (2, None)] and library.add_many([]) == []


def test_one_trigger_for_two_bases(library, maker):
    """Concepts for other encoders may have the same words."""
    first = maker(5)
    role = first.roles["clip_l"]
    import dataclasses

    other = dataclasses.replace(first, base="another", roles={"clip_l": dataclasses.replace(role, fingerprint="f" * 64)})
    library.add(other, "for another tokenizer")
    entries = {entry.name: entry for entry in library}
    assert entries["for another tokenizer"].base == "another" and len(library.kinds) == 3
    ids = np.array([[1, *role.variants[0].ids, 2]])
    assert [entry.name for entry, _ in library.spoken("clip_l", role.fingerprint, ids)] == [first.name]
    assert [entry.name for entry, _ in library.spoken("clip_l", "f" * 64, ids)] == ["for another tokenizer"]
    assert library.spoken("clip_l", role.fingerprint, ids[:, :-2]) == [] and library.spoken("t5", role.fingerprint, ids) == []


def test_every_sequence_is_found_where_it_stands(library, maker):
    """Against a plain search, in ids around all sequences of all concepts, some removed."""
    library.remove(*(maker(k).name for k in (2, 7)))
    role = maker(0).roles["clip_l"]
    draw = random.Random(1)
    spans = [variant.ids for k in range(12) for variant in maker(k).roles["clip_l"].variants]
    rows = [[token for _ in range(8) for token in (*draw.choice(spans), *draw.choices(range(300), k=draw.randrange(3)))] for _ in range(20)]
    ids = np.array([row[: min(map(len, rows))] for row in rows])
    wanted = set()
    for k in range(12):
        for variant in maker(k).roles["clip_l"].variants if maker(k).name in library else ():
            n = len(variant.ids)
            if any(tuple(row[s : s + n]) == variant.ids for row in ids.tolist() for s in range(len(row) - n + 1)):
                wanted.add((maker(k).name, variant.ids))
    found = library.spoken("clip_l", role.fingerprint, ids)
    assert {(entry.name, sequence) for entry, sequence in found} == wanted and len(found) == len(wanted) > 12


def test_closed_and_gone(library, maker, tmp_path):
    with library as inside:
        assert inside is library
    assert "closed" in repr(library)
    for action in (lambda: len(library), lambda: library.get(maker(0).name), lambda: library.add(maker(30)), library.list, library.compact):
        with pytest.raises(LibraryError, match="this library was closed"):
            action()
    assert is_library(library.path) and not is_library(tmp_path) and not is_library(tmp_path / "absent")
    with pytest.raises(LibraryError, match="is there already, expected a new name"):
        ConceptLibrary.create(library.path)
    with pytest.raises(LibraryError, match="cannot make a library"):
        ConceptLibrary.create(tmp_path / "no folder" / "x.engrams")
    with pytest.raises(LibraryError, match="cannot open the library.*tiny-engram library create"):
        ConceptLibrary.open(tmp_path / "absent.engrams")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ducks.engrams"]


def test_behind_a_link(library, maker, tmp_path):
    link = tmp_path / "link.engrams"
    link.symlink_to(library.path)
    through = ConceptLibrary.open(link)
    through.remove(maker(0).name)
    assert through.compact() > 0 and link.is_symlink() and len(ConceptLibrary.open(library.path)) == 11
