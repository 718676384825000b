"""Contact sheets of what every method draws of every subject, from the pictures that the bench kept.

A sheet is a PNG with a palette, as large as its share of the bytes allows: pages that nobody can open show nothing.
Imports results, subjects and tiny_engram.sheet.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.personalization.results import NotMeasured, Results
from benchmarks.personalization.subjects import Subject, load_subjects, taught_pictures
from tiny_engram.files import write_atomically
from tiny_engram.sheet import Sheet

SHEET_BYTES, ALL_BYTES = 300_000, 3_000_000
# Side of a picture and colours of the palette, best first; the first that fits is taken.
SIZES = ((112, 256), (96, 256), (96, 128), (80, 256), (80, 128), (64, 256), (64, 128), (64, 64), (64, 32), (64, 16))
CAPTIONS = {
    "taught": "as taught",
    "background-1": "new colour",
    "background-2": "new colour",
    "background-3": "new colour",
    "style-flat": "new style: flat",
    "style-outlined": "new style: outlined",
    "left": "left of another",
    "right": "right of another",
    "bare": "trigger alone",
}
PAIRS = 9
MISSING = np.full((128, 128, 3), 244, np.uint8)


def encode(sheet: Sheet, limit: int, first: int = 0) -> tuple[bytes, int]:
    """The sheet as PNG of at most `limit` bytes, and which of `SIZES` it took; those from `first` on are tried.

    Raises:
        ValueError: it is larger even at the smallest size with the fewest colours.
    """
    data = b""
    for number, (cell, colours) in list(enumerate(SIZES))[first:]:
        sheet.cell = cell
        blob = io.BytesIO()
        sheet.render().quantize(colours, dither=Image.Dither.NONE).save(blob, "PNG", optimize=True)
        data = blob.getvalue()
        if len(data) <= limit:
            return data, number
    raise ValueError(f"sheet {sheet.title!r} takes {len(data):,} bytes at its smallest, of {limit:,}: give it fewer rows or columns")


def subject_sheet(
    subject: Subject, methods: Mapping[str, str], pictures: Mapping[str, np.ndarray], step: int, *, seed: int = 0
) -> Sheet | None:
    """Rows are methods (label -> name), columns a given picture and the contexts; None where no method has a picture."""
    given = taught_pictures(subject)[0].image
    sheet = Sheet(f"{subject.name.capitalize()}, {step} steps", cell=SIZES[0][0])
    for label, method in methods.items():
        keys = [f"{method}/{subject.name}/{seed}/{step}/{context}" for context in CAPTIONS]
        if not any(key in pictures for key in keys):
            continue
        cells = [pictures.get(key, MISSING) for key in keys]
        sheet.row(label, [given, *cells], ["given picture", *CAPTIONS.values()] if not sheet.parts else ())
    return sheet if sheet.parts else None


def pairs_sheet(methods: Mapping[str, str], pictures: Mapping[str, np.ndarray], step: int, *, seed: int = 0) -> Sheet | None:
    """Rows are methods, columns some pairs of subjects, spread over all; None where no method has one."""
    known: dict[str, None] = {}
    for key in pictures:
        method, pair, of, at, context = key.rsplit("/", 4)
        if context == "pair" and method in methods.values() and (of, at) == (str(seed), str(step)):
            known[pair] = None
    if not known:
        return None
    every = sorted(known)
    chosen = [every[i * len(every) // PAIRS] for i in range(PAIRS)] if len(every) > PAIRS else every
    sheet = Sheet(f"Two subjects in one prompt, {step} steps", cell=SIZES[0][0])
    for label, method in methods.items():
        keys = [f"{method}/{pair}/{seed}/{step}/pair" for pair in chosen]
        captions = [" and ".join(pair.split("+")) for pair in chosen] if not sheet.parts else ()
        sheet.row(label, [pictures.get(key, MISSING) for key in keys], captions)
    return sheet


def draw_all(
    results: Results, pictures: Mapping[str, np.ndarray], folder: Path, *, prefix: str = "sheet", only: Sequence[str] = ()
) -> list[Path]:
    """`{prefix}-<subject>.png` of all final and development subjects, or of those in `only`, and `{prefix}-two-subjects.png`, in `folder`;
    old ones are replaced."""
    sheets: dict[str, Sheet] = {}

    def add(name: str, sheet: Sheet | None) -> None:
        if sheet is not None:
            sheets[f"{prefix}-{name.replace(' ', '-')}"] = sheet

    for split, stage in (("final", "final"), ("development", "methods")):
        try:
            methods = results.methods(stage)
        except NotMeasured:
            continue
        for subject in (one for one in load_subjects(split) if not only or one.name in only):
            add(subject.name, subject_sheet(subject, methods, pictures, results.main))
        if split == "final":
            add("two subjects", pairs_sheet(methods, pictures, results.main))
    limit = min(SHEET_BYTES, ALL_BYTES // max(len(sheets), 1))
    encoded: dict[str, bytes] = {}
    number = 1
    for name, sheet in sheets.items():
        # sheets of one kind come out at much the same size: begin one above the last one's
        encoded[name], number = encode(sheet, limit, max(0, number - 1))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{prefix}-*.png"):
        if old.stem not in encoded:
            old.unlink()
    return [write_atomically(folder / f"{name}.png", data) for name, data in encoded.items()]
