"""One picture as a person sees it, whatever its file. Imports Pillow, numpy and errors only."""

import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps

from tiny_engram.errors import TinyEngramError

__all__ = [
    "DataError",
    "Example",
    "Opened",
    "Source",
    "fitted_mask",
    "fitted_picture",
    "load_picture",
    "open_mask",
    "open_picture",
    "reason",
]

# A file, or a picture that Pillow has opened.
Source: TypeAlias = Path | Image.Image


class DataError(TinyEngramError):
    """The training pictures cannot be used as they are."""


@dataclass(frozen=True, slots=True)
class Example:
    """One picture with the captions it may be shown with, each holding the trigger or one of its aliases.

    Attributes:
        path: its file; of a picture given from Python, a name such as "example 3".
        picture: what was given from Python, None where the file is read.
        mask: where the loss counts, white; a file, or a picture given from Python. alpha_mask: its own transparency says so instead.
        repeats: how often it is drawn, against the 1 of the others.
    """

    path: Path
    captions: tuple[str, ...]
    picture: Image.Image | None = None
    mask: Source | None = None
    alpha_mask: bool = False
    repeats: int = 1

    @property
    def source(self) -> Source:
        """What `open_picture` takes."""
        return self.path if self.picture is None else self.picture


@dataclass(frozen=True, slots=True)
class Opened:
    """The picture in RGB, and its opacity, uint8 `[height, width]`; None where nothing is transparent."""

    picture: Image.Image
    alpha: np.ndarray | None


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def _grey(values: np.ndarray, mode: str) -> Image.Image:
    """Greys of more than 8 bits, scaled: Pillow's own conversion clips at 255. Where the mode does not say what white is, the values do."""
    values = np.nan_to_num(values.astype(np.float64))
    scales = (65535.0,) if mode.startswith("I;16") else (255.0, 65535.0, 2.0**31) if mode == "I" else (1.0, 255.0, 65535.0)
    white = next((scale for scale in scales if values.max() <= scale), scales[-1])
    return Image.fromarray((values.clip(0, white) * (255 / white)).round().astype(np.uint8))


def _from_lab(picture: Image.Image) -> Image.Image:
    from PIL import ImageCms

    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.applyTransform(picture, ImageCms.buildTransform(lab, srgb, "LAB", "RGB"))
    assert converted is not None
    return converted


def _upright(opened: Image.Image) -> Image.Image:
    """Turned as its EXIF says; as it is stored where that cannot be read, as every viewer shows it."""
    try:
        return ImageOps.exif_transpose(opened)
    except (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error):
        return opened


def _seen(opened: Image.Image, background: tuple[int, int, int]) -> Opened:
    opened.load()
    picture, alpha = _upright(opened), None
    if picture.mode.startswith("I") or picture.mode == "F":
        values, key = np.asarray(picture), picture.info.get("transparency")
        picture = _grey(values, picture.mode)
        if isinstance(key, int):
            picture.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    if picture.mode == "LAB":
        picture = _from_lab(picture)
    if picture.mode == "La":
        picture = picture.convert("LA")  # the one way out that Pillow has
    if picture.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        alpha = np.asarray(rgba.getchannel("A"))
        picture = Image.alpha_composite(Image.new("RGBA", rgba.size, (*background, 255)), rgba)
        alpha = None if (alpha == 255).all() else alpha
    return Opened(picture.convert("RGB"), alpha)


def open_picture(source: Source, name: str, background: tuple[int, int, int] = (255, 255, 255)) -> Opened:
    """The picture a person sees: first frame, turned as its EXIF says, transparency laid over `background`.

    Raises DataError, which begins with `name`, if it cannot be read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            if isinstance(source, Image.Image):
                return _seen(source, background)
            with Image.open(source) as opened:
                return _seen(opened, background)
    except Exception as error:  # damaged files make decoders raise anything, struct.error and IndexError included
        raise DataError(f"{name}: not a picture that can be read ({reason(error)}); replace or remove it") from error


def load_picture(path: Path, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """A file's picture as `open_picture` sees it, mode RGB. Raises DataError naming the file if it cannot be read."""
    return open_picture(path, str(path), background).picture


def fitted_picture(example: Example, side: int | tuple[int, int]) -> Image.Image:
    """An example's picture, scaled so that it covers a square of `side` pixels, or (width, height), and cropped in the middle to it."""
    return ImageOps.fit(open_picture(example.source, str(example.path)).picture, _size(side))


def open_mask(example: Example) -> Image.Image | None:
    """Where the loss counts, mode L in the picture's size; None for a picture that is taught whole.

    Raises DataError naming the mask: unreadable, of another size than the picture, black all over.
    """
    if example.mask is None and not example.alpha_mask:
        return None
    seen = open_picture(example.source, str(example.path))
    if example.mask is None:
        if seen.alpha is None:
            return None
        name, mask = f"{example.path}: its transparency as a mask", Image.fromarray(seen.alpha)
    else:
        name = str(example.mask) if isinstance(example.mask, Path) else f"{example.path}: its mask"
        # a mask may be transparent where nothing counts
        mask = open_picture(example.mask, name, background=(0, 0, 0)).picture.convert("L")
    if mask.size != seen.picture.size:
        raise DataError(
            f"{name} is {mask.width}x{mask.height}, expected {seen.picture.width}x{seen.picture.height} as {example.path.name} has it; "
            "save it in the picture's size"
        )
    if mask.getextrema() == (0, 0):
        raise DataError(f"{name} is empty, so that nothing of the picture would count; make white what shall count, or remove it")
    return mask


def fitted_mask(example: Example, side: int | tuple[int, int]) -> Image.Image | None:
    """The mask, scaled and cropped as `fitted_picture` does it. Raises DataError as `open_mask`, and where nothing of it is left."""
    mask = open_mask(example)
    if mask is None:
        return None
    # no overshoot: a sharp edge keeps both of its sides
    mask = ImageOps.fit(mask, _size(side), Image.Resampling.BOX)
    if mask.getextrema() == (0, 0):
        raise DataError(
            f"{example.path}: the crop to {mask.width}x{mask.height} leaves nothing of its mask; crop the picture around what is taught, "
            "or pass --buckets"
        )
    return mask


def _size(side: int | tuple[int, int]) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else side
