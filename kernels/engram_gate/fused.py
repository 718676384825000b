"""The gate in Triton, forward and backward, one kernel each. Imports torch and triton.

Both walk over tokens with one program for a copy and a strided set of tokens (launch.py). Bytes from DRAM for each token and
copy, in bf16 with four copies: forward x, key, a quarter of value, out; backward grad, x, key, a quarter of value and of its
gradient, and the gradients of x and key. The forward leaves three floats a row (dot and both inverse norms), so the backward
needs one sum before it can write, and so any program can compute the gate of any copy: the gradient of value, a sum over
copies, is taken by the copies' programs in turn, whose rows of grad are then in L2.
"""
# The stubs know neither launch options, nor that static_range can be walked over, nor that a tuple grows at compile time.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from .launch import Launch, as_rows, launch_for, row_blocks, slots_for
from .reference import SQRT_FLOOR

_FLOOR = tl.constexpr(SQRT_FLOOR)


@triton.jit
def _read(row, offsets, wanted, D: tl.constexpr, EXACT: tl.constexpr, GUARD: tl.constexpr):
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
def _write(row, offsets, value, D: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        tl.store(row + offsets, value)
    else:
        tl.store(row + offsets, value, mask=offsets < D)


@triton.jit
def _gate(dot, V41: tl.constexpr):
    """(gate, root) of a dot product; NaN stays NaN."""
    size = tl.abs(dot)
    root = tl.sqrt_rn(tl.where(size < _FLOOR, _FLOOR, size))
    if V41:
        signed = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)
    else:
        signed = tl.where(dot > 0, root, tl.where(dot < 0, -root, root * 0.0))
    return tl.div_rn(1.0, 1.0 + tl.exp(-signed)), root


@triton.jit(do_not_specialize=["T", "slots"])
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
    slots,
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
    program = tl.program_id(0)
    copy = (program % COPIES).to(tl.int64)
    slot = program // COPIES
    lanes = tl.arange(0, BLOCK)
    weights = ()
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + lanes
        query = _read(q_weight + copy * D, at, True, D, EXACT, False).to(tl.float32)
        weights = weights + (query * _read(k_weight + copy * D, at, True, D, EXACT, False).to(tl.float32),)
    for t in tl.range(slot, T, slots, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        wanted = True
        if MASKED:
            wanted = tl.load(mask + token) == 0
        xs = ()
        keys = ()
        values = ()
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + lanes
            xs = xs + (_read(x + token * x_token + copy * x_copy, at, True, D, EXACT, False),)
            keys = keys + (_read(key + token * key_token + copy * key_copy, at, wanted, D, EXACT, MASKED),)
            values = values + (_read(value + token * value_token, at, wanted, D, EXACT, MASKED),)
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
        gate, _ = _gate(dot, V41)
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
            _write(out + (token * COPIES + copy) * D, i * BLOCK + lanes, rounded, D, EXACT)


@triton.jit(do_not_specialize=["T", "slots"])
def _backward_kernel(
    grad_x,
    grad_key,
    grad_value,
    partial,
    grad,
    x,
    key,
    value,
    q_weight,
    k_weight,
    stats,
    mask,
    T,
    slots,
    grad_token,
    grad_copy,
    x_token,
    x_copy,
    key_token,
    key_copy,
    value_token,
    root_size,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    V41: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MASKED: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_KEY: tl.constexpr,
    NEED_VALUE: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    EXACT: tl.constexpr = BLOCK * CHUNKS == D
    THROUGH_GATE: tl.constexpr = NEED_X or NEED_KEY or NEED_WEIGHT
    program = tl.program_id(0)
    copy = (program % COPIES).to(tl.int64)
    slot = program // COPIES
    lanes = tl.arange(0, BLOCK)
    weights = ()
    sums = ()
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + lanes
        if NEED_X or NEED_KEY:
            query = _read(q_weight + copy * D, at, True, D, EXACT, False).to(tl.float32)
            weights = weights + (query * _read(k_weight + copy * D, at, True, D, EXACT, False).to(tl.float32),)
        if NEED_WEIGHT:
            sums = sums + (tl.zeros([BLOCK], tl.float32),)
    for t in tl.range(slot, T, slots, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        row = token * COPIES + copy
        wanted = True
        if MASKED:
            wanted = tl.load(mask + token) == 0
        dot = tl.load(stats + row * 3)
        gate, root = _gate(dot, V41)
        grads = ()
        for i in tl.static_range(CHUNKS):
            grads = grads + (_read(grad + token * grad_token + copy * grad_copy, i * BLOCK + lanes, True, D, EXACT, False),)
        if THROUGH_GATE:
            inv_x = tl.load(stats + row * 3 + 1)
            inv_key = tl.load(stats + row * 3 + 2)
            xs = ()
            keys = ()
            along = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                xs = xs + (_read(x + token * x_token + copy * x_copy, at, wanted, D, EXACT, MASKED),)
                keys = keys + (_read(key + token * key_token + copy * key_copy, at, wanted, D, EXACT, MASKED),)
            for i in tl.static_range(CHUNKS):
                wide_value = _read(value + token * value_token, i * BLOCK + lanes, wanted, D, EXACT, MASKED).to(tl.float32)
                along += grads[i].to(tl.float32) * wide_value
            slope = tl.sum(along) * gate * (1.0 - gate) * tl.div_rn(0.5, root)
            # Below the floor the root is a constant; a masked token has no gate (and its sum may be NaN).
            slope = tl.where(tl.abs(dot) < _FLOOR, 0.0, slope)
            if MASKED:
                slope = tl.where(wanted, slope, 0.0)
            cross = tl.div_rn(slope * inv_x * inv_key, root_size)
            shrink_x = slope * dot * inv_x * inv_x / D
            shrink_key = slope * dot * inv_key * inv_key / D
            new_sums = ()
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                wide_x = xs[i].to(tl.float32)
                wide_key = keys[i].to(tl.float32)
                if NEED_X:
                    result = cross * (weights[i] * wide_key) - shrink_x * wide_x
                    if MASKED:
                        # A weight that is not finite makes NaN of the zeros that stand for what was not read.
                        result = tl.where(wanted, result, 0.0)
                    if RESIDUAL:
                        result += grads[i].to(tl.float32)
                    _write(grad_x + row * D, at, result.to(grad_x.dtype.element_ty), D, EXACT)
                if NEED_KEY:
                    result = cross * (weights[i] * wide_x) - shrink_key * wide_key
                    if MASKED:
                        result = tl.where(wanted, result, 0.0)
                    _write(grad_key + row * D, at, result.to(grad_key.dtype.element_ty), D, EXACT)
                if NEED_WEIGHT:
                    new_sums = new_sums + (sums[i] + cross * (wide_x * wide_key),)
            if NEED_WEIGHT:
                sums = new_sums
        if NEED_VALUE:
            if COPIES == 1:
                if MASKED:
                    gate = tl.where(wanted, gate, 0.0)
                for i in tl.static_range(CHUNKS):
                    result = gate * grads[i].to(tl.float32)
                    if MASKED:
                        result = tl.where(wanted, result, 0.0)
                    _write(grad_value + token * D, i * BLOCK + lanes, result.to(grad_value.dtype.element_ty), D, EXACT)
            else:
                # Turns go round over tokens, so that no copy's program falls behind its siblings.
                if (t // slots + slot) % COPIES == copy:
                    gates = ()
                    for c in tl.static_range(COPIES):
                        other, _ = _gate(tl.load(stats + (token * COPIES + c) * 3), V41)
                        gates = gates + (other,)
                    for i in tl.static_range(CHUNKS):
                        at = i * BLOCK + lanes
                        result = tl.zeros([BLOCK], tl.float32)
                        for c in tl.static_range(COPIES):
                            # In 64 bits: a copy may begin beyond 2^31 although the stride stays below.
                            above = _read(grad + token * grad_token + tl.cast(grad_copy, tl.int64) * c, at, wanted, D, EXACT, MASKED)
                            result += gates[c] * above.to(tl.float32)
                        _write(grad_value + token * D, at, result.to(grad_value.dtype.element_ty), D, EXACT)
    if NEED_WEIGHT:
        for i in tl.static_range(CHUNKS):
            _write(partial + (slot.to(tl.int64) * COPIES + copy) * D, i * BLOCK + lanes, sums[i], D, EXACT)


def _flat_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
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
    slots = slots_for(launch, tokens, copies, x.device)
    with torch.cuda.device_of(x):
        _forward_kernel[(slots * copies,)](
            out,
            stats,
            rows,
            keys,
            values,
            q_weight.contiguous(),
            k_weight.contiguous(),
            _flat_mask(mask),
            tokens,
            slots,
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


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    stats: torch.Tensor,
    form: str,
    mask: torch.Tensor | None,
    residual: bool,
    need: list[bool],
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, key, value and (float32) of the product of both weights; an empty tensor for each that `need` leaves out."""
    copies, size = x.shape[-2:]
    grads = [torch.empty(t.shape if n else (0,), dtype=t.dtype, device=x.device) for t, n in zip((x, key, value), need[:3], strict=True)]
    if x.numel() == 0:
        weight = torch.zeros(q_weight.shape if need[3] else (0,), dtype=torch.float32, device=x.device)
        return grads[0], grads[1], grads[2].zero_(), weight
    launch = launch or launch_for("backward", size)
    block, chunks = row_blocks(size)
    above, rows, keys, values = as_rows(grad, 2), as_rows(x, 2), as_rows(key, 2), as_rows(value, 1)
    tokens = rows.shape[0]
    slots = slots_for(launch, tokens, copies, x.device)
    partial = torch.empty((slots, copies, size) if need[3] else (0,), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward_kernel[(slots * copies,)](
            *grads,
            partial,
            above,
            rows,
            keys,
            values,
            q_weight.contiguous(),
            k_weight.contiguous(),
            stats,
            _flat_mask(mask),
            tokens,
            slots,
            above.stride(0),
            above.stride(1),
            rows.stride(0),
            rows.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            size**0.5,
            D=size,
            COPIES=copies,
            BLOCK=block,
            CHUNKS=chunks,
            V41=form == "v41",
            RESIDUAL=residual,
            MASKED=mask is not None,
            NEED_X=need[0],
            NEED_KEY=need[1],
            NEED_VALUE=need[2],
            NEED_WEIGHT=need[3],
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    return grads[0], grads[1], grads[2], partial.sum(0) if need[3] else partial
