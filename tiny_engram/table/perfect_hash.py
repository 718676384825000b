"""PerfectHash: which slot a known key has, in two loads and one comparison. Imports numpy, torch, kernels and tiny_engram.errors.

Hash and displace: keys fall into buckets of four on average; buckets are placed from the largest to the smallest, each with the first
displacement that sends all its keys to free slots. The table keeps whole keys, so that a key that is not in it is never found.
Source: Belazzouqui, Botelho, Dietzfelbinger, "Hash, displace, and compress" (ESA 2009); the displacements are not compressed here.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.hot_gather import EMPTY, bucket_of, mix, probe, slot_of

__all__ = ["PerfectHash", "index_shape"]

_KEYS_PER_BUCKET = 4
_SLOTS_PER_KEY = 1.1
_TRIES = 1 << 18  # (key, displacement) pairs tried in one numpy pass
_MOST_TRIES = 1 << 24  # such pairs for one size of bucket: a second's work, which only keys chosen to collide need


def index_shape(capacity: int) -> tuple[int, int]:
    """(slots, buckets) of an index for up to ``capacity`` keys."""
    return max(1, -int(-capacity * _SLOTS_PER_KEY // 1)), max(1, -(-capacity // _KEYS_PER_BUCKET))


@dataclass(frozen=True, slots=True)
class PerfectHash:
    """An index of up to ``capacity`` keys; make one with :meth:`build`.

    Attributes:
        keys: int64 ``[slots]``, the key that each slot belongs to, -1 where it belongs to none.
        displacement: int32 ``[buckets]``.
    """

    keys: torch.Tensor
    displacement: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, *, capacity: int | None = None) -> Self:
        """Index keys, on the CPU; a million take about two seconds.

        Args:
            keys: int64 ``[K]``, all different, none negative.
            capacity: keys that the shape is made for (K unless told), so that indexes of fewer keys have the same shape.

        Raises:
            TableError: a key is negative or given twice, keys were chosen to collide, or there are more keys than ``capacity``.
        """
        capacity = keys.numel() if capacity is None else capacity
        if keys.dtype != torch.int64 or keys.numel() > capacity:
            raise TableError(f"keys are {keys.dtype} {list(keys.shape)}: expected at most {capacity} of torch.int64")
        values = np.asarray(keys.cpu().numpy()).reshape(-1)
        if values.size and values.min() < 0:
            raise TableError(f"key {values.min()} is negative: expected 0 or more, -1 marks empty slots")
        if np.unique(values).size != values.size:
            raise TableError(f"{values.size - np.unique(values).size} of {values.size} keys are given twice: expected different ones")
        slots, buckets = index_shape(capacity)
        displacement, places = _place(mix(values), slots, buckets)
        table = np.full(slots, EMPTY, dtype=np.int64)
        table[places] = values
        return cls(torch.from_numpy(table), torch.from_numpy(displacement))

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Slots int64 ``[...]`` of ids int64 ``[...]`` on the index's device; -1 where an id is not a key. Never synchronises."""
        return probe(self.keys, self.displacement, ids)

    def to(self, device: torch.device | str) -> "PerfectHash":
        """The same index on another device."""
        return PerfectHash(self.keys.to(device), self.displacement.to(device))


def _place(mixed: np.ndarray, slots: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Displacements int32 ``[buckets]`` and the slot of each key int64 ``[K]``, all different."""
    bucket = bucket_of(mixed, buckets)
    order = np.argsort(bucket, kind="stable")
    sizes = np.bincount(bucket, minlength=buckets)
    starts = np.cumsum(sizes) - sizes
    taken = np.zeros(slots, dtype=bool)
    owner = np.zeros(slots, dtype=np.int64)
    displacement = np.zeros(buckets, dtype=np.int32)
    places = np.zeros(mixed.size, dtype=np.int64)
    for size in range(int(sizes.max(initial=0)), 0, -1):
        waiting = np.flatnonzero(sizes == size)
        first = 0
        while waiting.size:
            if first * size > _MOST_TRIES:
                raise TableError(
                    f"no perfect hash of {mixed.size} keys in {slots} slots: expected keys that were not chosen to collide; "
                    "leave some out, or give more capacity"
                )
            # The fewer buckets wait, the more displacements are tried in one pass.
            tries = np.arange(first, first + max(1, min(1024, _TRIES // (waiting.size * size))))
            first += tries.size
            members = order[starts[waiting, None] + np.arange(size)]
            asked = slot_of(mixed[members][:, None, :], tries[None, :, None], slots)
            fits = np.logical_not(taken[asked].any(axis=-1))
            if size > 1:
                ordered = np.sort(asked, axis=-1)
                fits &= (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1)
            choice = fits.argmax(axis=1)
            found = np.flatnonzero(fits[np.arange(waiting.size), choice])
            wanted = asked[found, choice[found]]
            # Of buckets that want the same slot in this pass the last one written has it; the others try further.
            owner[wanted] = found[:, None]
            won = np.asarray(owner[wanted] == found[:, None]).all(axis=1)
            taken[wanted[won]] = True
            displacement[waiting[found[won]]] = tries[choice[found[won]]]
            places[members[found[won]]] = wanted[won]
            waiting = np.delete(waiting, found[won])
    return displacement, places
