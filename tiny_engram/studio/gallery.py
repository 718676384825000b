"""The gallery: every picture that was drawn, a PNG each that carries its settings. May import uploads, workspace and errors.

Ids grow with time, so the order of the names is the order of the pictures.
"""

import contextlib
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.uploads import Limits, open_checked, png_bytes
from tiny_engram.studio.workspace import Workspace, check_id, write_bytes

__all__ = ["Entry", "Gallery", "check_settings", "parameters_text", "settings_in"]

KEY = "tiny_engram"
MOST_PICTURES = 1000
MOST_SETTINGS = 64 * 1024  # characters, as JSON
MOST_TEXT = 4000  # characters of one text
MOST_DEPTH = 4
# The least and the most, and whether it is a whole number.
_NUMBERS = {
    "seed": (0, 2**32 - 1, True),
    "steps": (1, 150, True),
    "guidance": (0, 30, False),
    "width": (1, 8192, True),
    "height": (1, 8192, True),
}
_FILES = Limits()
_ID = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture: its id, file, settings as they were saved, and size in pixels."""

    id: str
    file: Path
    settings: Mapping[str, Any]
    width: int
    height: int


def check_settings(given: Any) -> dict[str, Any]:
    """The settings, if they are plain JSON within bounds and the fields that the Studio knows make sense. Raises StudioError."""
    if not isinstance(given, Mapping):
        raise StudioError(f"settings are {type(given).__name__}, expected an object; take a picture that the Studio drew")
    _check_plain(given, 0)
    settings = dict(given)
    for name in ("prompt", "negative_prompt"):
        if settings.get(name) is not None and not isinstance(settings[name], str):
            raise StudioError(f"setting {name} is {_short(settings[name])}, expected text; take a picture that the Studio drew")
    for name, (low, high, whole) in _NUMBERS.items():
        value = settings.get(name)
        if value is not None and (not _is_number(value) or (whole and value != int(value)) or not low <= value <= high):
            raise StudioError(f"setting {name} is {_short(value)}, expected {low} to {high}; take a picture that the Studio drew")
    concepts = settings.get("concepts") or []
    for each in concepts if isinstance(concepts, list) else [None]:
        texts = ("id", "name", "trigger")
        if not isinstance(each, Mapping) or not all(isinstance(each.get(n), str) for n in texts) or not _is_number(each.get("strength")):
            raise StudioError(
                f"setting concepts is {_short(concepts)}, expected an id, a name, a trigger and a strength each; "
                "take a picture that the Studio drew"
            )
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return repr(value)[:40]


def _check_plain(value: Any, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise StudioError(f"settings are nested more than {MOST_DEPTH} deep, expected flat ones; take a picture that the Studio drew")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and len(key) <= MOST_TEXT for key in value):
            raise StudioError("settings have a key that is no text, expected names; take a picture that the Studio drew")
        for inner in value.values():
            _check_plain(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_plain(inner, depth + 1)
    elif isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise StudioError(f"a text of the settings has {len(value)} characters, expected at most {MOST_TEXT}")
    elif not (value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))):
        raise StudioError(f"settings hold {_short(value)}, expected text and finite numbers; take a picture that the Studio drew")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise StudioError(f"settings hold a number of {len(str(abs(value)))} digits, expected a smaller one")


def parameters_text(settings: Mapping[str, Any], size: tuple[int, int]) -> str:
    """The settings as other programs of this kind write and read them in a PNG: prompt, negative prompt, then "Name: value" pairs."""

    def line(value: Any) -> str:
        return " ".join(str(value).split())

    lines = [line(settings.get("prompt") or "")]
    if settings.get("negative_prompt"):
        lines.append(f"Negative prompt: {line(settings['negative_prompt'])}")
    known = (("Steps", "steps"), ("CFG scale", "guidance"), ("Seed", "seed"))
    pairs = [f"{shown}: {settings[name]}" for shown, name in known if settings.get(name) is not None]
    pairs.append(f"Size: {size[0]}x{size[1]}")
    concepts = ", ".join(f"{line(each['name'])} {each['strength']:g}" for each in settings.get("concepts") or [])
    if concepts:
        pairs.append(f"Concepts: {json.dumps(concepts, ensure_ascii=False)}")
    if settings.get("base"):
        pairs.append("Model: " + line(settings["base"]).replace(",", " "))
    lines.append(", ".join(pairs))
    return "\n".join(lines)


def settings_in(blob: bytes) -> dict[str, Any]:
    """The settings that a PNG of the Studio carries; nothing is decoded. Raises StudioError: no such picture, or settings beyond bounds."""
    if len(blob) > _FILES.file_bytes:
        raise StudioError(f"more than {_FILES.file_bytes // 2**20} MiB, expected a picture that the Studio drew; choose another one")
    with contextlib.closing(open_checked(blob, _FILES)) as picture:
        text = picture.info.get(KEY) if picture.format == "PNG" else None
    if not isinstance(text, str):
        raise StudioError("the picture carries no settings, expected a PNG that the Studio drew and no other program saved again")
    if len(text) > MOST_SETTINGS:
        raise StudioError(f"the picture's settings have {len(text)} characters, expected at most {MOST_SETTINGS}; choose another one")
    try:
        return check_settings(json.loads(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, StudioError):
            raise
        raise StudioError("the picture's settings are no JSON, expected a PNG that the Studio drew; choose another one") from error


class Gallery:
    """All verbs may be called from any thread."""

    def __init__(self, workspace: Workspace, keep: int = MOST_PICTURES) -> None:
        self.workspace, self.keep = workspace, keep
        self._lock = threading.RLock()
        self._read: dict[str, tuple[tuple[int, int], Entry | None]] = {}

    def add(self, picture: Image.Image, settings: Mapping[str, Any]) -> str:
        """Save a picture with its settings; the oldest beyond `keep` go. Returns its id.

        Raises StudioError: settings that are not plain JSON within bounds, or a picture that cannot be written.
        """
        told = json.dumps(check_settings(settings), allow_nan=False)
        if len(told) > MOST_SETTINGS:
            raise StudioError(f"settings have {len(told)} characters, expected at most {MOST_SETTINGS}; use a shorter prompt")
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text(KEY, told)
        chunks.add_itxt("parameters", parameters_text(settings, picture.size))
        blob = png_bytes(picture, pnginfo=chunks)
        with self._lock:
            ids = self._ids()
            now = max(time.time_ns(), int(ids[0][:16], 16) + 1 if ids else 0)
            made = f"{now:016x}{secrets.token_hex(4)}"
            write_bytes(self._path(made), blob)
            for old in ids[max(0, self.keep - 1) :]:
                self._remove(old)
        return made

    def entries(self, limit: int = 50, offset: int = 0) -> list[Entry]:
        """Newest first, damaged files passed over. Negative numbers count as 0."""
        first, last = max(0, offset), max(0, offset) + max(0, limit)
        found: list[Entry] = []
        with self._lock:
            for id in self._ids():
                if len(found) >= last:
                    break
                if (entry := self._entry(id)) is not None:
                    found.append(entry)
        return found[first:]

    def get(self, id: str) -> Entry:
        """One picture. Raises StudioError: no such picture, or a damaged one."""
        with self._lock:
            entry = self._entry(check_id("picture", id))
        if entry is None:
            raise StudioError(f"no picture {id!r} in the gallery; it was deleted or is damaged, reload the page")
        return entry

    def settings_of(self, source: str | Path) -> dict[str, Any]:
        """The settings of a picture of the gallery (text: its id), or of any file (a Path). Raises StudioError."""
        if isinstance(source, str):
            return dict(self.get(source).settings)
        try:
            with source.open("rb") as file:
                blob = file.read(_FILES.file_bytes + 1)
        except OSError as error:
            raise StudioError(f"the picture cannot be read ({error.strerror}); choose it again") from error
        return settings_in(blob)

    def delete(self, id: str) -> None:
        """For good. Raises StudioError where there is none."""
        with self._lock:
            if not self._path(check_id("picture", id)).is_file():
                raise StudioError(f"no picture {id!r} in the gallery; it was deleted, reload the page")
            self._remove(id)

    def _path(self, id: str) -> Path:
        return self.workspace.gallery / f"{id}.png"

    def _ids(self) -> list[str]:
        """Newest first."""
        return sorted((p.stem for p in self.workspace.gallery.glob("*.png") if _ID.fullmatch(p.stem)), reverse=True)

    def _remove(self, id: str) -> None:
        self._read.pop(id, None)
        try:
            self._path(id).unlink(missing_ok=True)
        except OSError as error:
            raise StudioError(f"cannot delete the picture ({error.strerror}); look at the permissions of the Studio's folder") from error

    def _entry(self, id: str) -> Entry | None:
        path = self._path(id)
        try:
            about = path.stat()
            stamp = (about.st_mtime_ns, about.st_size)
            if (known := self._read.get(id)) is None or known[0] != stamp:
                self._read[id] = known = (stamp, _read_entry(id, path))
        except OSError:
            return None
        return known[1]


def _read_entry(id: str, path: Path) -> Entry | None:
    blob = path.read_bytes() if path.stat().st_size <= _FILES.file_bytes else b""
    try:
        settings = settings_in(blob)
        with Image.open(path, formats=("PNG",)) as picture:
            picture.verify()
            width, height = picture.size
    except Exception:  # damaged files make decoders raise anything
        return None
    return Entry(id, path, settings, width, height)
