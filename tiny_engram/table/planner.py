"""LookupPlanner: rows of a table onto the device that asks, by the path that costs least.

Paths: "device", the rows are where the ids are; "zero_copy", the device reads host memory in place; "cpu_gather", ids go to
the host, which gathers rows and copies them over, while in large lookups the device reads some of them in place. Imports torch,
kernels, tiny_engram.errors, and of this package costs, host_gather, shared and storage.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import Bounds, row_gather
from tiny_engram.kernels.row_gather.bounds import checked_mode
from tiny_engram.kernels.row_gather.bounds import count as count_outside
from tiny_engram.kernels.row_gather.bounds import refuse as refuse_outside
from tiny_engram.kernels.row_gather.bounds import warn as warn_outside
from tiny_engram.kernels.unique_ids import unique_ids

from .costs import HostPath, LookupCosts, machine_key, measure, resolve
from .host_gather import HostGather, gathering
from .shared import SharedRows
from .storage import RowStorage, room_for

__all__ = ["LookupPlanner", "LookupPath"]

LookupPath = Literal["device"] | HostPath

_FEW_ROWS = 512  # never worth a trip over the host, nor a measurement of whether it is
_SPAN = 1 << 20  # ids handled at once by the CPU: bounds its staging
_SHARED_ROWS = 1 << 16  # from here on the device reads some rows in place meanwhile; below, another launch costs what it gains
_FIRST_PROBES, _PROBE_EVERY = 2, 64  # lookups whose ids are counted, to learn the share of duplicates


class LookupPlanner(SharedRows):
    """Reads rows of one table onto one device. Not for use by several threads at once.

    Every path gives the same bits. Where the GPU cannot read the table's memory, all lookups go over the CPU.

    Attributes:
        path_counts: lookups by path.
        distinct_share: the share of ids that were distinct in the lookups that were counted, 1.0 before any was.

    Args:
        storage: the table's rows.
        device: where ids are given and rows are wanted.
        costs: what the choice rests on; None takes those kept on this machine, or measures them at the first lookup of more
            than 512 rows (a second or two).
        chunk_rows: rows that the CPU gathers at a time; None goes by the lookup's size.

    Raises:
        TableError: rows of one device asked for on another.
    """

    def __init__(self, storage: RowStorage, device: torch.device | str, *, costs: LookupCosts | None = None, chunk_rows: int | None = None):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        home = storage.payload.device
        if home.type != "cpu" and home != device:
            raise TableError(f"rows on {home} asked for on {device}: expected ids on {home}, or a table in host memory")
        self.storage = storage
        self.device = device
        self.path_counts: Counter[LookupPath] = Counter()
        self.distinct_share = 1.0
        self._here = home == device
        self._readable = not self._here and storage.rows > 0 and storage.payload.is_pinned()
        self._given_costs = costs
        self._chunk_rows = chunk_rows
        self._large_lookups = 0
        self._crossing: int | None = None
        self._host_ids = torch.empty(0, dtype=torch.int64)
        self._host_numbers = torch.empty(0, dtype=torch.int64)

    @cached_property
    def costs(self) -> LookupCosts:
        """What the choice rests on; measured when first asked for, if need be."""
        storage = self.storage
        if self._given_costs is not None:
            return self._given_costs
        key = machine_key(self.device, storage.row_bytes, storage.nbytes, storage.home, storage.layout, gathering())
        return resolve(key, row_bytes=storage.row_bytes, table_bytes=storage.nbytes, run=self._measure)

    @cached_property
    def _gather(self) -> HostGather:
        return HostGather(self.storage, self.device, chunk_rows=self._chunk_rows)

    @cached_property
    def _share(self) -> float:
        """Of the rows of a large lookup over the CPU, how many the device reads in place meanwhile."""
        return self.costs.share_in_place(4 * _SHARED_ROWS) if self._readable else 0.0

    @cached_property
    def _side(self) -> Any:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory held to stage rows in, however many were asked for."""
        return self._gather.staging_bytes

    def choose(self, count: int) -> LookupPath:
        """The path for ``count`` ids on the current stream."""
        return self._choose(count, self._capturing())

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _choose(self, count: int, capturing: bool) -> LookupPath:
        if self._here:
            return "device"
        if capturing:
            return "zero_copy"
        if not self._readable:
            return "cpu_gather"
        if count <= _FEW_ROWS:
            return "zero_copy"
        if self._crossing is None:
            self._crossing = self.costs.crossing(self.distinct_share)
        return "zero_copy" if count < self._crossing else "cpu_gather"

    def explain(self) -> str:
        """Why: the predicted times of each path, as text."""
        if self._here:
            return f"the rows are on {self.device}, where they are asked for: one gather"
        if not self._readable:
            return f"home {self.storage.home!r} is not registered with the GPU: every lookup goes over the CPU, by {gathering()}"
        return f"{self.costs.explain(self.distinct_share)}\ncpu_gather by {gathering()}"

    def lookup(
        self,
        row_ids: torch.Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        bounds: Bounds = "fatal",
        out: torch.Tensor | None = None,
        violations: torch.Tensor | None = None,
        path: LookupPath | None = None,
    ) -> torch.Tensor:
        """Read rows; under stream capture by "zero_copy", without waiting for the host.

        Args:
            row_ids: int64 ``[...]`` on the planner's device; -1 is no row and gives zeros.
            dtype, bounds, out, violations: as in :func:`tiny_engram.kernels.row_gather.row_gather`.
            path: take this one, for measurements; None chooses.

        Returns:
            ``[..., head_dim]`` on the planner's device, or ``out``.

        Raises:
            TableError: arguments do not fit, an id is outside the table (``"fatal"``), a path that this table does not have,
                or a capture that would have to wait for the host.
        """
        if row_ids.dtype != torch.int64 or row_ids.device != self.device:
            raise TableError(f"row ids are {row_ids.dtype} on {row_ids.device}: expected torch.int64 on {self.device}")
        capturing = self._capturing()
        if path is not None:
            self._check_path(path)
        taken = path or self._choose(row_ids.numel(), capturing)
        if capturing:
            self._check_capture(taken, bounds)
        try:
            if taken == "cpu_gather":
                out = self._by_cpu(row_ids, dtype, bounds, out, violations)
            else:
                storage = self.storage
                out = row_gather(storage.payload, storage.scale, row_ids, bounds=bounds, violations=violations, dtype=dtype, out=out)
        except (IndexError, ValueError) as error:
            raise TableError(str(error)) from error
        self.path_counts[taken] += 1
        return out

    def _check_path(self, path: LookupPath) -> None:
        """Does this table have the path that a caller asks for?"""
        here: tuple[LookupPath, ...] = ("device", "cpu_gather") if self.device.type == "cpu" else ("device",)
        there: tuple[LookupPath, ...] = ("zero_copy", "cpu_gather") if self._readable else ("cpu_gather",)
        if path not in (here if self._here else there):
            raise TableError(
                f"path {path!r} for rows in home {self.storage.home!r} and ids on {self.device}: "
                f"expected {' or '.join(here if self._here else there)}, or None to have it chosen"
            )

    def _check_capture(self, path: LookupPath, bounds: Bounds) -> None:
        if path == "zero_copy" and not self._readable:
            raise TableError(
                f"a captured lookup reads host memory in place, and home {self.storage.home!r} is not registered with the GPU: "
                "allocate the table with home='pinned', or look up outside the capture"
            )
        if path == "cpu_gather" or bounds == "fatal":
            raise TableError(f"path {path!r} with bounds={bounds!r} waits for the host, which a capture cannot: use bounds='warn'")

    def _by_cpu(
        self, row_ids: torch.Tensor, dtype: torch.dtype, bounds: Bounds, out: torch.Tensor | None, violations: torch.Tensor | None
    ) -> torch.Tensor:
        shape = (*row_ids.shape, self.storage.head_dim)
        out = room_for(shape, dtype, self.device, out)
        checked_mode(bounds, TableError)
        flat, target = row_ids.reshape(-1).contiguous(), out.view(-1, shape[-1])
        deduplicate = self._deduplicates(flat.numel())
        distinct = 0
        for start in range(0, flat.numel(), _SPAN):
            span = flat[start : start + _SPAN]
            distinct += self._span(span, target[start : start + _SPAN], bounds, violations, deduplicate)
        if deduplicate:
            self._learn(distinct / flat.numel())
        return out

    def _deduplicates(self, count: int) -> bool:
        """Count the distinct ids of this lookup? Where it paid lately, and now and then to find out."""
        if count <= _FEW_ROWS:
            return False
        self._large_lookups += 1
        if self._large_lookups <= _FIRST_PROBES or self._large_lookups % _PROBE_EVERY == 0:
            return True
        # Where there is one path only, its costs are not worth measuring: a tenth of duplicates pays for finding them.
        return self.costs.deduplicates(count, self.distinct_share) if self._readable else self.distinct_share < 0.9

    def _learn(self, share: float) -> None:
        self.distinct_share = share if self._large_lookups <= 1 else (self.distinct_share + share) / 2
        self._crossing = None

    def _span(self, flat: torch.Tensor, out: torch.Tensor, bounds: Bounds, violations: torch.Tensor | None, deduplicate: bool) -> int:
        """Rows of up to 2**20 ids; returns how many were fetched."""
        count = flat.numel()
        shared = 0 if deduplicate or count < _SHARED_ROWS else int(count * self._share)
        kept = count - shared
        side: Any = self._side if shared else None
        ready = torch.cuda.current_stream(self.device).record_event() if side is not None else None

        def in_place() -> None:
            """The others are read by the device, on a stream of its own."""
            if side is not None:
                side.wait_event(ready)
            with torch.cuda.stream(side) if side is not None else nullcontext():
                row_gather(self.storage.payload, self.storage.scale, flat[kept:], bounds="ignore", out=out[kept:])

        meanwhile = in_place if shared else None
        try:
            return shared + self._over(flat[:kept], out[:kept], bounds, violations, deduplicate, checked=flat, meanwhile=meanwhile)
        finally:
            if side is not None:
                torch.cuda.current_stream(self.device).wait_stream(side)

    def _over(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        bounds: Bounds,
        violations: torch.Tensor | None,
        deduplicate: bool,
        *,
        checked: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> int:
        """Rows by way of the host; returns how many were fetched. All ids of ``checked`` are held against the bounds.

        ``meanwhile`` is called while the ids are on their way to the host.
        """
        rows = self.storage.rows
        inverse = distinct = None
        fetched = flat
        if deduplicate:
            fetched, inverse, distinct = unique_ids(flat)
        ids, low, high, number = self._to_host(fetched, checked, distinct, meanwhile)
        absent = None
        if low < 0 or high >= rows:
            if low < -1 or high >= rows:
                self._report_outside(checked, bounds, violations)
            absent = (flat < 0) | (flat >= rows)
            ids = ids.clamp(0, max(rows - 1, 0))
        if rows == 0 or number == 0:
            out.zero_()
        elif inverse is not None:
            self._gather.expand(ids[:number], inverse if absent is None else inverse.masked_fill(absent, -1), out)
        else:
            self._gather.read(ids, out, absent)
        return number

    def _report_outside(self, flat: torch.Tensor, bounds: Bounds, violations: torch.Tensor | None) -> None:
        rows = self.storage.rows
        if bounds == "fatal":
            refuse_outside(flat, rows)
        elif bounds == "warn" and violations is not None:
            count_outside(flat, rows, violations)
        elif bounds == "warn" and not flat.is_cuda:
            warn_outside(flat, rows)

    def _to_host(
        self, ids: torch.Tensor, checked: torch.Tensor, distinct: torch.Tensor | None, meanwhile: Callable[[], None] | None
    ) -> tuple[torch.Tensor, int, int, int]:
        """The ids to fetch on the CPU, the smallest and largest id checked, and how many to fetch: one wait for the device."""
        numbers = torch.stack(torch.aminmax(checked))
        if distinct is not None:
            numbers = torch.cat((numbers, distinct))
        if ids.is_cuda:
            if self._host_ids.numel() < ids.numel():
                size = max(1024, 1 << (ids.numel() - 1).bit_length())
                with torch.inference_mode(False):  # to be written by lookups in and out of that mode
                    self._host_ids = torch.empty(size, dtype=torch.int64, pin_memory=True)
                    self._host_numbers = torch.empty(3, dtype=torch.int64, pin_memory=True)
            ids = self._host_ids[: ids.numel()].copy_(ids, non_blocking=True)
            numbers = self._host_numbers[: numbers.numel()].copy_(numbers, non_blocking=True)
            self._gather.alert()  # the ids take about as long to come as threads to wake
        if meanwhile is not None:
            meanwhile()
        if checked.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        low, high, *rest = numbers.tolist()
        return ids, low, high, rest[0] if rest else ids.numel()

    def _measure(self) -> LookupCosts:
        storage = self.storage

        def in_place(ids: torch.Tensor) -> None:
            row_gather(storage.payload, storage.scale, ids, bounds="ignore")

        def by_cpu(ids: torch.Tensor) -> None:
            self._over(ids, torch.empty((ids.numel(), storage.head_dim), device=self.device), "ignore", None, False, checked=ids)

        actions = {"zero_copy": in_place, "cpu_gather": by_cpu, "deduplicate": unique_ids}
        return measure(actions, rows=storage.rows, device=self.device)
