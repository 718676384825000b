"""A file or DAX device open for reading, with its checked header. Imports numpy, errors and header."""

import contextlib
import fcntl
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from tiny_engram.errors import TableError

from .header import WRITING, Header, parse_header

__all__ = ["DEVICE_PAGE", "OpenFile", "device_size", "is_device", "padded"]

DEVICE_PAGE = 2 * 2**20  # DAX devices map in these steps


def padded(size: int, page: int) -> int:
    """Up to the next whole page."""
    return -(-size // page) * page


def is_device(about: os.stat_result) -> bool:
    """A character device, such as DAX memory: it can be mapped, but neither read nor measured."""
    return stat.S_ISCHR(about.st_mode)


def device_size(about: os.stat_result) -> int | None:
    """Bytes of a DAX device, from sysfs; None where it does not say."""
    number = f"{os.major(about.st_rdev)}:{os.minor(about.st_rdev)}"
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/dev/char/{number}/size").read_text())
    return None


class OpenFile:
    """A table's file, open for reading from several threads.

    Attributes:
        path, handle: of the file. size: in bytes when it was opened; None on a device that does not say.
        device: it is a character device. page: bytes in which it can be mapped. header: checked.
    """

    def __init__(self, path: Path):
        """Raises TableError: cannot be opened, neither file nor device, unfinished, or a header that is not sound."""
        self.path = path
        try:
            # A FIFO would wait for its other end for ever.
            self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            why = (isinstance(error, OSError) and error.strerror) or error
            index = path.with_name(path.name + ".index.json")
            sharded = isinstance(error, FileNotFoundError) and os.path.exists(index)
            raise TableError(
                f"{path}: cannot open the table ({why}); " + (f"open {index}" if sharded else "expected a .safetensors file")
            ) from error
        try:
            about = os.fstat(self.handle)
            self.device = is_device(about)
            self.page = DEVICE_PAGE if self.device else mmap.PAGESIZE
            self.size = device_size(about) if self.device else about.st_size
            if not self.device and not stat.S_ISREG(about.st_mode):
                kind = "is a folder" if stat.S_ISDIR(about.st_mode) else "is neither a file nor a device that can be mapped"
                raise TableError(f"{path}: {kind}, expected a .safetensors file, its index, or a pool")
            head = self.read(0, 16)
            if head[:8] == WRITING:
                raise TableError(f"{path}: {self._unfinished(int.from_bytes(head[8:], 'little'))}")
            self.header: Header = parse_header(path, self.size, self.read)
        except BaseException:
            os.close(self.handle)
            raise

    def _unfinished(self, pid: int) -> str:
        try:
            fcntl.flock(self.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self.handle, fcntl.LOCK_UN)
        except BlockingIOError:
            return f"still being written by pid {pid}; wait for it"
        return f"its writer, pid {pid}, ended before it was complete; write it again"

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes, fewer at the file's end."""
        if not self.device:
            try:
                return os.pread(self.handle, count, offset)
            except OSError as error:
                raise self._unreadable(offset, error) from error
        with self._window(offset, count) as (view, first):
            return view[first : first + count]

    def read_into(self, offset: int, out: np.ndarray) -> None:
        """Fill a contiguous uint8 array; raises TableError where the file is shorter than it was."""
        view, done = out.reshape(-1).data, 0
        if self.device:
            with self._window(offset, len(view)) as (window, first):
                view[:] = window[first : first + len(view)]
            return
        while done < len(view):
            try:
                got = os.preadv(self.handle, [view[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(offset + done, error) from error
            if not got:
                raise TableError(f"{self.path}: ends at byte {offset + done}, {self.size} when it was opened; open the table again")
            done += got

    def _unreadable(self, offset: int, error: OSError) -> TableError:
        return TableError(f"{self.path}: cannot be read at byte {offset} ({error.strerror}); copy it from where it is sound")

    @contextlib.contextmanager
    def _window(self, offset: int, count: int):
        """A mapping of a device that holds these bytes, and where they begin in it."""
        first = offset % DEVICE_PAGE
        length = padded(first + max(count, 1), DEVICE_PAGE)
        try:
            view = mmap.mmap(self.handle, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - first)
        except (OSError, ValueError) as error:
            raise TableError(f"{self.path}: {length} bytes at {offset - first} cannot be mapped ({error}); is it a DAX device?") from error
        try:
            yield view, first
        finally:
            view.close()

    def close(self) -> None:
        # The number may become another file's: nothing must read by it any more.
        handle, self.handle = self.handle, -1
        os.close(handle)
