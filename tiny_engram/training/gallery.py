"""Pictures of a run's model card: those of its last validation sheet, one by one. May import validation, concept_card and errors."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tiny_engram.concept_card import ConceptCard, Shown
from tiny_engram.training.validation import read_sheet_info, save_picture

__all__ = ["MOST_SHOWN", "clear_gallery", "write_gallery"]

MOST_SHOWN = 12


def write_gallery(folder: Path, sheet: Path, prompts: Sequence[str], seeds: Sequence[int], step: int, stem: str) -> list[Shown]:
    """Write the pictures of a sheet to images/STEM-N.png in the folder, those of the first seed first, at most MOST_SHOWN.

    Returns what the card says of them: nothing where the sheet is not there, cannot be read, or shows other prompts or seeds: a run
    that was taken up may have drawn it before it was told these.

    Raises:
        TinyEngramError: a picture cannot be written.
    """
    try:
        with Image.open(sheet, formats=("PNG",)) as image:
            if read_sheet_info(image) != (list(prompts), list(seeds)):
                return []
            pixels = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return []
    width, height = pixels.width // len(prompts), pixels.height // len(seeds)
    shown = []
    for k, (row, column) in enumerate([(row, column) for row in range(len(seeds)) for column in range(len(prompts))][:MOST_SHOWN]):
        left, top = column * width, row * height
        url = f"images/{stem}-{k}.png"
        save_picture(pixels.crop((left, top, left + width, top + height)), folder / url)
        shown.append(Shown(url, " ".join(prompts[column].split()), step=step))
    return shown


def clear_gallery(folder: Path, before: ConceptCard | None, shown: Sequence[Shown], stem: str) -> None:
    """Delete the pictures that a run's earlier card showed and this one does not."""
    kept = {each.url for each in shown}
    for each in () if before is None else before.gallery:
        if each.url not in kept and each.step is not None and re.fullmatch(rf"images/{re.escape(stem)}-\d+\.png", each.url):
            with contextlib.suppress(OSError):
                (folder / each.url).unlink()
