"""The gather as one Triton kernel: words of a row from any memory that the device can address, to values. Imports torch and triton.

A row is read in the widest words that its addresses allow. Device memory gets a program for every few rows; over host memory
a bounded number of programs walks the rows, since the bus is full long before the multiprocessors are, and what runs beside
the gather needs those.
"""

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

# Bytes of payload that one program has in flight.
DEVICE_TILE = 1024
# Over the bus: programs of one warp, which find room beside whatever fills the multiprocessors, and few of them. 64 programs of four
# warps took 10 % less time alone, but slowed the decoder that they run beside by 1.2 to 2.5 %; these by 1.0 % (batches of 32 and 256).
HOST_TILE = 2048
HOST_PROGRAMS, MOST_HOST_PROGRAMS, HOST_ROWS = 32, 128, 256  # more of them where each would read more than HOST_ROWS rows
DEVICE_WARPS, HOST_WARPS = 2, 1
# A row wider than this is read by several programs.
MAX_CHUNK = 4096
WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def scale_of(byte):
    """float32 2 ** (byte - 127) of e8m0 bytes: byte 0 is a subnormal, byte 255 is NaN."""
    wide = byte.to(tl.int32) & 0xFF
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    bits = tl.where(wide == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def values_of(words, WORD: tl.constexpr):
    """float32 ``[..., WORD]`` of the e4m3 bytes in words ``[A, B]`` of ``WORD`` bytes, without any scale.

    By integer work, which needs no float8 unit: exponent and mantissa moved to float32's place make a number that is
    2 ** 120 too small, subnormals included, and the product with 2 ** 120 is exact.
    """
    places = tl.arange(0, WORD)[None, None, :] * 8
    wide = words[:, :, None] if WORD == 8 else words.to(tl.int32)[:, :, None]
    # Each byte at the top of an int32, its sign where float32 has it.
    top = ((wide << (56 - places)) >> 32).to(tl.int32) if WORD == 8 else wide << (24 - places)
    magnitude = (top >> 4) & 0x07F00000
    bits = (top & -2147483648) | magnitude
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x07F00000, float("nan"), value)


@triton.jit
def dequantised(words, byte, WORD: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """float32 ``[ROWS, CHUNK * WORD]`` of words ``[ROWS, CHUNK]`` and their scale bytes ``[ROWS, CHUNK * WORD / 32]``.

    Two-dimensional at both ends, so that the compiler lays threads along what is contiguous in memory; given the three
    dimensions in between it may lay them across rows.
    """
    factor = tl.broadcast_to(scale_of(byte)[:, :, None], [ROWS, CHUNK * WORD // 32, 32 // WORD])
    return tl.reshape(values_of(words, WORD) * tl.reshape(factor, [ROWS, CHUNK])[:, :, None], [ROWS, CHUNK * WORD])


@triton.jit
def dequantised_by_unit(bytes_, byte, ROWS: tl.constexpr, VALUES: tl.constexpr):
    """As `dequantised`, of e4m3 bytes uint8 ``[ROWS, VALUES]``, by the device's own float8 conversion: 30 % fewer instructions."""
    values = tl.reshape(bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ROWS, VALUES // 32, 32])
    return tl.reshape(values * scale_of(byte)[:, :, None], [ROWS, VALUES])


@triton.jit
def count_outside(violations, ids, asked, rows_total, chunk, ROWS: tl.constexpr):
    """Add to ``violations`` how many of the ids ``[ROWS]`` are outside the table, and which is the first; once for a row, by chunk 0."""
    bad = asked & ((ids < -1) | (ids >= rows_total))
    number = tl.sum(bad.to(tl.int32), axis=0)
    if (number > 0) & (chunk == 0):
        before = tl.atomic_add(violations, number.to(tl.int64))
        if before == 0:
            lane = tl.arange(0, ROWS)
            earliest = tl.min(tl.where(bad, lane, ROWS), axis=0)
            tl.store(violations + 1, tl.sum(tl.where(lane == earliest, ids, 0), axis=0))


@triton.jit(do_not_specialize=["count", "first_row", "rows", "rows_total"])
def _row_gather_kernel(
    payload,
    scale,
    row_ids,
    out,
    violations,
    count,
    first_row,
    rows,
    rows_total,
    payload_stride: tl.constexpr,
    scale_stride: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    WORD_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Program (p, c): words ``c * CHUNK ...`` of rows p * ROWS ... of every num_programs-th block."""
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    whole = place < WIDTH // WORD
    group = chunk * (CHUNK * WORD // 32) + tl.arange(0, CHUNK * WORD // 32)
    value = chunk * (CHUNK * WORD) + tl.arange(0, CHUNK * WORD)
    words_at = tl.cast(payload, tl.pointer_type(WORD_TYPE))  # pyright: ignore[reportArgumentType]
    blocks = tl.cdiv(count, ROWS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        position = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        asked = position < count
        ids = tl.load(row_ids + position, mask=asked, other=-1)
        slot = ids - first_row
        here = (slot >= 0) & (slot < rows)
        # Not by a mask alone: an address far outside is never even formed.
        slot = tl.where(here, slot, 0)
        scaled = here[:, None] & (group < WIDTH // 32)[None, :]
        # Both loads stand before the first use of either, so that a program waits once. An absent row is 0 * 2 ** -127.
        if FLOAT8:
            wanted = here[:, None] & (value < WIDTH)[None, :]
            bytes_ = tl.load(payload + slot[:, None] * payload_stride + value[None, :], mask=wanted, other=0)
            byte = tl.load(scale + slot[:, None] * scale_stride + group[None, :], mask=scaled, other=0)
            result = dequantised_by_unit(bytes_, byte, ROWS, CHUNK * WORD)
        else:
            wanted = here[:, None] & whole[None, :]
            words = tl.load(words_at + slot[:, None] * (payload_stride // WORD) + place[None, :], mask=wanted, other=0)
            byte = tl.load(scale + slot[:, None] * scale_stride + group[None, :], mask=scaled, other=0)
            result = dequantised(words, byte, WORD, ROWS, CHUNK)
        stored = asked[:, None] & (value < WIDTH)[None, :]
        tl.store(out + position[:, None] * WIDTH + value[None, :], result.to(out.dtype.element_ty), mask=stored)

        if violations is not None:
            count_outside(violations, ids, asked, rows_total, chunk, ROWS)


def word_bytes(payload: torch.Tensor) -> int:
    """The widest of 8, 4, 2 and 1 bytes in which every row of ``payload`` can be read."""
    return gcd(payload.data_ptr(), payload.stride(0), payload.shape[1], 8)


def host_programs(count: int) -> int:
    """Programs that read ``count`` rows over the bus."""
    return max(HOST_PROGRAMS, min(MOST_HOST_PROGRAMS, count // HOST_ROWS))


@lru_cache(maxsize=16)
def _has_float8(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


def by_unit(payload: torch.Tensor, row_ids: torch.Tensor) -> bool:
    """Whether the device converts float8 itself, and the compiler sees from the addresses that bytes can be read eight at a time."""
    aligned = payload.data_ptr() % 16 == 0 and payload.stride(0) % 8 == 0 and payload.shape[1] % 8 == 0
    return row_ids.is_cuda and aligned and _has_float8(row_ids.get_device())


def launch(
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    first_row: int,
    rows_total: int,
    out: torch.Tensor,
    violations: torch.Tensor | None,
    *,
    word: int | None = None,
    tile: int | None = None,
    programs: int | None = None,
    warps: int | None = None,
    float8: bool | None = None,
) -> None:
    """Fill ``out``; the keyword arguments are for benchmarks, None is the rule.

    Raises:
        ValueError: the table is plain host memory, which the device cannot address.
    """
    flat = row_ids.contiguous().view(-1)
    width = payload.shape[1]
    if flat.numel() == 0 or width == 0:
        return
    over_bus = row_ids.is_cuda and not payload.is_cuda
    float8 = by_unit(payload, flat) if float8 is None else float8
    word = word or word_bytes(payload)
    chunk = min(1 << (width - 1).bit_length(), MAX_CHUNK) // word
    tile = tile or (HOST_TILE if over_bus else DEVICE_TILE)
    rows = max(1, tile // (chunk * word))
    blocks = -(-flat.numel() // rows)
    programs = min(blocks, programs or (host_programs(flat.numel()) if over_bus else blocks))
    grid = (programs, -(-(width // word) // chunk))
    try:
        with torch.cuda.device_of(flat):
            _row_gather_kernel[grid](
                payload.view(torch.uint8),
                scale,
                flat,
                out,
                violations,
                flat.numel(),
                first_row,
                payload.shape[0],
                rows_total,
                payload.stride(0),
                scale.stride(0),
                width,
                word,
                WORD_TYPES[word],
                rows,
                chunk,
                float8,
                num_warps=warps or (HOST_WARPS if over_bus else DEVICE_WARPS),  # pyright: ignore[reportCallIssue]
                num_stages=1,  # pyright: ignore[reportCallIssue]
            )
    except ValueError as error:
        if "cannot be accessed" not in str(error):
            raise
        raise ValueError(
            "the table is in plain host memory, which the device cannot read: pin it (home 'pinned'), register it, or gather on the CPU"
        ) from error
