"""Rows that are read beside the layers before theirs. Imports torch and tiny_engram.table.

Row ids depend on tokens alone, so a call knows the rows of all its layers before the first one runs. In a graph of torch.compile rows
are read where they are needed, by an operator that the compiler does not look into: files, locks and threads are behind it.
"""

import copy
import itertools
import weakref
from collections import defaultdict, deque
from functools import partial
from threading import Lock
from typing import Any

import torch

from tiny_engram.table.hot import HotRows
from tiny_engram.table.prefetch import Prefetcher, Rows

__all__ = ["Ahead", "Coming", "read_rows"]

_MOST = 4096  # tokens of a read: the memory for more would lie idle most of the time, and so long a text has long layers


class Ahead:
    """Reads of one layer's rows that may be under way at a time: as many as there are calls.

    Each read has memory of its own until its rows were used, and then leaves it to a later one on the same stream. Reads may be
    begun from several threads. HotRows are told what is asked for.

    Attributes:
        handle: by which a graph knows it.
    """

    _numbers = itertools.count()
    _by_handle: "weakref.WeakValueDictionary[int, Ahead]" = weakref.WeakValueDictionary()

    def __init__(self, rows: Rows, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.handle = next(self._numbers)
        self._by_handle[self.handle] = self
        self._idle: defaultdict[Any, deque[Prefetcher]] = defaultdict(deque)
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ahead":
        return Ahead(copy.deepcopy(self.rows, memo), self.columns)

    def begin(self, row_ids: torch.Tensor, dtype: torch.dtype) -> "Coming | None":
        """Begin to read int64 ``[B, T, columns]``; None where they are better read when they are needed, by `read_rows`."""
        tokens = row_ids.shape[0] * row_ids.shape[1]
        if not 0 < tokens <= _MOST:
            return None
        device = row_ids.device
        made = partial(Prefetcher, self.rows, columns=self.columns, device=device, dtype=dtype)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Each replay reads there again, so that nobody else may have it: taken within the capture, it is the graph's own.
            idle, prefetcher = deque(), made(capacity=tokens)
        else:
            size = max(8, 1 << (tokens - 1).bit_length())
            # Another stream would not wait for those who read this one's memory before.
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
            idle = self._idle[size, dtype, device, stream]
            try:
                prefetcher = idle.pop()
            except IndexError:
                prefetcher = made(capacity=size)
        with self._lock:  # a table that is read from a device is for one thread at a time
            self._tell(row_ids)
            prefetcher.start(row_ids)
        return Coming(prefetcher, idle)

    def look(self, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``[B, T, columns * head_dim]`` of int64 ``[B, T, columns]``, at once."""
        with self._lock:
            self._tell(row_ids)
            return self.rows.lookup(row_ids, dtype=dtype).flatten(-2)

    def _tell(self, row_ids: torch.Tensor) -> None:
        if isinstance(self.rows, HotRows):
            self.rows.observe(row_ids)


class Coming:
    """Rows that are being read."""

    def __init__(self, prefetcher: Prefetcher, idle: deque[Prefetcher]) -> None:
        self._prefetcher, self._idle = prefetcher, idle

    def wait(self) -> torch.Tensor:
        """The rows ``[B, T, columns * head_dim]``, once, valid until `done`."""
        return self._prefetcher.wait()

    def done(self) -> None:
        """Whatever reads the rows was launched, on the stream that waited; another read may take their memory."""
        self._idle.append(self._prefetcher)


@torch.library.custom_op("tiny_engram::read_rows", mutates_args=())
def read_rows(row_ids: torch.Tensor, handle: int, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """`Ahead.look` by its handle; head_dim: values of a row."""
    return Ahead._by_handle[handle].look(row_ids, dtype)


@read_rows.register_fake
def _(row_ids, handle, dtype, head_dim):
    return row_ids.new_empty((*row_ids.shape[:-1], row_ids.shape[-1] * head_dim), dtype=dtype)
