"""The gather from two homes as one Triton kernel. Imports torch, triton and row_gather's helpers.

A program probes the index for a handful of ids, then asks for each row where it is: rows that hit touch only the device's memory, and
only the others pay for a read of the host's.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from ..row_gather.fused import (
    DEVICE_TILE,
    DEVICE_WARPS,
    HOST_TILE,
    HOST_WARPS,
    MAX_CHUNK,
    WORD_TYPES,
    count_outside,
    dequantised,
    word_bytes,
)
from .reference import FIRST, SECOND, STEP

# Over host memory a bounded number of programs walks the rows, as in row_gather; more of them, since most rows are hits.
HOST_PROGRAMS = 256
_FIRST, _SECOND, _STEP = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(STEP)
_MASK32, _MASK33 = tl.constexpr((1 << 32) - 1), tl.constexpr((1 << 33) - 1)
_MASK34, _MASK37 = tl.constexpr((1 << 34) - 1), tl.constexpr((1 << 37) - 1)


@triton.jit
def mix64(x):
    """`mix` of reference.py."""
    x = (x ^ ((x >> 30) & _MASK34)) * _FIRST
    x = (x ^ ((x >> 27) & _MASK37)) * _SECOND
    return x ^ ((x >> 31) & _MASK33)


@triton.jit
def _mix_kernel(x, out, COUNT: tl.constexpr):
    """mix64 alone, so that its bits can be held against numpy's and torch's."""
    at = tl.arange(0, COUNT)
    tl.store(out + at, mix64(tl.load(x + at)))


@triton.jit
def probe_slots(keys, displacement, ids, slots, buckets):
    """Slots of int64 ids, -1 where an id is not a key."""
    mixed = mix64(ids)
    bucket = (((mixed >> 32) & _MASK32) * buckets) >> 32
    moved = tl.load(displacement + bucket, mask=ids >= 0, other=0).to(tl.int64)
    slot = (((mix64(mixed + (moved + 1) * _STEP) >> 32) & _MASK32) * slots) >> 32
    key = tl.load(keys + slot, mask=ids >= 0, other=-1)
    return tl.where((key == ids) & (ids >= 0), slot, -1)


@triton.jit(do_not_specialize=["count", "rows", "slots", "buckets"])
def _hot_gather_kernel(
    hot_payload,
    hot_scale,
    keys,
    displacement,
    payload,
    scale,
    row_ids,
    out,
    hits,
    violations,
    count,
    rows,
    slots,
    buckets,
    hot_payload_stride: tl.constexpr,
    hot_scale_stride: tl.constexpr,
    payload_stride: tl.constexpr,
    scale_stride: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    WORD_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (p, c): words ``c * CHUNK ...`` of rows p * ROWS ... of every num_programs-th block."""
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    whole = place < WIDTH // WORD
    group = chunk * (CHUNK * WORD // 32) + tl.arange(0, CHUNK * WORD // 32)
    scaled = group < WIDTH // 32
    value = chunk * (CHUNK * WORD) + tl.arange(0, CHUNK * WORD)
    hot_words = tl.cast(hot_payload, tl.pointer_type(WORD_TYPE))  # pyright: ignore[reportArgumentType]
    table_words = tl.cast(payload, tl.pointer_type(WORD_TYPE))  # pyright: ignore[reportArgumentType]
    found = tl.zeros([ROWS], dtype=tl.int64)
    seen = tl.zeros([ROWS], dtype=tl.int64)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        position = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        asked = position < count
        ids = tl.load(row_ids + position, mask=asked, other=-1)
        slot = probe_slots(keys, displacement, ids, slots, buckets)
        # A row that the table lacks is outside, whatever the index says.
        slot = tl.where(ids < rows, slot, -1)
        hit = slot >= 0
        miss = (slot < 0) & (ids >= 0) & (ids < rows)
        at_hot = tl.where(hit, slot, 0)[:, None]
        at_table = tl.where(miss, ids, 0)[:, None]
        from_hot = hit[:, None] & whole[None, :]
        from_table = miss[:, None] & whole[None, :]
        # All loads stand before the first use of any. The masks never meet, and a masked load asks for nothing.
        cold = tl.load(table_words + at_table * (payload_stride // WORD) + place[None, :], mask=from_table, other=0)
        cold_byte = tl.load(scale + at_table * scale_stride + group[None, :], mask=miss[:, None] & scaled[None, :], other=0)
        warm = tl.load(hot_words + at_hot * (hot_payload_stride // WORD) + place[None, :], mask=from_hot, other=0)
        warm_byte = tl.load(hot_scale + at_hot * hot_scale_stride + group[None, :], mask=hit[:, None] & scaled[None, :], other=0)
        result = dequantised(cold | warm, cold_byte | warm_byte, WORD, ROWS, CHUNK).to(out.dtype.element_ty)
        tl.store(out + position[:, None] * WIDTH + value[None, :], result, mask=asked[:, None] & (value < WIDTH)[None, :])

        found += hit.to(tl.int64)
        seen += (ids != -1).to(tl.int64)
        if violations is not None:
            count_outside(violations, ids, asked, rows, chunk, ROWS)
    if hits is not None:
        number_found, number_seen = tl.sum(found, axis=0), tl.sum(seen, axis=0)
        if chunk == 0:
            tl.atomic_add(hits, number_found)
            tl.atomic_add(hits + 1, number_seen)


def launch(
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
    """Fill ``out`` and add to the counters.

    Raises:
        ValueError: the table is plain host memory, which the device cannot address.
    """
    flat = row_ids.contiguous().view(-1)
    width = payload.shape[1]
    if flat.numel() == 0 or width == 0:
        return
    over_bus = row_ids.is_cuda and not payload.is_cuda
    word = gcd(word_bytes(payload), word_bytes(hot_payload))
    chunk = min(1 << (width - 1).bit_length(), MAX_CHUNK) // word
    rows = max(1, (HOST_TILE if over_bus else DEVICE_TILE) // (chunk * word))
    blocks = -(-flat.numel() // rows)
    grid = (min(blocks, HOST_PROGRAMS) if over_bus else blocks, -(-(width // word) // chunk))
    try:
        with torch.cuda.device_of(flat):
            _hot_gather_kernel[grid](
                hot_payload.view(torch.uint8),
                hot_scale,
                hot_keys,
                displacement,
                payload.view(torch.uint8),
                scale,
                flat,
                out,
                hits,
                violations,
                flat.numel(),
                payload.shape[0],
                hot_keys.shape[0],
                displacement.shape[0],
                hot_payload.stride(0),
                hot_scale.stride(0),
                payload.stride(0),
                scale.stride(0),
                width,
                word,
                WORD_TYPES[word],
                rows,
                chunk,
                num_warps=HOST_WARPS if over_bus else DEVICE_WARPS,  # pyright: ignore[reportCallIssue]
                num_stages=1,  # pyright: ignore[reportCallIssue]
            )
    except ValueError as error:
        if "cannot be accessed" not in str(error):
            raise
        raise ValueError(
            "the table is in plain host memory, which the device cannot read: pin it (home 'pinned'), register it, or gather on the CPU"
        ) from error
