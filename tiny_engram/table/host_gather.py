"""Rows out of host memory by the CPU: gathered in chunks into pinned staging, copied to the device while the next chunk is gathered.

The gather is one torch.index_select a chunk: it copies rows with all of torch's threads and refuses ids outside the table.
Python threads around numpy were 5 to 20 times slower on 16 cores, which hand the interpreter's lock around. Launchers that set
OMP_NUM_THREADS=1 (torchrun does) leave one thread: raise it, or call torch.set_num_threads. Imports torch, kernels, and
tiny_engram.table.storage for its type.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from tiny_engram.kernels.row_gather import row_gather

from .storage import RowStorage

__all__ = ["HostGather", "chunks", "gather_records"]

# The device's copy engine is slower than the gather (52 to 70 GB/s): chunks need only be large enough that starting a
# copy costs little, and three of them let the gather run ahead.
_CHUNK_BYTES = 8 << 20
_CHUNKS_HELD = 3
_GROUP_CHUNKS = 2  # chunks that one launch dequantises


def gather_records(storage: RowStorage, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows as records, whatever the table's layout.

    Args:
        storage: a table in host memory, R rows.
        ids: int64 ``[N]`` on the CPU, in ``[0, R)``.
        out: uint8 ``[N, row_bytes]``, contiguous: payload bytes, then scale bytes of each row.

    Raises:
        IndexError: an id is outside the table; nothing outside is read.
    """
    if storage.records is not None:
        torch.index_select(storage.records, 0, ids, out=out)
        return
    head_dim = storage.head_dim
    torch.index_select(storage.payload.view(torch.uint8), 0, ids, out=out[:, :head_dim])
    torch.index_select(storage.scale, 0, ids, out=out[:, head_dim:])


def chunks(count: int, largest: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of ``count`` rows: small ones first, so that copying starts early, then ``largest``."""
    start, size = 0, max(1, largest // 4)
    while start < count:
        stop = min(count, start + size)
        yield start, stop
        start, size = stop, min(largest, size * 2)


class HostGather:
    """Reads rows of a table in host memory onto a device; on a CPU the same steps run without streams.

    Memory it holds: three chunks of 8 MiB, pinned; on the device 32 MiB, and the distinct rows of the largest `expand` so far.
    Not for use by several threads at once.

    Args:
        storage: a table in host memory.
        device: where rows go.
        chunk_rows: rows of one chunk; None takes what fills 8 MiB.
    """

    def __init__(self, storage: RowStorage, device: torch.device, *, chunk_rows: int | None = None):
        self._storage = storage
        self._device = device
        self._cuda = device.type == "cuda"
        self.chunk_rows = chunk_rows or max(1, _CHUNK_BYTES // storage.row_bytes)
        self._copies: Any = torch.cuda.Stream(device) if self._cuda else None
        self._chunks = [_Buffer(device, storage.row_bytes, on_host=True) for _ in range(_CHUNKS_HELD)]
        self._groups = [_Buffer(device, storage.row_bytes) for _ in range(2)]
        self._distinct = _Buffer(device, storage.row_bytes)
        self._turn = 0
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host staging held now."""
        return sum(buffer.records.numel() for buffer in self._chunks)

    def read(self, ids: torch.Tensor, out: torch.Tensor, absent: torch.Tensor | None = None) -> None:
        """Rows of ``ids`` into ``out``, enqueued on the current stream.

        Args:
            ids: int64 ``[N]`` on the CPU, in ``[0, R)``.
            out: ``[N, D]`` on the device, contiguous.
            absent: bool ``[N]`` on the device: rows to be zeros, whatever their id.
        """
        step = self.chunk_rows * _GROUP_CHUNKS
        if self._places.numel() < min(step, ids.numel()):
            self._places = torch.arange(step, device=self._device)
        for turn, start in enumerate(range(0, ids.numel(), step)):
            stop = min(start + step, ids.numel())
            group = self._groups[turn % 2]
            places = self._places[: stop - start]
            if absent is not None:
                places = places.masked_fill(absent[start:stop], -1)
            # Only the first chunks of a call have nothing to hide behind.
            group.hold(step)
            self._stage(ids[start:stop], group, ramp=turn == 0)
            self._dequantise(group, places, out[start:stop])

    def expand(self, ids: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
        """Rows ``ids[inverse]`` into ``out``, each fetched once.

        Args:
            ids: int64 ``[U]`` on the CPU, in ``[0, R)``.
            inverse: int64 ``[N]`` on the device, in ``[-1, U)``; -1 gives zeros.
            out: ``[N, D]`` on the device, contiguous.
        """
        if ids.numel() > self._distinct.records.shape[0]:
            self._distinct.hold(max(ids.numel(), 2 * self._distinct.records.shape[0]))
        self._stage(ids, self._distinct, ramp=True)
        self._dequantise(self._distinct, inverse, out)

    def _stage(self, ids: torch.Tensor, target: "_Buffer", *, ramp: bool) -> None:
        """Bring records to the device; the current stream waits for them."""
        count = ids.numel()
        if self._cuda:
            self._copies.wait_event(target.free)
        pieces = chunks(count, self.chunk_rows) if ramp else _even(count, self.chunk_rows)
        with torch.cuda.stream(self._copies) if self._cuda else nullcontext():
            for start, stop in pieces:
                chunk = self._chunks[self._turn]
                self._turn = (self._turn + 1) % _CHUNKS_HELD
                if self._cuda:
                    chunk.free.synchronize()  # the copy out of it that was started three chunks ago
                chunk.hold(self.chunk_rows)
                held = chunk.records[: stop - start]
                gather_records(self._storage, ids[start:stop], held)
                target.records[start:stop].copy_(held, non_blocking=True)
                if self._cuda:
                    chunk.free.record(self._copies)
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def _dequantise(self, source: "_Buffer", places: torch.Tensor, out: torch.Tensor) -> None:
        head_dim = self._storage.head_dim
        payload = source.records[:, :head_dim].view(torch.float8_e4m3fn)
        row_gather(payload, source.records[:, head_dim:], places, bounds="ignore", out=out)
        if self._cuda:
            source.free.record(torch.cuda.current_stream(self._device))


def _even(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(count, start + size)) for start in range(0, count, size))


class _Buffer:
    """Records, and the event after which they may be overwritten."""

    def __init__(self, device: torch.device, row_bytes: int, *, on_host: bool = False):
        self._device = device
        self._on_host = on_host
        self.records = torch.empty((0, row_bytes), dtype=torch.uint8, device="cpu" if on_host else device)
        self.free: Any = torch.cuda.Event() if device.type == "cuda" else None

    def hold(self, rows: int) -> None:
        """Make room for so many rows, if it is not there; what was held is lost."""
        old = self.records
        if rows <= old.shape[0]:
            return
        if self.free is not None:
            # Two streams use this memory: both are to be done with it before the allocator hands it on.
            torch.cuda.synchronize(self._device)
        pinned = self._on_host and self.free is not None
        # Tensors made in inference mode could not be written by a later lookup outside it.
        with torch.inference_mode(False):
            self.records = torch.empty((rows, old.shape[1]), dtype=torch.uint8, device=old.device, pin_memory=pinned)
