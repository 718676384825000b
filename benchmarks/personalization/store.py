"""What pieces leave behind: one zip file each, packs of them to carry between machines, and the results file that they add up to.

A piece's file holds `piece.json` (what it was, its records), `pictures/*.webp` (the first sample of each prompt) and
`concepts/*.safetensors`; it is there whole or not at all. Imports numpy, Pillow and the package's atomic writing.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.personalization.bases import EMOJI_SD
from tiny_engram.files import write_atomically

__all__ = ["Pictures", "PieceFile", "load_results", "merge", "pack", "save_results", "unpack"]

# What comes back from a lent machine: parts of a pack stay below it.
PART_BYTES = 15 * 2**20


class PieceFile:
    """The file of a finished piece, `folder/<key>.zip`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def key(self) -> str:
        return self.path.stem

    def read(self) -> dict[str, Any]:
        """`piece.json`."""
        with zipfile.ZipFile(self.path) as file:
            return _parsed(file.read("piece.json"))

    @classmethod
    def write(
        cls, folder: Path, key: str, content: Mapping[str, Any], pictures: Mapping[str, np.ndarray], files: Mapping[str, bytes]
    ) -> PieceFile:
        """`pictures`: "method/subject/seed/step/context" -> uint8 `[h, w, 3]`. `files`: concept files by name.

        Raises ValueError for a figure that is no number.
        """
        blob = io.BytesIO()
        with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("piece.json", _written(content))
            for name, picture in pictures.items():
                file.writestr(zipfile.ZipInfo(f"pictures/{name}.webp"), _webp(picture))  # stored: it is compressed already
            for name, data in files.items():
                file.writestr(f"concepts/{name}", data)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(write_atomically(folder / f"{key}.zip", blob.getvalue()))

    @classmethod
    def all(cls, folder: Path) -> list[PieceFile]:
        """Those in a folder, by name."""
        return [cls(path) for path in sorted(folder.glob("*.zip"))]


def _written(value: Any, **options: Any) -> str:
    """As JSON, which knows neither NaN nor infinity: a loss of a run that diverged is null, of anything else it is a fault."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError as error:
        raise ValueError(f"a figure is no number ({error}): expected null for losses of runs that diverged, numbers elsewhere") from error


def _parsed(text: str | bytes) -> Any:
    """From JSON; NaN and infinity, which others may have written, become None."""
    return json.loads(text, parse_constant=lambda name: None)


def _webp(picture: np.ndarray) -> bytes:
    blob = io.BytesIO()
    Image.fromarray(picture).save(blob, "WEBP", quality=90, method=4)
    return blob.getvalue()


class Pictures(Mapping[str, np.ndarray]):
    """The pictures of all pieces in a folder: "method/subject/seed/step/context" -> uint8 `[128, 128, 3]`, decoded when asked for.

    A lever's label takes the method's place; pairs have "left thing+right thing" for a subject and "pair" for a context.
    """

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, Path] = {}
        # of two pieces about the same runs the newer counts
        for piece in sorted(PieceFile.all(folder), key=lambda piece: piece.read()["finished"]):
            with zipfile.ZipFile(piece.path) as file:
                names = [name for name in file.namelist() if name.startswith("pictures/")]
            self._where |= {name.removeprefix("pictures/").removesuffix(".webp"): piece.path for name in names}

    def __getitem__(self, name: str) -> np.ndarray:
        with zipfile.ZipFile(self._where[name]) as file:
            return np.asarray(Image.open(io.BytesIO(file.read(f"pictures/{name}.webp"))).convert("RGB"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def pack(pieces: Sequence[PieceFile], path: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Put piece files into one zip file, or into `<name>-2.zip` and so on where they are more than `part_bytes`."""
    parts: list[list[PieceFile]] = [[]]
    room = part_bytes
    for piece in pieces:
        size = piece.path.stat().st_size + 512
        if size > room and parts[-1]:
            parts.append([])
            room = part_bytes
        parts[-1].append(piece)
        room -= size
    written = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, 1):
        blob = io.BytesIO()
        with zipfile.ZipFile(blob, "w", zipfile.ZIP_STORED) as file:
            for piece in part:
                file.write(piece.path, piece.path.name)
        target = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        written.append(write_atomically(target, blob.getvalue()))
    return written


def unpack(packs: Sequence[Path], folder: Path) -> list[PieceFile]:
    """The piece files of packs, put into `folder`. Raises ValueError where a pack is none."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for path in packs:
        try:
            with zipfile.ZipFile(path) as file:
                names = file.namelist()
                if any("/" in name or not name.endswith(".zip") for name in names):
                    raise ValueError(f"{path}: holds {names[:3]}, expected files of pieces, <key>.zip")
                pieces += [PieceFile(write_atomically(folder / name, file.read(name))) for name in names]
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: cannot be read as a pack of pieces ({error}); give files that --pack wrote") from error
    return pieces


def load_results(path: Path, base: str = EMOJI_SD.name) -> dict[str, Any]:
    """The results file of a base, or an empty one. Raises ValueError where it is none, or another base's."""
    empty = {} if base == EMOJI_SD.name else {"base": base}
    empty |= {"pieces": {}, "judges": {}, "ceilings": {}, "stages": {}, "pairs": [], "losses": {}, "costs": {}, "settings": {}}
    if not path.exists():
        return empty
    try:
        results = empty | _parsed(path.read_text())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no results of this bench ({error}); move it away, or restore it") from error
    if (found := results.get("base", EMOJI_SD.name)) != base:
        raise ValueError(
            f"{path}: results on the base {found}, expected those on {base}; give --base {found}, or another file by --results"
        )
    return results


def save_results(path: Path, results: Mapping[str, Any]) -> None:
    """As JSON with a record a line: changes stay readable. Raises ValueError for a figure that is no number."""

    def lines(value: Any, deep: int) -> str:
        pad = "\n" + " " * (deep + 1)
        if isinstance(value, dict) and value and deep < 2:
            entries = [f"{_written(name)}: {lines(entry, deep + 1)}" for name, entry in value.items()]
            return "{" + pad + f",{pad}".join(entries) + pad[:-1] + "}"
        if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            return "[" + pad + f",{pad}".join(_written(entry, separators=(",", ":")) for entry in value) + pad[:-1] + "]"
        return _written(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (lines(results, 0) + "\n").encode())


def merge(results: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results with finished pieces put in, each in the place of what was measured before of the same runs, or of its method in
    another version.

    Of two pieces about the same runs the one that was finished later stays, in whatever order they come. Every record
    names its piece by the first 8 digits of its key. Results and pieces that name no base are about emoji-sd.

    Raises:
        ValueError: a piece of another base.
    """
    base = results.get("base", EMOJI_SD.name)
    if others := {piece.get("base", EMOJI_SD.name) for piece in pieces} - {base}:
        raise ValueError(f"pieces on the base {others.pop()}, but the results are about {base}; give --base, or another folder by --out")
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in results.items()}
    stages = {stage: list(records) for stage, records in results["stages"].items()}
    pairs = list(results["pairs"])
    for piece in sorted(pieces, key=lambda piece: piece["finished"]):
        about, cells = piece["piece"], set(piece["cells"])
        same, version = ("stage", "method"), ("version", "method_version")
        rivals = {
            key: old
            for key, old in merged["pieces"].items()
            if all(old[name] == about[name] for name in same)
            and (old["label"] == about["label"] and cells & set(old["cells"]) or any(old[name] != about[name] for name in version))
        }
        if any(old["finished"] > piece["finished"] for old in rivals.values()):
            continue
        gone = {key[:8] for key in rivals}
        merged["pieces"] = {key: old for key, old in merged["pieces"].items() if key[:8] not in gone}
        stages = {stage: [r for r in records if r["piece"] not in gone] for stage, records in stages.items()}
        pairs = [record for record in pairs if record["piece"] not in gone]
        merged["losses"] = {name: loss for name, loss in merged["losses"].items() if loss["piece"] not in gone}
        kept = ("stage", "method", "label", "version", "method_version", "settings")
        merged["pieces"][piece["key"]] = {name: about[name] for name in kept} | {
            name: piece[name] for name in ("cells", "seconds", "work", "finished", "commit", "machine", "versions")
        }
        for stage, records in piece["records"].items():
            stages.setdefault(stage, []).extend(record | {"piece": piece["key"][:8]} for record in records)
        pairs += [record | {"piece": piece["key"][:8]} for record in piece["pairs"]]
        merged["losses"] |= {name: {"piece": piece["key"][:8], "curve": curve} for name, curve in piece["losses"].items()}
        for name in ("judges", "ceilings"):
            merged[name] |= piece[name]
        # time alone on a machine and changes elsewhere are pieces of their own
        merged["costs"] |= {method: merged["costs"].get(method, {}) | found for method, found in piece["costs"].items()}
        merged |= {name: piece[name] for name in ("commit", "machine", "versions")}
    machines = list(dict.fromkeys(old["machine"] for old in merged["pieces"].values()))
    if machines:
        merged["machine"] = " and ".join(machines)
    return merged | {"stages": {stage: records for stage, records in stages.items() if records}, "pairs": pairs}
