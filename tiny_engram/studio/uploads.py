"""Pictures that a browser sends, taken in as PNG under names of the server. May import training.data, workspace and errors.

A file is looked at before it is decoded: its size, its format by content, its pixels by header. What comes out holds pixels alone: no
EXIF (which may say where a picture was taken), no colour profile, no name.
"""

import io
import os
import threading
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from tiny_engram.studio.errors import MOST_FILE, StudioError, without_folder
from tiny_engram.studio.workspace import new_id, write_bytes
from tiny_engram.training.data import DataError, load_picture

__all__ = ["Limits", "Picture", "Taken", "open_checked", "png_bytes", "shown_name", "take_pictures"]

# No format whose reader starts another program (EPS), none that is recognised by little (TGA), none but pictures of one canvas.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
MOST_NAME = 80
# A picture of the most pixels takes some hundred megabytes while it is decoded.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`file_bytes` of one file and `total_bytes` of all, `files` of them, `pixels` of one picture as its header says; pictures are kept
    with at most `side` pixels along their longer side."""

    file_bytes: int = MOST_FILE
    total_bytes: int = 256 * 2**20
    files: int = 64
    pixels: int = 50_000_000
    side: int = 2048


@dataclass(frozen=True, slots=True)
class Picture:
    """One that was taken: the server's id and file, the name a user knows it by (not escaped), its size in pixels as kept, and as it was
    sent (`sent`)."""

    id: str
    file: Path
    name: str
    width: int
    height: int
    sent: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of the files: pictures in their order, and (shown name, one-line reason) of each that was refused."""

    pictures: tuple[Picture, ...]
    refused: tuple[tuple[str, str], ...]


def shown_name(name: object) -> str:
    """The last part of a file's name on one line, without control and direction characters, at most 80 characters; not escaped."""
    last = str(name).replace("\\", "/").rstrip("/").rpartition("/")[2]
    clean = " ".join("".join(" " if unicodedata.category(c)[0] == "C" else c for c in last).split())
    if len(clean) > MOST_NAME:
        clean = clean[: MOST_NAME - 12] + "..." + clean[-9:]
    return clean or "unnamed"


def take_pictures(files: Iterable[str | Path | tuple[str, str | Path | bytes]], folder: Path, limits: Limits | None = None) -> Taken:
    """Write every sound picture of `files` to `folder` as ID.png: mode RGB, turned as its EXIF says, transparency over white, first frame.

    files: paths, or (the user's name for it, path or bytes). Nothing of a refused file is kept, and none of them stops the others.
    Raises StudioError only where nothing can be written.
    """
    limits = limits or Limits()
    pictures: list[Picture] = []
    refused: list[tuple[str, str]] = []
    total = 0
    for given in files:
        name, source = given if isinstance(given, tuple) else (Path(given).name, given)
        shown = shown_name(name)
        if len(pictures) >= limits.files:
            refused.append((shown, f"more than {limits.files} pictures; take another one out first"))
            continue
        try:
            blob = _read(source, limits)
            if total + len(blob) > limits.total_bytes:
                raise StudioError(f"more than {_mib(limits.total_bytes)} in all; send smaller pictures")
            with _one_at_a_time:
                taken = _take(blob, shown, folder, limits)
        except _Unwritable as error:
            raise StudioError(str(error)) from error
        except StudioError as error:
            refused.append((shown, str(error)))
            continue
        total += len(blob)
        pictures.append(taken)
    return Taken(tuple(pictures), tuple(refused))


class _Unwritable(StudioError):
    """Not the picture's fault."""


def _mib(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"


def _read(source: str | Path | bytes, limits: Limits) -> bytes:
    if isinstance(source, bytes):
        blob = source
        size = len(blob)
    else:
        path = Path(source)
        try:
            if not path.is_file():
                raise StudioError("no such file, expected a picture; send it again")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                blob = file.read(limits.file_bytes + 1)
        except OSError as error:
            raise StudioError(f"cannot be read ({error.strerror}); send it again") from error
    if not blob:
        raise StudioError("the file is empty, expected a picture; send it again")
    if len(blob) > limits.file_bytes:
        raise StudioError(f"{_mib(size)}, expected at most {_mib(limits.file_bytes)}; save the picture smaller")
    return blob


def open_checked(blob: bytes, limits: Limits) -> Image.Image:
    """The picture, not decoded yet: a known format by its content, and no more pixels than `limits` says. Raises StudioError."""
    known = "PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or PPM"
    try:
        with warnings.catch_warnings(action="ignore"):
            Image.init()  # or formats that nobody opened before are not known
            opened = Image.open(io.BytesIO(blob), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise StudioError(f"more than {limits.pixels:,} pixels, expected fewer; save the picture smaller") from error
    except UnidentifiedImageError as error:
        raise StudioError(f"not a picture that can be read, expected {known}; save it as one of these") from error
    except Exception as error:  # damaged headers make readers raise anything
        raise StudioError(f"a damaged picture ({_reason(error)}), expected {known}; send it again") from error
    width, height = opened.size
    if width * height > limits.pixels:
        opened.close()
        raise StudioError(f"{width} x {height} pixels, expected at most {limits.pixels:,} in all; save the picture smaller")
    if width < 1 or height < 1:
        opened.close()
        raise StudioError(f"{width} x {height} pixels, expected a picture with at least one")
    return opened


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def png_bytes(picture: Image.Image, **options: object) -> bytes:
    """The picture as PNG, with nothing of what came with it but what `options` say."""
    bare = picture.copy()
    bare.info.clear()
    buffer = io.BytesIO()
    bare.save(buffer, "PNG", **options)
    return buffer.getvalue()


def _take(blob: bytes, shown: str, folder: Path, limits: Limits) -> Picture:
    open_checked(blob, limits).close()
    made = new_id()
    # Where a killed app leaves it, the workspace clears it: it is named as write_atomically names its own.
    sent = folder / f".{made}.sent.tmp"
    try:
        write_bytes(sent, blob)
        picture = load_picture(sent)
    except StudioError as error:
        raise _Unwritable(str(error)) from error
    except DataError as error:
        cause = error.__cause__ or error
        raise StudioError(f"a damaged picture ({without_folder(_reason(cause), sent, shown)}); send it again or leave it out") from error
    finally:
        sent.unlink(missing_ok=True)
    sent_size = picture.size
    if max(picture.size) > limits.side:
        scale = limits.side / max(picture.size)
        size = tuple(max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((size[0], size[1]), Image.Resampling.LANCZOS, reducing_gap=2.0)
    file = folder / f"{made}.png"
    try:
        write_bytes(file, png_bytes(picture, compress_level=3))
    except StudioError as error:
        raise _Unwritable(str(error)) from error
    return Picture(made, file, shown, *picture.size, sent_size)
