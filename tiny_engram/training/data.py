"""A folder of pictures and captions becomes a checked list of examples. Imports Pillow, numpy and errors only.

Everything is looked at before training starts: one bad file is named now, not met an hour later.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tiny_engram.errors import TinyEngramError

__all__ = ["DataError", "Example", "Scan", "fitted_picture", "load_picture", "scan_folder"]

EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
DEFAULT_TEMPLATES = (
    "a {trigger}",
    "a picture of a {trigger}",
    "a photo of a {trigger}",
    "the {trigger}",
    "a drawing of a {trigger}",
)
CAPTION_COLUMNS = ("text", "caption")


class DataError(TinyEngramError):
    """The folder of training pictures cannot be used as it is."""


@dataclass(frozen=True, slots=True)
class Example:
    """One picture with the captions it may be shown with, each holding the trigger or one of its aliases."""

    path: Path
    captions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder holds: examples in the order of their file names, a line for each bad picture left out, a count of other files."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...]
    others: int


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


def load_picture(path: Path, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """The picture a person sees: first frame, turned as its EXIF says, transparency laid over `background`; mode RGB.

    Raises DataError naming the file if it cannot be read.
    """
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path) as opened:
            opened.load()
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I") or picture.mode == "F":
                picture = _grey(np.asarray(picture), picture.mode)
            if picture.mode == "LAB":
                picture = _from_lab(picture)
            if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
                rgba = picture.convert("RGBA")
                canvas = Image.new("RGBA", rgba.size, (*background, 255))
                picture = Image.alpha_composite(canvas, rgba)
            return picture.convert("RGB")
    except Exception as error:  # damaged files make decoders raise anything, struct.error and IndexError included
        raise DataError(f"{path}: not a picture that can be read ({_reason(error)}); replace or remove it") from error


def fitted_picture(example: Example, side: int) -> Image.Image:
    """An example's picture, scaled so that its shorter side fits and cropped in the middle to a square of `side` pixels."""
    return ImageOps.fit(load_picture(example.path), (side, side))


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({_reason(error)}); save it as UTF-8") from error


def _read_metadata(file: Path, pictures: set[str]) -> dict[str, list[str]]:
    """Picture name -> its captions; a picture may have several lines."""
    captions: dict[str, list[str]] = {}
    # not splitlines(): JSON text may hold separators that it would cut at
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number}: not JSON ({_reason(error)}); expected one object a line") from error
        column = next((c for c in CAPTION_COLUMNS if isinstance(row, dict) and isinstance(row.get(c), str)), None)
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str) or column is None:
            columns = sorted(row) if isinstance(row, dict) else type(row).__name__
            expected = " or ".join(CAPTION_COLUMNS)
            raise DataError(f"{file}, line {number}: columns {columns}, expected file_name and {expected}, both text")
        captions.setdefault(row["file_name"].removeprefix("./"), []).append(row[column])
    missing = sorted(set(captions) - pictures)
    if missing:
        raise DataError(
            f"{file} names {missing[0]!r}, which is no picture in this folder ({len(missing)} such); "
            "file_name is the plain name of a picture beside it"
        )
    return captions


def _fill(text: str, spellings: tuple[str, ...], source: str) -> list[str]:
    """The caption in every spelling if it holds `{trigger}`, else as it is; one without any trigger teaches nothing and is refused."""
    if "{trigger}" in text:
        return [text.replace("{trigger}", spelling).strip() for spelling in spellings]
    if not any(spelling.lower() in text.lower() for spelling in spellings):
        raise DataError(
            f"{source}: caption {text!r} holds neither {{trigger}} nor {spellings[0]!r}; put {{trigger}} where the subject is named"
        )
    return [text.strip()]


def scan_folder(folder: str | Path, spellings: tuple[str, ...], *, templates: tuple[str, ...] = (), skip_bad: bool = False) -> Scan:
    """All pictures of a folder, each opened once, with their captions in every spelling.

    Captions come from metadata.jsonl ({"file_name", "text"} a line), else from a .txt beside the picture (one caption a
    line), else from `templates`, else from built-in ones. `{trigger}` stands for the trigger.

    Raises DataError: no folder, no pictures, unreadable ones (all are named) unless `skip_bad`, none left, a caption without trigger.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "no such folder"
        raise DataError(f"{folder}: {what}; expected a folder of training pictures")
    try:
        files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({_reason(error)}); choose another folder") from error
    pictures = [p for p in files if p.suffix.lower() in EXTENSIONS]
    if not pictures:
        raise DataError(f"{folder}: no pictures in it; expected files ending in {', '.join(sorted(EXTENSIONS))}")
    sidecars = {p.with_suffix(".txt") for p in pictures}
    about = folder / "metadata.jsonl"
    metadata = _read_metadata(about, {p.name for p in pictures}) if about in files else {}
    examples: list[Example] = []
    bad: dict[str, str] = {}
    for path in pictures:
        try:
            load_picture(path)
        except DataError as error:
            bad[path.name] = str(error)
            continue
        if path.name in metadata:
            texts, source = tuple(metadata[path.name]), f"{about}, {path.name}"
        elif path.with_suffix(".txt") in files:
            sidecar = path.with_suffix(".txt")
            lines = tuple(line for line in _read_text(sidecar).splitlines() if line.strip())
            texts, source = lines or templates or DEFAULT_TEMPLATES, str(sidecar)
        else:
            texts, source = templates or DEFAULT_TEMPLATES, str(path)
        captions = [caption for text in texts for caption in _fill(text, spellings, source)]
        examples.append(Example(path, tuple(dict.fromkeys(captions))))
    if bad and not examples:
        raise DataError(f"{folder}: none of its {len(bad)} pictures can be read: {', '.join(bad)}")
    if bad and not skip_bad:
        first, *rest = bad
        more = f" (also {', '.join(rest)})" if rest else ""
        raise DataError(f"{bad[first]}, or pass --skip_bad_pictures{more}")
    others = sum(p not in pictures and p not in sidecars and p != about for p in files)
    return Scan(tuple(examples), tuple(bad.values()), others)
