"""Where concepts stand in a batch, and what their rows do there: shared by the methods that have an address.

The arithmetic is the product's own, `tiny_engram.residual.apply_spans`, called once for all mounts that read the same states;
training takes the same formula in fewer operations.
Imports numpy, torch, tiny_engram and the shape of a method's batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from benchmarks.personalization.methods.method import Rows, to_device
from tiny_engram.config import ConceptConfig
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.span_residual.reference import EPS, SQRT_FLOOR
from tiny_engram.residual import Spans, apply_spans
from tiny_engram.training.graphed_encoder import encode_graphed

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["BASES", "CONFIG", "Places", "basis_matrices", "context_inputs", "encoder_with", "gathered", "hooked", "moved"]

CONFIG = ConceptConfig()
# Seeds of the fixed key and value bases.
BASES = (2 * CONFIG.basis_seed, 2 * CONFIG.basis_seed + 1)
# Values of a gather's gradient, times rows of its table, up to which a sum over all of them takes less than the launches of a product.
_FEW = 1 << 22


@dataclass(frozen=True, slots=True)
class Places:
    """The N fired positions of a batch, span by span.

    Attributes:
        batch, time: int64 `[N]`, on the device: row of the batch and token.
        position: int64 `[N]`, on the device: place within the span, which is the concept's row position.
        slot, run: int64 `[N]`, on the device: of the batch's row, and whose rows stand there.
        rows: int64, on the device: the rows of the batch in which something fires, in order.
        within: int64 `[N]`, on the device: which of those each position lies in.
        length: tokens of each span.
    """

    batch: torch.Tensor
    time: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    run: torch.Tensor
    rows: torch.Tensor
    within: torch.Tensor
    length: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows, positions: int) -> Places:
        """Where the spans of `rows` are, each of at most `positions` tokens.

        Raises:
            ValueError: a span is longer than the concepts have positions.
        """
        longest = max((span[3] for span in rows.spans), default=0)
        if longest > positions:
            raise ValueError(f"a span of {longest} tokens, but these runs hold rows for {positions} positions; teach one trigger per run")
        at = rows.positions()
        fired = to_device(torch.tensor(sorted({span[0] for span in rows.spans}), dtype=torch.int64), rows.ids.device)
        within = torch.searchsorted(fired, at.row)
        return cls(at.row, at.place, at.offset, at.slot, at.run, fired, within, tuple(span[3] for span in rows.spans))

    def __len__(self) -> int:
        return sum(self.length)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over each span of x `[N]`, at its positions."""
        first = self.length[0]
        if all(length == first for length in self.length):
            return x.view(-1, first).mean(1, keepdim=True).expand(-1, first).flatten()
        owner = (self.position == 0).cumsum(0) - 1
        total, count = (x.new_zeros(len(self.length)).index_add(0, owner, y) for y in (x, torch.ones_like(x)))
        return (total / count)[owner]

    def line(self, copies: int) -> Spans:
        """The same spans with nothing between them, in `copies` rows: of `[copies, N, width]` states."""
        length = np.tile(np.array(self.length, dtype=np.int64), copies)
        start = np.cumsum(self.length) - self.length
        table = (np.repeat(np.arange(copies), len(self.length)), np.tile(start, copies), length, np.zeros_like(length))
        return Spans(*(torch.from_numpy(np.asarray(column, dtype=np.int64)) for column in table))


class _Gathered(torch.autograd.Function):
    """`table[index]`, whose gradient is a sum or a product: a gather's own would sort the indices, or add them in no fixed order."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(table)
        return table[index]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        if ctx.size == 1:
            return grads[0].sum(0, keepdim=True), None
        own = torch.arange(ctx.size, device=index.device)[:, None] == index
        if ctx.size * grads[0].numel() <= _FEW:
            return torch.where(own[..., None], grads[0], 0.0).sum(1), None
        # in a product 0 * NaN is NaN: a run that diverged would take every other run with it
        summed = own.to(grads[0].dtype) @ grads[0].nan_to_num(0.0, 0.0, 0.0)
        return summed + torch.where(own, grads[0].sum(1) * 0.0, 0.0).sum(1, keepdim=True), None


def gathered(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `[N, values]` of a table `[rows, values]` by index int64 `[N]`; differentiable."""
    return _Gathered.apply(table, index)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=8)
def basis_matrices(inputs: int, width: int, device: torch.device) -> torch.Tensor:
    """The fixed key and value bases as matrices: float32 `[2, inputs, width]`; e @ matrix is `fixed_basis(e)` up to rounding."""
    with torch.inference_mode(False):
        one = torch.eye(inputs, device=device)
        return torch.stack([fixed_basis(one, width=width, seed=seed) for seed in BASES])


class _Formula(torch.autograd.Function):
    """What `moved` says, in float32 and few operations: a step of one run waits for kernels to be launched, not for numbers.

    The products lose nothing to TF32: rows that were quantised and the entries of the bases fit its mantissa.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        rows: torch.Tensor,
        gain: torch.Tensor,
        bias: torch.Tensor,
        scale: torch.Tensor,
        bases: torch.Tensor,
        means: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """h `[N, width]`, rows `[mounts, N, values]`, gates and scale `[mounts, N]`, bases `[2, values, width]`."""
        width = h.shape[-1]
        key, value = made = (rows.flatten(0, 1).expand(2, -1, -1) @ bases).unflatten(1, rows.shape[:2])
        of_key, of_value = torch.linalg.vector_norm(made, dim=-1)
        norm = torch.linalg.vector_norm(h, dim=-1)
        # the two means of squares, with what keeps them from zero, times width
        whole, whole_key = norm.square() + EPS * width, of_key.square() + EPS * width
        per_product = (whole * whole_key).rsqrt() * math.sqrt(width)
        dot = (h * key).sum(-1) * per_product
        size = dot.abs()
        root = torch.copysign(size.clamp(min=SQRT_FLOOR).sqrt(), dot)
        gate = torch.addcmul(bias, gain, root).sigmoid()
        mean = means(norm)
        factor = scale * mean * gate / of_value.clamp(min=1.0)
        ctx.save_for_backward(
            h, made, of_value, norm, whole, whole_key, per_product, dot, size, root, gain, gate, mean, scale, factor, bases
        )
        ctx.means = means
        return torch.addcmul(h, factor[..., None], value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, made, of_value, norm, whole, whole_key, per_product, dot, size, root, gain, gate, mean, scale, factor, bases = ctx.saved_tensors
        (key, value), grad = made, grads[0]
        # of the logarithm of the factor, which is a product
        to_factor = (grad * value).sum(-1) * factor
        to_gate = torch.addcmul(to_factor, to_factor, gate, value=-1)
        # by parts of dot: it too is a product, of h * key and of 1 / sqrt(whole * whole_key)
        to_dot = torch.where(size >= SQRT_FLOOR, to_gate * gain / root.abs(), 0.0) * 0.5
        to_product, to_log = to_dot * per_product, to_dot * dot
        to_rows = to_h = None
        if ctx.needs_input_grad[1]:
            to_made = torch.empty_like(made)
            shrunk = torch.where(of_value >= 1.0, to_factor / of_value.square(), 0.0)
            torch.addcmul(to_product[..., None] * h, (to_log / whole_key)[..., None], key, value=-1, out=to_made[0])
            torch.addcmul(factor[..., None] * grad, shrunk[..., None], value, value=-1, out=to_made[1])
            to_rows = (to_made.flatten(1, 2) @ bases.transpose(1, 2)).sum(0).unflatten(0, to_dot.shape)
        if ctx.needs_input_grad[0]:
            to_norm = ctx.means((to_factor / mean).sum(0)) / norm
            along = to_norm - to_log.sum(0) / whole
            to_h = torch.addcmul(torch.addcmul(grad, to_product[..., None], key).sum(0), along[..., None], h)
        to_scale = to_factor / scale if ctx.needs_input_grad[4] else None
        return to_h, to_rows, to_gate * root if ctx.needs_input_grad[2] else None, to_gate, to_scale, None, None


def _formula(
    here: torch.Tensor, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, places: Places, columns: int
) -> torch.Tensor:
    """`moved` with gradients, once."""
    with torch.autocast(here.device.type, enabled=False):
        h, e = here if here.dtype == torch.float64 else here.float(), rows.flatten(2)
        bases = basis_matrices(columns * rows.shape[-1], h.shape[-1], h.device)[:, : e.shape[-1]].to(h.dtype)
        moved: Any = _Formula.apply(h, e, gain, bias, scale, bases, places.means)
        return moved.to(here.dtype)


def moved(
    here: torch.Tensor,
    places: Places,
    rows: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    *,
    columns: int,
) -> torch.Tensor:
    """The states of all fired positions with the residual of several mounts, each alone, added.

    Args:
        here: `[N, width]`, the states of `places`.
        rows: float32 `[mounts, N, columns or fewer, head_dim]`; missing columns are zero.
        gain, bias, scale: float32 `[mounts, N]`; scale is strength * rho.
        columns: that the basis reads.

    Returns:
        `[mounts, N, width]` in the type of `here`. Without gradients, the bits that `apply_spans` gives for each mount and span
        alone: what is drawn is what would be served. With them, the same up to rounding.
    """
    if torch.is_grad_enabled():
        return _formula(here, rows, gain, bias, scale, places, columns)
    mounts = len(rows)
    return apply_spans(
        here.expand(mounts, -1, -1),
        places.line(mounts),
        functional.pad(rows, (0, 0, 0, columns - rows.shape[2])).flatten(0, 1),
        gain.flatten(),
        bias.flatten(),
        scale.flatten(),
        basis_seed=CONFIG.basis_seed,
    )


@contextmanager
def hooked(hooks: list[tuple[nn.Module, Callable[..., Any], bool]]) -> Iterator[None]:
    """Inside, each module has its hook: (module, hook, before it runs). Keyword arguments are passed as well."""
    handles = []
    try:
        for module, hook, before in hooks:
            put = module.register_forward_pre_hook if before else module.register_forward_hook
            handles.append(put(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def context_inputs(
    projections: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]],
) -> list[tuple[nn.Module, Callable[..., Any], bool]]:
    """Hooks that put `change(states)` in place of what each projection reads."""

    def hook(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        return lambda _module, args, kwargs: ((change(args[0]), *args[1:]), kwargs)

    return [(module, hook(change), True) for module, change in projections]


def encoder_with(
    base: Base,
    ids: torch.Tensor,
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """Last hidden states `[batch, time, width]` of the base's encoder whose states are changed on their way.

    `changes`: "input" is given the token embeddings (without their positions), "layer-k" what encoder layer k reads; each
    returns them changed, `[batch, time, width]`. Differentiable.
    """
    if list(changes) == ["input"] and not base.spec.masked:
        return encode_graphed(base.text_encoder, ids, changes["input"])
    layers: Any = base.text_encoder.get_submodule(base.spec.layers)
    hooks: list[tuple[nn.Module, Callable[..., Any], bool]] = []
    for place, change in changes.items():
        if place == "input":
            hooks.append((base.embedding, lambda _m, _a, _k, out, change=change: change(out), False))
        else:
            hooks += context_inputs([(layers[int(place.removeprefix("layer-"))], change)])
    with hooked(hooks):
        return base.encoded(ids)
