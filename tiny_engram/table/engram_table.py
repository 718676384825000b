"""EngramTable: rows of e4m3 values with one e8m0 scale per 32, looked up by row id.

Imports numpy, torch, kernels and tiny_engram.errors. Row ids, slots: int64. A dense table's row id is its slot; a virtual
table keeps the few rows that exist out of a huge address space, found by binary search.
"""

from typing import Literal, Self

import numpy as np
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK
from tiny_engram.kernels.row_gather import row_gather

_SMALLEST = 256  # slots of the first allocation


class EngramTable:
    """Rows by id; make one with :meth:`dense` or :meth:`virtual`.

    Adding or removing costs one pass over the index (not a sort), a lookup of k ids among R rows k * log(R).
    """

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor, *, virtual: bool):
        """Use :meth:`dense` or :meth:`virtual`."""
        self._payload = payload.view(torch.uint8)  # bytes: not every operation has a float8 kernel
        self._scale = scale
        self._virtual = virtual
        empty = torch.empty(0, dtype=torch.int64)
        self._ids = empty  # sorted
        self._slots = empty  # slot of each id
        self._free = torch.arange(payload.shape[0]) if virtual else empty

    @classmethod
    def dense(cls, payload: torch.Tensor, scale: torch.Tensor) -> Self:
        """A table over existing storage (not copied): payload float8_e4m3fn ``[R, D]``, scale uint8 ``[R, D / 32]``.

        Raises:
            TableError: types or shapes do not belong together.
        """
        if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8 or payload.ndim != 2:
            raise TableError(
                f"payload is {payload.dtype} {list(payload.shape)}, scale {scale.dtype}: expected float8_e4m3fn [R, D] and uint8"
            )
        _check_rows(payload, scale, payload.shape[0], payload.shape[1])
        return cls(payload, scale, virtual=False)

    @classmethod
    def virtual(cls, head_dim: int) -> Self:
        """An empty table for rows of ``head_dim`` values (a multiple of 32) at any int64 address."""
        if head_dim < 1 or head_dim % BLOCK:
            raise TableError(f"head_dim is {head_dim}: expected a multiple of {BLOCK}")
        payload = torch.zeros((0, head_dim), dtype=torch.uint8).view(torch.float8_e4m3fn)
        return cls(payload, torch.zeros((0, head_dim // BLOCK), dtype=torch.uint8), virtual=True)

    @property
    def head_dim(self) -> int:
        """Values per row."""
        return self._payload.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the rows are; ids must be there too."""
        return self._payload.device

    @property
    def nbytes(self) -> int:
        """Bytes of the rows (payload and scales); the index and spare room are not counted."""
        return len(self) * (self._payload.shape[1] + self._scale.shape[1])

    def __len__(self) -> int:
        return self._ids.numel() if self._virtual else self._payload.shape[0]

    @torch.no_grad()
    def add(self, row_ids: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor) -> None:
        """Add rows; pass all rows of many concepts at once where you can.

        Args:
            row_ids: int64 ``[...]``, all different.
            payload: float8_e4m3fn ``[..., head_dim]``.
            scale: uint8 ``[..., head_dim / 32]``.

        Raises:
            TableError: an id is given twice or is in the table already (nothing is added then), or shapes do not fit.
        """
        self._need_virtual("add")
        _check_rows(payload, scale, row_ids.numel(), self.head_dim, row_ids.shape)
        # Tensors made in inference mode could not be written by a later call outside it.
        with torch.inference_mode(False):
            ids, order = row_ids.reshape(-1).sort()
            doubles = int((ids[1:] == ids[:-1]).sum())
            if doubles:
                raise TableError(f"{doubles} of {ids.numel()} row ids are given twice: raise the collision counter and rehash")
            present = int(self.contains(ids).sum())
            if present:
                raise TableError(f"{present} of {ids.numel()} row ids are in the table already: raise the collision counter and rehash")
            slots = self._take(ids.numel())
            self._payload[slots] = payload.view(torch.uint8).reshape(-1, self.head_dim)[order]
            self._scale[slots] = scale.reshape(-1, self._scale.shape[1])[order]
            places = torch.searchsorted(self._ids, ids)
            self._ids = _inserted(self._ids, places, ids)
            self._slots = _inserted(self._slots, places, slots)

    @torch.no_grad()
    def remove(self, row_ids: torch.Tensor) -> None:
        """Remove exactly these rows, int64 ``[...]``.

        Raises:
            TableError: an id is not in the table (nothing is removed then).
        """
        self._need_virtual("remove")
        with torch.inference_mode(False):
            ids = row_ids.reshape(-1).unique()
            places, found = self._find(ids)
            self._raise_missing(ids, found)
            self._free = torch.cat((self._free, self._slots[places]))
            self._ids, self._slots = _without(self._ids, places), _without(self._slots, places)
            # Give memory back once three quarters are spare, so that load and unload in turn do not copy each time.
            if self._payload.shape[0] > _SMALLEST and len(self) * 4 < self._payload.shape[0]:
                self._payload, self._scale = self._payload[self._slots], self._scale[self._slots]
                self._slots = torch.arange(len(self))
                self._free = self._slots[:0]

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """bool ``[...]``: which of the ids (int64 ``[...]``) have a row."""
        return self._find(row_ids)[1]

    def lookup(self, row_ids: torch.Tensor, missing: Literal["raise", "zero"] = "raise") -> torch.Tensor:
        """Read rows in one vectorised call.

        Args:
            row_ids: int64 ``[...]`` on the table's device.
            missing: "raise", or "zero" to read an id without a row as zeros.

        Returns:
            float32 ``[..., head_dim]``.

        Raises:
            TableError: ``missing="raise"`` and an id has no row; the first such id is named.
        """
        places, found = self._find(row_ids)
        if missing == "raise":
            self._raise_missing(row_ids, found)
        slots = self._slots[places] if self._virtual and len(self) else places
        return row_gather(self._payload.view(torch.float8_e4m3fn), self._scale, slots.masked_fill(~found, -1))

    def _find(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Place of each id in the index (some valid place where there is none) and whether it was found."""
        if row_ids.dtype != torch.int64:
            raise TableError(f"row ids are {row_ids.dtype}: expected torch.int64")
        last = max(len(self) - 1, 0)
        if not self._virtual:
            return row_ids.clamp(0, last), (row_ids >= 0) & (row_ids < len(self))
        if not len(self):
            return torch.zeros_like(row_ids), torch.zeros_like(row_ids, dtype=torch.bool)
        # By numpy: torch's search wakes the thread pool for 200 ids, which costs milliseconds when the cores are busy.
        places = torch.from_numpy(np.asarray(np.searchsorted(self._ids.numpy(), row_ids.numpy()))).clamp(max=last)
        return places, self._ids[places] == row_ids

    def _raise_missing(self, row_ids: torch.Tensor, found: torch.Tensor) -> None:
        if not bool(found.all()):
            first = int(row_ids.reshape(-1)[~found.reshape(-1)][0])
            count = int((~found).sum())
            raise TableError(f"row {first} is not in the table ({count} of {found.numel()} missing): add it first, or read as zero")

    def _need_virtual(self, verb: str) -> None:
        if not self._virtual:
            raise TableError(f"cannot {verb} rows of a dense table: its size is its storage's; use EngramTable.virtual")

    def _take(self, count: int) -> torch.Tensor:
        """Free slots ``[count]``, growing the storage by at least half when there are too few."""
        lacking = count - self._free.numel()
        if lacking > 0:
            old = self._payload.shape[0]
            more = max(lacking, old // 2, _SMALLEST)
            self._payload = torch.cat((self._payload, self._payload.new_zeros((more, self._payload.shape[1]))))
            self._scale = torch.cat((self._scale, self._scale.new_zeros((more, self._scale.shape[1]))))
            self._free = torch.cat((self._free, torch.arange(old, old + more)))
        taken, self._free = self._free[:count], self._free[count:]
        return taken


# numpy shifts a million entries in a millisecond; torch's boolean masks take twenty times as long.
def _inserted(values: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.insert(values.numpy(), places.numpy(), new.numpy()))


def _without(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.delete(values.numpy(), places.numpy()))


def _check_rows(payload: torch.Tensor, scale: torch.Tensor, rows: int, head_dim: int, lead: torch.Size | None = None) -> None:
    shape = (rows,) if lead is None else tuple(lead)
    if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise TableError(f"payload is {payload.dtype}, scale {scale.dtype}: expected float8_e4m3fn and uint8")
    if tuple(payload.shape) != (*shape, head_dim) or tuple(scale.shape) != (*shape, head_dim // BLOCK) or head_dim % BLOCK:
        raise TableError(
            f"payload {list(payload.shape)} and scale {list(scale.shape)}: expected {[*shape, head_dim]} "
            f"and {[*shape, head_dim // BLOCK]}, {BLOCK} values per scale"
        )
