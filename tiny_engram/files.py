"""Files that are there whole or not at all, and names that every system takes. Imports errors."""

import contextlib
import os
import tempfile
import unicodedata
from pathlib import Path

from tiny_engram.errors import TinyEngramError

__all__ = ["check_writable", "file_name_of", "sync_folder", "write_atomically"]

# What Windows takes for a device, whatever its ending.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{k}" for name in ("com", "lpt") for k in range(10))}


def write_atomically(path: Path, blob: bytes, *, gone: Path | None = None) -> Path:
    """Write beside the target, flush to disk, rename over it; on any failure (OSError) the old file stays and nothing is left behind.

    `gone` is a file that shall not outlive the old one: it is deleted once all of the new one is on the disk, before the rename.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        if gone is not None:
            gone.unlink(missing_ok=True)
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def sync_folder(folder: Path) -> None:
    """Make a rename in it durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_writable(folder: Path) -> None:
    """Can files be made in this folder, once it is there? Makes nothing. Raises TinyEngramError."""
    place = folder.absolute()
    while not os.path.exists(place) and place != place.parent:  # Path.exists raises where a folder on the way may not be searched
        place = place.parent
    try:
        handle, probe = tempfile.mkstemp(prefix=".writable.", dir=place)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise TinyEngramError(f"{folder}: cannot write there ({error.strerror or error}); choose another folder") from error


def file_name_of(name: str) -> str:
    """A file name that every system takes: letters and digits of any script, "-" and "_", at most 60 characters, and .safetensors."""
    plain = unicodedata.normalize("NFC", name)
    joined = "-".join("".join(c if c.isalnum() or c in "-_" else " " for c in plain).split()).strip("-_")
    while len(joined) > 60 or len(joined.encode()) > 180:
        joined = joined[:-1]
    joined = joined.strip("-_") or "concept"
    return (f"{joined}-concept" if joined.lower() in _DEVICES else joined) + ".safetensors"
