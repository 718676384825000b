"""Files that are there whole or not at all. Imports errors."""

import contextlib
import os
import tempfile
from pathlib import Path

from tiny_engram.errors import TinyEngramError

__all__ = ["check_writable", "sync_folder", "write_atomically"]


def write_atomically(path: Path, blob: bytes) -> Path:
    """Write beside the target, flush to disk, rename over it; on any failure (OSError) the old file stays and nothing is left behind."""
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
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        handle, probe = tempfile.mkstemp(prefix=".writable.", dir=place)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise TinyEngramError(f"{folder}: cannot write there ({error.strerror or error}); choose another folder") from error
