"""Rows out of host memory by the CPU: gathered in chunks into pinned staging, copied to the device while the next ones are gathered.

Threads in C gather (native_gather.py): one job for a whole lookup, whose chunks leave for the device as they are done. Without
a C compiler each chunk is one torch.index_select, which is slower on rows that no cache holds, and wakes torch's threads for
every chunk. Python threads around numpy were slower than either by far, handing the interpreter's lock around. Imports torch,
kernels, and its neighbours native_gather and storage.
"""

import warnings
from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

import torch

from tiny_engram.kernels.row_gather import row_gather

from . import native_gather
from .storage import RowStorage

__all__ = ["HostGather", "gather_records", "gathering"]

# A copy must last longer (80 us for 16,384 rows of 264 B) than it takes to start, and the first chunk's gather and the last
# one's copy have nothing to hide behind: chunks are a quarter of a lookup, between these.
_LEAST_ROWS, _MOST_ROWS = 8192, 32_768
_BAYS = 4  # chunks of staging; small enough for the copy to find them in the caches
_GROUP_CHUNKS = 2  # chunks that one launch dequantises
_SELECTED_ROWS, _SELECTED_BAYS = 65_536, 2  # of index_select: each call wakes torch's threads, 90 us
_WIDE_ROWS = 8192  # from here on index_select is faster by words of 8 bytes, below it splits finer by bytes

_warned = False


def gathering() -> str:
    """Who gathers, in words."""
    shared = native_gather.shared_threads()
    return f"native gather, {shared.count} threads" if shared else f"torch.index_select (no native gather: {native_gather.reason()})"


def gather_records(storage: RowStorage, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows as records, whatever the table's layout, by torch.index_select.

    Args:
        storage: a table in host memory, R rows.
        ids: int64 ``[N]`` on the CPU, in ``[0, R)``.
        out: uint8 ``[N, row_bytes]``, contiguous: payload bytes, then scale bytes of each row.

    Raises:
        IndexError: an id is outside the table; nothing outside is read.
    """
    head_dim = storage.head_dim
    if storage.records is None:
        torch.index_select(storage.payload.view(torch.uint8), 0, ids, out=out[:, :head_dim])
        torch.index_select(storage.scale, 0, ids, out=out[:, head_dim:])
    elif storage.row_bytes % 8 or ids.numel() <= _WIDE_ROWS or storage.records.data_ptr() % 8 or out.data_ptr() % 8:
        torch.index_select(storage.records, 0, ids, out=out)
    else:
        torch.index_select(storage.records.view(torch.int64), 0, ids, out=out.view(torch.int64))


class HostGather:
    """Reads rows of a table in host memory onto a device; on a CPU the same steps run without streams.

    Memory it holds for rows of 264 B: 17 MB of pinned staging, 35 MB without the native gather; on the device as much, and the
    distinct rows of the largest `expand` so far. Not for use by several threads at once.

    Args:
        storage: a table in host memory.
        device: where rows go.
        chunk_rows: rows of one chunk; None goes by the lookup's size.
        threads: the threads that gather; None takes the process's, or torch.index_select where there are none.
    """

    def __init__(
        self,
        storage: RowStorage,
        device: torch.device,
        *,
        chunk_rows: int | None = None,
        threads: native_gather.GatherThreads | None = None,
    ):
        self._storage = storage
        self._device = device
        self._cuda = device.type == "cuda"
        self._chunk_rows = chunk_rows
        self._threads = threads or native_gather.shared_threads()
        if self._cuda and self._threads is None:
            _warn()
        self._bays = _SELECTED_BAYS if self._threads is None else _BAYS
        self._copies: Any = torch.cuda.Stream(device) if self._cuda else None
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(self._bays)] if self._cuda else []
        self._staging = _Buffer(device, storage.row_bytes, on_host=True)
        self._groups = [_Buffer(device, storage.row_bytes) for _ in range(2)]
        self._distinct = _Buffer(device, storage.row_bytes)
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host staging held now."""
        return self._staging.records.numel()

    def alert(self) -> None:
        """A lookup is about to come, once its ids are known: wake the threads meanwhile."""
        if self._threads is not None:
            self._threads.alert()

    def chunk_rows(self, count: int) -> int:
        """Rows of the chunks that a lookup of ``count`` rows is cut into."""
        if self._chunk_rows is not None:
            return self._chunk_rows
        if self._threads is None:
            return min(_SELECTED_ROWS, _power(count))
        return min(_MOST_ROWS, max(_LEAST_ROWS, _power(count // 4)))

    def read(self, ids: torch.Tensor, out: torch.Tensor, absent: torch.Tensor | None = None) -> None:
        """Rows of ``ids`` into ``out``, enqueued on the current stream.

        Args:
            ids: int64 ``[N]`` on the CPU, in ``[0, R)``; pinned, or at least at hand: they are read at once.
            out: ``[N, D]`` on the device, contiguous.
            absent: bool ``[N]`` on the device: rows to be zeros, whatever their id.
        """
        count = ids.numel()
        step = self.chunk_rows(count) * _GROUP_CHUNKS
        room = min(step, _power(count))
        if self._places.numel() < room:
            with torch.inference_mode(False):
                self._places = torch.arange(room, device=self._device)
        for group in self._groups:
            group.hold(room)
        with closing(self._chunks(ids)) as chunks:
            for start, stop, records in chunks:
                turn, offset = divmod(start, step)
                group = self._groups[turn % 2]
                self._copy(records, group, offset)
                if stop == count or stop - start + offset == step:
                    first = start - offset
                    places = self._places[: stop - first]
                    if absent is not None:
                        places = places.masked_fill(absent[first:stop], -1)
                    self._dequantise(group, places, out[first:stop])

    def expand(self, ids: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
        """Rows ``ids[inverse]`` into ``out``, each fetched once.

        Args:
            ids: int64 ``[U]`` on the CPU, in ``[0, R)``.
            inverse: int64 ``[N]`` on the device, in ``[-1, U)``; -1 gives zeros.
            out: ``[N, D]`` on the device, contiguous.
        """
        if ids.numel() > self._distinct.records.shape[0]:
            self._distinct.hold(max(ids.numel(), 2 * self._distinct.records.shape[0]))
        with closing(self._chunks(ids)) as chunks:
            for start, _, records in chunks:
                self._copy(records, self._distinct, start)
        self._dequantise(self._distinct, inverse, out)

    def _chunks(self, ids: torch.Tensor) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        """(start, stop, records) of each chunk in order, in staging; what is enqueued on the copying stream till the next may read it."""
        count = ids.numel()
        size = self.chunk_rows(count)
        starts = range(0, count, size)
        bays = min(self._bays, max(1, len(starts)))
        # Bays lie elsewhere when sizes change: the copies of the lookup before are to be done with all of them.
        for event in self._copied:
            event.synchronize()
        self._staging.hold(bays * size)
        staging = self._staging.records[: bays * size]
        threads = self._threads
        with nullcontext() if threads is None else threads.job(self._storage, ids.contiguous(), staging, chunk_rows=size) as job:
            free = bays  # chunks that may be written
            for chunk, start in enumerate(starts):
                stop = min(count, start + size)
                while free < len(starts) and free - bays < chunk and (free <= chunk or self._is_copied(free % bays)):
                    if self._cuda:
                        self._copied[free % bays].synchronize()
                    free += 1
                    if job is not None:
                        job.release(free)
                held = staging[chunk % bays * size :][: stop - start]
                if job is None:
                    gather_records(self._storage, ids[start:stop], held)
                else:
                    job.wait(chunk)
                try:
                    yield start, stop, held
                finally:
                    if self._cuda:
                        self._copied[chunk % bays].record(self._copies)

    def _is_copied(self, bay: int) -> bool:
        return not self._cuda or self._copied[bay].query()

    def _copy(self, records: torch.Tensor, target: "_Buffer", offset: int) -> None:
        """Bring records to the device on the copying stream, behind the last use of what they overwrite."""
        with torch.cuda.stream(self._copies) if self._cuda else nullcontext():
            if self._cuda and offset == 0:
                self._copies.wait_event(target.free)
            target.records[offset : offset + records.shape[0]].copy_(records, non_blocking=True)

    def _dequantise(self, source: "_Buffer", places: torch.Tensor, out: torch.Tensor) -> None:
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        head_dim = self._storage.head_dim
        payload = source.records[:, :head_dim].view(torch.float8_e4m3fn)
        row_gather(payload, source.records[:, head_dim:], places, bounds="ignore", out=out)
        if self._cuda:
            source.free.record(torch.cuda.current_stream(self._device))


def _power(count: int) -> int:
    """The power of two from ``count`` on."""
    return 1 << max(0, count - 1).bit_length()


def _warn() -> None:
    """Once in a process: lookups are slower than they need be."""
    global _warned
    if not _warned and native_gather.reason() != f"{native_gather.VARIABLE}=0":
        _warned = True
        warnings.warn(
            f"rows are gathered by torch.index_select, which is slower: {native_gather.reason()}; install a C compiler, "
            f"or set {native_gather.VARIABLE}=0 to have it so",
            RuntimeWarning,
            stacklevel=4,
        )


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
