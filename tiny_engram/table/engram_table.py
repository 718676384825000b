"""EngramTable: rows of e4m3 values with one e8m0 scale per 32, looked up by row id, wherever they live.

Imports torch, kernels, tiny_engram.errors and its neighbours; the planner and mapped files when they are first used. Row ids are int64.
A dense table's row id is its slot in a storage; a virtual table keeps the few rows that exist out of a huge address space.
"""

import copy
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Self

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import Bounds, row_gather
from tiny_engram.kernels.row_gather.bounds import checked_mode, count, outside

from .counters import OutsideCounters
from .report import TableReport
from .storage import Home, Layout, RowStorage, check_dtype, check_ids
from .virtual_index import VirtualRows, missing_rows

if TYPE_CHECKING:
    from .planner import LookupPlanner

__all__ = ["EngramTable"]


class EngramTable:
    """Rows by id; make one with :meth:`dense`, :meth:`virtual`, :meth:`over`, :meth:`allocate` or :meth:`open`.

    Row id -1 is "no row": it reads as zeros whatever ``bounds`` says. Lookups of ids on a device are for one thread at a time; so is
    a virtual table while rows are added or removed.

    Rows are no parameters: ``copy.deepcopy`` of a dense table, or of a model with one, is a table over the same storage (:meth:`copy_to`
    copies rows), of a virtual one an independent table. A dense table cannot be pickled: open its file in the other process.

    Attributes:
        bounds: what an id without a row does where the lookup does not say: "fatal" raises and names it, "warn" reads zeros and
            counts (see :meth:`check_bounds`), "ignore" reads zeros.
        counters: what "warn" counted.
    """

    def __init__(self, rows: RowStorage | VirtualRows, *, bounds: Bounds = "fatal"):
        """Use one of the class methods."""
        self.bounds: Bounds = checked_mode(bounds, TableError)
        self._rows = rows
        self._planners: dict[torch.device, LookupPlanner] = {}
        self.counters = OutsideCounters()

    @classmethod
    def dense(cls, payload: torch.Tensor, scale: torch.Tensor) -> Self:
        """A table over two tensors (not copied): payload float8_e4m3fn ``[R, D]``, scale uint8 ``[R, D / 32]``.

        Raises:
            TableError: types or shapes do not belong together.
        """
        home: Home = "device" if payload.device.type != "cpu" else "pageable"
        if home == "pageable" and torch.cuda.is_available() and payload.is_pinned() and scale.is_pinned():
            home = "pinned"
        return cls(RowStorage(payload, scale, home=home, layout="split"))

    @classmethod
    def virtual(cls, head_dim: int) -> Self:
        """An empty table for rows of ``head_dim`` values (a multiple of 32) at any int64 address but -1.

        Adding or removing costs one pass over the index (not a sort), a lookup of k ids among R rows k * log(R).
        """
        return cls(VirtualRows(head_dim))

    @classmethod
    def over(cls, storage: RowStorage, *, bounds: Bounds = "fatal") -> Self:
        """A table over a storage, which it shares; TableError for anything else."""
        if not isinstance(storage, RowStorage):
            raise TableError(f"{type(storage).__name__} is no storage of rows: expected a RowStorage (.storage of an EngramTable)")
        return cls(storage, bounds=bounds)

    @classmethod
    def allocate(
        cls,
        rows: int,
        head_dim: int,
        *,
        home: Home,
        layout: Layout = "record",
        device: torch.device | str | None = None,
        path: str | PathLike[str] | None = None,
        bounds: Bounds = "fatal",
    ) -> Self:
        """A table of zeros; arguments and errors as in ``RowStorage.allocate``."""
        return cls(RowStorage.allocate(rows, head_dim, home=home, layout=layout, device=device, path=path), bounds=bounds)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        home: Home = "mapped",
        *,
        prefix: str | None = None,
        device: torch.device | str | None = None,
        bounds: Bounds = "fatal",
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """The table in a file: a safetensors file, a sharded one, or a pool file.

        Args:
            home: "mapped" reads rows from the file as they are asked for; another home copies all of them there first.
            prefix: of the tensor names, such as "model.layers.1.engram."; None where the file holds one table only.
            device: of home "device".
            progress: called with (bytes copied, bytes in all).

        Raises:
            TableError: no such file, a damaged one, no room for the copy, or a device with another home.
        """
        from .mapped import map_rows

        if device is not None and home != "device":
            raise TableError(f"home {home!r} with device {str(device)!r}: expected home 'device' with it, which copies the rows there")
        mapped = map_rows(path, prefix=prefix)
        if home == "mapped":
            return cls(mapped, bounds=bounds)
        with mapped:
            return cls(mapped.copy_to(home, device=device, progress=progress), bounds=bounds)

    def copy_to(
        self,
        home: Home,
        *,
        layout: Layout = "record",
        device: torch.device | str | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> "EngramTable":
        """The same rows in another home or layout, as a table of its own; not for virtual tables."""
        copy = self.storage.copy_to(home, layout=layout, device=device, progress=progress)
        return EngramTable(copy, bounds=self.bounds)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return type(self)(copy.deepcopy(self._rows, memo), bounds=self.bounds)

    @property
    def storage(self) -> RowStorage:
        """The rows of a dense table. Raises TableError for a virtual one."""
        if not isinstance(self._rows, RowStorage):
            raise TableError("a virtual table has no storage: expected a dense one; read its rows with lookup")
        return self._rows

    @property
    def head_dim(self) -> int:
        """Values per row."""
        return self._rows.head_dim if isinstance(self._rows, RowStorage) else self._rows.payload.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device if isinstance(self._rows, RowStorage) else self._rows.payload.device

    @property
    def nbytes(self) -> int:
        """Bytes of the rows (payload and scales); the index and spare room are not counted."""
        if isinstance(self._rows, RowStorage):
            return self._rows.nbytes
        return len(self) * (self._rows.payload.shape[1] + self._rows.scale.shape[1])

    def __len__(self) -> int:
        return self._rows.rows if isinstance(self._rows, RowStorage) else len(self._rows)

    def add(self, row_ids: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor) -> None:
        """Add rows to a virtual table; pass all rows of many concepts at once where you can.

        Args:
            row_ids: int64 ``[...]``, all different.
            payload: float8_e4m3fn ``[..., head_dim]``.
            scale: uint8 ``[..., head_dim / 32]``.

        Raises:
            TableError: an id is given twice or is in the table already (nothing is added then), shapes do not fit, or a dense table.
        """
        self._virtual("add").add(row_ids, payload, scale)

    def remove(self, row_ids: torch.Tensor) -> None:
        """Remove exactly these rows, int64 ``[...]``, from a virtual table.

        Raises:
            TableError: an id is not in the table (nothing is removed then), or a dense table.
        """
        self._virtual("remove").remove(row_ids)

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """bool ``[...]``: which of the ids (int64 ``[...]``) have a row."""
        if isinstance(self._rows, VirtualRows):
            return self._rows.find(row_ids)[1]
        check_ids(row_ids)
        return (row_ids >= 0) & (row_ids < len(self))

    def stored(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload and scale of these rows, int64 ``[...]``, of a virtual table, as ``add`` takes them.

        Raises:
            TableError: an id is not in the table, or a dense table.
        """
        rows = self._virtual("copy")
        slots, found = rows.find(row_ids)
        if not bool(found.all()):
            raise TableError(missing_rows(row_ids, ~found))
        return rows.payload[slots].view(torch.float8_e4m3fn), rows.scale[slots]

    def lookup(
        self,
        row_ids: torch.Tensor,
        *,
        bounds: Bounds | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read rows in one vectorised call.

        Args:
            row_ids: int64 ``[...]``. Their device is where the rows are returned, whichever home they come from; ids on the CPU
                with a table on a device, and ids on a device with a virtual table, cost a copy and a wait.
            bounds: as the attribute, which counts when this is None. Under stream capture "fatal" is refused.
            dtype: float32, bfloat16 or float16; rounded once.
            out: contiguous ``[..., head_dim]`` on the ids' device to write into; its type then counts, not ``dtype``.

        Returns:
            ``[..., head_dim]``, or ``out``.

        Raises:
            TableError: "fatal" and an id has no row (the first such id is named), types or devices do not belong together, or the
                storage is closed.
        """
        check_ids(row_ids)
        mode = self.bounds if bounds is None else checked_mode(bounds, TableError)
        check_dtype(dtype if out is None else out.dtype)
        if mode == "fatal" and row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise TableError("bounds='fatal' waits for the device, which a captured stream cannot: look up with bounds='warn'")
        try:
            if isinstance(self._rows, VirtualRows):
                return self._lookup_virtual(self._rows, row_ids, mode, dtype, out)
            return self._lookup_dense(self._rows, row_ids, mode, dtype, out)
        except IndexError as error:
            raise TableError(missing_rows(row_ids, outside(row_ids, len(self)), len(self))) from error
        except TableError:
            raise
        except ValueError as error:
            raise TableError(str(error)) from error

    def check_bounds(self) -> int:
        """Warn of the ids outside the table that ``bounds="warn"`` read as zeros since the last call, and count anew. Waits for devices.

        Returns:
            How many they were.
        """
        return self.counters.check()

    def report(self) -> TableReport:
        """Where the rows are, how they are held, and how many ids outside the table were counted. Waits for devices."""
        counted = self.counters.total()
        if isinstance(self._rows, RowStorage):
            return self._rows.report(out_of_bounds=counted)
        return TableReport(
            rows=len(self),
            head_dim=self.head_dim,
            row_bytes=self._rows.payload.shape[1] + self._rows.scale.shape[1],
            nbytes=self.nbytes,
            layout="split",
            home="pageable",
            device=str(self.device),
            out_of_bounds=counted,
        )

    def _lookup_dense(
        self, storage: RowStorage, row_ids: torch.Tensor, bounds: Bounds, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        payload, scale = storage.payload, storage.scale
        if row_ids.device == storage.device or (storage.device.type == "cpu" and row_ids.is_cuda):
            counter = self.counters.at(row_ids.device) if bounds == "warn" else None
            if row_ids.device == storage.device:
                return row_gather(payload, scale, row_ids, bounds=bounds, violations=counter, dtype=dtype, out=out)
            planner = self._planner(storage, row_ids.device)
            return planner.lookup(row_ids, dtype=dtype, bounds=bounds, out=out, violations=counter)
        if row_ids.device.type != "cpu":
            raise TableError(f"row ids on {row_ids.device}, the table on {storage.device}: expected one device; copy the table there")
        rows = self._lookup_dense(storage, row_ids.to(storage.device), bounds, dtype if out is None else out.dtype, None)
        return _moved(rows, row_ids.device, out)

    def _lookup_virtual(
        self, rows: VirtualRows, row_ids: torch.Tensor, bounds: Bounds, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        if row_ids.device.type != "cpu":
            values = self._lookup_virtual(rows, row_ids.cpu(), bounds, dtype if out is None else out.dtype, None)
            return _moved(values, row_ids.device, out)
        slots, found = rows.find(row_ids)
        if bounds != "ignore" and not bool(found.all()):
            missing = ~found & (row_ids != -1)
            if bool(missing.any()):
                if bounds == "fatal":
                    raise TableError(missing_rows(row_ids, missing))
                # Ids that were found count as "no row", which is never outside; a table of no rows has none of the others.
                count(torch.where(missing, row_ids, -1), 0, self.counters.at(row_ids.device))
        payload = rows.payload.view(torch.float8_e4m3fn)
        return row_gather(payload, rows.scale, slots.masked_fill(~found, -1), bounds="ignore", dtype=dtype, out=out)

    def _planner(self, storage: RowStorage, device: torch.device) -> "LookupPlanner":
        if device not in self._planners:
            from .planner import LookupPlanner

            self._planners[device] = LookupPlanner(storage, device)
        return self._planners[device]

    def _virtual(self, verb: str) -> VirtualRows:
        if not isinstance(self._rows, VirtualRows):
            raise TableError(f"cannot {verb} rows of a dense table: its size is its storage's; use EngramTable.virtual")
        return self._rows


def _moved(rows: torch.Tensor, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return rows.to(device)
    if out.shape != rows.shape or out.device != device:
        raise TableError(f"out {list(out.shape)} on {out.device}: expected {list(rows.shape)} on {device}")
    return out.copy_(rows)
