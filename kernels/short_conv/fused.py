"""The short convolution in Triton, forward and backward. Imports torch, triton and how the gate cuts rows into blocks.

A sum over D (one row) and a sum over time (one channel) do not fit one program, so each direction takes two kernels: forward
the inverse norm of every row, then taps and SiLU over tiles of time x channels; backward the slope before SiLU over the same
tiles (in float32, with one partial sum of the taps' gradient for each program), then row by row the gradient of v.
"""
# The stubs know neither launch options, nor that static_range can be walked over, nor that a tuple grows at compile time.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from ..engram_gate.launch import launch_for, row_blocks, slots_for

# A tile of 16 steps and 128 channels: 16 values a thread forward and 8 backward, and taps a few steps back are in the L1 cache.
_STEPS, _CHANNELS = 16, 128
# Tiles that one program of the backward walks over: its partial sums cost 4 K / (16 * 8) bytes a value.
_TILES = 8


@triton.jit(do_not_specialize=["T", "rows", "slots"])
def _inverse_kernel(
    inverse,
    v,
    T,
    rows,
    slots,
    v_batch,
    v_time,
    v_copy,
    eps,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    program = tl.program_id(0)
    copy = (program % COPIES).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    for n in tl.range(program // COPIES, rows, slots):
        row = tl.cast(n, tl.int64)
        base = v + (row // T) * v_batch + (row % T) * v_time + copy * v_copy
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + lanes
            wide = tl.load(base + at, mask=at < D, other=0.0).to(tl.float32)
            squares += wide * wide
        tl.store(inverse + row * COPIES + copy, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares) / D + eps)))


@triton.jit
def _normed(v, inverse, batch, steps, copy, channels, norm, T, v_batch, v_time, v_copy, D: tl.constexpr, COPIES: tl.constexpr):
    """float32 ``[steps, channels]`` of rms(v) * norm_weight; zeros before the sequence and after it."""
    inside = (steps >= 0) & (steps < T)
    places = (batch * T + steps) * COPIES + copy
    scale = tl.load(inverse + places, mask=inside, other=0.0)
    at = batch * v_batch + steps * v_time + copy * v_copy
    wide = tl.load(v + at[:, None] + channels[None, :], mask=inside[:, None] & (channels < D)[None, :], other=0.0).to(tl.float32)
    return wide * scale[:, None] * norm[None, :]


@triton.jit(do_not_specialize=["T"])
def _mix_kernel(
    out,
    slope,
    partial,
    v,
    grad,
    inverse,
    weight,
    norm_weight,
    T,
    v_batch,
    v_time,
    v_copy,
    grad_batch,
    grad_time,
    grad_copy,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    BACKWARD: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
):
    """Forward: `out`. Backward: `slope`, the gradient before SiLU, and `partial`, this program's part of the taps' gradient."""
    across: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    copy = (program // across % COPIES).to(tl.int64)
    segment = program // (across * COPIES)
    segments = tl.cdiv(T, STEPS * TILES)
    batch = (segment // segments).to(tl.int64)
    channels = (program % across) * CHANNELS + tl.arange(0, CHANNELS)
    real = channels < D
    norm = tl.load(norm_weight + copy * D + channels, mask=real, other=0.0).to(tl.float32)
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([CHANNELS], tl.float32),)
    first = (segment % segments) * TILES
    for tile in tl.range(first, tl.minimum(first + TILES, tl.cdiv(T, STEPS))):
        steps = tl.cast(tile, tl.int64) * STEPS + tl.arange(0, STEPS)
        inside = (steps < T)[:, None] & real[None, :]
        mixed = tl.zeros([STEPS, CHANNELS], tl.float32)
        for j in tl.static_range(TAPS):
            tap = tl.load(weight + (copy * D + channels) * TAPS + j, mask=real, other=0.0).to(tl.float32)
            past = steps - (TAPS - 1 - j) * DILATION
            normed = _normed(v, inverse, batch, past, copy, channels, norm, T, v_batch, v_time, v_copy, D, COPIES)
            mixed += normed * tap[None, :]
        place = ((batch * T + steps) * COPIES + copy)[:, None] * D + channels[None, :]
        grown = 1.0 + tl.exp(-mixed)
        if BACKWARD:
            at = batch * grad_batch + steps * grad_time + copy * grad_copy
            above = tl.load(grad + at[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
            share = tl.div_rn(tl.full([STEPS, CHANNELS], 1.0, tl.float32), grown)
            before = above * share * (1.0 + mixed * (1.0 - share))
            tl.store(slope + place, before, mask=inside)
            if NEED_WEIGHT:
                new_sums = ()
                for j in tl.static_range(TAPS):
                    past = steps - (TAPS - 1 - j) * DILATION
                    normed = _normed(v, inverse, batch, past, copy, channels, norm, T, v_batch, v_time, v_copy, D, COPIES)
                    new_sums = new_sums + (sums[j] + tl.sum(before * normed, axis=0),)
                sums = new_sums
        else:
            at = batch * v_batch + steps * v_time + copy * v_copy
            own = tl.load(v + at[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
            result = own + tl.div_rn(mixed, grown)
            tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    if NEED_WEIGHT:
        for j in tl.static_range(TAPS):
            place = ((segment.to(tl.int64) * COPIES + copy) * D + channels) * TAPS + j
            tl.store(partial + place, sums[j], mask=real)


@triton.jit(do_not_specialize=["T", "rows", "slots"])
def _rows_kernel(
    grad_v,
    partial,
    grad,
    slope,
    v,
    inverse,
    weight,
    norm_weight,
    T,
    rows,
    slots,
    v_batch,
    v_time,
    v_copy,
    grad_batch,
    grad_time,
    grad_copy,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    NEED_V: tl.constexpr,
    NEED_NORM: tl.constexpr,
):
    """The gradient of v from the slope before SiLU, and this program's part of norm_weight's."""
    program = tl.program_id(0)
    copy = (program % COPIES).to(tl.int64)
    slot = program // COPIES
    lanes = tl.arange(0, BLOCK)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    for n in tl.range(slot, rows, slots):
        row = tl.cast(n, tl.int64)
        batch = row // T
        time = row % T
        scale = tl.load(inverse + row * COPIES + copy)
        inner = tl.zeros([BLOCK], tl.float32)
        values = ()
        pulls = ()
        new_sums = ()
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + lanes
            real = at < D
            found = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(TAPS):
                ahead = (TAPS - 1 - j) * DILATION
                tap = tl.load(weight + (copy * D + at) * TAPS + j, mask=real, other=0.0).to(tl.float32)
                place = slope + ((row + ahead) * COPIES + copy) * D + at
                found += tap * tl.load(place, mask=real & (time + ahead < T), other=0.0)
            wide = tl.load(v + batch * v_batch + time * v_time + copy * v_copy + at, mask=real, other=0.0).to(tl.float32)
            new_sums = new_sums + (sums[i] + found * (wide * scale),)
            pull = found * tl.load(norm_weight + copy * D + at, mask=real, other=0.0).to(tl.float32)
            inner += pull * wide
            values = values + (wide,)
            pulls = pulls + (pull,)
        sums = new_sums
        if NEED_V:
            shrink = tl.sum(inner) * scale * scale * scale / D
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                place = grad + batch * grad_batch + time * grad_time + copy * grad_copy + at
                above = tl.load(place, mask=at < D, other=0.0).to(tl.float32)
                result = above + (scale * pulls[i] - shrink * values[i])
                tl.store(grad_v + (row * COPIES + copy) * D + at, result.to(grad_v.dtype.element_ty), mask=at < D)
    if NEED_NORM:
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + lanes
            tl.store(partial + (slot.to(tl.int64) * COPIES + copy) * D + at, sums[i], mask=at < D)


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _programs(v: torch.Tensor, tiles: int) -> tuple[int, int]:
    """(segments of time over all sequences, programs)."""
    batch, time, copies, size = v.shape
    segments = batch * -(-time // (_STEPS * tiles))
    return segments, segments * copies * -(-size // _CHANNELS)


def forward(
    v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, dilation: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and the inverse norms, float32 ``[B, T, copies]``."""
    batch, time, copies, size = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inverse = torch.empty(v.shape[:-1], dtype=torch.float32, device=v.device)
    if out.numel() == 0:
        return out, inverse
    v = _last_contiguous(v)
    launch, (block, chunks) = launch_for("forward", size), row_blocks(size)
    slots = slots_for(launch, batch * time, copies, v.device)
    with torch.cuda.device_of(v):
        _inverse_kernel[(slots * copies,)](
            inverse,
            v,
            time,
            batch * time,
            slots,
            *v.stride()[:3],
            eps,
            D=size,
            COPIES=copies,
            BLOCK=block,
            CHUNKS=chunks,
            num_warps=launch.warps,
        )
        _mix_kernel[(_programs(v, 1)[1],)](
            out,
            None,
            None,
            v,
            None,
            inverse,
            weight.contiguous(),
            norm_weight.contiguous(),
            time,
            *v.stride()[:3],
            0,
            0,
            0,
            D=size,
            COPIES=copies,
            TAPS=weight.shape[-1],
            DILATION=dilation,
            STEPS=_STEPS,
            CHANNELS=_CHANNELS,
            TILES=1,
            BACKWARD=False,
            NEED_WEIGHT=False,
            num_warps=4,
        )
    return out, inverse


def backward(
    grad: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse: torch.Tensor,
    dilation: int,
    need: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v and (float32) of weight and norm_weight; an empty tensor for each that `need` leaves out."""
    batch, time, copies, size = v.shape
    taps = weight.shape[-1]
    grad_v = torch.empty(v.shape if need[0] else (0,), dtype=v.dtype, device=v.device)
    if v.numel() == 0:
        zeros = [torch.zeros(w.shape if n else (0,), device=v.device) for w, n in zip((weight, norm_weight), need[1:], strict=True)]
        return grad_v, zeros[0], zeros[1]
    grad, v, weight, norm_weight = _last_contiguous(grad), _last_contiguous(v), weight.contiguous(), norm_weight.contiguous()
    segments, programs = _programs(v, _TILES)
    launch, (block, chunks) = launch_for("backward", size), row_blocks(size)
    slots = slots_for(launch, batch * time, copies, v.device)
    slope = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    parts = torch.empty((segments, *weight.shape) if need[1] else (0,), dtype=torch.float32, device=v.device)
    norm_parts = torch.empty((slots, *norm_weight.shape) if need[2] else (0,), dtype=torch.float32, device=v.device)
    sizes = {"D": size, "COPIES": copies, "TAPS": taps, "DILATION": dilation}
    strides = (*v.stride()[:3], *grad.stride()[:3])
    with torch.cuda.device_of(v):
        _mix_kernel[(programs,)](
            None,
            slope,
            parts,
            v,
            grad,
            inverse,
            weight,
            norm_weight,
            time,
            *strides,
            **sizes,
            STEPS=_STEPS,
            CHANNELS=_CHANNELS,
            TILES=_TILES,
            BACKWARD=True,
            NEED_WEIGHT=need[1],
            num_warps=8,
        )
        if need[0] or need[2]:
            _rows_kernel[(slots * copies,)](
                grad_v,
                norm_parts,
                grad,
                slope,
                v,
                inverse,
                weight,
                norm_weight,
                time,
                batch * time,
                slots,
                *strides,
                **sizes,
                BLOCK=block,
                CHUNKS=chunks,
                NEED_V=need[0],
                NEED_NORM=need[2],
                num_warps=launch.warps,
            )
    return grad_v, parts.sum(0) if need[1] else parts, norm_parts.sum(0) if need[2] else norm_parts
