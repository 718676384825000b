"""The gallery: pictures that carry their settings, newest first, bounded, and never stopped by a damaged file."""

import json
import threading

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.gallery import Gallery, check_settings, parameters_text, settings_in

SETTINGS = {
    "prompt": "a \u201czorblax\u201d, <b>bold</b>\non a table \U0001f600",
    "negative_prompt": "blurry",
    "seed": 2**32 - 1,
    "steps": 20,
    "guidance": 7.5,
    "width": 24,
    "height": 16,
    "base": "emoji-sd",
    "concepts": [{"id": "0123456789abcdef", "name": 'Zorb, "the" one', "trigger": "zorblax", "strength": 0.8}],
}


@pytest.fixture
def gallery(workspace):
    return Gallery(workspace)


def noise(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 24, 3), dtype=np.uint8))


def test_a_picture_carries_its_settings(gallery, workspace):
    id = gallery.add(noise(), SETTINGS)
    entry = gallery.get(id)
    assert entry.settings == SETTINGS and (entry.width, entry.height) == (24, 16)
    assert gallery.settings_of(id) == gallery.settings_of(entry.file) == SETTINGS
    with Image.open(entry.file) as kept:
        assert np.array_equal(np.asarray(kept), np.asarray(noise()))
        assert json.loads(kept.info["tiny_engram"]) == SETTINGS
        first, negative, pairs = kept.info["parameters"].split("\n")
    assert first == "a \u201czorblax\u201d, <b>bold</b> on a table \U0001f600" and negative == "Negative prompt: blurry"
    assert pairs == 'Steps: 20, CFG scale: 7.5, Seed: 4294967295, Size: 24x16, Concepts: "Zorb, \\"the\\" one 0.8", Model: emoji-sd'
    # another app that opens the folder knows it too
    assert [e.id for e in Gallery(workspace).entries()] == [id]


def test_newest_first_in_pages(gallery):
    ids = [gallery.add(noise(k), SETTINGS | {"seed": k}) for k in range(7)]
    assert [e.id for e in gallery.entries()] == ids[::-1]
    assert [e.settings["seed"] for e in gallery.entries(3, 2)] == [4, 3, 2]
    assert gallery.entries(3, 7) == [] == gallery.entries(0) == gallery.entries(-1)
    assert [e.id for e in gallery.entries(2, -5)] == ids[:-3:-1]


def test_bounded_to_the_newest(workspace):
    gallery = Gallery(workspace, keep=3)
    ids = [gallery.add(noise(), SETTINGS) for _ in range(8)]
    assert [e.id for e in gallery.entries()] == ids[:-4:-1] and len(list(workspace.gallery.iterdir())) == 3


def test_damaged_files_are_passed_over(gallery, workspace):
    ids = [gallery.add(noise(k), SETTINGS) for k in range(5)]
    paths = [workspace.gallery / f"{id}.png" for id in ids]
    gallery.entries()
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    paths[2].write_bytes(b"")
    noise().save(paths[3])  # without settings
    (workspace.gallery / "notes.png").write_text("a user's own")
    (workspace.gallery / f"{'z' * 24}.png").write_text("no id")
    assert [e.id for e in gallery.entries(2)] == [ids[4], ids[0]]
    with pytest.raises(StudioError, match=r"no picture .* deleted or is damaged"):
        gallery.get(ids[1])
    gallery.delete(ids[2])  # a damaged one can go too
    assert not paths[2].exists()


def test_delete_is_for_good(gallery):
    id = gallery.add(noise(), SETTINGS)
    gallery.delete(id)
    assert gallery.entries() == []
    for call in (gallery.delete, gallery.get, gallery.settings_of):
        with pytest.raises(StudioError, match="no picture"):
            call(id)


@pytest.mark.parametrize("given", ["../concepts/x", "/etc/passwd", "", "0" * 15 + "/"])
def test_no_path_comes_from_text(gallery, given):
    for call in (gallery.get, gallery.delete, gallery.settings_of):
        with pytest.raises(StudioError, match="no picture"):
            call(given)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"prompt": 7}, "setting prompt is 7"),
        ({"prompt": "x" * 4001}, "4001 characters"),
        ({"seed": -1}, "setting seed is -1, expected 0 to 4294967295"),
        ({"seed": 1.5}, "setting seed"),
        ({"seed": True}, "setting seed"),
        ({"steps": 151}, "setting steps is 151, expected 1 to 150"),
        ({"guidance": "much"}, "setting guidance"),
        ({"guidance": float("inf")}, "settings hold inf"),
        ({"width": 0}, "setting width is 0, expected 1 to 8192"),
        ({"concepts": {"a": "b"}}, "setting concepts"),
        ({"concepts": [1]}, "setting concepts"),
        ({"concepts": [{"id": "a", "name": "b", "trigger": "c"}]}, "setting concepts is .*, expected an id"),
        ({"concepts": [{"id": 1, "name": "b", "trigger": "c", "strength": 1}]}, "setting concepts"),
        ({"x": {"x": {"x": {"x": {"x": 1}}}}}, "nested more than 4"),
        ({"x": 10**30}, "31 digits"),
        ({"x": object()}, "settings hold <object"),
        ({1: 2}, "a key that is no text"),
    ],
)
def test_settings_beyond_bounds_are_refused(gallery, workspace, change, line):
    with pytest.raises(StudioError, match=line):
        gallery.add(noise(), SETTINGS | change)
    assert not list(workspace.gallery.iterdir())


def test_many_settings_are_refused(gallery):
    with pytest.raises(StudioError, match="characters, expected at most 65536"):
        gallery.add(noise(), {str(k): "x" * 4000 for k in range(17)})
    with pytest.raises(StudioError, match="expected an object"):
        check_settings([1])


def uploaded(path, text: str | None, **options):
    chunks = PngImagePlugin.PngInfo()
    if text is not None:
        chunks.add_text("tiny_engram", text, **options)
    noise().save(path, "PNG", pnginfo=chunks)
    return path


def test_uploaded_pictures_are_checked(gallery, tmp_path):
    path = tmp_path / "given.png"
    assert gallery.settings_of(uploaded(path, json.dumps(SETTINGS), zip=True)) == SETTINGS
    for text, line in (
        (None, "carries no settings"),
        ("{", "are no JSON"),
        ("[" * 50_000, "are no JSON|nested"),
        ("[1]", "expected an object"),
        ('{"seed": NaN}', "hold nan"),
        (json.dumps({"x": "y" * 70_000}), "characters, expected at most 65536"),
        (json.dumps({"prompt": "y" * 5000}), "5000 characters"),
    ):
        with pytest.raises(StudioError, match=line) as error:
            gallery.settings_of(uploaded(path, text))
        assert str(tmp_path) not in str(error.value) and "\n" not in str(error.value)
    uploaded(path, " " * (2**22), zip=True)  # a text that unpacks to far more than its file
    with pytest.raises(StudioError, match="damaged|characters"):
        gallery.settings_of(path)
    noise().save(tmp_path / "a.jpg")
    with pytest.raises(StudioError, match="carries no settings"):
        gallery.settings_of(tmp_path / "a.jpg")
    with pytest.raises(StudioError, match=r"cannot be read \(No such file"):
        gallery.settings_of(tmp_path / "none.png")
    with pytest.raises(StudioError, match="more than 32 MiB"):
        settings_in(bytes(32 * 2**20 + 1))


def test_commas_and_lines_do_not_mix_parameters():
    text = parameters_text({"prompt": "a\nSteps: 99", "base": "x, Seed: 4", "seed": 0}, (8, 9))
    assert text == "a Steps: 99\nSeed: 0, Size: 8x9, Model: x  Seed: 4"


def test_threads_add_and_look_at_once(gallery):
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in range(5):
                id = gallery.add(noise(seed), {"seed": seed * 10 + k})
                assert gallery.get(id).settings["seed"] == seed * 10 + k and gallery.entries(3)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len({e.settings["seed"] for e in gallery.entries(100)}) == 40
