"""Pictures as the Teach tab shows them: small, as data URIs, made once. Imports training.data; nothing of gradio."""

import base64
import functools
import io
from pathlib import Path

from PIL import Image

from tiny_engram.training.data import DataError, Example, fitted_picture

__all__ = ["crop_box", "crop_uri", "sample_uri", "whole_uri"]

WHOLE_SIDE, CROP_SIDE, SAMPLE_SIDE = 320, 192, 384


def whole_uri(path: Path) -> str:
    """The whole picture, its longer side at most 320 pixels. "" where it cannot be read."""
    return _made(path, "whole", WHOLE_SIDE)


def crop_uri(path: Path, side: int) -> str:
    """What teaching sees of a picture: `training.data.fitted_picture` at `side` pixels, shown at most 192 pixels wide."""
    return _made(path, "crop", side)


def sample_uri(path: Path) -> str:
    """A sample picture, its longer side at most 384 pixels."""
    return _made(path, "sample", SAMPLE_SIDE)


def crop_box(width: int, height: int) -> tuple[float, float, float, float]:
    """The square that teaching sees, as (left, top, width, height) in percent of the picture."""
    side = min(width, height)
    return (50 * (width - side) / width, 50 * (height - side) / height, 100 * side / width, 100 * side / height)


def _made(path: Path, kind: str, side: int) -> str:
    try:
        about = path.stat()
        return _encoded(path, kind, side, about.st_mtime_ns, about.st_size)
    except (OSError, ValueError, SyntaxError, DataError):
        return ""


@functools.lru_cache(maxsize=600)
def _encoded(path: Path, kind: str, side: int, _changed: int, _bytes: int) -> str:
    if kind == "crop":
        picture = fitted_picture(Example(path, ()), side)
        picture.thumbnail((CROP_SIDE, CROP_SIDE))
    else:
        with Image.open(path, formats=["PNG"]) as opened:
            picture = opened.convert("RGB")
        picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=82, method=2)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
