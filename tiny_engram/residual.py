"""What a concept does to hidden states at its spans: one function that serving and training both call. Imports kernels only.

A fired position's result depends on its own span alone: every sum runs in a fixed order that no other row of the batch can change.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.span_residual import span_residual

__all__ = ["Spans", "apply_concept", "apply_spans"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Places in a batch where one concept fires; int64 CPU tensors `[spans]`.

    `offset` is where the span's rows start among the concept's positions (0 for its first spelling).
    """

    batch: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, int, int]]) -> "Spans":
        """From (batch, start, length, offset) tuples."""
        table = torch.tensor(list(places), dtype=torch.int64).reshape(-1, 4)
        return cls(*table.unbind(1))

    def __len__(self) -> int:
        return len(self.batch)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch row, time and row position of every fired position, int64 `[N]`, span by span."""
        step = torch.cat([torch.arange(n) for n in self.length.tolist()]) if len(self) else self.length
        return (
            self.batch.repeat_interleave(self.length),
            self.start.repeat_interleave(self.length) + step,
            self.offset.repeat_interleave(self.length) + step,
        )


def _ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: elementwise additions, whose order depends on the width alone."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], rest), dim=-1)
    return x[..., 0]


def span_mean_norm(h: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Mean of |h| over each span, repeated at its positions: h float32 `[N, width]`, length `[spans]` -> float32 `[N]`."""
    norms = _ordered_sum(h * h).sqrt()
    first = (length.cumsum(0) - length).to(h.device)
    length = length.to(h.device)
    total = torch.zeros(len(length), dtype=norms.dtype, device=h.device)
    for step in range(int(length.max())):
        # A span that is over adds an exact zero.
        total = total + torch.where(step < length, norms[(first + step).clamp(max=len(norms) - 1)], 0.0)
    return (total / length).repeat_interleave(length)


def apply_spans(
    hidden: torch.Tensor,
    spans: Spans,
    rows: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale: float,
    basis_seed: int,
) -> torch.Tensor:
    """Hidden states with one concept's residual added at its spans; all other positions keep their bits.

    Args:
        hidden: `[batch, time, width]`, any float dtype and device.
        spans: where the concept fires; N positions in all.
        rows: float32 `[N, columns, head_dim]`, one set per fired position, in the order of `spans.flat()`.
        gain, bias: float32 `[N]`.
        scale: strength * rho.
        basis_seed: of the fixed key (2 * seed) and value (2 * seed + 1) bases.

    Returns:
        A new tensor like `hidden` (computed in float32, rounded once); `hidden` itself where no span is given. Differentiable.
    """
    if not len(spans):
        return hidden
    batch, time, _ = (index.to(hidden.device) for index in spans.flat())
    width = hidden.shape[-1]
    h = hidden[batch, time].float()
    e = rows.to(hidden.device).flatten(1)
    residual = span_residual(
        h,
        fixed_basis(e, width=width, seed=2 * basis_seed),
        fixed_basis(e, width=width, seed=2 * basis_seed + 1),
        gain=gain.to(hidden.device),
        bias=bias.to(hidden.device),
        scale=torch.full((len(h),), scale, dtype=torch.float32, device=hidden.device),
        mean_norm=span_mean_norm(h, spans.length),
    )
    return hidden.index_put((batch, time), (h + residual).to(hidden.dtype))


def apply_concept(
    hidden: torch.Tensor,
    spans: Spans,
    rows: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    *,
    rho: float,
    strength: float = 1.0,
    basis_seed: int = 0,
) -> torch.Tensor:
    """`apply_spans` from a concept's own tensors: what training calls with fake-quantised masters.

    rows float32 `[positions, columns, head_dim]`, gain and bias float32 `[positions]`, as in `concept.MountRows`. The result has the
    bits that serving gives once the same rows are quantised, saved and loaded.
    """
    if not len(spans):
        return hidden
    at = spans.flat()[2].to(rows.device)
    return apply_spans(hidden, spans, rows[at], gain[at], bias[at], scale=strength * rho, basis_seed=basis_seed)
