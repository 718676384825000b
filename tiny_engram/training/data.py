"""A folder of pictures and captions becomes a checked list of examples. Imports Pillow and numpy only.

Everything is looked at before training starts: one bad file is named now, not met an hour later.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from tiny_engram.errors import TinyEngramError

__all__ = ["DataError", "Example", "load_picture", "scan_folder"]

logger = logging.getLogger(__name__)

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
    """One picture with the captions it may be shown with, each holding the trigger."""

    path: Path
    captions: tuple[str, ...]


def load_picture(path: Path, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """The picture a person sees: first frame, turned as its EXIF says, transparency laid over `background`; mode RGB.

    Raises DataError naming the file if it cannot be read.
    """
    try:
        with Image.open(path) as opened:
            opened.load()
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I") or picture.mode == "F":
                # 16-bit greys: Pillow's own conversion clips at 255 instead of scaling
                values = np.asarray(picture, dtype=np.float64)
                top = 65535 if values.max() > 255 else 255
                picture = Image.fromarray((values.clip(0, top) * (255 / top)).round().astype(np.uint8))
            if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
                rgba = picture.convert("RGBA")
                canvas = Image.new("RGBA", rgba.size, (*background, 255))
                picture = Image.alpha_composite(canvas, rgba)
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: not a picture that can be read ({reason}); replace or remove it, or pass --skip_bad_pictures") from error


def _read_metadata(folder: Path) -> dict[str, str]:
    file = folder / "metadata.jsonl"
    captions: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number}: not JSON ({error.msg}); expected one object a line") from error
        column = next((c for c in CAPTION_COLUMNS if isinstance(row, dict) and isinstance(row.get(c), str)), None)
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str) or column is None:
            columns = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{file}, line {number}: columns {columns}, expected file_name and one of {', '.join(CAPTION_COLUMNS)}")
        captions[row["file_name"]] = row[column]
    missing = sorted(name for name in captions if not (folder / name).is_file())
    if missing:
        raise DataError(f"{file} names {missing[0]!r}, which is not in the folder ({len(missing)} missing); file_name is relative to it")
    return captions


def with_trigger(text: str, trigger: str, source: str) -> str:
    """The caption with `{trigger}` filled in; one that holds neither placeholder nor trigger teaches nothing and is refused."""
    filled = text.replace("{trigger}", trigger).strip()
    if trigger.lower() not in filled.lower():
        raise DataError(f"{source}: caption {text!r} holds neither {{trigger}} nor {trigger!r}; put {{trigger}} where the subject is named")
    return filled


def scan_folder(
    folder: str | Path, spellings: tuple[str, ...], *, templates: tuple[str, ...] = (), skip_bad: bool = False
) -> tuple[list[Example], list[str]]:
    """All pictures of a folder, each opened once, with their captions in every spelling.

    Captions come from metadata.jsonl ({"file_name", "text"} a line), else from a .txt beside the picture (one caption a
    line), else from `templates`, else from built-in ones. `{trigger}` stands for the trigger.

    Returns the examples in the order of their file names, and one line for every bad picture that was skipped.
    Raises DataError: no folder, no pictures, unreadable ones (all are named) unless `skip_bad`, none left, a caption without trigger.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected a folder of training pictures")
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    pictures = [p for p in files if p.suffix.lower() in EXTENSIONS]
    other = [p for p in files if p not in pictures and p.suffix.lower() != ".txt" and p.name != "metadata.jsonl"]
    if other:
        logger.info("%d other files in %s are left alone, %s among them", len(other), folder, other[0].name)
    if not pictures:
        raise DataError(f"{folder}: no pictures in it; expected files ending in {', '.join(sorted(EXTENSIONS))}")
    metadata = _read_metadata(folder) if (folder / "metadata.jsonl").is_file() else {}
    examples: list[Example] = []
    bad: list[str] = []
    for path in pictures:
        try:
            load_picture(path)
        except DataError as error:
            bad.append(str(error))
            continue
        sidecar = path.with_suffix(".txt")
        if path.name in metadata:
            texts, source = (metadata[path.name],), f"{folder / 'metadata.jsonl'}, {path.name}"
        elif sidecar.is_file():
            lines = tuple(line for line in sidecar.read_text(encoding="utf-8-sig").splitlines() if line.strip())
            texts, source = lines or DEFAULT_TEMPLATES, str(sidecar)
        else:
            texts, source = templates or DEFAULT_TEMPLATES, str(path)
        captions = [with_trigger(text, spelling, source) for text in texts for spelling in spellings if "{trigger}" in text]
        captions += [with_trigger(text, spellings[0], source) for text in texts if "{trigger}" not in text]
        examples.append(Example(path, tuple(dict.fromkeys(captions))))
    if bad and not skip_bad:
        more = "" if len(bad) == 1 else f" (and {len(bad) - 1} more: {', '.join(Path(b.split(': ')[0]).name for b in bad[1:6])})"
        raise DataError(bad[0] + more)
    if not examples:
        raise DataError(f"{folder}: none of its {len(pictures)} pictures can be read; the first: {bad[0]}")
    return examples, bad
