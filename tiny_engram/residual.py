"""What a concept does to hidden states at its spans: one function that serving and training both call. Imports numpy, torch
and kernels.

A fired position's result depends on its own span alone: every sum runs in a fixed order that no other row of the batch can change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.span_residual import span_residual

__all__ = ["SpanRuns", "Spans", "add_to_spans", "apply_concept", "apply_spans", "moved", "spread", "token_norms"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Places in a batch where concepts fire; int64 CPU tensors `[spans]`.

    `offset` is where the span's rows start among its concept's positions (0 for its first spelling).
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

    def marks(self, shape: Sequence[int]) -> torch.Tensor:
        """1 at every position of the spans and 0 elsewhere, float32 of this shape `[batch, time]`, on the CPU."""
        batch, time, _ = self.flat()
        marked = torch.zeros(*shape)
        marked[batch, time] = 1.0
        return marked

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch row, time and row position of every fired position, int64 `[N]`, span by span."""
        owner, step = _owner_and_step(self.length)
        return self.batch[owner], self.start[owner] + step, self.offset[owner] + step


def _owner_and_step(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position of spans of these lengths (int64 CPU `[spans]`): its span, and its place inside it; int64 `[N]`.

    By numpy: torch's repeat_interleave wakes the thread pool for any two spans, which costs milliseconds when the cores are busy.
    """
    count = length.numpy()
    owner = np.repeat(np.arange(len(count)), count)
    return torch.from_numpy(owner), torch.from_numpy(np.arange(len(owner)) - (count.cumsum() - count)[owner])


def _ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: elementwise additions, whose order depends on the width alone."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs, rest = x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]
        x = torch.cat((pairs, rest), dim=-1) if rest.shape[-1] else pairs
    return x[..., 0]


def token_norms(h: torch.Tensor) -> torch.Tensor:
    """|h| float32 `[N]` of `[N, width]`; of spans of one position, their `span_mean_norm`."""
    return _ordered_sum(h * h).sqrt()


@dataclass(frozen=True, slots=True)
class SpanRuns:
    """Where spans lie among their N positions, on one device: int64 `owner` `[N]`, `length` `[spans]`, and `positions`
    `[longest, spans]`, whose entries behind a span's end are N."""

    owner: torch.Tensor
    length: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, length: torch.Tensor, device: torch.device) -> "SpanRuns":
        """Of spans of these lengths, int64 CPU `[spans]`."""
        owner, _ = _owner_and_step(length)
        count, step = length.numpy(), np.arange(int(length.max()))[:, None]
        positions = np.where(step < count, count.cumsum() - count + step, len(owner))
        return cls(owner.to(device), length.to(device), torch.from_numpy(positions).to(device))


def span_mean_norm(h: torch.Tensor, spans: torch.Tensor | SpanRuns) -> torch.Tensor:
    """Mean of |h| over each span, repeated at its positions: h float32 `[N, width]`, lengths int64 CPU `[spans]` -> float32 `[N]`."""
    norms = token_norms(h)
    runs = spans if isinstance(spans, SpanRuns) else SpanRuns.of(spans, h.device)
    # One after another, in the span's order; a span that is over adds an exact zero.
    first, *others = pad(norms, (0, 1))[runs.positions].unbind(0)
    return (sum(others, first) / runs.length).index_select(0, runs.owner)


def spread(rows: torch.Tensor, *, width: int, basis_seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that rows float32 `[N, columns, head_dim]` stand for in states of a width: float32 `[N, width]` each."""
    e = rows.flatten(1)
    return fixed_basis(e, width=width, seed=2 * basis_seed), fixed_basis(e, width=width, seed=2 * basis_seed + 1)


def moved(
    states: torch.Tensor,
    spans: torch.Tensor | SpanRuns,
    key: torch.Tensor,
    value: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """States `[N, width]` of spans, or of spans of these lengths (int64 CPU `[spans]`), with the residual added, in their type.

    Computed in float32, and rounded once. key and value float32 `[N, width]`, gain, bias and scale (strength * rho) float32 `[N]`, all on
    the states' device.
    """
    h = states.float()
    mean_norm = span_mean_norm(h, spans)
    return (h + span_residual(h, key, value, gain=gain, bias=bias, scale=scale, mean_norm=mean_norm)).to(states.dtype)


def apply_spans(
    hidden: torch.Tensor,
    spans: Spans,
    rows: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    *,
    basis_seed: int,
) -> torch.Tensor:
    """Hidden states with the residual added at spans of any concepts; all other positions keep their bits.

    Args:
        hidden: `[batch, time, width]`, any float dtype and device.
        spans: where concepts fire; N positions in all, no position twice.
        rows: float32 `[N, columns, head_dim]`, one set per fired position, in the order of `spans.flat()`.
        gain, bias, scale: float32 `[N]`; scale is strength * rho.
        basis_seed: of the fixed key (2 * seed) and value (2 * seed + 1) bases.

    Returns:
        A new tensor like `hidden` (computed in float32, rounded once); `hidden` itself where no span is given. Differentiable.
    """
    if not len(spans):
        return hidden
    key, value = spread(rows.to(hidden.device), width=hidden.shape[-1], basis_seed=basis_seed)
    return add_to_spans([hidden], spans, key, value, gain, bias, scale)[0]


def add_to_spans(
    states: Sequence[torch.Tensor],
    spans: Spans,
    key: torch.Tensor,
    value: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
) -> list[torch.Tensor]:
    """`apply_spans` to several states of one batch in one pass, from the keys and values that the rows stand for.

    key and value float32 `[N, width]`, on the device of the first states; the gates float32 `[N]`, on any.
    """
    at, device = spans.flat()[:2], states[0].device
    places = [tuple(index.to(hidden.device) for index in at) for hidden in states]
    own = [hidden[place].to(device) for hidden, place in zip(states, places, strict=True)]
    count, lengths = len(states), spans.length
    sides, gates = (key, value), tuple(x.to(device) for x in (gain, bias, scale))
    if count > 1:
        lengths, sides, gates = lengths.repeat(count), tuple(x.repeat(count, 1) for x in sides), tuple(x.repeat(count) for x in gates)
    changed = moved(torch.cat(own) if count > 1 else own[0], lengths, *sides, *gates).split(len(own[0]))
    return [hidden.index_put(place, new.to(hidden)) for hidden, place, new in zip(states, places, changed, strict=True)]


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
    scale = torch.full((len(at),), strength * rho, dtype=torch.float32)
    return apply_spans(hidden, spans, rows[at], gain[at], bias[at], scale, basis_seed=basis_seed)
