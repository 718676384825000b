"""HotRows: copies of the rows that are asked for most, on the device, before a table that may be anywhere.

What n-grams of text ask for follows Zipf's law: few rows get most of the reads. Imports torch, kernels, tiny_engram.errors and
its neighbours.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.hot_gather import EMPTY, hot_gather, probe
from tiny_engram.kernels.row_gather import Bounds, row_gather
from tiny_engram.kernels.row_gather.bounds import checked_mode, count, outside

from .engram_table import EngramTable
from .perfect_hash import PerfectHash, index_shape
from .shared import SharedRows
from .storage import check_dtype, check_ids, device_memory, whole
from .virtual_index import missing_rows

__all__ = ["HotReport", "HotRows"]

_SAMPLE = 1 << 16  # ids noted of one call
_REMEMBERED = 4  # ids whose frequency is kept from one refresh to the next, for each row of the capacity
_CHUNK = 1 << 16  # rows copied at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class HotReport:
    """What the hot rows hold and do.

    Attributes:
        capacity, rows: rows that fit, rows that are there.
        nbytes: bytes on the device: rows, index and the window of ids.
        hits, lookups: ids since the last refresh that were found, and all but -1.
        hit_rate: hits over lookups, 0 where there were none.
        out_of_bounds: ids outside the table that ``bounds="warn"`` read as zeros, since the beginning.
        refreshes: how often the rows were chosen.
    """

    capacity: int
    rows: int
    nbytes: int
    hits: int
    lookups: int
    hit_rate: float
    out_of_bounds: int
    refreshes: int

    def __str__(self) -> str:
        return (
            f"{self.rows:,} of {self.capacity:,} hot rows, {self.nbytes / 2**20:,.1f} MiB, {self.refreshes} refreshes; "
            f"{self.hits:,} of {self.lookups:,} lookups hit ({self.hit_rate:.1%})"
        )


class HotRows(SharedRows):
    """Hot rows of a dense table; ``lookup`` gives the table's own results, bit for bit.

    ``observe`` notes ids, ``refresh`` chooses rows by what was noted. All memory that ``lookup`` and ``observe`` use keeps its
    address, so both can be captured into CUDA graphs; ``refresh`` between replays then counts for the next one. The table's
    rows must not change, or be followed by a refresh. ``copy.deepcopy`` shares them; they cannot be pickled.
    """

    def __init__(
        self, table: EngramTable, *, capacity_rows: int, device: torch.device | str, window: int = 1 << 20, decay: float = 0.5
    ) -> None:
        """Take the memory; nothing is hot before the first refresh.

        Args:
            table: a dense table.
            capacity_rows: rows to hold; each takes 1.1 times its bytes and 10 bytes of index on the device.
            device: where ids come from and rows go to.
            window: ids kept between two refreshes, the latest ones.
            decay: what a refresh multiplies earlier counts with, 0 (forget) to 1 (never forget).

        Raises:
            TableError: a virtual table, sizes that make no sense, or no such memory.
        """
        storage = table.storage
        capacity_rows, window = whole("capacity_rows", capacity_rows), whole("window", window)
        if capacity_rows < 0 or window < 1 or not 0 <= decay <= 1:
            raise TableError(f"capacity_rows {capacity_rows}, window {window}, decay {decay}: expected 0 or more, 1 or more, 0 to 1")
        self.table, self.capacity, self.decay = table, min(capacity_rows, len(table)), decay
        self._storage = storage
        slots, buckets = index_shape(self.capacity)
        # Normal tensors: those made in inference mode could not be written by a later call outside it.
        with torch.inference_mode(False), device_memory(f"room for {self.capacity} rows", device, "take another, or hold fewer rows"):
            self._payload = torch.zeros((slots, table.head_dim), dtype=torch.uint8, device=device)
            self._scale = torch.zeros((slots, storage.row_bytes - table.head_dim), dtype=torch.uint8, device=device)
            self._keys = torch.full((slots,), EMPTY, dtype=torch.int64, device=device)
            self._displacement = torch.zeros(buckets, dtype=torch.int32, device=device)
            self._window = torch.zeros(window, dtype=torch.int64, device=device)
            self._noted = torch.zeros(1, dtype=torch.int64, device=device)  # ids noted since the last refresh
            self._hits = torch.zeros(2, dtype=torch.int64, device=device)
            self._violations = torch.zeros(2, dtype=torch.int64, device=device)
        self.device = self._payload.device
        # Whether the device reads the table's rows in place.
        self._readable = storage.device == self.device or (
            self.device.type == "cuda" and storage.rows > 0 and storage.device.type == "cpu" and storage.payload.is_pinned()
        )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._known_ids, self._known_counts = self._window[:0], self._window[:0].double()
        self._prepared: tuple[torch.Tensor, ...] | None = None
        self._prepared_rows = self._held = self._refreshes = 0

    @property
    def head_dim(self) -> int:
        """Values per row."""
        return self.table.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes taken on the device; a refresh takes those of rows and index once more while it runs."""
        parts = (self._payload, self._scale, self._keys, self._displacement, self._window)
        return sum(part.nbytes for part in parts)

    @torch.no_grad()
    def observe(self, row_ids: torch.Tensor) -> None:
        """Note what was asked for: int64 ``[...]`` on the device. Never synchronises; of many ids it takes an even sample."""
        self._check(row_ids)
        flat = row_ids.reshape(-1)
        if flat.numel() > min(_SAMPLE, self._window.numel()):
            step = -(-flat.numel() // min(_SAMPLE, self._window.numel()))
            # A step that shares a factor with the columns would see some of them only.
            while gcd(step, row_ids.shape[-1]) > 1:
                step += 1
            flat = flat[::step]
        # The place is counted on the device, so that the replay of a captured graph notes its ids behind those of the last one.
        places = (torch.arange(flat.numel(), device=self.device) + self._noted) % self._window.numel()
        self._window.index_copy_(0, places, flat)
        self._noted += flat.numel()

    def refresh(self) -> None:
        """Choose the rows anew: :meth:`prepare`, then :meth:`swap`."""
        self.prepare()
        self.swap()

    @torch.no_grad()
    def prepare(self) -> None:
        """Copy the most frequent rows to spare memory, and wait until they are there; lookups run on meanwhile.

        Takes about 3 seconds for each million rows, most of them on the host for the index. Another thread may do it, on the
        stream that calls ``observe``.
        """
        window, noted = self._window.clone(), self._noted.clone()
        self._noted.zero_()
        with torch.inference_mode(False), self._beside():
            hot = self._most_frequent(window[: min(int(noted), window.numel())])
            index = PerfectHash.build(hot, capacity=self.capacity)
            slots = index.slots(hot)
            payload, scale = torch.zeros_like(self._payload), torch.zeros_like(self._scale)
            source, exponents = self._storage.payload.view(torch.uint8), self._storage.scale
            for ids, places in zip(hot.split(_CHUNK), slots.to(self.device).split(_CHUNK), strict=True):
                ids = ids.to(self._storage.device)
                payload.index_copy_(0, places, source.index_select(0, ids).to(self.device))
                scale.index_copy_(0, places, exponents.index_select(0, ids).to(self.device))
            self._prepared = payload, scale, index.keys.to(self.device), index.displacement.to(self.device)
            self._prepared_rows = hot.numel()
        if self._stream is not None:
            self._stream.synchronize()

    @torch.no_grad()
    def swap(self) -> None:
        """Put what was prepared in the place of the old rows, in the order of the current stream.

        Whatever was launched on it before, replays of graphs included, reads all old rows, whatever comes after all new ones.

        Raises:
            TableError: nothing is prepared.
        """
        if self._prepared is None:
            raise TableError("swap was called without prepare: call prepare first, or refresh for both")
        live = (self._payload, self._scale, self._keys, self._displacement)
        for old, new in zip(live, self._prepared, strict=True):
            old.copy_(new)
            if new.is_cuda:
                new.record_stream(torch.cuda.current_stream(self.device))
        self._hits.zero_()
        self._held, self._prepared = self._prepared_rows, None
        self._refreshes += 1

    def lookup(
        self,
        row_ids: torch.Tensor,
        *,
        bounds: Bounds | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read rows; arguments, result and errors as in ``EngramTable.lookup``, ids on the device of the hot rows.

        Rows that are not hot come from the table in the same kernel where the device can read it, else by its own lookup. Ids that
        ``"warn"`` finds outside the table are counted in :meth:`report`.
        """
        self._check(row_ids)
        mode = self.table.bounds if bounds is None else checked_mode(bounds, TableError)
        check_dtype(dtype if out is None else out.dtype)
        if mode == "fatal" and row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise TableError("bounds='fatal' waits for the device, which a captured stream cannot: look up with bounds='warn'")
        hot = self._payload.view(torch.float8_e4m3fn), self._scale, self._keys, self._displacement
        storage = self._storage
        try:
            if self._readable:
                return hot_gather(
                    *hot,
                    storage.payload,
                    storage.scale,
                    row_ids,
                    bounds=mode,
                    violations=self._violations,
                    hits=self._hits,
                    dtype=dtype,
                    out=out,
                )
        except IndexError as error:
            raise TableError(missing_rows(row_ids, outside(row_ids, storage.rows), storage.rows)) from error
        except ValueError as error:
            raise TableError(str(error)) from error
        slots = probe(self._keys, self._displacement, row_ids)
        found = slots >= 0
        self._hits += torch.stack((found.sum(), (row_ids != EMPTY).sum()))
        if mode == "warn":
            count(row_ids, storage.rows, self._violations)
            mode = "ignore"
        rows = self.table.lookup(row_ids.masked_fill(found, EMPTY), bounds=mode, dtype=dtype, out=out)
        warm = row_gather(hot[0], hot[1], slots, bounds="ignore", dtype=rows.dtype)
        return torch.where(found.unsqueeze(-1), warm, rows, out=rows)

    @property
    def hit_rate(self) -> float:
        """Share of the ids since the last refresh that were hot, -1 left out; waits for the device."""
        hits, lookups = self._hits.tolist()
        return hits / max(lookups, 1)

    def report(self) -> HotReport:
        """What is held and how often it was asked for; waits for the device."""
        hits, lookups = self._hits.tolist()
        return HotReport(
            capacity=self.capacity,
            rows=self._held,
            nbytes=self.nbytes,
            hits=hits,
            lookups=lookups,
            hit_rate=hits / max(lookups, 1),
            out_of_bounds=int(self._violations[0]),
            refreshes=self._refreshes,
        )

    def _most_frequent(self, noted: torch.Tensor) -> torch.Tensor:
        """int64 ``[rows]`` on the CPU, the ids with the highest counts; earlier counts have decayed."""
        ids, counts = torch.unique(noted[(noted >= 0) & (noted < len(self.table))], return_counts=True)
        both = torch.cat((self._known_ids, ids))
        weights = torch.cat((self._known_counts * self.decay, counts.double()))
        ids, place = torch.unique(both, return_inverse=True)
        counts = torch.zeros(ids.numel(), dtype=torch.float64, device=ids.device).index_add_(0, place, weights)
        order = counts.sort(descending=True, stable=True).indices[: self.capacity * _REMEMBERED]
        self._known_ids, self._known_counts = ids[order], counts[order]
        return self._known_ids[: self.capacity].cpu()

    def _beside(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def _check(self, row_ids: torch.Tensor) -> None:
        check_ids(row_ids)
        if row_ids.device != self.device:
            raise TableError(f"row ids are {row_ids.dtype} on {row_ids.device}: expected torch.int64 on {self.device}")
