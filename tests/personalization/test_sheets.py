"""Contact sheets of painted pictures of the real subjects: everything is on them, in its place, and they stay small."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.personalization import sheets
from benchmarks.personalization.results import Results
from benchmarks.personalization.subjects import load_subjects, taught_pictures
from tiny_engram.sheet import Row, Sheet

METHODS = {"Textual inversion, 1 vector a token": "inversion-t", "LoRA r8, denoiser and text encoder": "lora-both-r8", "Ours": "ours"}
STEP = 300


@pytest.fixture(scope="module")
def results():
    record = {"seed": 0, "step": STEP, "context": "taught", "options": {}}
    named = [record | {"label": label, "method": method} for label, method in METHODS.items()]
    return Results({"stages": {"final": named, "methods": named}, "settings": {"main": STEP}})


@pytest.fixture(scope="module")
def pictures():
    """What a final and a development subject were taught with, grainy as drawn pictures are."""
    rng = np.random.default_rng(0)
    made = {}
    chosen = [load_subjects("final")[0], load_subjects("development")[0]]
    for method in METHODS.values():
        for subject in chosen:
            for number, context in enumerate(sheets.CAPTIONS):
                image = taught_pictures(subject)[number % 5].image.astype(np.int16)
                grain = rng.normal(0, 2, image.shape).astype(np.int16)
                made[f"{method}/{subject.name}/0/{STEP}/{context}"] = (image + grain).clip(0, 255).astype(np.uint8)
        names = [subject.name for subject in load_subjects("final")]
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                made[f"{method}/{one}+{other}/0/{STEP}/pair"] = np.full((128, 128, 3), 16 * i, np.uint8)
    return made


def lines(sheet: Sheet | None) -> list[Row]:
    """A sheet's rows."""
    assert sheet is not None
    return [part for part in sheet.parts if isinstance(part, Row)]


def test_every_subject_has_a_sheet_within_the_bytes(results, pictures, tmp_path):
    (tmp_path / "sheet-of-old.png").write_bytes(b"")
    (tmp_path / "fidelity.png").write_bytes(b"")
    drawn = sheets.draw_all(results, pictures, tmp_path)
    shown = [load_subjects("final")[0].name, "two subjects", load_subjects("development")[0].name]
    names = [f"sheet-{name.replace(' ', '-')}.png" for name in shown]
    assert [path.name for path in drawn] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "fidelity.png"])
    for path in drawn:
        assert path.stat().st_size <= sheets.SHEET_BYTES
        with Image.open(path) as image:
            assert 800 <= image.width <= 1400


def test_pictures_stand_in_their_places(pictures):
    subject = load_subjects("final")[0]
    rows = lines(sheets.subject_sheet(subject, METHODS, pictures, STEP))
    assert [row.label for row in rows] == list(METHODS)
    for row, method in zip(rows, METHODS.values(), strict=True):
        assert np.array_equal(row.pictures[0], taught_pictures(subject)[0].image)
        for picture, context in zip(row.pictures[1:], sheets.CAPTIONS, strict=True):
            assert picture is pictures[f"{method}/{subject.name}/0/{STEP}/{context}"]
    assert rows[0].captions == ["given picture", *sheets.CAPTIONS.values()] and not rows[1].captions


def test_gaps_are_grey_and_methods_without_pictures_are_left_out(pictures):
    subject = load_subjects("final")[0]
    gone = {key: value for key, value in pictures.items() if not key.startswith("inversion-t/") and not key.endswith("/bare")}
    rows = lines(sheets.subject_sheet(subject, METHODS, gone, STEP))
    assert [row.label for row in rows] == list(METHODS)[1:]
    assert all(row.pictures[-1] is sheets.MISSING for row in rows)
    assert sheets.subject_sheet(subject, METHODS, {}, STEP) is None
    assert sheets.pairs_sheet(METHODS, {}, STEP) is None


def test_contexts_are_those_of_the_prompts():
    from benchmarks.personalization.prompts import CONTEXTS

    assert tuple(sheets.CAPTIONS) == CONTEXTS


def test_pairs_are_spread_over_all(pictures):
    captions = lines(sheets.pairs_sheet(METHODS, pictures, STEP))[0].captions
    assert len(captions) == len(set(captions)) == sheets.PAIRS and all(" and " in caption for caption in captions)
    assert len({caption.split(" and ")[0] for caption in captions}) > 4
    assert sheets.pairs_sheet(METHODS, pictures, STEP + 1) is None


def test_a_sheet_shrinks_until_it_fits(pictures):
    subject = load_subjects("final")[0]
    sheet = sheets.subject_sheet(subject, {"Ours": "ours"}, pictures, STEP)
    assert sheet is not None
    whole, number = sheets.encode(sheet, 10**9)
    assert number == 0
    less, number = sheets.encode(sheet, len(whole) // 2)
    assert len(less) <= len(whole) // 2 and number > 0
    assert sheets.encode(sheet, len(whole) // 2, number) == (less, number)
    with pytest.raises(ValueError, match="fewer rows or columns"):
        sheets.encode(sheet, 1000, len(sheets.SIZES) - 1)
