"""What is in use is in use again after a restart."""

import os

import pytest

from tiny_engram.studio.engine import Engine
from tiny_engram.studio.shelf import Shelf
from tiny_engram.studio.workspace import read_json

ONE, TWO, THREE = (letter * 16 for letter in "abc")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shelf.json"


def test_it_is_there_again_in_its_order_and_each_base_has_its_own(path):
    shelf, other = Shelf(path, "sd15"), Shelf(path, "sdxl")
    for id in (TWO, ONE, THREE, TWO):
        shelf.put(id)
    other.put(THREE)
    shelf.take(ONE)
    shelf.take(ONE)
    assert shelf.ids == (TWO, THREE) and TWO in shelf and ONE not in shelf
    assert Shelf(path, "sd15").ids == (TWO, THREE) and Shelf(path, "sdxl").ids == (THREE,) and Shelf(path, "flux").ids == ()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"sd15": 3}', '{"sd15": ["../x"]}', '{"sd15": [{}]}', '{"sdxl": 1}', "[" * 50_000])
def test_a_damaged_file_is_an_empty_shelf_and_is_written_anew(path, text):
    path.write_text(text)
    shelf = Shelf(path, "sd15")
    assert shelf.ids == ()
    shelf.put(ONE)
    assert read_json(path) == {"sd15": [ONE]}


def test_a_full_disk_is_no_error(path, monkeypatch, caplog):
    shelf = Shelf(path, "sd15")
    shelf.put(ONE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    shelf.put(TWO)
    assert shelf.ids == (ONE, TWO) and "No space left" in caplog.text and Shelf(path, "sd15").ids == (ONE,)


def test_an_engine_takes_it_up(engine_pipe, library, concept_of):
    one, two, gone = (library.add(concept_of(word, plain=True)) for word in ("zed-quack", "octopus", "sprocket"))
    with Engine(engine_pipe, library) as engine:
        for id in (two, gone, one):
            engine.load(id)
        engine.unload(two)
    library.delete(gone)
    with Engine(engine_pipe, library) as engine:
        assert [each.id for each in engine.loaded()] == [one], "what the library no longer has is left out"
        assert engine.explain("a zed-quack").fired
