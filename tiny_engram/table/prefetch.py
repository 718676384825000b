"""Prefetcher: rows are fetched beside the layers before theirs, and waited for only where they are read.

Row ids depend on tokens alone, so they are known before the first layer runs. Imports torch, kernels, tiny_engram.errors,
shared and storage.
"""

import copy
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol, Self

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import Bounds
from tiny_engram.kernels.row_gather.bounds import checked_mode

from .shared import SharedRows
from .storage import check_dtype, check_ids, device_memory, whole

__all__ = ["Prefetcher", "Rows", "side_stream"]


class Rows(Protocol):
    """What rows are read from: an EngramTable, HotRows over one, a ShardedTable, MooncakeRows, or whatever has their lookup."""

    @property
    def head_dim(self) -> int: ...

    def lookup(
        self, row_ids: torch.Tensor, *, bounds: Bounds | None = None, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@cache
def side_stream(device: torch.device) -> "torch.cuda.Stream":
    """The one stream of a device on which all its prefetchers read.

    One for all, because they share the bus: in the order of their starts, the layer that comes first has all of it. It has
    priority, because its kernels are short and the layers beside them are not.
    """
    return torch.cuda.Stream(device, priority=-1)


class Prefetcher(SharedRows):
    """Reads the rows of one Engram layer into memory at a fixed address.

    ``start(ids)``, anything else, ``wait()``; then the same for the next step. The ids are copied when ``start`` is called: their
    memory may be written again, or given back, at once. What ``wait`` returns is valid until the next ``start``.

    On a CUDA device the reading runs on a side stream, which waits for the ids and for whatever read the staging before, as far as the
    current stream knows it at ``start``; ``wait`` makes the current stream wait, never the host. Call both on the stream that reads the
    rows. Both may be captured into a CUDA graph, together: look up once before, with bounds "warn" or "ignore"; a replay reads
    the ids' memory anew. Outside a graph a table that the device cannot read, or that the planner gathers on the CPU, makes ``start``
    wait for the ids.

    On the CPU a worker thread of the prefetcher's own reads, so that the page faults of several mapped tables wait for the disk together.

    ``copy.deepcopy`` gives another one, with memory of its own and nothing under way, over what a deep copy of the table is; it cannot be
    pickled.

    Attributes:
        staging: ``[capacity, columns, head_dim]``, where rows are read to.
    """

    def __init__(
        self,
        table: Rows,
        *,
        capacity: int,
        columns: int,
        device: torch.device | str,
        dtype: torch.dtype,
        bounds: Bounds | None = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Take the memory.

        Args:
            table: where rows come from.
            capacity: the most tokens of one step.
            columns: row ids of a token.
            device: where ids come from and rows go to.
            dtype: float32, bfloat16 or float16.
            bounds: what an id outside the table does; None is the table's own rule.
            stream: None is the stream that all prefetchers of the device share.

        Raises:
            TableError: sizes below 1, another dtype or rule, or no such memory.
        """
        capacity, columns = whole("capacity", capacity), whole("columns", columns)
        if capacity < 1 or columns < 1:
            raise TableError(f"capacity {capacity}, columns {columns}: expected 1 or more of each")
        check_dtype(dtype)
        self.table = table
        self.capacity, self.columns = capacity, columns
        self.bounds: Bounds | None = None if bounds is None else checked_mode(bounds, TableError)
        # Normal tensors: those made in inference mode could not be written by a later call outside it.
        with torch.inference_mode(False), device_memory(f"room for {capacity} tokens", device, "take another, or read fewer at a time"):
            self.staging = torch.zeros((capacity, columns, table.head_dim), dtype=dtype, device=device)
            self._ids = torch.full((capacity, columns), -1, dtype=torch.int64, device=device)
        self.device = self.staging.device
        self._lead: torch.Size | None = None  # shape of the tokens under way
        self._captured = False
        self._future: Future[None] | None = None
        if self.device.type == "cuda":
            self._stream = stream or side_stream(self.device)
            self._ready = torch.cuda.Event()
        self._employ()

    def __copy__(self) -> Self:
        return self._with(self.table)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self._with(copy.deepcopy(self.table, memo))

    def _with(self, table: Rows) -> Self:
        return type(self)(
            table,
            capacity=self.capacity,
            columns=self.columns,
            device=self.device,
            dtype=self.staging.dtype,
            bounds=self.bounds,
            stream=self._stream if self.device.type == "cuda" else None,
        )

    @torch.no_grad()
    def start(self, row_ids: torch.Tensor) -> None:
        """Begin to read.

        Args:
            row_ids: int64 ``[tokens, columns]`` or ``[B, T, columns]`` on the device, at most ``capacity`` tokens.

        Raises:
            TableError: ids that do not fit, or a second start without a wait. On a CUDA device also what the lookup raises.
        """
        if self._lead is not None:
            raise TableError(f"start was called again before wait: rows of {self._lead.numel()} tokens are under way; call wait first")
        check_ids(row_ids)
        if row_ids.ndim not in (2, 3) or row_ids.shape[-1] != self.columns or row_ids.device != self.device:
            raise TableError(
                f"row ids are {row_ids.dtype} {list(row_ids.shape)} on {row_ids.device}: expected torch.int64 [tokens, {self.columns}] "
                f"or [B, T, {self.columns}] on {self.device}"
            )
        lead = row_ids.shape[:-1]
        tokens = lead.numel()
        if tokens > self.capacity:
            raise TableError(f"{tokens} tokens, capacity {self.capacity}: read in parts, or make a larger prefetcher")
        ids, rows = self._hold(row_ids, tokens), self.staging[:tokens]
        if self.device.type == "cuda":
            self._captured = torch.cuda.is_current_stream_capturing()
            with torch.cuda.device(self.device):
                self._fork()
                try:
                    with torch.cuda.stream(self._stream):
                        self._read(ids, rows)
                except BaseException:
                    # A capture that ends with a stream left open would hide the reason behind an error of its own.
                    self._ready.record(self._stream)
                    torch.cuda.current_stream().wait_event(self._ready)
                    raise
                self._ready.record(self._stream)
        else:
            if self._process != os.getpid():
                self._employ()  # a fork has all but the thread, and would wait for it for ever
            self._future = self._worker.submit(self._read, ids, rows)
        self._lead = lead

    def wait(self) -> torch.Tensor:
        """The rows that ``start`` was called for.

        Returns:
            ``[tokens, columns * head_dim]`` or ``[B, T, columns * head_dim]``, a view of the staging.

        Raises:
            TableError: there was no start, or it was captured into a graph and this is not. On the CPU also what the lookup raises.
        """
        lead = self._lead
        if lead is None:
            raise TableError("wait was called without start: call start(row_ids) first, once for each wait")
        if self.device.type == "cuda" and self._captured != torch.cuda.is_current_stream_capturing():
            raise TableError(f"start was {'' if self._captured else 'not '}captured into a graph: expected wait in the same one")
        self._lead = None
        if self._process != os.getpid():
            raise TableError("start was called before this process was forked, which has no such thread: call start again")
        self._join()
        return self.staging[: lead.numel()].view(*lead, self.columns * self.staging.shape[-1])

    def _employ(self) -> None:
        self._process = os.getpid()
        if self.device.type == "cpu":
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    # -- the steps that order depends on, each by itself; tests leave one out to see that it is needed ------------------------------

    def _hold(self, row_ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """The ids where nobody else writes or frees them. On the current stream, which is where they were made."""
        held = self._ids[:tokens]
        held.copy_(row_ids.reshape(held.shape))
        return held

    def _fork(self) -> None:
        """The side stream waits for the ids, and for what read the staging before."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def _read(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        with torch.no_grad():
            self.table.lookup(ids, bounds=self.bounds, dtype=rows.dtype, out=rows)

    def _join(self) -> None:
        """Whoever reads the staging next waits for the rows."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self._ready)
        elif self._future is not None:
            self._future.result()
