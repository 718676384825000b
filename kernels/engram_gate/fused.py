"""The gate in Triton, forward, and what its backward (fused_backward.py) shares with it. Imports torch and triton.

Programs walk over tokens, each for a copy and a strided set of them (launch.py). Bytes from DRAM for each token and copy, in bf16
with four copies: x, key, a quarter of value, out. Three floats a row are left for the backward: dot and both inverse norms.
"""
# The stubs know neither launch options, nor that static_range can be walked over, nor that a tuple grows at compile time.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from .launch import Launch, as_rows, launch_for, programs_for, row_blocks
from .reference import SQRT_FLOOR

FLOOR = tl.constexpr(SQRT_FLOOR)


@triton.jit
def read(row, offsets, wanted, D: tl.constexpr, EXACT: tl.constexpr, GUARD: tl.constexpr):
    # A token that is masked is not read at all: what stands there may be NaN.
    if EXACT:
        if GUARD:
            return tl.load(row + offsets, mask=wanted & (offsets >= 0), other=0.0)
        else:
            return tl.load(row + offsets)
    else:
        if GUARD:
            return tl.load(row + offsets, mask=wanted & (offsets < D), other=0.0)
        else:
            return tl.load(row + offsets, mask=offsets < D, other=0.0)


@triton.jit
def write(row, offsets, value, D: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        tl.store(row + offsets, value)
    else:
        tl.store(row + offsets, value, mask=offsets < D)


@triton.jit
def gate_of(dot, V41: tl.constexpr):
    """(gate, root) of a dot product; NaN stays NaN."""
    size = tl.abs(dot)
    root = tl.sqrt_rn(tl.where(size < FLOOR, FLOOR, size))
    if V41:
        signed = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)
    else:
        signed = tl.where(dot > 0, root, tl.where(dot < 0, -root, root * 0.0))
    return tl.div_rn(1.0, 1.0 + tl.exp(-signed)), root


@triton.jit(do_not_specialize=["T", "programs"])
def _forward_kernel(
    out,
    stats,
    x,
    key,
    value,
    q_weight,
    k_weight,
    mask,
    T,
    programs,
    x_token,
    x_copy,
    key_token,
    key_copy,
    value_token,
    eps,
    root_size,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    V41: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MASKED: tl.constexpr,
    KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    EXACT: tl.constexpr = BLOCK * CHUNKS == D
    copy = (tl.program_id(0) % COPIES).to(tl.int64)
    program = tl.program_id(0) // COPIES  # among those of this copy
    lanes = tl.arange(0, BLOCK)
    weights = ()
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + lanes
        query = read(q_weight + copy * D, at, True, D, EXACT, False).to(tl.float32)
        weights = weights + (query * read(k_weight + copy * D, at, True, D, EXACT, False).to(tl.float32),)
    for t in tl.range(program, T, programs, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        wanted = True
        if MASKED:
            wanted = tl.load(mask + token) == 0
        xs = ()
        keys = ()
        values = ()
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + lanes
            xs = xs + (read(x + token * x_token + copy * x_copy, at, True, D, EXACT, False),)
            keys = keys + (read(key + token * key_token + copy * key_copy, at, wanted, D, EXACT, MASKED),)
            values = values + (read(value + token * value_token, at, wanted, D, EXACT, MASKED),)
        # Sums start at +0 as torch's do: copysign would see the sign of a sum of -0 alone.
        squares_x = tl.zeros([BLOCK], tl.float32)
        squares_key = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            wide_x = xs[i].to(tl.float32)
            wide_key = keys[i].to(tl.float32)
            squares_x += wide_x * wide_x
            squares_key += wide_key * wide_key
            products += wide_x * weights[i] * wide_key
        inv_x = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares_x) / D + eps))
        inv_key = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares_key) / D + eps))
        dot = tl.div_rn((tl.sum(products) + 0.0) * inv_x * inv_key, root_size)
        gate, _ = gate_of(dot, V41)
        if KEEP:
            place = stats + (token * COPIES + copy) * 3
            if MASKED:
                dot = tl.where(wanted, dot, 0.0)
                inv_x = tl.where(wanted, inv_x, 0.0)
                inv_key = tl.where(wanted, inv_key, 0.0)
            tl.store(place, dot)
            tl.store(place + 1, inv_x)
            tl.store(place + 2, inv_key)
        for i in tl.static_range(CHUNKS):
            result = gate * values[i].to(tl.float32)
            if RESIDUAL:
                result = xs[i].to(tl.float32) + result
            rounded = result.to(out.dtype.element_ty)
            if MASKED:
                if RESIDUAL:
                    rounded = tl.where(wanted, rounded, xs[i])
                else:
                    rounded = tl.where(wanted, rounded, tl.zeros([BLOCK], out.dtype.element_ty))
            write(out + (token * COPIES + copy) * D, i * BLOCK + lanes, rounded, D, EXACT)


def flat_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)


def forward(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    form: str,
    mask: torch.Tensor | None,
    residual: bool,
    keep: bool,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and, where `keep`, ``[..., copies, 3]`` float32 statistics for :func:`backward` (else an empty tensor)."""
    copies, size = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stats = torch.empty((*x.shape[:-1], 3) if keep else (0,), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out, stats
    launch = launch or launch_for("forward", size)
    block, chunks = row_blocks(size)
    rows, keys, values = as_rows(x, 2), as_rows(key, 2), as_rows(value, 1)
    tokens = rows.shape[0]
    programs = programs_for(launch, tokens, copies, x.device)
    with torch.cuda.device_of(x):
        _forward_kernel[(programs * copies,)](
            out,
            stats,
            rows,
            keys,
            values,
            q_weight.contiguous(),
            k_weight.contiguous(),
            flat_mask(mask),
            tokens,
            programs,
            rows.stride(0),
            rows.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            eps,
            size**0.5,
            D=size,
            COPIES=copies,
            BLOCK=block,
            CHUNKS=chunks,
            V41=form == "v41",
            RESIDUAL=residual,
            MASKED=mask is not None,
            KEEP=keep,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    return out, stats
