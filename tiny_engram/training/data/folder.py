"""Which files of a folder are pictures, and what lies beside each: captions, a mask, how often it is drawn. Nothing is decoded here.

Imports the standard library and the neighbours captions, metadata and pictures.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiny_engram.training.data.metadata import METADATA, About, read_metadata, read_text
from tiny_engram.training.data.pictures import DataError, Source, reason

__all__ = ["EXTENSIONS", "Found", "find_pictures"]

EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
SIDECARS = (".txt", ".caption")
MASKS = "masks"
_NUMBERED = re.compile(r"(\d+)_")


@dataclass(frozen=True, slots=True)
class Found:
    """A picture that was not looked at yet; `texts` are its captions as written, none where templates serve, and `told` says where."""

    path: Path
    name: str
    source: Source
    texts: tuple[str, ...]
    told: str
    mask: Source | None
    repeats: int


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def _files(folder: Path, recursive: bool) -> Iterator[Path]:
    """Files in the order of their names, hidden ones left out; of folders those named masks, and with `recursive` all but linked ones."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and (path.name == MASKS or (recursive and not path.is_symlink())):
            yield from _files(path, recursive)


def _masks(files: list[Path], folder: Path) -> dict[tuple[Path, str], Path]:
    """NAME.mask.png, and NAME.png in a folder named masks, by the folder of their picture and NAME."""
    found: dict[tuple[Path, str], Path] = {}
    for path in filter(_is_picture, files):
        if path.parent.name == MASKS and path.parent != folder:
            owner = path.parent.parent, path.stem
        elif path.stem.lower().endswith(".mask"):
            owner = path.parent, path.stem[: -len(".mask")]
        else:
            continue
        if owner in found:
            raise DataError(f"{path}: {found[owner]} is a mask of the same picture; keep one of them")
        found[owner] = path
    return found


def _of_folder(path: Path) -> int | None:
    """The 10 of a folder named "10_vortex cat"."""
    numbered = _NUMBERED.match(path.parent.absolute().name)
    if numbered is None:
        return None
    if len(numbered[1]) > 8 or int(numbered[1]) < 1:
        raise DataError(f"{path.parent}: its name says {numbered[1]} repeats, expected a whole number from 1; rename the folder")
    return int(numbered[1])


def find_pictures(folder: Path, *, recursive: bool, folder_repeats: bool) -> tuple[list[Found], int]:
    """The pictures of a folder in the order of their names, and the count of files that say nothing of any.

    Raises DataError: no folder, no pictures, metadata that cannot be used, a mask of no picture.
    """
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "no such folder"
        raise DataError(f"{folder}: {what}; expected a folder of training pictures")
    try:
        files = list(_files(folder, recursive))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({reason(error)}); choose another folder") from error
    by_name = _masks(files, folder)
    pictures = [path for path in files if _is_picture(path) and path not in by_name.values()]
    tables = [folder / name for name in METADATA if folder / name in files]
    if len(tables) > 1:
        raise DataError(f"{folder}: both {' and '.join(METADATA)} say what its pictures are; keep one of them")
    names = {path: path.relative_to(folder).as_posix() for path in pictures}
    about = read_metadata(tables[0], set(names.values())) if tables else {}
    by_table = {name: folder / each.mask for name, each in about.items() if each.mask is not None}
    for name, path in by_table.items():
        if not path.is_file():
            raise DataError(f"{tables[0]}: the mask {about[name].mask!r} of {name!r} is no file; expected its path from that folder")
    used = {path.resolve() for path in by_table.values()}
    # what a table calls a mask is no picture, unless it has a line of its own
    pictures = [path for path in pictures if names[path] in about or path.resolve() not in used]
    if not pictures:
        more = "" if recursive or not any(p.is_dir() for p in folder.iterdir()) else "; those of the folders in it need --recursive"
        raise DataError(f"{folder}: no pictures in it; expected files ending in {', '.join(sorted(EXTENSIONS))}{more}")
    owners = {(path.parent, path.stem) for path in pictures}
    orphan = next((path for owner, path in by_name.items() if owner not in owners and path.resolve() not in used), None)
    if orphan is not None:
        raise DataError(f"{orphan}: a mask of no picture here; name it as its picture, or rename it if it is one")
    numbers = {path: _of_folder(path) for path in pictures} if folder_repeats else {}
    if folder_repeats and not any(numbers.values()):
        raise DataError(
            f"folder_repeats is True, but no folder of pictures in {folder} is named as 10_words; rename one, or leave the flag out"
            + ("" if recursive else "; folders in it need --recursive")
        )
    sidecars = {path.with_suffix(suffix) for path in pictures for suffix in SIDECARS}
    found = []
    for path in pictures:
        told = about.get(names[path], About())
        texts, where = tuple(told.captions), f"{tables[0]}, {names[path]}" if told.captions else str(path)
        sidecar = next((s for s in (path.with_suffix(suffix) for suffix in SIDECARS) if s in files), None)
        if not texts and sidecar is not None:
            texts, where = tuple(line for line in read_text(sidecar).splitlines() if line.strip()), str(sidecar)
        mask = by_table.get(names[path]) or by_name.get((path.parent, path.stem))
        repeats = told.repeats or numbers.get(path) or 1
        found.append(Found(path, names[path], path, texts, where, mask, repeats))
    known = {*pictures, *sidecars, *tables, *by_name.values(), *by_table.values()}
    return found, sum(path not in known for path in files)
