"""The digest of a table: it depends on the rows alone, not on layout, sharding or home. Imports torch and errors.

Rows are hashed in blocks of ``BLOCK_ROWS`` (the last may be shorter): sha256 over the block's payload bytes, then its scale bytes,
both in row order. The table's digest is sha256 over a line with rows and head_dim, then all block digests. So a part can be
verified alone, blocks in parallel, and damage has a place.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from tiny_engram.errors import TableError

__all__ = [
    "BLOCK_ROWS",
    "RowsProgress",
    "RowSource",
    "as_bytes",
    "block_digest",
    "check_block",
    "checked_source",
    "digest_blocks",
    "each_block",
    "table_digest",
    "verify_rows",
]

BLOCK_ROWS = 65_536  # part of what a digest is: 17 MB of 264-byte rows
RowsProgress = Callable[[int, int], object]  # rows done, rows in all
T = TypeVar("T")


class RowSource(Protocol):
    """Whatever gives rows by range, from several threads at once."""

    @property
    def rows(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def read(self, first_row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload float8_e4m3fn ``[count, head_dim]``, scale uint8 ``[count, head_dim / 32]``."""
        ...


def checked_source(source: RowSource) -> RowSource:
    """The source itself; TableError for what has no rows to read, such as the table over a storage."""
    if not callable(getattr(source, "read", None)):
        raise TableError(f"{type(source).__name__} gives no rows by range: expected a storage (.storage of an EngramTable) or TableFile")
    return source


def as_bytes(rows: torch.Tensor) -> memoryview:
    """The bytes of payload or scale, in row order, on the CPU and contiguous; not copied where they are so already."""
    return rows.view(torch.uint8).cpu().reshape(-1).numpy().data


def block_digest(payload: memoryview, scale: memoryview) -> bytes:
    """sha256 of the bytes of one block of rows."""
    found = hashlib.sha256(payload)
    found.update(scale)
    return found.digest()


def _digest_of(source: RowSource, first_row: int, count: int) -> bytes:
    payload, scale = source.read(first_row, count)
    return block_digest(as_bytes(payload), as_bytes(scale))


def table_digest(rows: int, head_dim: int, blocks: list[bytes]) -> str:
    """The hex digest of a table, from its block digests."""
    found = hashlib.sha256(f"tiny-engram table 1, {rows} rows of {head_dim}, blocks of {BLOCK_ROWS}\n".encode())
    for block in blocks:
        found.update(block)
    return found.hexdigest()


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="table-rows")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def each_block(
    rows: int, work: Callable[[int, int], T], progress: RowsProgress | None = None, *, first: int = 0, last: int | None = None
) -> Iterator[T]:
    """``work(first_row, count)`` for each block of ``[first, last)``, in order; on threads, since hashing, reading and writing
    free the interpreter."""
    last = rows if last is None else last
    starts = range(first, last, BLOCK_ROWS)
    with _threads() as pool:
        for start, result in zip(starts, pool.map(lambda at: work(at, min(BLOCK_ROWS, last - at)), starts), strict=True):
            yield result
            if progress is not None:
                progress(min(start + BLOCK_ROWS, last) - first, last - first)


def digest_blocks(source: RowSource, progress: RowsProgress | None = None) -> list[bytes]:
    """The digest of each block of a source; ``table_digest(source.rows, source.head_dim, these)`` is the table's."""
    return list(each_block(source.rows, lambda first, count: _digest_of(source, first, count), progress))


def check_block(first_row: int, count: int, digest: bytes, blocks: list[bytes]) -> None:
    """Raises TableError where a block's digest is not the stored one."""
    block = first_row // BLOCK_ROWS
    if digest != blocks[block]:
        raise TableError(
            f"rows {first_row} to {first_row + count - 1} (block {block} of {len(blocks)}) are damaged: digest {digest.hex()[:16]}, "
            f"expected {blocks[block].hex()[:16]}; copy the table again"
        )


def verify_rows(
    source: RowSource, blocks: list[bytes], first_row: int = 0, count: int | None = None, *, progress: RowsProgress | None = None
) -> int:
    """Compare rows ``[first_row, first_row + count)`` (None: all from there on), widened to whole blocks, with their stored digests.

    Returns:
        How many blocks were compared.

    Raises:
        TableError: a block differs; the first such is named with its rows.
    """
    first, last = first_row, source.rows if count is None else first_row + count
    if not 0 <= first <= last <= source.rows:
        raise TableError(f"rows {first}:{last} are asked for, expected a range in 0:{source.rows}")
    first -= first % BLOCK_ROWS
    last = min(source.rows, last + -last % BLOCK_ROWS)
    found = each_block(source.rows, lambda start, rows: (start, rows, _digest_of(source, start, rows)), progress, first=first, last=last)
    compared = 0
    for start, rows, digest in found:
        check_block(start, rows, digest, blocks)
        compared += 1
    return compared
