"""The folder in which the Studio keeps all it knows: who owns it, and how files get into it. May import files and errors.

Everything in it has an id that the server made; no path is ever made of a user's words.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from tiny_engram.files import write_atomically
from tiny_engram.studio.errors import StudioError

__all__ = ["Workspace", "check_id", "default_folder", "free_name", "new_id", "read_json", "write_bytes", "write_json"]

FOLDERS = ("concepts", "drafts", "jobs", "gallery", "trash", "tmp")
MOST_JSON = 4 * 2**20
MOST_TEMPORARY = 64  # folders in tmp/
MOST_TEMPORARY_BYTES = 512 * 2**20
# The worker of an app that was killed may still live, and write: only what it has long given up is cleared there.
SECONDS_OF_A_WRITE = 600
_ID = re.compile(r"[0-9a-f]{16,40}")


def new_id() -> str:
    """A fresh id: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def check_id(what: str, given: object) -> str:
    """The id, if it is one that the server could have made. Raises StudioError."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise StudioError(f"no {what} {str(given)[:40]!r}; reload the page and choose one that is listed")
    return given


def free_name(name: str, taken: set[str]) -> str:
    """The name, or the first of "name-2", "name-3", ... that `taken` (case-folded names) has not."""
    if name.casefold() not in taken:
        return name
    return next(n for n in (f"{name}-{k}" for k in range(2, len(taken) + 3)) if n.casefold() not in taken)


def default_folder() -> Path:
    """$TINY_ENGRAM_HOME, else tiny-engram in the user's data folder ($XDG_DATA_HOME or ~/.local/share)."""
    if given := os.environ.get("TINY_ENGRAM_HOME"):
        return Path(given).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "tiny-engram"


def write_bytes(path: Path, blob: bytes) -> Path:
    """Whole or not at all, on disk when this returns. Raises StudioError (disk full, no permission, ...)."""
    try:
        return write_atomically(path, blob)
    except OSError as error:
        raise StudioError(
            f"cannot save ({error.strerror or type(error).__name__}); free space in the Studio's folder, or start it with another one"
        ) from error


def write_json(path: Path, value: Any) -> Path:
    """As `write_bytes`, JSON in UTF-8."""
    return write_bytes(path, (json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote. Raises StudioError: no such file, not JSON, or more than 4 MiB."""
    try:
        with path.open("rb") as file:
            blob = file.read(MOST_JSON + 1)
        if len(blob) > MOST_JSON:
            raise StudioError(f"{path.name}: more than {MOST_JSON} bytes, expected a small file of the Studio; move it away")
        return json.loads(blob)
    except OSError as error:
        raise StudioError(f"{path.name}: cannot be read ({error.strerror or type(error).__name__}); reload the page") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, StudioError):
            raise
        raise StudioError(f"{path.name}: damaged, expected JSON; move it away") from error


class Workspace:
    """One folder and the lock on it: `concepts`, `drafts`, `jobs`, `gallery`, `trash` and `tmp` are its folders.

    Made by `Workspace.open`; `close` (or leaving a `with` block, or the end of the process, however it comes) gives the lock back.
    """

    def __init__(self, root: Path, lock: int) -> None:
        self.root = root
        self.concepts, self.drafts, self.jobs, self.gallery, self.trash, self.tmp = (root / name for name in FOLDERS)
        self._lock: int | None = lock
        self._making = threading.Lock()

    @classmethod
    def open(cls, folder: str | Path | None = None) -> "Workspace":
        """Make the folder if it is not there, lock it, and clear what a killed app left half-written.

        folder None: `default_folder()`. Raises StudioError: it cannot be made or written, or another app has it open.
        """
        root = (default_folder() if folder is None else Path(folder)).expanduser().absolute()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not inherited by a job's process, which may outlive the app.
            lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StudioError(
                f"{root}: cannot keep the Studio's files there ({error.strerror}); set TINY_ENGRAM_HOME to a folder that can be written"
            ) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                by = f" (process {holder})" if holder else ""
                raise StudioError(
                    f"{root}: another Studio{by} has this folder open; close that one, or set TINY_ENGRAM_HOME to another folder"
                ) from error
            try:
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                for name in FOLDERS:
                    (root / name).mkdir(exist_ok=True)
            except OSError as error:
                raise StudioError(
                    f"{root}: cannot keep the Studio's files there ({error.strerror}); free space, or set TINY_ENGRAM_HOME to another one"
                ) from error
        except BaseException:
            os.close(lock)
            raise
        made = cls(root, lock)
        made._clear()
        return made

    def _clear(self) -> None:
        """What was being written when an app was killed. Nothing here is anybody's only copy."""
        for left in self.tmp.iterdir():
            _remove(left)
        for folder in (self.concepts, self.drafts, self.gallery, self.trash):
            for left in folder.glob(".*.tmp"):
                _remove(left)
        for left in self.jobs.rglob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > SECONDS_OF_A_WRITE:
                    _remove(left)

    def close(self) -> None:
        """Give the folder back; once is enough."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that is being started may still have it open
            os.close(lock)

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def temporary(self, keep: int = MOST_TEMPORARY, keep_bytes: int = MOST_TEMPORARY_BYTES) -> Path:
        """A new empty folder in tmp/, gone at the next start; the oldest go when there are more than `keep`, or `keep_bytes` in all."""
        with self._making:
            made = self.tmp / f"{time.time_ns():016x}{secrets.token_hex(4)}"
            try:
                made.mkdir()
            except OSError as error:
                raise StudioError(f"cannot save ({error.strerror}); free space in the Studio's folder") from error
            total = 0
            for count, old in enumerate(sorted(self.tmp.iterdir(), reverse=True), 1):
                total += sum(file.stat().st_size for file in old.rglob("*") if file.is_file()) if count > 1 else 0
                if count > keep or total > keep_bytes:
                    _remove(old)
            return made


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
