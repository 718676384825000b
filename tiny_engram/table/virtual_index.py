"""VirtualRows: the few rows that exist out of a huge address space, packed, found by binary search.

Imports numpy, torch, kernels, tiny_engram.errors and storage. Row ids, slots: int64, on the CPU.
"""

import numpy as np
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK

from .storage import check_ids, check_rows, whole

__all__ = ["VirtualRows", "missing_rows"]

_SMALLEST = 256  # slots of the first allocation


class VirtualRows:
    """Sorted row ids -> slots of packed rows. Adding or removing costs one pass over the index (not a sort).

    Attributes:
        payload: uint8 ``[slots, head_dim]``, the bytes of e4m3 values: not every operation has a float8 kernel.
        scale: uint8 ``[slots, head_dim / 32]``.
        free: int64, slots that hold no row.
    """

    def __init__(self, head_dim: int):
        head_dim = whole("head_dim", head_dim)
        if head_dim < 1 or head_dim % BLOCK:
            raise TableError(f"head_dim is {head_dim}: expected a multiple of {BLOCK}")
        self.payload = torch.zeros((0, head_dim), dtype=torch.uint8)
        self.scale = torch.zeros((0, head_dim // BLOCK), dtype=torch.uint8)
        self.free = torch.empty(0, dtype=torch.int64)
        self._ids = self.free  # sorted
        self._slots = self.free  # slot of each id

    def __len__(self) -> int:
        return self._ids.numel()

    def find(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot of each id (some slot or 0 where there is none) and whether it was found."""
        places, found = self._places(row_ids)
        return self._slots[places] if len(self) else places, found

    @torch.no_grad()
    def add(self, row_ids: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor) -> None:
        """As ``EngramTable.add``."""
        check_ids(row_ids)
        check_rows(payload, scale, lead=tuple(row_ids.shape), head_dim=self.payload.shape[1])
        # Tensors made in inference mode could not be written by a later call outside it.
        with torch.inference_mode(False):
            ids, order = row_ids.reshape(-1).sort()
            doubles = int((ids[1:] == ids[:-1]).sum())
            if doubles:
                raise TableError(f"{doubles} of {ids.numel()} row ids are given twice: give each once")
            if bool((ids == -1).any()):
                raise TableError("row id -1 stands for no row, which reads as zeros: expected any other id")
            present = int(self._places(ids)[1].sum())
            if present:
                raise TableError(f"{present} of {ids.numel()} row ids are in the table already: remove them first, or use other ids")
            slots = self._take(ids.numel())
            self.payload[slots] = payload.view(torch.uint8).reshape(-1, self.payload.shape[1])[order]
            self.scale[slots] = scale.reshape(-1, self.scale.shape[1])[order]
            places = torch.searchsorted(self._ids, ids)
            self._ids = _inserted(self._ids, places, ids)
            self._slots = _inserted(self._slots, places, slots)

    @torch.no_grad()
    def remove(self, row_ids: torch.Tensor) -> None:
        """As ``EngramTable.remove``."""
        check_ids(row_ids)
        with torch.inference_mode(False):
            ids = row_ids.reshape(-1).unique()
            places, found = self._places(ids)
            if not bool(found.all()):
                raise TableError(missing_rows(ids, ~found))
            self.free = torch.cat((self.free, self._slots[places]))
            self._ids, self._slots = _without(self._ids, places), _without(self._slots, places)
            # Give memory back once three quarters are spare, so that load and unload in turn do not copy each time.
            if self.payload.shape[0] > _SMALLEST and len(self) * 4 < self.payload.shape[0]:
                self.payload, self.scale = self.payload[self._slots], self.scale[self._slots]
                self._slots = torch.arange(len(self))
                self.free = self._slots[:0]

    def _places(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Place of each id in the index (some valid place where there is none) and whether it was found."""
        check_ids(row_ids)
        if not len(self):
            return torch.zeros_like(row_ids), torch.zeros_like(row_ids, dtype=torch.bool)
        # By numpy: torch's search wakes the thread pool for 200 ids, which costs milliseconds when the cores are busy.
        places = torch.from_numpy(np.asarray(np.searchsorted(self._ids.numpy(), row_ids.numpy()))).clamp(max=len(self) - 1)
        return places, self._ids[places] == row_ids

    def _take(self, count: int) -> torch.Tensor:
        """Free slots ``[count]``, growing the storage by at least half when there are too few."""
        lacking = count - self.free.numel()
        if lacking > 0:
            old = self.payload.shape[0]
            more = max(lacking, old // 2, _SMALLEST)
            self.payload = torch.cat((self.payload, self.payload.new_zeros((more, self.payload.shape[1]))))
            self.scale = torch.cat((self.scale, self.scale.new_zeros((more, self.scale.shape[1]))))
            self.free = torch.cat((self.free, torch.arange(old, old + more)))
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def missing_rows(row_ids: torch.Tensor, missing: torch.Tensor, rows_total: int | None = None) -> str:
    """The message on ids that a table does not have, of which there is at least one.

    Args:
        row_ids: int64 ``[...]``.
        missing: bool ``[...]``.
        rows_total: rows of a dense table; None for a virtual one, to which rows can be added.
    """
    first = int(row_ids.reshape(-1)[missing.reshape(-1)][0])
    way_out = "add it first" if rows_total is None else f"expected 0 to {rows_total - 1}, or -1 for no row; mend the ids"
    return (
        f"row {first} is not in the table ({int(missing.sum())} of {missing.numel()} missing): {way_out}, or read zeros there by "
        "bounds='warn' or bounds='ignore'"
    )


# numpy shifts a million entries in a millisecond; torch's boolean masks take twenty times as long.
def _inserted(values: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.insert(values.numpy(), places.numpy(), new.numpy()))


def _without(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.delete(values.numpy(), places.numpy()))
