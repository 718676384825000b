"""Both published gates in plain torch. Imports torch only."""

import math

import torch

SQRT_FLOOR = 1e-6


def engram_gate_reference(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    form: str,
    mask: torch.Tensor | None,
    residual: bool,
) -> torch.Tensor:
    """Gate; arguments and result as in :func:`engram_gate`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide_x, wide_key, wide_value = x.to(compute), key.to(compute), value.to(compute)
    if mask is not None:
        # What stands at a masked token may be NaN, and a gradient's zero times NaN would reach all weights.
        wide_x, wide_key, wide_value = (
            torch.where(mask.view(*mask.shape, *(1,) * (wide.ndim - mask.ndim)), 1.0, wide) for wide in (wide_x, wide_key, wide_value)
        )
    inv_x = torch.rsqrt(wide_x.square().mean(dim=-1) + eps)
    inv_key = torch.rsqrt(wide_key.square().mean(dim=-1) + eps)
    weight = q_weight.to(compute) * k_weight.to(compute)
    dot = (wide_x * weight * wide_key).sum(dim=-1) * inv_x * inv_key / math.sqrt(x.shape[-1])
    root = dot.abs().clamp(min=SQRT_FLOOR).sqrt()
    # The forms part at dot = 0 only: copysign keeps +-0.001 there, sign() gives 0 and so a gate of exactly one half.
    signed = torch.copysign(root, dot) if form == "v41" else root * dot.sign()
    gated = torch.sigmoid(signed).unsqueeze(-1) * wide_value.unsqueeze(-2)
    out = (wide_x + gated if residual else gated).to(x.dtype)
    if mask is None:
        return out
    return torch.where(mask[..., None, None], x if residual else torch.zeros_like(x), out)


def engram_gate_statistics(
    x: torch.Tensor, key: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """``[..., copies, 3]``: the dot product under the gate, 1 / rms(x) and 1 / rms(key); zeros at masked tokens."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide_x, wide_key = x.to(compute), key.to(compute)
    inv_x = torch.rsqrt(wide_x.square().mean(dim=-1) + eps)
    inv_key = torch.rsqrt(wide_key.square().mean(dim=-1) + eps)
    weight = q_weight.to(compute) * k_weight.to(compute)
    dot = (wide_x * weight * wide_key).sum(dim=-1) * inv_x * inv_key / math.sqrt(x.shape[-1])
    stats = torch.stack([dot, inv_x, inv_key], dim=-1)
    return stats if mask is None else torch.where(mask[..., None, None], 0.0, stats)


def engram_gate_backward_reference(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, key, value and of ``q_weight * k_weight`` from the statistics; an empty tensor for each not in `need`.

    With g the gate, s its argument and a = ds/d(dot) = 1 / (2 |s|) above the floor and 0 below it:
    d(dot) = <grad, value> g (1 - g) a; dx = grad + d(dot) (w key / (rms rms sqrt(D)) - dot x / (D rms(x)^2)), key likewise.
    """
    compute, size = stats.dtype, x.shape[-1]
    wide_grad = grad.to(compute)
    wide_x, wide_key, wide_value = x.to(compute), key.to(compute), value.to(compute).unsqueeze(-2)
    dot, inv_x, inv_key = (part.unsqueeze(-1) for part in stats.unbind(-1))
    root = dot.abs().clamp(min=SQRT_FLOOR).sqrt()
    gate = torch.sigmoid(torch.copysign(root, dot) if form == "v41" else root * dot.sign())
    slope = (wide_grad * wide_value).sum(dim=-1, keepdim=True) * gate * (1 - gate) * 0.5 / root
    slope = torch.where(dot.abs() < SQRT_FLOOR, 0.0, slope)
    weight = q_weight.to(compute) * k_weight.to(compute)
    cross = slope * inv_x * inv_key / math.sqrt(size)
    grad_x = cross * weight * wide_key - slope * dot * inv_x.square() / size * wide_x
    grad_key = cross * weight * wide_x - slope * dot * inv_key.square() / size * wide_key
    grad_weight = cross * wide_x * wide_key
    grad_value = gate * wide_grad
    if mask is not None:
        kept = ~mask[..., None, None]
        grad_x, grad_key, grad_weight, grad_value = (torch.where(kept, g, 0.0) for g in (grad_x, grad_key, grad_weight, grad_value))
    if residual:
        grad_x = grad_x + wide_grad

    def leave(found: torch.Tensor, wanted: bool, like: torch.Tensor | None = None) -> torch.Tensor:
        # An op's outputs may not share memory, nor may their layout depend on the inputs' strides.
        found = found if like is None else found.to(like.dtype)
        return found.clone(memory_format=torch.contiguous_format) if wanted else found.new_empty(0)

    sums = grad_value.sum(dim=-2), grad_weight.reshape(-1, *x.shape[-2:]).sum(dim=0)
    return leave(grad_x, need[0], x), leave(grad_key, need[1], key), leave(sums[0], need[2], value), leave(sums[1], need[3])
