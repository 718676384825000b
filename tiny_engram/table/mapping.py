"""Runs of bytes of one or more files as one run of read-only memory, and its registration with the GPU. Imports torch, errors,
open_file, pinning and report.

Pages are shared by every process that maps the same file: resident memory counts once.
"""

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiny_engram.errors import TableError

from .open_file import OpenFile, is_device, padded
from .pinning import PORTABLE_MAPPED, READ_ONLY, Pieces, register_range, unregister_all
from .report import huge_page_share, numa_nodes

__all__ = ["RowMapping", "Run", "map_runs"]

_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Run:
    """``nbytes`` at ``offset`` of an open file."""

    file: OpenFile
    offset: int
    nbytes: int


class _Memory:
    """Mapped pages: unmapped when the last tensor over them is gone, unregistered before that."""

    def __init__(self, address: int, nbytes: int):
        self.address, self.nbytes = address, nbytes
        self._pieces: Pieces = []

    @property
    def registered(self) -> bool:
        return bool(self._pieces)

    def free(self) -> None:
        self.unregister()
        _libc.munmap(self.address, self.nbytes)

    def unregister(self) -> None:
        unregister_all(self._pieces)

    def register(self) -> str:
        """An empty string, or why not."""
        if not torch.cuda.is_available():
            return "CUDA is not available"
        why = register_range(self.address, self.nbytes, self._pieces, PORTABLE_MAPPED | READ_ONLY)
        # Drivers that cannot pin memory as read-only pin it while it may be written to, if we may write the file at all.
        if why and not _libc.mprotect(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            writable = register_range(self.address, self.nbytes, self._pieces)
            _libc.mprotect(self.address, self.nbytes, mmap.PROT_READ)
            why = writable and f"{why} as read-only; {writable}"
        return why


class RowMapping:
    """What holds the memory of a mapped table; closed with its storage. Memory goes with the last tensor over it.

    Attributes:
        registered: the GPU may read all of it in place. locked: never. notes: what was asked for and did not work.
    """

    locked = False

    def __init__(self, memories: Sequence[_Memory], files: Sequence[OpenFile]):
        self._memories = list(memories)
        self._files: list[tuple[int, Path, int | None]] = []
        handles: list[int] = []
        self._close_files = weakref.finalize(self, _close_all, handles)
        for file in files:
            try:
                handles.append(os.dup(file.handle))
            except OSError as error:
                self.close()
                why = f"{len(files)} files cannot be kept open ({error.strerror})"
                raise TableError(f"{file.path}: {why}; raise `ulimit -n`, or convert to larger shards") from error
            self._files.append((handles[-1], file.path, file.size))
        self.notes: tuple[str, ...] = ()

    def check_length(self) -> None:
        """Raises TableError where a file was cut in place, which would kill whoever reads past its end."""
        for handle, path, size in tuple(self._files):
            try:
                about = os.fstat(handle)
            except OSError:
                return  # closed meanwhile by another thread; the rows stay as long as somebody reads them
            if size is not None and about.st_size < size and not is_device(about):
                raise TableError(
                    f"{path}: cut from {size:,} to {about.st_size:,} bytes since it was mapped; write it again and map it anew"
                )

    def check(self) -> None:
        """Is behind the mapping what was mapped?

        Raises:
            TableError: a file was cut, or another one has taken its name (its rows are still those that were mapped).
        """
        self.check_length()
        for handle, path, _ in self._files:
            try:
                same = os.path.samestat(os.fstat(handle), os.stat(path))
            except OSError:
                same = False
            if not same:
                raise TableError(f"{path}: replaced or removed since it was mapped, the rows are still the old ones; map it anew")

    @property
    def registered(self) -> bool:
        return bool(self._memories) and all(memory.registered for memory in self._memories)

    def register(self) -> None:
        """Make it readable by the GPU in place; where that fails, a note says why and nothing stays registered."""
        for memory in self._memories:
            if why := memory.register():
                self._unregister()
                self.notes += (f"the mapping is not registered with a GPU, which cannot read it in place: {why}",)
                return

    def advise(self, advice: int, name: str) -> None:
        """madvise over all of it; where that fails, a note says why."""
        for memory in self._memories:
            if _libc.madvise(memory.address, memory.nbytes, advice):
                self.notes += (f"the kernel did not take the advice {name}: {os.strerror(ctypes.get_errno())}",)
                return

    def huge_page_share(self) -> float | None:
        """0..1 of the payload's bytes in huge pages; None where the kernel does not say."""
        return huge_page_share(self._memories[0].address, self._memories[0].nbytes) if self._memories else None

    def numa_nodes(self) -> tuple[tuple[int, ...] | None, str]:
        """Nodes of a sample of the payload's pages, or None and the reason."""
        return numa_nodes(self._memories[0].address, self._memories[0].nbytes) if self._memories else (None, "no bytes")

    def close(self) -> None:
        """Take it from the GPU; closing twice does nothing."""
        self._unregister()
        self._memories.clear()
        self._files.clear()
        self._close_files()

    def _unregister(self) -> None:
        for memory in self._memories:
            memory.unregister()


def _close_all(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def map_runs(runs: Sequence[Run], *, populate: bool = False, register: bool = False) -> tuple[torch.Tensor, _Memory | None]:
    """Map runs one behind the other.

    Args:
        runs: in order. populate: read them into memory now. register: they are to be registered with the GPU, later.

    Returns:
        uint8 ``[sum of nbytes]`` that must not be written to (the process would be killed), and what holds it; None where empty.

    Raises:
        TableError: the runs cannot stand together, because an inner end or beginning is not on a page; or the system refuses.
    """
    runs = [run for run in runs if run.nbytes]
    if not runs:
        return torch.empty(0, dtype=torch.uint8), None
    page = max(run.file.page for run in runs)
    lead = runs[0].offset % page
    total, inner = lead, []
    for number, run in enumerate(runs):
        begins = run.offset - (lead if number == 0 else 0)
        if begins % page or total % page * (number > 0):
            raise TableError(
                f"shard {number} begins at byte {run.offset} of its file and byte {total} of the mapping, expected multiples of {page}: "
                "write the table again with `tiny-engram table convert`"
            )
        start = 0 if number == 0 else total
        inner.append((start, run.file.handle, begins, run.nbytes + (lead if number == 0 else 0)))
        total += run.nbytes
    size = padded(total, page)
    address = _reserve(size, page)
    memory = _Memory(address, size)
    flags = mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if populate else 0)
    for start, handle, offset, nbytes in inner:
        # A device maps whole pages; a file's last page ends with zeros.
        length = padded(nbytes, page)
        with _writable(handle) if register else contextlib.nullcontext(handle) as source:
            failed = _libc.mmap(address + start, length, mmap.PROT_READ, flags, source, offset) == _FAILED
            code = ctypes.get_errno()
        if failed:
            memory.free()
            raise TableError(f"{nbytes:,} bytes at {offset} cannot be mapped ({os.strerror(code)}); copy the table to a file that can")
    held = (ctypes.c_uint8 * (total - lead)).from_address(address + lead)
    weakref.finalize(held, memory.free).atexit = False
    return torch.frombuffer(held, dtype=torch.uint8), memory


@contextlib.contextmanager
def _writable(handle: int) -> Iterator[int]:
    """The same file, open for writing where we may: only such a mapping can be made writable for a moment."""
    try:
        writable = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield handle
        return
    try:
        yield writable
    finally:
        os.close(writable)


def _reserve(size: int, page: int) -> int:
    """Addresses for ``size`` bytes, beginning on a page of any size."""
    room = size + page
    address = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if address == _FAILED:
        raise TableError(f"no room for {size:,} bytes in this process's address space ({os.strerror(ctypes.get_errno())}); see `ulimit -v`")
    start = padded(address, page)
    for low, high in ((address, start), (start + size, address + room)):
        if high > low:
            _libc.munmap(low, high - low)
    return start
