"""The paper's short convolution in plain torch. Imports torch only."""

import torch
from torch.nn import functional


def short_conv_reference(v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, dilation: int, eps: float) -> torch.Tensor:
    """Convolve; arguments and result as in :func:`short_conv`."""
    compute = torch.promote_types(v.dtype, torch.float32)
    wide = v.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norm_weight.to(compute)
    taps = weight.shape[-1]
    length = v.shape[1]
    padded = functional.pad(normed, (0, 0, 0, 0, (taps - 1) * dilation, 0))
    mixed = torch.zeros_like(normed)
    for tap in range(taps):
        mixed = mixed + padded[:, tap * dilation : tap * dilation + length] * weight[..., tap].to(compute)
    return (wide + functional.silu(mixed)).to(v.dtype)
