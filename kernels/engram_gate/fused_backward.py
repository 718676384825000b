"""The gate's backward in Triton, one kernel. Imports torch and triton.

Walks over tokens as the forward does. Bytes from DRAM for each token and copy, in bf16 with four copies: grad, x, key, a quarter of
value and of its gradient, and the gradients of x and key. With the forward's three floats a row (dot and both inverse norms) one
sum is needed before anything can be written, and any program can compute the gate of any copy: the gradient of value, a sum over
copies, is taken by the copies' programs in turn, whose rows of grad are then in L2.
"""
# The stubs know neither launch options, nor that static_range can be walked over, nor that a tuple grows at compile time.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from .fused import FLOOR, flat_mask, gate_of, read, write
from .launch import Launch, as_rows, launch_for, programs_for, row_blocks


@triton.jit(do_not_specialize=["T", "programs"])
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
    programs,
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
    copy = (tl.program_id(0) % COPIES).to(tl.int64)
    program = tl.program_id(0) // COPIES  # among those of this copy
    lanes = tl.arange(0, BLOCK)
    weights = ()
    sums = ()
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK + lanes
        if NEED_X or NEED_KEY:
            query = read(q_weight + copy * D, at, True, D, EXACT, False).to(tl.float32)
            weights = weights + (query * read(k_weight + copy * D, at, True, D, EXACT, False).to(tl.float32),)
        if NEED_WEIGHT:
            sums = sums + (tl.zeros([BLOCK], tl.float32),)
    for t in tl.range(program, T, programs, num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        row = token * COPIES + copy
        wanted = True
        if MASKED:
            wanted = tl.load(mask + token) == 0
        dot = tl.load(stats + row * 3)
        gate, root = gate_of(dot, V41)
        grads = ()
        for i in tl.static_range(CHUNKS):
            grads = grads + (read(grad + token * grad_token + copy * grad_copy, i * BLOCK + lanes, True, D, EXACT, False),)
        if THROUGH_GATE:
            inv_x = tl.load(stats + row * 3 + 1)
            inv_key = tl.load(stats + row * 3 + 2)
            xs = ()
            keys = ()
            along = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                xs = xs + (read(x + token * x_token + copy * x_copy, at, wanted, D, EXACT, MASKED),)
                keys = keys + (read(key + token * key_token + copy * key_copy, at, wanted, D, EXACT, MASKED),)
            for i in tl.static_range(CHUNKS):
                wide_value = read(value + token * value_token, i * BLOCK + lanes, wanted, D, EXACT, MASKED).to(tl.float32)
                along += grads[i].to(tl.float32) * wide_value
            slope = tl.sum(along) * gate * (1.0 - gate) * tl.div_rn(0.5, root)
            # Below the floor the root is a constant; a masked token has no gate (and its sum may be NaN).
            slope = tl.where(tl.abs(dot) < FLOOR, 0.0, slope)
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
                    write(grad_x + row * D, at, result.to(grad_x.dtype.element_ty), D, EXACT)
                if NEED_KEY:
                    result = cross * (weights[i] * wide_x) - shrink_key * wide_key
                    if MASKED:
                        result = tl.where(wanted, result, 0.0)
                    write(grad_key + row * D, at, result.to(grad_key.dtype.element_ty), D, EXACT)
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
                    write(grad_value + token * D, i * BLOCK + lanes, result.to(grad_value.dtype.element_ty), D, EXACT)
            else:
                # Turns go round over tokens, so that no copy's program falls behind its siblings.
                if (t // programs + program) % COPIES == copy:
                    gates = ()
                    for c in tl.static_range(COPIES):
                        other, _ = gate_of(tl.load(stats + (token * COPIES + c) * 3), V41)
                        gates = gates + (other,)
                    for i in tl.static_range(CHUNKS):
                        at = i * BLOCK + lanes
                        result = tl.zeros([BLOCK], tl.float32)
                        for c in tl.static_range(COPIES):
                            # In 64 bits: a copy may begin beyond 2^31 although the stride stays below.
                            above = read(grad + token * grad_token + tl.cast(grad_copy, tl.int64) * c, at, wanted, D, EXACT, MASKED)
                            result += gates[c] * above.to(tl.float32)
                        write(grad_value + token * D, at, result.to(grad_value.dtype.element_ty), D, EXACT)
    if NEED_WEIGHT:
        for i in tl.static_range(CHUNKS):
            write(partial + (program.to(tl.int64) * COPIES + copy) * D, i * BLOCK + lanes, sums[i], D, EXACT)


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
    programs = programs_for(launch, tokens, copies, x.device)
    partial = torch.empty((programs, copies, size) if need[3] else (0,), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward_kernel[(programs * copies,)](
            *grads,
            partial,
            above,
            rows,
            keys,
            values,
            q_weight.contiguous(),
            k_weight.contiguous(),
            stats,
            flat_mask(mask),
            tokens,
            programs,
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
