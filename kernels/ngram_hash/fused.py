"""The hash as one Triton kernel, bit for bit the reference. Imports torch and triton.

A program prepares all primes once, then walks blocks of tokens.
"""

import torch
import triton
import triton.language as tl

# Row ids of one n-gram size that a program makes at a time, and programs: each has blocks enough to repay its preparation.
TILE = 2048
PROGRAMS = 1024
WARPS = 4


@triton.jit
def modulo_by(prime):
    """The factor uint64 floor((2**64 - 1) / prime) with which `modulo` divides; 2 <= prime < 2**62.

    2**64 - 1 = 2 (2**63 - 1) + 1, so signed arithmetic does: the half's remainder r is below the prime, and (2r + 1) / prime 0 or 1.
    """
    half = 9223372036854775807 // prime
    rest = 9223372036854775807 - half * prime
    return (2 * half + (2 * rest + 1 >= prime).to(tl.int64)).to(tl.uint64)


@triton.jit
def modulo(x, prime, factor):
    """x mod prime for 0 <= x < 2**63, all uint64, without a division (a 64-bit one is a hundred instructions).

    2**64 = factor * prime + e with 1 <= e <= prime, so x / prime exceeds x * factor / 2**64 by x * e / (prime * 2**64) < 1 / 2.
    The quotient below is therefore the right one or one less, and the remainder below 2 * prime < 2**63.
    """
    remainder = x - tl.umulhi(x, factor) * prime
    return tl.where(remainder >= prime, remainder - prime, remainder)


@triton.jit
def narrow_by(prime):
    """(bits of the prime, and two factors of 32 bits) with which `narrow_modulo` divides; 3 <= prime < 2**29, all uint32."""
    bits = tl.zeros_like(prime)
    for place in tl.static_range(29):
        bits += ((prime >> place) > 0).to(tl.uint32)
    one = tl.full(prime.shape, 1, tl.uint64)
    second = (one << (31 + bits.to(tl.uint64))) // prime.to(tl.uint64)
    # 2**32 for a power of two, which is none of the primes but may be tried.
    return bits, 4294967295 // prime, tl.where(second > 4294967295, 4294967295, second).to(tl.uint32)


@triton.jit
def narrow_modulo(x, prime, bits, first, second):
    """x mod prime for 0 <= x < 2**63 (uint64) and a prime below 2**29, in products of 32 bits: half the work of `modulo`.

    The upper half first, as in `modulo`: its remainder r is below the prime. Then y = r * 2**32 + lower half is below prime * 2**32,
    so that its quotient has 32 bits, and only the low 32 bits of y - quotient * prime are needed. Quotient: y without its lowest
    `bits` (an error below 2), times 2**(31 + bits) / prime rounded down (below 2), rounded down (below 1): at most 4 too small.
    """
    upper = (x >> 32).to(tl.uint32)
    lower = x.to(tl.uint32)
    rest = upper - tl.umulhi(upper, first) * prime
    rest = tl.minimum(rest, rest - prime)
    top = (rest << (32 - bits)) | (lower >> bits)
    quotient = ((top.to(tl.uint64) * second.to(tl.uint64)) >> 31).to(tl.uint32)
    rest = lower - quotient * prime
    rest = tl.minimum(rest, rest - 4 * prime)
    rest = tl.minimum(rest, rest - 2 * prime)
    return tl.minimum(rest, rest - prime)


@triton.jit(
    do_not_specialize=[
        *("pad_id", "tokens", "length", "blocked_row", "blocked_time", "history_row", "history_time"),
        *("history_blocked_row", "history_blocked_time", "salt_row", "salt_time"),
    ]
)
def _ngram_hash_kernel(
    ids,
    blocked,
    history,
    history_blocked,
    salt,
    multipliers,
    primes,
    out,
    pad_id,
    tokens,
    length,
    ids_row,
    ids_time,
    blocked_row,
    blocked_time,
    history_row,
    history_time,
    history_blocked_row,
    history_blocked_time,
    salt_row,
    salt_time,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program p: all n-grams that end at the tokens of every num_programs-th block; strides are those of ``[rows, time]``.

    A token's row ids stand side by side in memory, so one program writes them all: programs that each wrote their size's part
    of other tokens reached 40 % of the copy rate.
    """
    columns: tl.constexpr = (ORDER - 1) * HEADS
    head = tl.arange(0, PADDED_HEADS)
    real = head < HEADS
    divisors = ()
    offsets = ()
    before = tl.zeros([], dtype=tl.int64)
    least = tl.full([], 3, dtype=tl.int64)
    largest = tl.full([], 3, dtype=tl.int64)
    for size in tl.static_range(ORDER - 1):
        prime = tl.load(primes + size * HEADS + head, mask=real, other=3)
        divisors = divisors + (prime,)
        offsets = offsets + (before + tl.cumsum(tl.where(real, prime, 0), axis=0) - prime,)
        before += tl.sum(tl.where(real, prime, 0), axis=0)
        least = tl.minimum(least, tl.min(prime, axis=0))
        largest = tl.maximum(largest, tl.max(prime, axis=0))
    # What moduli of the published sizes allow.
    narrow = (largest < 536870912) & (least > 2)
    factors = ()
    narrow_bits = ()
    narrow_first = ()
    narrow_second = ()
    for size in tl.static_range(ORDER - 1):
        factors = factors + (modulo_by(divisors[size]),)
        bits, first, second = narrow_by(tl.where(narrow, divisors[size], 3).to(tl.uint32))
        narrow_bits = narrow_bits + (bits,)
        narrow_first = narrow_first + (first,)
        narrow_second = narrow_second + (second,)

    # Not tl.cdiv, whose sum passes 2**31 where the tokens just do not.
    for block in range(tl.program_id(0), (tokens - 1) // BLOCK + 1, tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK if WIDE else block * BLOCK
        token = start + tl.arange(0, BLOCK)
        asked = token < tokens
        row = tl.zeros([BLOCK], dtype=tl.int64) if ONE_ROW else (token // length).to(tl.int64)
        time = token.to(tl.int64) - row * length
        running = tl.zeros([BLOCK], dtype=tl.int64)
        if salt is not None:
            running = tl.load(salt + row * salt_row + time * salt_time, mask=asked, other=0)
        dead = tl.zeros([BLOCK], dtype=tl.int1)
        for back in tl.static_range(ORDER):
            at = time - back
            now = asked & (at >= 0)
            past = asked & (at < 0)
            look_back = tl.load(ids + row * ids_row + at * ids_time, mask=now, other=0).to(tl.int64)
            if blocked is not None:
                dead = dead | (tl.load(blocked + row * blocked_row + at * blocked_time, mask=now, other=0) != 0)
            if history is None:
                # Without a history the positions before the sequence do not exist, which is the same as blocked.
                dead = dead | past
            else:
                slot = at + (ORDER - 1)
                look_back += tl.load(history + row * history_row + slot * history_time, mask=past, other=0).to(tl.int64)
                if history_blocked is not None:
                    stop = tl.load(history_blocked + row * history_blocked_row + slot * history_blocked_time, mask=past, other=0)
                    dead = dead | (stop != 0)
            # Once one look-back is blocked every older one is pad too: an n-gram never reaches across a gap.
            running = running ^ (tl.where(dead, pad_id, look_back) * tl.load(multipliers + back))
            if back > 0:
                # Below 0 are only ids below 0 and products beyond 2**63, so that the work for them stands aside. There, as % does,
                # x mod p = p - 1 - (~x mod p).
                below = tl.min((running >> 32).to(tl.int32), axis=0) < 0
                x = tl.broadcast_to((running ^ (running >> 63)).to(tl.uint64)[:, None], [BLOCK, PADDED_HEADS])
                divisor = divisors[back - 1]
                if narrow:
                    known = (narrow_bits[back - 1][None, :], narrow_first[back - 1][None, :], narrow_second[back - 1][None, :])
                    rest = narrow_modulo(x, divisor.to(tl.uint32)[None, :], known[0], known[1], known[2]).to(tl.int64)
                else:
                    wide = tl.broadcast_to(divisor.to(tl.uint64)[None, :], [BLOCK, PADDED_HEADS])
                    factor = tl.broadcast_to(factors[back - 1][None, :], [BLOCK, PADDED_HEADS])
                    rest = modulo(x, wide, factor).to(tl.int64)
                if below:
                    rest = tl.where((running < 0)[:, None], divisor[None, :] - 1 - rest, rest)
                target = token.to(tl.int64)[:, None] * columns + ((back - 1) * HEADS + head)[None, :]
                tl.store(out + target, rest + offsets[back - 1][None, :], mask=asked[:, None] & real[None, :])


def _rows(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, int, int]:
    """A tensor that expands to ``shape`` as ``[rows, time]`` and its two strides; flags as bytes."""
    if tensor is None:
        return None, 0, 0
    flat = tensor.expand(shape).reshape(-1, shape[-1])
    return (flat.view(torch.uint8) if flat.dtype == torch.bool else flat), flat.stride(0), flat.stride(1)


def launch(
    canonical: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    pad_id: int,
    blocked: torch.Tensor | None,
    history: torch.Tensor | None,
    history_blocked: torch.Tensor | None,
    salt: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tile: int = TILE,
    programs: int = PROGRAMS,
    warps: int = WARPS,
) -> None:
    """Fill ``out [..., T, columns]``; the keyword arguments are for benchmarks."""
    if out.numel() == 0:
        return
    order, heads = multipliers.shape[0], primes.shape[1]
    shape, past = tuple(canonical.shape), (*canonical.shape[:-1], order - 1)
    ids, ids_row, ids_time = _rows(canonical, shape)
    flags, flags_row, flags_time = _rows(blocked, shape)
    window, window_row, window_time = _rows(history, past)
    window_flags, window_flags_row, window_flags_time = _rows(history_blocked, past)
    start, start_row, start_time = _rows(salt, shape)
    padded = 1 << (heads - 1).bit_length()
    block = max(1, tile // padded)
    tokens = canonical.numel()
    grid = (min(-(-tokens // block), programs),)
    with torch.cuda.device_of(canonical):
        _ngram_hash_kernel[grid](
            ids,
            flags,
            window,
            window_flags,
            start,
            multipliers.contiguous(),
            primes.contiguous(),
            out,
            pad_id,
            tokens,
            shape[-1],
            ids_row,
            ids_time,
            flags_row,
            flags_time,
            window_row,
            window_time,
            window_flags_row,
            window_flags_time,
            start_row,
            start_time,
            order,
            heads,
            padded,
            block,
            tokens == shape[-1],
            tokens + block >= 2**31,
            num_warps=warps,  # pyright: ignore[reportCallIssue]
            num_stages=1,  # pyright: ignore[reportCallIssue]
        )
