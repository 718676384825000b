"""Contact sheets: rows of labelled pictures as one image. Imports Pillow and numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

__all__ = ["Row", "Sheet"]

INK, SOFT, PAPER, RULE = (24, 24, 27), (113, 113, 122), (255, 255, 255), (228, 228, 231)
GAP, MARGIN, LEFT = 6, 20, 128


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a sheet: uint8 pictures `[h, w, 3]`, what they are, and optionally a caption above each."""

    label: str
    pictures: Sequence[np.ndarray]
    captions: Sequence[str] = ()


def _wrap(text: str, font, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line] if line else lines


class Sheet:
    """Collects a title, rows and notes; `render()` draws them below each other."""

    def __init__(self, title: str, *, cell: int = 128) -> None:
        self.title, self.cell = title, cell
        self.parts: list[Row | str] = []

    def row(self, label: str, pictures: Sequence[np.ndarray], captions: Sequence[str] = ()) -> None:
        self.parts.append(Row(label, pictures, captions))

    def note(self, text: str) -> None:
        """A line of text across the sheet."""
        self.parts.append(text)

    def render(self) -> Image.Image:
        fonts = {name: ImageFont.load_default(size) for name, size in (("title", 22), ("text", 13), ("small", 11))}
        cell = self.cell
        columns = max((len(p.pictures) for p in self.parts if isinstance(p, Row)), default=1)
        width = MARGIN * 2 + LEFT + columns * (cell + GAP) - GAP
        blocks: list[tuple[Row | str, list[list[str]], int]] = []
        height = MARGIN + 36
        for part in self.parts:
            if isinstance(part, str):
                lines = [_wrap(part, fonts["text"], width - 2 * MARGIN)]
                size = 18 * len(lines[0]) + 10
            else:
                lines = [_wrap(c, fonts["small"], cell) for c in part.captions]
                size = cell + GAP + 14 * max((len(c) for c in lines), default=0)
            blocks.append((part, lines, size))
            height += size
        canvas = Image.new("RGB", (width, height + MARGIN), PAPER)
        pen = ImageDraw.Draw(canvas)
        pen.text((MARGIN, MARGIN - 4), self.title, INK, fonts["title"])
        y = MARGIN + 36
        for part, lines, size in blocks:
            if isinstance(part, str):
                for k, line in enumerate(lines[0]):
                    pen.text((MARGIN, y + 4 + 18 * k), line, INK, fonts["text"])
            else:
                above = size - cell - GAP
                for column, caption in enumerate(lines):
                    x = MARGIN + LEFT + column * (cell + GAP)
                    for k, line in enumerate(caption):
                        pen.text((x, y + above - 14 * (len(caption) - k)), line, SOFT, fonts["small"])
                for k, line in enumerate(_wrap(part.label, fonts["text"], LEFT - 12)):
                    pen.text((MARGIN, y + above + 4 + 17 * k), line, INK, fonts["text"])
                for column, picture in enumerate(part.pictures):
                    x = MARGIN + LEFT + column * (cell + GAP)
                    image = Image.fromarray(picture)
                    if image.size != (cell, cell):
                        image = ImageOps.fit(image, (cell, cell), Image.Resampling.LANCZOS)
                    canvas.paste(image, (x, y + above))
                    pen.rectangle((x - 1, y + above - 1, x + cell, y + above + cell), outline=RULE)
            y += size
        return canvas
