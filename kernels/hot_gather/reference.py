"""One gather from two homes in plain torch, and the arithmetic of the index that chooses between them. Imports torch and row_gather.

The index is a hash-and-displace perfect hash: a key's bucket names a displacement, key and displacement name one slot, and the key
kept in that slot says whether the key is known at all. Two loads and one comparison, whatever the number of keys.
"""

from typing import Any

import torch

from ..row_gather.bounds import count
from ..row_gather.reference import row_gather_reference

# Source of the mixing constants: the finaliser of splitmix64 (Steele, Lea, Flood 2014), written as signed 64-bit integers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
HALF = (1 << 32) - 1
EMPTY = -1  # the key of a slot that holds none


def mix(x: Any) -> Any:
    """A bijection of int64 that spreads every bit; products wrap. Takes a torch tensor or a numpy array and gives the same bits."""
    # Masks, since >> of a signed integer fills with its sign.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _reduced(mixed: Any, size: int) -> Any:
    """The upper half of the bits, scaled to ``[0, size)``; size below 2**31 keeps the product positive."""
    return (((mixed >> 32) & HALF) * size) >> 32


def bucket_of(mixed: Any, buckets: int) -> Any:
    """The bucket of a key, from ``mix(key)``."""
    return _reduced(mixed, buckets)


def slot_of(mixed: Any, displacement: Any, size: int) -> Any:
    """The only slot where a key can be, from ``mix(key)`` and its bucket's displacement (int64)."""
    return _reduced(mix(mixed + (displacement + 1) * STEP), size)


def probe_reference(keys: torch.Tensor, displacement: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where ids stand in an index, -1 where they do not. Never synchronises.

    Args:
        keys: int64 ``[S]``, the key of each slot, -1 where it is empty.
        displacement: int32 ``[buckets]``.
        ids: int64 ``[...]``, on the same device.

    Returns:
        int64 ``[...]``.
    """
    mixed = mix(ids)
    moved = displacement[bucket_of(mixed, displacement.shape[0])].to(torch.int64)
    slots = slot_of(mixed, moved, keys.shape[0])
    # A negative id would "find" the key of an empty slot.
    return torch.where((keys[slots] == ids) & (ids >= 0), slots, -1)


def hot_gather_reference(
    hot_payload: torch.Tensor,
    hot_scale: torch.Tensor,
    hot_keys: torch.Tensor,
    displacement: torch.Tensor,
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    out: torch.Tensor,
    hits: torch.Tensor | None,
    violations: torch.Tensor | None,
) -> None:
    """Fill ``out`` and add to the counters; arguments as in :func:`hot_gather`."""
    slots = probe_reference(hot_keys, displacement, row_ids)
    # A row that the table lacks is outside, whatever the index says.
    hot = (slots >= 0) & (row_ids < payload.shape[0])
    rows = row_gather_reference(payload, scale, row_ids.masked_fill(hot, -1), dtype=out.dtype)
    out.copy_(torch.where(hot.unsqueeze(-1), row_gather_reference(hot_payload, hot_scale, slots, dtype=out.dtype), rows))
    if hits is not None:
        hits += torch.stack((hot.sum(), (row_ids != -1).sum()))
    if violations is not None:
        count(row_ids, payload.shape[0], violations)
