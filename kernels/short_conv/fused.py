"""The short convolution in Triton, one kernel for each direction. Imports torch, triton and how the gate cuts rows into blocks.

Taps lie `dilation` steps apart, so a program that walks over every dilation-th step (one phase) of a segment of time meets a
row once for its norm and all taps: it keeps the K - 1 sums that the row has begun for later steps, D channels of each, in
registers. Backward the same walk keeps the last K - 1 normalised rows, for the taps' gradient and the norm's, and the K - 1 sums
of slopes before SiLU that the gradients of those rows wait for. A segment starts K - 1 rows early, and backward also ends K - 1
late; those rows are all that is read twice.

Bytes from DRAM: forward v and out; backward v, the gradient and the result. The gradient comes back for its row K - 1 steps
later, from L2. Taps are multiplied by norm_weight beforehand, and both their gradients are made of the same K sums a channel,
of slope times normalised row: a program leaves its own and torch adds them, so no result depends on the order of programs.
"""
# The stubs know neither launch options, nor that static_range can be walked over, nor that a tuple grows at compile time.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..engram_gate.launch import multiprocessors, power_of_two, row_blocks, stages_within


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One way to launch a direction."""

    warps: int
    resident: int  # programs on an SM at a time
    stages: int  # depth to which loads run ahead of the walk

    @property
    def registers(self) -> int:
        """What a thread may take so that `resident` programs fit."""
        return min(255, _REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


_REGISTERS = 65536  # of an SM
# Rows that a program walks over at least, where there are enough: below, the rows that segments share cost too much.
_LEAST = 24


@triton.jit
def _read(row, at, inside, D: tl.constexpr):
    return tl.load(row + at, mask=inside & (at < D), other=0.0)


@triton.jit
def _taps(weight, norm_weight, copy, lanes, D: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """float32 taps times norm_weight, one block for each tap and chunk."""
    taps = ()
    for j in tl.static_range(TAPS):
        for i in tl.static_range(CHUNKS):
            at = copy * D + i * BLOCK + lanes
            real = i * BLOCK + lanes < D
            tap = tl.load(weight + at * TAPS + j, mask=real, other=0.0).to(tl.float32)
            taps = taps + (tap * tl.load(norm_weight + at, mask=real, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(COUNT):
        blocks = blocks + (tl.zeros([BLOCK], tl.float32),)
    return blocks


@triton.jit
def _convolve(row, taps, begun, AHEAD: tl.constexpr, TAPS: tl.constexpr, CHUNKS: tl.constexpr):
    """One step of the walk: (the sum that this row ends, the K - 1 sums begun for later steps, next first).

    With `AHEAD` the convolution is the adjoint, and the sum that ends belongs to the row K - 1 steps ago. Sums move on and not
    rows, because a loop that only shuffles values is one whose loads Triton does not run ahead.
    """
    ended = ()
    later = ()
    for j in tl.static_range(TAPS):
        for i in tl.static_range(CHUNKS):
            total = taps[j * CHUNKS + i] * row[i] if AHEAD else taps[(TAPS - 1 - j) * CHUNKS + i] * row[i]
            if j < TAPS - 1:
                total += begun[j * CHUNKS + i]
            if j == 0:
                ended = ended + (total,)
            else:
                later = later + (total,)
    return ended, later


@triton.jit(do_not_specialize=["T", "phases", "segments", "length"])
def _forward_kernel(
    out,
    inverse,
    v,
    weight,
    norm_weight,
    T,
    phases,
    segments,
    length,
    v_batch,
    v_time,
    v_copy,
    eps,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    phase = program % phases
    copy = (program // phases % COPIES).to(tl.int64)
    segment = program // (phases * COPIES)
    batch = (segment // segments).to(tl.int64)
    first = (segment % segments) * length
    end = tl.minimum(first + length, tl.cdiv(T - phase, DILATION))
    lanes = tl.arange(0, BLOCK)
    taps = _taps(weight, norm_weight, copy, lanes, D, TAPS, BLOCK, CHUNKS)
    begun = _zeros((TAPS - 1) * CHUNKS, BLOCK)
    for n in tl.range(first - (TAPS - 1), end, num_stages=STAGES):
        time = tl.cast(n, tl.int64) * DILATION + phase
        row = (batch * T + time) * COPIES + copy
        values = ()
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            found = _read(v + batch * v_batch + time * v_time + copy * v_copy, i * BLOCK + lanes, time >= 0, D).to(tl.float32)
            values = values + (found,)
            squares += found * found
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares) / D + eps))
        own = n >= first
        tl.store(inverse + row, scale, mask=own)
        scale = tl.where(time >= 0, scale, 0.0)
        normed = ()
        for i in tl.static_range(CHUNKS):
            normed = normed + (values[i] * scale,)
        mixes, begun = _convolve(normed, taps, begun, False, TAPS, CHUNKS)
        for i in tl.static_range(CHUNKS):
            mixed = mixes[i]
            result = values[i] + mixed / (1.0 + tl.exp(-mixed))
            at = i * BLOCK + lanes
            tl.store(out + row * D + at, result.to(out.dtype.element_ty), mask=own & (at < D))


@triton.jit(do_not_specialize=["T", "phases", "segments", "length"])
def _backward_kernel(
    grad_v,
    partial,
    grad,
    v,
    inverse,
    weight,
    norm_weight,
    T,
    phases,
    segments,
    length,
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
    NEED_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    BACK: tl.constexpr = TAPS - 1
    program = tl.program_id(0)
    phase = program % phases
    copy = (program // phases % COPIES).to(tl.int64)
    segment = program // (phases * COPIES)
    batch = (segment // segments).to(tl.int64)
    first = (segment % segments) * length
    end = tl.minimum(first + length, tl.cdiv(T - phase, DILATION))
    lanes = tl.arange(0, BLOCK)
    taps = _taps(weight, norm_weight, copy, lanes, D, TAPS, BLOCK, CHUNKS)
    past = _zeros(BACK * CHUNKS, BLOCK)
    pulls = _zeros(BACK * CHUNKS, BLOCK)
    sums = _zeros(TAPS * CHUNKS, BLOCK)
    last = end
    if NEED_V:
        last = end + BACK
    for n in tl.range(first - BACK, last, num_stages=STAGES):
        time = tl.cast(n, tl.int64) * DILATION + phase
        inside = (time >= 0) & (time < T)
        scale = tl.load(inverse + (batch * T + time) * COPIES + copy, mask=inside, other=0.0)
        window = past
        for i in tl.static_range(CHUNKS):
            found = _read(v + batch * v_batch + time * v_time + copy * v_copy, i * BLOCK + lanes, inside, D)
            window = window + (found.to(tl.float32) * scale,)
        slopes = ()
        for i in tl.static_range(CHUNKS):
            mixed = taps[i] * window[i]
            for j in tl.static_range(1, TAPS):
                mixed += taps[j * CHUNKS + i] * window[j * CHUNKS + i]
            # Rows before the segment are another program's: without a gradient their slope is zero.
            place = grad + batch * grad_batch + time * grad_time + copy * grad_copy
            above = _read(place, i * BLOCK + lanes, inside & (n >= first), D).to(tl.float32)
            share = 1.0 / (1.0 + tl.exp(-mixed))
            slopes = slopes + (above * share * (1.0 + mixed * (1.0 - share)),)
        if NEED_WEIGHT:
            new_sums = ()
            for j in tl.static_range(TAPS):
                for i in tl.static_range(CHUNKS):
                    counted = slopes[i]
                    if NEED_V:
                        # Rows after the segment are another program's too.
                        counted = tl.where(n < end, counted, 0.0)
                    new_sums = new_sums + (sums[j * CHUNKS + i] + counted * window[j * CHUNKS + i],)
            sums = new_sums
        if NEED_V:
            oldest = time - BACK * DILATION
            own = n - BACK >= first
            row = (batch * T + oldest) * COPIES + copy
            ended, pulls = _convolve(slopes, taps, pulls, True, TAPS, CHUNKS)
            inner = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(CHUNKS):
                inner += ended[i] * window[i]
            shrink = tl.sum(inner) / D
            scale = tl.load(inverse + row, mask=own, other=0.0)
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                above = _read(grad + batch * grad_batch + oldest * grad_time + copy * grad_copy, at, own, D).to(tl.float32)
                result = above + scale * (ended[i] - shrink * window[i])
                tl.store(grad_v + row * D + at, result.to(grad_v.dtype.element_ty), mask=own & (at < D))
        kept = ()
        for i in tl.static_range(BACK * CHUNKS):
            # The zero makes a new value of it, see _convolve.
            kept = kept + (window[CHUNKS + i] + 0.0,)
        past = kept
    if NEED_WEIGHT:
        for j in tl.static_range(TAPS):
            for i in tl.static_range(CHUNKS):
                at = i * BLOCK + lanes
                place = ((segment * phases + phase).to(tl.int64) * TAPS + j) * COPIES + copy
                tl.store(partial + place * D + at, sums[j * CHUNKS + i], mask=at < D)


def walk_for(direction: str, size: int, taps: int) -> Walk:
    """A rule by registers; direction is "forward" or "backward".

    A thread has about 10 values of a row, at least two of a block (a copy that runs ahead moves 4 bytes or more). Each value
    takes what the walk holds: forward K taps and K - 1 sums begun, backward K taps, K sums, K rows and K - 1 sums begun. The
    estimates are ptxas's counts for sm_90 at K = 4. On an H200 backward gained more from loads that run ahead (289 us) than from
    a third program on an SM (334 us), and forward from a fourth stage (121 us for 127).
    """
    block, chunks = row_blocks(size)
    warps = max(1, min(power_of_two(-(-size // (32 * 10))), block // 64, 16))
    values = -(-block * chunks // (32 * warps))
    registers = max(64, (2 * taps + 4) * values) if direction == "forward" else 80 + 4 * taps * values
    resident = max(1, min(_REGISTERS // (32 * warps * registers), 64 // warps, 32))
    # A stage holds a row of v; backward one of grad too, in two places.
    wanted, rows = (4, 1) if direction == "forward" else (3, 3)
    return Walk(warps=warps, resident=resident, stages=stages_within(wanted, rows * 4 * block * chunks))


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _segments(v: torch.Tensor, dilation: int, walk: Walk) -> tuple[int, int, int]:
    """(phases, segments of a phase, steps of a segment): as many programs as the device holds at a time."""
    batch, time, copies, _ = v.shape
    phases = min(dilation, time)
    steps = -(-time // dilation)
    filled = walk.resident * multiprocessors(v.device) // (batch * copies * phases)
    length = -(-steps // max(1, min(filled, steps // _LEAST)))
    return phases, -(-steps // length), length


def forward(
    v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, dilation: int, eps: float, walk: Walk | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and the inverse norms, float32 ``[B, T, copies]``."""
    batch, time, copies, size = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inverse = torch.empty(v.shape[:-1], dtype=torch.float32, device=v.device)
    if out.numel() == 0:
        return out, inverse
    v = _last_contiguous(v)
    walk, (block, chunks) = walk or walk_for("forward", size, weight.shape[-1]), row_blocks(size)
    phases, segments, length = _segments(v, dilation, walk)
    with torch.cuda.device_of(v):
        _forward_kernel[(batch * segments * copies * phases,)](
            out,
            inverse,
            v,
            weight.contiguous(),
            norm_weight.contiguous(),
            time,
            phases,
            segments,
            length,
            *v.stride()[:3],
            eps,
            D=size,
            COPIES=copies,
            TAPS=weight.shape[-1],
            DILATION=dilation,
            BLOCK=block,
            CHUNKS=chunks,
            STAGES=walk.stages,
            num_warps=walk.warps,
            maxnreg=walk.registers,
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
    walk: Walk | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v and (float32) of weight and norm_weight; an empty tensor for each that `need` leaves out."""
    batch, time, copies, size = v.shape
    taps = weight.shape[-1]
    grad_v = torch.empty(v.shape if need[0] else (0,), dtype=v.dtype, device=v.device)
    if v.numel() == 0:
        zeros = [torch.zeros(w.shape if n else (0,), device=v.device) for w, n in zip((weight, norm_weight), need[1:], strict=True)]
        return grad_v, zeros[0], zeros[1]
    grad, v = _last_contiguous(grad), _last_contiguous(v)
    walk, (block, chunks) = walk or walk_for("backward", size, taps), row_blocks(size)
    phases, segments, length = _segments(v, dilation, walk)
    either = need[1] or need[2]
    parts = torch.empty((batch * segments * phases, taps, copies, size) if either else (0,), dtype=torch.float32, device=v.device)
    with torch.cuda.device_of(v):
        _backward_kernel[(batch * segments * copies * phases,)](
            grad_v,
            parts,
            grad,
            v,
            inverse,
            weight.contiguous(),
            norm_weight.contiguous(),
            time,
            phases,
            segments,
            length,
            *v.stride()[:3],
            *grad.stride()[:3],
            D=size,
            COPIES=copies,
            TAPS=taps,
            DILATION=dilation,
            BLOCK=block,
            CHUNKS=chunks,
            NEED_V=need[0],
            NEED_WEIGHT=either,
            STAGES=walk.stages,
            num_warps=walk.warps,
            maxnreg=walk.registers,
        )
    grad_weight, grad_norm = parts.new_empty(0), parts.new_empty(0)
    if either:
        sums = parts.sum(0)
        if need[1]:
            grad_weight = (sums * norm_weight).permute(1, 2, 0).contiguous()
        if need[2]:
            grad_norm = (sums * weight.permute(2, 0, 1)).sum(0)
    return grad_v, grad_weight, grad_norm
