"""One process at a time changes a file of facts. Imports the standard library and errors.

The lock is on a file beside it, which is gone when nobody holds it: the file of facts itself is replaced whole with every change.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiny_engram.errors import TinyEngramError

__all__ = ["locked"]

_log = logging.getLogger(__name__)
SECONDS = 30.0  # a change takes milliseconds
_SAID_AFTER = 2.0


@contextmanager
def locked(path: Path, *, seconds: float = SECONDS) -> Iterator[None]:
    """Nobody else who asks for it has the lock on this path meanwhile; not to be taken twice by one thread.

    Raises:
        TinyEngramError: another process has it for `seconds`, or its file cannot be made.
    """
    beside = path.parent / f".{path.name}.lock"
    try:
        handle = _taken(beside, path, seconds)
    except OSError as error:
        raise TinyEngramError(f"{path}: cannot be locked ({error.strerror or error}); expected a folder that can be written to") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
        os.close(handle)


def _taken(beside: Path, path: Path, seconds: float) -> int:
    began, said = time.monotonic(), False
    while True:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before took its file away: what was locked may be no file any more.
            if os.path.samestat(os.fstat(handle), os.stat(beside)):
                return handle
            os.close(handle)
            continue
        except FileNotFoundError:
            os.close(handle)
            continue
        except BlockingIOError:
            os.close(handle)
        except BaseException:
            os.close(handle)
            raise
        waited = time.monotonic() - began
        if waited > seconds:
            raise TinyEngramError(
                f"{path}: another process has been writing it for {waited:.0f} s, expected it to take less; stop it, or try again later"
            )
        if waited > _SAID_AFTER and not said:
            _log.warning("%s: another process writes it; waiting for up to %.0f s", path, seconds)
            said = True
        time.sleep(0.02)
