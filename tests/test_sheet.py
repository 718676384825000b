"""Contact sheets: every picture is there, unchanged where it fits, labelled and captioned."""

import numpy as np
from PIL import ImageFont

from tiny_engram.sheet import GAP, LEFT, MARGIN, PAPER, Sheet, _wrap


def places(image: np.ndarray, picture: np.ndarray) -> list[tuple[int, int]]:
    """(y, x) of every place where the picture stands, pixel for pixel."""
    h, w = picture.shape[:2]
    corner = np.argwhere((image[: -h + 1, : -w + 1] == picture[0, 0]).all(-1))
    return [(y, x) for y, x in corner.tolist() if np.array_equal(image[y : y + h, x : x + w], picture)]


def noise(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_every_picture_stands_in_its_row_and_column():
    pictures = [noise(k) for k in range(5)]
    sheet = Sheet("title", cell=32)
    sheet.row("first", pictures[:3], ["one", "two", "three"])
    sheet.note("a note " * 20)
    sheet.row("second", pictures[3:])
    image = np.asarray(sheet.render())
    found = [places(image, picture) for picture in pictures]
    assert all(len(f) == 1 for f in found)
    ys, xs = zip(*(f[0] for f in found), strict=True)
    assert list(xs) == [MARGIN + LEFT + k * (32 + GAP) for k in (0, 1, 2, 0, 1)]
    assert ys[0] == ys[1] == ys[2] < ys[3] - 32 - 18 and ys[3] == ys[4]
    assert image.shape[1] == 2 * MARGIN + LEFT + 3 * (32 + GAP) - GAP and image.shape[0] >= ys[3] + 32 + MARGIN


def test_captions_labels_notes_and_title_are_drawn():
    def ink(**changes) -> int:
        texts = {"title": "", "label": "", "caption": "", "note": ""} | changes
        sheet = Sheet(texts["title"], cell=64)
        sheet.row(texts["label"], [np.full((64, 64, 3), 255, np.uint8)], [texts["caption"]] if texts["caption"] else ())
        sheet.note(texts["note"])
        return int((np.asarray(sheet.render()) != PAPER).any(-1).sum())

    bare = ink()
    for what in ("title", "label", "caption", "note"):
        assert ink(**{what: "words"}) > bare + 20, what


def test_pictures_of_other_sizes_are_fitted_without_distortion():
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, 16:48] = 200  # the middle square
    sheet = Sheet("", cell=32)
    sheet.row("", [wide])
    image = np.asarray(sheet.render())
    inside = image[MARGIN + 36 + GAP : MARGIN + 36 + GAP + 32, MARGIN + LEFT : MARGIN + LEFT + 32]
    assert (inside[2:-2, 2:-2] > 190).all()


def test_an_empty_sheet_renders():
    assert Sheet("nothing yet").render().size[0] > LEFT


def test_long_text_wraps_at_words_and_loses_none():
    font = ImageFont.load_default(11)
    text = "a 3d tako-blip left of a pizza on a white background"
    lines = _wrap(text, font, 80)
    assert " ".join(lines) == text and len(lines) > 2 and all(font.getlength(line) <= 80 for line in lines)
    assert _wrap("incomprehensibilities", font, 10) == ["incomprehensibilities"] and _wrap("", font, 10) == []
