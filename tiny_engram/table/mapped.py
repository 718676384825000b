"""The mapped home, which is also the memory pool of a host: written once by one loader, mapped read-only by any number of processes.

A pool is a table file like any other; only its place makes it one: /dev/shm (memory), a DAX device (CXL memory) or a disk. Imports torch,
errors and, of this package, header, mapping, open_file, storage, table_digest, table_file and table_writer.
"""

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path

import torch

from tiny_engram.errors import TableError

from .header import WRITING
from .mapping import RowMapping, Run, map_runs
from .open_file import DEVICE_PAGE, OpenFile, device_size, is_device, padded
from .storage import RowStorage
from .table_digest import RowSource, RowsProgress
from .table_file import TableFile
from .table_writer import rows_of, write_into, write_table, writer_of

__all__ = ["map_rows", "write_pool"]

_POLL_SECONDS = 0.02


def map_rows(
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    register: bool = False,
    populate: bool = False,
    random: bool = False,
    wait: float = 0.0,
) -> RowStorage:
    """Map a table read-only, without copying it.

    A file that another one replaces (by renaming) stays mapped as it was.

    Args:
        path: a safetensors file, the index of a sharded one, a pool file in /dev/shm, or a DAX device.
        prefix: of the tensor names; None where the file holds one table only.
        register: make it readable by the GPU in place; where that fails, a note in the report says why.
        populate: read it into memory now. random: tell the kernel not to read ahead.
        wait: seconds to wait for a file that is not there yet or still being written.

    Returns:
        Home "mapped", layout "split".

    Raises:
        TableError: no sound table, still being written, its writer died, or shards that cannot stand in one run of addresses.
    """
    path = Path(path)
    with _opened(path, prefix, wait) as table:
        payloads = [Run(p.payload_file, p.payload.offset, p.payload.nbytes) for p in table.parts]
        scales = [Run(p.scale_file, p.scale.offset, p.scale.nbytes) for p in table.parts]
        payload, first = map_runs(payloads, populate=populate, register=register)
        scale, second = map_runs(scales, populate=populate, register=register)
        files = {id(file): file for part in table.parts for file in (part.payload_file, part.scale_file)}
        mapping = RowMapping([memory for memory in (first, second) if memory is not None], list(files.values()))
        mapping.check()
        if random:
            mapping.advise(mmap.MADV_RANDOM, "random")
        if register:
            mapping.register()
        rows = payload.view(table.rows, table.head_dim).view(torch.float8_e4m3fn)
        return RowStorage(rows, scale.view(table.rows, table.head_dim // 32), home="mapped", layout="split", block=mapping)


def _opened(path: Path, prefix: str | None, wait: float) -> TableFile:
    end = time.monotonic() + wait
    while True:
        there = _about(path) is not None
        try:
            return TableFile(path, prefix=prefix)
        except TableError as error:
            about = _about(path)
            if there and about is not None and not is_device(about):
                raise  # a file has its name only when it is complete
            if time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            elif there or about is None:  # it may have come this moment
                if there or (found := writer_of(path)) is None:
                    raise
                if found[1]:
                    after = f" after {wait:g} s" if wait else ""
                    raise TableError(f"{path}: still being written by pid {found[0]}{after}; wait for it") from error
                raise TableError(f"{path}: its writer, pid {found[0]}, ended before it was complete; write it again") from error


def _about(path: Path) -> os.stat_result | None:
    """None where there is no such file, or cannot be."""
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path)
    return None


def write_pool(
    path: str | os.PathLike[str],
    source: RowSource | tuple[torch.Tensor, torch.Tensor],
    *,
    prefix: str = "",
    progress: RowsProgress | None = None,
    replace: bool = False,
) -> str:
    """Write a table once, for many to map; a second writer is refused while one is at work, and takes over from one that died.

    Args:
        path: a new file, or a DAX device.
        source, prefix, progress, replace: as for :func:`write_table`.

    Returns:
        The digest.

    Raises:
        TableError: there is a table already, somebody else writes it, or no room.
    """
    path = Path(path)
    about = _about(path)
    if about is None or not is_device(about):
        return write_table(path, source, prefix=prefix, progress=progress, replace=replace)
    return _write_device(path, rows_of(source), prefix, progress, replace)


class _Device:
    """A DAX device as a sink: it can only be written by mapping it."""

    def __init__(self, path: Path):
        self.path = path
        self.handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self.handle)
            raise TableError(f"{path}: is being written by another process; wait for it, or stop it first") from error

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if not data:
            return
        first = offset % DEVICE_PAGE
        length = padded(first + len(data), DEVICE_PAGE)
        with mmap.mmap(self.handle, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset - first) as view:
            view[first : first + len(data)] = data

    def sync(self) -> None:
        """Stores to mapped device memory are seen by every mapping at once."""


def _write_device(path: Path, source: RowSource, prefix: str, progress: RowsProgress | None, replace: bool) -> str:
    try:
        device = _Device(path)
        try:
            size = device_size(os.fstat(device.handle))
            needed = source.rows * (source.head_dim + source.head_dim // 32)
            if size is not None and needed + DEVICE_PAGE > size:
                raise TableError(f"{path}: needs {needed + DEVICE_PAGE:,} bytes, the device has {size:,}; use a larger one")
            if not replace and _holds_table(path):
                raise TableError(f"{path}: holds a table already, expected an empty device; pass replace=True (--force)")
            if isinstance(source, TableFile) and any(os.path.samestat(os.stat(file), os.stat(path)) for file in source.files):
                raise TableError(f"{path}: is read and to be written at once, expected another place; convert to a file first")
            device.write(0, WRITING + os.getpid().to_bytes(8, "little"))
            digest = write_into(device, source, prefix, progress)
            if not _holds_table(path):
                raise TableError(f"{path}: keeps nothing of what was written; is it a DAX device that may be mapped?")
            return digest
        finally:
            os.close(device.handle)
    except (OSError, ValueError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"{path}: cannot write to the device ({error}); is it a DAX device that may be mapped?") from error


def _holds_table(path: Path) -> bool:
    try:
        OpenFile(path).close()
    except TableError:
        return False
    return True
