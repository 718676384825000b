"""The gallery of a run's card: the last sheet's own pixels under their own prompts, and nothing of another run."""

import logging

import numpy as np
import pytest
from PIL import Image

from tiny_engram.concept_card import ConceptCard
from tiny_engram.sharing import save_pretrained
from tiny_engram.training import train
from tiny_engram.training.gallery import MOST_SHOWN

PROMPTS = ("a {trigger}", "the {trigger} & <b>  by night")


@pytest.fixture
def drawing(config):
    return lambda **changes: config(**{"validation_steps": 2, "validation_prompts": PROMPTS, "validation_seeds": (3, 4), **changes})


def card_of(out) -> ConceptCard:
    card = ConceptCard.read((out / "README.md").read_text())
    assert card is not None
    return card


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_every_picture_is_its_place_of_the_last_sheet(pipe, drawing, tmp_path):
    out = tmp_path / "out"
    train(pipe, drawing(max_train_steps=5), progress=False)
    gallery = card_of(out).gallery
    assert [(each.url, each.text, each.step) for each in gallery] == [
        ("images/concept-0.png", "a zqx", 4),
        ("images/concept-1.png", "the zqx & <b> by night", 4),
        ("images/concept-2.png", "a zqx", 4),
        ("images/concept-3.png", "the zqx & <b> by night", 4),
    ]
    sheet = pixels(out / "validation" / "step-4.png")
    for k, each in enumerate(gallery):
        row, column = divmod(k, 2)
        assert np.array_equal(pixels(out / each.url), sheet[row * 64 : row * 64 + 64, column * 64 : column * 64 + 64])
    assert not np.array_equal(pixels(out / gallery[0].url), pixels(out / gallery[1].url))
    text = (out / "README.md").read_text()
    assert "<Gallery />" in text and "at step 4, from fixed seeds" in text and "url: images/concept-3.png" in text.replace('"', "")


def test_it_goes_along_when_the_folder_is_shared(pipe, drawing, tmp_path):
    train(pipe, drawing(), progress=False)
    save_pretrained(tmp_path / "out", tmp_path / "shared")
    assert card_of(tmp_path / "shared").gallery == card_of(tmp_path / "out").gallery
    for each in card_of(tmp_path / "shared").gallery:
        assert np.array_equal(pixels(tmp_path / "shared" / each.url), pixels(tmp_path / "out" / each.url))


def test_another_run_in_the_folder_leaves_its_own_alone(pipe, drawing, tmp_path):
    out = tmp_path / "out"
    train(pipe, drawing(), progress=False)
    (out / "images" / "mine.png").write_bytes((out / "images" / "concept-0.png").read_bytes())
    train(pipe, drawing(validation_seeds=(3,)), progress=False)
    assert sorted(path.name for path in (out / "images").iterdir()) == ["concept-0.png", "concept-1.png", "mine.png"]
    train(pipe, drawing(validation_steps=0), progress=False)
    assert card_of(out).gallery == [] and [path.name for path in (out / "images").iterdir()] == ["mine.png"]
    train(pipe, drawing(validation_prompts=()), progress=False)
    assert card_of(out).gallery == [] and "<Gallery />" not in (out / "README.md").read_text()


def test_a_sheet_of_other_prompts_or_a_broken_one_is_not_shown(pipe, drawing, tmp_path):
    """Of a run that goes on behind its last sheet."""
    out = tmp_path / "out"
    options = {"max_train_steps": 3, "checkpointing_steps": 1}
    train(pipe, drawing(**options), progress=False)
    assert len(card_of(out).gallery) == 4
    train(pipe, drawing(**options, validation_prompts=("{trigger} at sea", PROMPTS[1]), resume_from_checkpoint="latest"), progress=False)
    assert card_of(out).gallery == [] and list((out / "images").iterdir()) == []
    train(pipe, drawing(**options, resume_from_checkpoint="latest"), progress=False)
    assert len(card_of(out).gallery) == 4
    sheet = out / "validation" / "step-2.png"
    whole = sheet.read_bytes()
    for damaged in (b"no picture", whole[: len(whole) // 2]):
        sheet.write_bytes(damaged)
        train(pipe, drawing(**options, resume_from_checkpoint="latest"), progress=False)
        assert card_of(out).gallery == []


def test_of_many_the_first_are_shown(pipe, drawing, tmp_path):
    train(pipe, drawing(validation_seeds=tuple(range(7)), max_train_steps=2), progress=False)
    assert len(card_of(tmp_path / "out").gallery) == MOST_SHOWN == len(list((tmp_path / "out" / "images").iterdir()))


def test_a_card_that_is_kept_keeps_its_pictures(pipe, drawing, tmp_path, caplog):
    out = tmp_path / "out"
    train(pipe, drawing(), progress=False)
    (out / "README.md").write_text((out / "README.md").read_text() + "mine\n")
    before = {path.name: path.read_bytes() for path in (out / "images").iterdir()}
    with caplog.at_level(logging.WARNING, "tiny_engram"):
        train(pipe, drawing(validation_seeds=(9,)), progress=False)
    assert "so it is kept" in caplog.text and {path.name: path.read_bytes() for path in (out / "images").iterdir()} == before
