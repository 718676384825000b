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


def short_conv_backward_reference(
    grad: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse: torch.Tensor,
    dilation: int,
    need: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v and (in the type of computing) of weight and norm_weight; an empty tensor for each not in `need`.

    `inverse` is 1 / rms(v), ``[B, T, copies]``. With m the sum of the taps, ``dm = grad * silu'(m)``; the gradient of the normed
    values is the same convolution backwards in time, and the norm's own gradient takes the part along v away.
    """
    compute = inverse.dtype
    wide, above, scale = v.to(compute), grad.to(compute), inverse.unsqueeze(-1)
    taps, length, past = weight.shape[-1], v.shape[1], (weight.shape[-1] - 1) * dilation
    tap = weight.to(compute).unbind(-1)
    unit = wide * scale
    padded = functional.pad(unit * norm_weight.to(compute), (0, 0, 0, 0, past, 0))
    windows = [padded[:, j * dilation : j * dilation + length] for j in range(taps)]
    mixed = torch.stack([window * t for window, t in zip(windows, tap, strict=True)]).sum(dim=0)
    share = torch.sigmoid(mixed)
    slope = above * share * (1 + mixed * (1 - share))
    grad_weight = torch.stack([(slope * window).sum(dim=(0, 1)) for window in windows], dim=-1)
    ahead = functional.pad(slope, (0, 0, 0, 0, 0, past))
    starts = [past - j * dilation for j in range(taps)]
    normed = torch.stack([ahead[:, s : s + length] * t for s, t in zip(starts, tap, strict=True)]).sum(dim=0)
    grad_norm = (normed * unit).sum(dim=(0, 1))
    pull = normed * norm_weight.to(compute)
    grad_v = above + scale * (pull - unit * (pull * unit).mean(dim=-1, keepdim=True))
    found = [g if n else g.new_empty(0) for g, n in zip((grad_v.to(v.dtype), grad_weight, grad_norm), need, strict=True)]
    # A custom op's outputs have the layout that its fake says, whatever the inputs' strides.
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()
