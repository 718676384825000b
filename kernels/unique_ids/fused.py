"""Distinct ids by a hash set in device memory, without a host synchronisation. Imports torch and triton.

Open addressing with linear probing. A lane that finds an empty slot claims it by compare-and-swap; who claims one numbers
the id. Numbers are read back by a second kernel, since a lane that lost the race may not see the winner's number yet.
"""

import torch
import triton
import triton.language as tl

# One id a thread of the four warps that Triton takes by default: compare-and-swap then is one instruction a thread.
_BLOCK = 128
_MOST_IDS = 1 << 29  # slots are numbered in int32


@triton.jit
def _insert(ids, keys, numbers, slots, unique, count, total, slot_mask, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < total
    key = tl.load(ids + lanes, mask=inside, other=-1)
    wanted = key >= 0
    # Fibonacci hashing with a xor-shift before it: row ids of one head are close to each other.
    slot = (((key ^ (key >> 29)) * -7046029254386353131) >> 20) & slot_mask
    active = wanted
    won = active & (key < 0)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        seen = tl.load(keys + slot, mask=active, other=0, volatile=True)
        claims = active & (seen == -1)
        # compare-and-swap takes no mask: a lane that claims nothing compares with -2, which no slot ever holds.
        before = tl.atomic_cas(keys + tl.where(claims, slot, lanes & slot_mask), tl.where(claims, -1, -2).to(tl.int64), key)
        first = claims & (before == -1)
        won = won | first
        seen = tl.where(claims, tl.where(first, key, before), seen)
        active = active & (seen != key)
        slot = tl.where(active, (slot + 1) & slot_mask, slot)
    winners = won.to(tl.int64)
    base = tl.atomic_add(count, tl.sum(winners, axis=0))
    number = base + tl.cumsum(winners, axis=0) - 1
    tl.store(unique + number, key, mask=won)
    tl.store(numbers + slot, number, mask=won)
    tl.store(slots + lanes, tl.where(wanted, slot, -1).to(tl.int32), mask=inside)


@triton.jit
def _number(slots, numbers, inverse, total, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < total
    slot = tl.load(slots + lanes, mask=inside, other=-1)
    number = tl.load(numbers + slot.to(tl.int64), mask=slot >= 0, other=-1)
    tl.store(inverse + lanes, number, mask=inside)


def unique_ids_triton(row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct ids; arguments and result as in :func:`unique_ids`."""
    flat = row_ids.reshape(-1).contiguous()  # a reshape alone may be a strided view
    total = flat.numel()
    if total > _MOST_IDS:
        raise ValueError(f"{total} ids: expected {_MOST_IDS} at most; pass them in pieces")
    unique, inverse = torch.full_like(flat, -1), torch.empty_like(flat)
    count = torch.zeros(1, dtype=torch.int64, device=flat.device)
    if total == 0:
        return unique, inverse, count
    # Half full at most, so that a probe seldom walks far.
    capacity = max(_BLOCK, 1 << (2 * total - 1).bit_length())
    keys = torch.full((capacity,), -1, dtype=torch.int64, device=flat.device)
    numbers = torch.empty_like(keys)
    slots = torch.empty(total, dtype=torch.int32, device=flat.device)
    wide = 1024
    with torch.cuda.device_of(flat):
        grid = (triton.cdiv(total, _BLOCK),)
        _insert[grid](flat, keys, numbers, slots, unique, count, total, capacity - 1, BLOCK=_BLOCK)  # pyright: ignore[reportArgumentType]
        _number[(triton.cdiv(total, wide),)](slots, numbers, inverse, total, BLOCK=wide)  # pyright: ignore[reportArgumentType]
    return unique, inverse, count
