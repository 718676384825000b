"""The subjects of the bench: exact to the byte, told apart, unknown to the base, with triggers it can hold; and their pictures."""

import hashlib
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from benchmarks.personalization import make_subjects
from benchmarks.personalization.subjects import (
    ASSET,
    EMOJI,
    KNOWN,
    SIDE,
    TaughtPicture,
    drawn_names,
    known_names,
    load_subjects,
    taught_pictures,
)
from tiny_engram.adapter import attach

TAUGHT = load_subjects("development", "final")


@pytest.fixture(scope="module")
def adapter(base):
    attached = attach(base.pipe)
    yield attached
    attached.detach()


def test_splits():
    assert [len(load_subjects(split)) for split in ("final", "development", "known")] == [15, 5, 15]
    assert len({s.name for s in load_subjects()}) == 35
    for split, emoji, objects in (("final", 8, 7), ("development", 2, 3), ("known", 15, 0)):
        kinds = Counter(s.kind for s in load_subjects(split))
        assert (kinds["emoji"], kinds["object"]) == (emoji, objects)
    assert sum(s.lookalikes == "mug" for s in load_subjects("final")) == 4


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split 'test': expected one of development, final, known"):
        load_subjects("final", "test")


def test_sprites_are_the_very_bytes_that_were_drawn():
    digest = hashlib.sha256()
    for subject in load_subjects():
        digest.update(subject.name.encode() + subject.sprites.tobytes())
    assert digest.hexdigest() == "86d4064123fec38826f70a5f593d04236debcc163dace835faa448002445190a"
    assert ASSET.stat().st_size < 2e6


@pytest.mark.parametrize("subject", load_subjects(), ids=lambda s: s.name)
def test_every_subject_is_whole(subject):
    views = len(subject.sprites)
    assert subject.sprites.shape == (views, 128, 128, 4) and subject.sprites.dtype == np.uint8
    assert not subject.sprites.flags.writeable
    alpha = subject.sprites[..., 3]
    assert not subject.sprites[alpha == 0].any()
    # the longer side of each is drawn large, and something is transparent
    rows, columns = (alpha > 128).any(2).sum(1), (alpha > 128).any(1).sum(1)
    assert (np.maximum(rows, columns) > 110).all() and (alpha == 0).any((1, 2)).all()
    assert len(subject.styles) == views
    assert subject.styles == (("3d", "flat", "outlined") if subject.kind == "emoji" else ("3d",) * 12)
    assert len(set(subject.given)) == len(subject.given) == (1 if subject.kind == "emoji" else 5)
    assert set(subject.given) < set(range(views)) and subject.styles[subject.given[0]] == "3d"


def test_subjects_look_different():
    def thumbnail(sprite: np.ndarray) -> np.ndarray:
        alpha = sprite[..., 3:] / 255
        flat = np.concatenate([alpha * sprite[..., :3] / 255 + (1 - alpha) * 0.55, alpha], -1)
        return flat.reshape(32, 4, 32, 4, 4).mean((1, 3))

    thumbs = np.stack([thumbnail(s.sprites[s.given[0]]) for s in load_subjects()]).astype(np.float32)
    distance = np.abs(thumbs[:, None] - thumbs[None]).mean((2, 3, 4)) + np.eye(len(thumbs))
    # the recipe of the base counts two drawings nearer than .045 as one
    assert distance.min() > 2 * 0.045


def test_what_the_base_knows():
    names, known = drawn_names(), known_names()
    assert len(names) == len(set(names)) == 666 and len(known) == 642 and set(known) < set(names)
    assert names[:3] == ("skull", "poop", "clown")
    assert not {entry.name for entry in EMOJI} & set(known) and {entry.name for entry in EMOJI} < set(names)
    assert set(KNOWN) < set(known)
    assert {s.class_word for s in load_subjects()} < set(known)
    assert all(s.trigger == s.class_word == s.name for s in load_subjects("known"))
    # so that "a {0}" is English for all of them
    assert not any(s.trigger[0] in "aeiou" for s in load_subjects())


def test_triggers_register_without_a_warning(adapter):
    reports = {s.trigger: adapter.register(s.trigger) for s in TAUGHT}
    tokens = []
    for trigger, report in reports.items():
        assert not report.warnings and not report.taken_by, report
        role = report.roles["clip_l"]
        # one sequence of four tokens wherever it stands in a sentence
        assert role.positions == 4 and len(role.tokens) == 1 and role.collisions == 0, report
        assert trigger == trigger.lower()
        tokens += [token for token in role.tokens[0] if token.strip("</w>") != "-"]
    assert len(tokens) == len(set(tokens)) == 60, Counter(tokens).most_common(3)


@pytest.mark.parametrize("subject", load_subjects(), ids=lambda s: s.name)
def test_taught_pictures(subject):
    taught = taught_pictures(subject)
    assert len(taught) == len({picture.colour for picture in taught}) == 5
    assert len({picture.image.tobytes() for picture in taught}) == 5
    for picture in taught:
        assert picture.image.shape == (SIDE, SIDE, 3) and picture.image.dtype == np.uint8
        assert len(set(picture.captions)) == len(picture.captions) == 6
        assert all(caption.count("{0}") == 1 and caption.count("{") == 1 for caption in picture.captions)
        whole = [caption for caption in picture.captions if "3d" in caption and picture.colour in caption]
        assert len(whole) == 5
        # nothing but the background at the corners
        corners = picture.image[[0, 0, -1, -1], [0, -1, 0, -1]]
        assert (corners == corners[0]).all()
    assert {taught[0].captions[-1], taught[1].captions[-1]} == {"a {0}", "a 3d {0}"}


def test_emoji_are_twice_mirrored():
    """The centre of gravity of a lopsided drawing changes sides in the pictures that show it flipped."""
    kangaroo = next(s for s in TAUGHT if s.name == "kangaroo")

    def lean(picture: TaughtPicture) -> float:
        thing = (picture.image != picture.image[0, 0]).any(-1)
        columns = np.nonzero(thing)[1]
        return float(columns.mean() - (columns.min() + columns.max()) / 2)

    leans = [lean(picture) > 0 for picture in taught_pictures(kangaroo)]
    assert leans == [leans[0], not leans[0], leans[0], not leans[0], leans[0]]


@pytest.mark.parametrize("subject", load_subjects("development"), ids=lambda s: s.name)
def test_pictures_are_those_of_the_examples(subject, repo_root):
    folder = repo_root / "assets" / "examples" / subject.name.replace(" ", "-")
    for number, picture in enumerate(taught_pictures(subject)):
        with Image.open(folder / f"{number}.png") as example:
            assert np.array_equal(picture.image, np.asarray(example.convert("RGB")))


def test_packing_loses_nothing(monkeypatch):
    monkeypatch.setattr(make_subjects, "COLUMNS", 2)
    rng = np.random.default_rng(0)
    cells = np.zeros((3, SIDE, SIDE, 4), np.uint8)
    cells[:, :16, :16] = rng.integers(0, 256, (3, 16, 16, 4))
    # straight alpha may carry any colour, under transparent pixels too
    cells[:, :16, :8, 3] = 0
    sheet = np.asarray(Image.open(io.BytesIO(make_subjects.encode(cells))).convert("RGBA"))
    assert sheet.shape == (2 * SIDE, 2 * SIDE, 4)
    assert np.array_equal(sheet[:SIDE, SIDE:], cells[1]) and np.array_equal(sheet[SIDE:, :SIDE], cells[2])
    assert not sheet[SIDE:, SIDE:].any()


def test_making_them_needs_the_recipes_data(tmp_path, monkeypatch):
    monkeypatch.setattr(make_subjects, "BUILD", tmp_path)
    with pytest.raises(SystemExit, match=r"sprites.npz, names.json, renders.npz not in .*: run sprites.py and renders.py"):
        make_subjects.gather()
