"""Blocks of host memory for tables: huge pages, touched in parallel, locked and registered with the GPU where that works.

Imports torch and tiny_engram.errors; sizes may exceed the memory that a machine admits to at first. What was asked for and did not
work is a note in the block and one warning; only memory that cannot be had at all is an error.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch

from tiny_engram.errors import TableError

from .pinning import Pieces, register_range, unregister_all
from .report import huge_page_share, numa_nodes

__all__ = ["HostBlock"]

BytesProgress = Callable[[int, int], object]  # bytes done, bytes in all

_CHUNK = 64 << 20  # bytes that a thread touches at a time
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: touches pages, and reports what a store would be killed for
# Seconds that a machine whose memory grows as it is used gets to do so: where the next round fits twice at most, and where it does not.
_SOON, _AT_LAST = 0.5, 20
_libc = ctypes.CDLL(None, use_errno=True)


class _Mapping(mmap.mmap):
    """A mapping that is unregistered before it is unmapped, whoever holds it last: a block, or a tensor taken from it."""

    pieces: Pieces

    def __del__(self):
        self.unregister()

    def unregister(self) -> None:
        """Take the memory from the GPU again, after everything that may still read it has ended."""
        unregister_all(getattr(self, "pieces", []))


class HostBlock:
    """Host memory for rows; make one with :meth:`allocate`. A context manager: leaving it closes the block.

    Tensors taken from a block keep its memory (and its registration, until `close`) alive, so none can dangle.

    Attributes:
        nbytes: its size.
        path: the file behind it, or None.
        registered: the GPU may read it in place.
        pieces: (address, bytes) of each registration, usually one. Kernels do not see the seams, but a plain copy by the driver
            must not cross one.
        locked: it cannot be swapped out.
        notes: what was asked for and did not work, with the reason.
    """

    def __init__(self, mapping: _Mapping | None, nbytes: int, path: Path | None = None):
        """Use :meth:`allocate`."""
        self._mapping = mapping
        self.nbytes = nbytes
        self.path = path
        self.locked = False
        self.notes: tuple[str, ...] = ()
        # A mapping cannot be empty, and torch takes no empty buffer.
        self._tensor: torch.Tensor | None = (
            torch.empty(0, dtype=torch.uint8) if mapping is None else torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
        )

    @classmethod
    def allocate(
        cls,
        nbytes: int,
        *,
        shared: str | os.PathLike[str] | None = None,
        register: bool | None = None,
        lock: bool = False,
        huge_pages: bool = True,
        threads: int | None = None,
        progress: BytesProgress | None = None,
    ) -> Self:
        """Zeroed memory, every page of it touched.

        Args:
            nbytes: size; 0 is allowed.
            shared: a new file to hold it, usually in /dev/shm, that other processes may map; it stays when the block is closed, and
                whoever named it removes it. None is private memory.
            register: make it readable by the GPU in place. None: if there is a GPU. True where that fails: a note.
            lock: keep it from being swapped out.
            huge_pages: ask for huge pages.
            threads: that touch it; None is one a core, at most 16.
            progress: called with (bytes touched, bytes in all).

        Raises:
            TableError: no such memory, a file system too small, or the file is there already. Nothing is left behind.
        """
        if nbytes < 0:
            raise TableError(f"a block of {nbytes} bytes: expected 0 or more")
        path = None if shared is None else Path(shared)
        mapping = _private(nbytes) if path is None else _of_new_file(path, nbytes)
        try:
            block = cls(mapping, nbytes, path)
            notes = _advise_huge(mapping, path) if mapping and huge_pages and nbytes >= _HUGE_PAGE else []
            if mapping:
                _touch(block.tensor.data_ptr(), nbytes, threads or min(os.cpu_count() or 1, 16), progress, path)
                if lock:
                    notes += block._lock()
                if torch.cuda.is_available() if register is None else register:
                    notes += block._register(mapping)
        except BaseException:
            if path is not None:
                path.unlink(missing_ok=True)
            raise
        block.notes = tuple(notes)
        if notes:
            warnings.warn(f"host memory of {nbytes:,} B works, but: {'; '.join(notes)}", RuntimeWarning, stacklevel=2)
        return block

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 ``[nbytes]``, not copied. Raises TableError once closed."""
        if self._tensor is None:
            raise TableError("this host memory is closed: expected an open block; allocate another")
        return self._tensor

    @property
    def closed(self) -> bool:
        return self._tensor is None

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._mapping.pieces) if self._mapping else ()

    @property
    def registered(self) -> bool:
        return bool(self.pieces)

    def huge_page_share(self) -> float | None:
        """0..1 of its bytes that stand in huge pages now; None where the kernel does not say."""
        return huge_page_share(self.tensor.data_ptr(), self.nbytes)

    def numa_nodes(self) -> tuple[tuple[int, ...] | None, str]:
        """NUMA nodes that hold it, from a sample of its pages; or None and the reason."""
        return numa_nodes(self.tensor.data_ptr(), self.nbytes)

    def close(self) -> None:
        """Unregister, unlock and let go; closing twice does nothing.

        Waits for the GPU where the block is registered. The memory returns to the system with the last tensor taken from it.
        """
        if self._tensor is None:
            return
        if self._mapping is not None:
            self._mapping.unregister()
            if self.locked:
                _libc.munlock(ctypes.c_void_p(self._tensor.data_ptr()), ctypes.c_size_t(self.nbytes))
        self._mapping = self._tensor = None
        self.locked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> list[str]:
        if not _libc.mlock(ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(self.nbytes)):
            self.locked = True
            return []
        why = os.strerror(ctypes.get_errno())
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        known = "" if limit == resource.RLIM_INFINITY else f"; the limit is {limit:,} B, raise it with `ulimit -l`"
        return [f"locking {self.nbytes:,} B failed ({why}{known})"]

    def _register(self, mapping: _Mapping) -> list[str]:
        if not torch.cuda.is_available():
            return ["not registered with a GPU: CUDA is not available"]
        if why := register_range(self.tensor.data_ptr(), self.nbytes, mapping.pieces):
            return [f"registering {self.nbytes:,} B with the GPU failed ({why})"]
        return [] if len(mapping.pieces) == 1 else [f"registered in {len(mapping.pieces)} pieces, not in one"]


def _new_mapping(*args: int, flags: int) -> _Mapping:
    mapping = _Mapping(*args, flags=flags)
    mapping.pieces = []
    return mapping


def _private(nbytes: int) -> _Mapping | None:
    if not nbytes:
        return None
    limit = _cgroup_limit()
    if limit is not None and nbytes > limit:
        raise TableError(f"{nbytes:,} B of host memory: this control group may use {limit:,} B; raise its limit or map a file instead")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        try:
            return _new_mapping(-1, nbytes, flags=flags)
        except OSError as error:
            # The kernel compares with the memory of now, which on some virtual machines grows as it is used.
            if error.errno != errno.ENOMEM or _overcommit() == 2:
                raise
            return _new_mapping(-1, nbytes, flags=flags | getattr(mmap, "MAP_NORESERVE", 0x4000))
    except (OSError, OverflowError, MemoryError) as error:
        raise TableError(f"{nbytes:,} B of host memory cannot be had ({error}); map a file instead, or keep fewer rows here") from error


def _of_new_file(path: Path, nbytes: int) -> _Mapping | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise TableError(f"{path} is there already: expected a new file; remove it or name another") from error
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        why = (isinstance(error, OSError) and error.strerror) or error
        raise TableError(f"{path}: cannot be made ({why}); name another path, or use private memory") from error
    try:
        # A store past what the file system can give kills the process, so ask first.
        status = os.fstatvfs(handle)
        free = status.f_bavail * status.f_frsize
        if nbytes > free and status.f_blocks:  # a tmpfs without a limit says that it has no blocks at all
            raise TableError(
                f"{path}: {nbytes:,} B do not fit, {free:,} B are free on {path.absolute().parent}; "
                "enlarge it (mount -o remount,size=...), name a path elsewhere, or use private memory"
            )
        os.ftruncate(handle, nbytes)
        return _new_mapping(handle, nbytes, flags=mmap.MAP_SHARED) if nbytes else None
    except (OSError, OverflowError) as error:
        path.unlink(missing_ok=True)
        raise TableError(f"{path}: {nbytes:,} B cannot be mapped ({error}); name another path, or use private memory") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _advise_huge(mapping: _Mapping, path: Path | None) -> list[str]:
    try:
        mapping.madvise(getattr(mmap, "MADV_HUGEPAGE", 14))
    except OSError as error:
        return [f"no huge pages ({error.strerror})"]
    policy = Path("/sys/kernel/mm/transparent_hugepage") / ("enabled" if path is None else "shmem_enabled")
    with contextlib.suppress(OSError):
        if any(word in policy.read_text() for word in ("[never]", "[deny]")):
            return [f"no huge pages ({policy} forbids them)"]
    return []


def _touch(address: int, nbytes: int, threads: int, progress: BytesProgress | None, path: Path | None) -> None:
    """Make every page exist, in rounds of one chunk a thread; the thread that touches first decides the NUMA node."""

    def touch(offset: int) -> None:
        place, size = ctypes.c_void_p(address + offset), min(_CHUNK, nbytes - offset)
        if _libc.madvise(place, ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE)):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            ctypes.memset(place, 0, size)  # an older kernel

    done = 0
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, nbytes, _CHUNK * threads):
            last = min(first + _CHUNK * threads, nbytes)
            try:
                _wait_for_room(last - first)
                list(pool.map(touch, range(first, last, _CHUNK)))
            except OSError as error:
                where = f"{path or 'host memory'} gave out after {done:,} of {nbytes:,} B"
                raise TableError(f"{where} ({error.strerror}); free some, or keep fewer rows") from error
            done = last
            if progress is not None:
                progress(done, nbytes)


def _wait_for_room(nbytes: int) -> None:
    """Give a machine whose memory grows as it is used the time to grow, since taking more than there is ends the process.

    Raises:
        OSError: there is less than ``nbytes``, and it did not grow.
    """
    start = time.monotonic()
    while (available := _available()) is not None and available < 2 * nbytes:
        waited = time.monotonic() - start
        if available >= nbytes and waited > _SOON:
            return
        if waited > _AT_LAST:
            raise OSError(errno.ENOMEM, f"{available:,} B are available, and no more in {waited:.0f} s")
        time.sleep(0.05)


def _available() -> int | None:
    """Bytes that can be had now, free swap included; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        told = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in file)}
        return told["MemAvailable"] + told.get("SwapFree", 0) if "MemAvailable" in told else None
    return None


def _overcommit() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm/overcommit_memory").read_text())
    return 0


def _cgroup_limit() -> int | None:
    """The least memory limit of the control groups this process is in, version 1 or 2; None where none is told."""
    limits = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = ("/sys/fs/cgroup", "memory.max") if not controllers else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            folder = Path(root + inside)
            for place in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((place / name).read_text()))
    return min(limits, default=None)
