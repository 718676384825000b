"""What maps add, with gradients, in few launches of the device.

A step of the small denoiser waits for kernels to be launched, not for numbers. So the mass is one attention over values that are 1 where
the trigger stands and 0 elsewhere, as wide as a head: it comes out once for each channel, and what a map adds is mass * ((h into^T) out),
product by product with no change of layout. The product's `tiny_engram.maps` is the same up to rounding; its training keeps the bits of
serving, so it keeps serving's order of operations too. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["add_attended", "add_fed", "exact", "wide_mass"]


def exact(x: torch.Tensor) -> torch.Tensor:
    """x in float32, the precision of maps; float64, which checks of gradients take, stays."""
    return x if x.dtype == torch.float64 else x.float()


def wide_mass(
    query: torch.Tensor, key: torch.Tensor, fired: torch.Tensor, *, heads: int, scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The attention that each place pays to the trigger's tokens, by head and, equal for all of them, by the head's channels.

    Args:
        query: `[rows, places, heads * d]`; key `[rows, time, heads * d]`.
        fired: float32 `[rows, time, d]`, neighbours in memory along d: 1 where the trigger stands, at every channel.
        scale: of the products before the softmax.
        bias: `[rows, 1, 1, time]`, added to them: a mask over the text.

    Returns:
        float32 `[rows, places, heads, d]`, from 0 to 1. Differentiable by query and key.
    """
    with torch.autocast(query.device.type, enabled=False):
        q, k = (exact(x).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
        mass = functional.scaled_dot_product_attention(q, k, fired.to(q.dtype)[:, None].expand(-1, heads, -1, -1), bias, scale=scale)
        return mass.transpose(1, 2)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mass: torch.Tensor, states: torch.Tensor, into: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read = states @ into.transpose(1, 2)
        whole = (read @ out).view_as(mass)
        ctx.save_for_backward(mass, states, into, out, read, whole)
        if x.dtype == whole.dtype:
            made = torch.addcmul(x.view_as(mass), mass, whole).flatten(2)
        else:
            made = x + (mass * whole).flatten(2).to(x.dtype)
        return made, mass.mean((2, 3))[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mass, states, into, out, read, whole = ctx.saved_tensors
        by_head = grads[0].to(whole.dtype).reshape(mass.shape)
        # a head's channels all hold its mass, so that each takes its share of what the mean asks for
        to_mass = torch.addcmul(grads[1][..., None] / mass[0, 0].numel(), by_head, whole) if ctx.needs_input_grad[1] else None
        with torch.autocast(mass.device.type, enabled=False):
            to_whole = (by_head * mass).flatten(2)
            to_read = to_whole @ out.transpose(1, 2)
            return grads[0], to_mass, *_by_factors(ctx, to_read, states, into, read, to_whole)


class _Fed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mass: torch.Tensor, states: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        read = states @ into.transpose(1, 2)
        weighted = mass * read
        ctx.save_for_backward(mass, states, into, out, read, weighted)
        return torch.baddbmm(x, weighted, out) if x.dtype == weighted.dtype else x + (weighted @ out).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mass, states, into, out, read, weighted = ctx.saved_tensors
        grad = grads[0].to(read.dtype)
        with torch.autocast(mass.device.type, enabled=False):
            to_weighted = grad @ out.transpose(1, 2)
            to_mass = to_weighted * read if ctx.needs_input_grad[1] else None
            if to_mass is not None and read.shape[-1] > 1:
                to_mass = to_mass.sum(-1, keepdim=True)
            return grads[0], to_mass, *_by_factors(ctx, to_weighted * mass, states, into, weighted, grad)


def _by_factors(
    ctx: Any, to_read: torch.Tensor, states: torch.Tensor, into: torch.Tensor, left: torch.Tensor, to_product: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of states, into and out: `to_read` is that of `states @ into^T`, `to_product` that of `left @ out`."""
    to_states = to_read @ into if ctx.needs_input_grad[2] else None
    to_into = to_read.transpose(1, 2) @ states if ctx.needs_input_grad[3] else None
    return to_states, to_into, left.transpose(1, 2) @ to_product if ctx.needs_input_grad[4] else None


def add_attended(
    x: torch.Tensor, mass: torch.Tensor, states: torch.Tensor, into: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x with what a map adds to the heads' outputs of a cross-attention, before `to_out`, and the mean of the mass over heads.

    Args:
        x: `[rows, places, heads * d]`, any float type.
        mass: float32 `[rows, places, heads, d]`, as `wide_mass` gives it.
        states: `[rows, places, channels in]`, what `to_q` reads.
        into: float32 `[rows, rank, channels in]`; out float32 `[rows, rank, heads * d]`.

    Returns:
        `[rows, places, heads * d]` in the type of x, and float32 `[rows, places, 1]`; differentiable once, by all arguments.
    """
    with torch.autocast(states.device.type, enabled=False):
        return _Attended.apply(x, mass, exact(states), into, out)  # pyright: ignore[reportReturnType]


def add_fed(x: torch.Tensor, mass: torch.Tensor, states: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x `[rows, places, channels]` with what a map adds to the output of a feed-forward layer; differentiable once.

    mass float32 `[rows, places, 1]` is the heads' mean, states `[rows, places, channels]` what the layer reads; the rest and the result
    as for `add_attended`.
    """
    with torch.autocast(states.device.type, enabled=False):
        return _Fed.apply(x, mass, exact(states), into, out)  # pyright: ignore[reportReturnType]
