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
