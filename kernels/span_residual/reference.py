"""A concept's residual at its trigger's positions, in plain torch. Imports torch only.

A row must not depend on which other rows stand beside it, to the last bit. So sums run as a fixed tree of elementwise
additions (``sum`` splits by shape), and the sigmoid is built of operations that IEEE 754 rounds exactly (torch's CPU
sigmoid and exp differ in the last bit between the vectorised body and the tail of a loop).
"""

import math

import torch
from torch.nn import functional

EPS = 1e-6
SQRT_FLOOR = 1e-6


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension, ``[..., D]`` -> ``[...]``, in an order that depends on D alone."""
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = functional.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def _exact_sigmoid(z: torch.Tensor) -> torch.Tensor:
    """float32 sigmoid through float64 additions, products and one division; within one ulp of the true value."""
    t = -z.to(torch.float64).abs().clamp(max=700.0)
    power = torch.round(t * (1 / math.log(2)))
    rest = t - power * math.log(2)
    series = torch.ones_like(rest)
    for term in range(11, 0, -1):
        series.mul_(rest).mul_(1 / term).add_(1.0)  # in place: no gradient is taken here
    exponential = series * ((power.to(torch.int64) + 1023) << 52).view(torch.float64)
    return (torch.where(z < 0, exponential, torch.ones_like(z, dtype=torch.float64)) / (1.0 + exponential)).to(torch.float32)


class _Sigmoid(torch.autograd.Function):
    """The sigmoid above with the textbook gradient, instead of a gradient through its series."""

    @staticmethod
    def forward(ctx, z: torch.Tensor) -> torch.Tensor:
        gate = _exact_sigmoid(z)
        ctx.save_for_backward(gate)
        return gate

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> torch.Tensor:
        (gate,) = ctx.saved_tensors
        return grads[0] * gate * (1.0 - gate)


def span_residual_reference(
    h: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    mean_norm: torch.Tensor,
) -> torch.Tensor:
    """Residual; arguments and result as in :func:`span_residual`."""
    h, key, value, gain, bias, scale, mean_norm = (x.to(torch.float32) for x in (h, key, value, gain, bias, scale, mean_norm))
    width = h.shape[-1]
    # All sums at once: a few positions cost as much as one does, and their time is that of starting operations.
    squares_h, squares_key, product, squares_value = _tree_sum(torch.stack((h * h, key * key, h * key, value * value)))
    # 1 / sqrt, not rsqrt: root and quotient are rounded exactly everywhere.
    norm_h, norm_key = torch.sqrt(squares_h / width + EPS), torch.sqrt(squares_key / width + EPS)
    # + 0.0 turns -0 into 0: a zero key must give one gate, whatever the signs of h.
    dot = product / norm_h / norm_key / math.sqrt(width) + 0.0
    root = torch.copysign(torch.sqrt(dot.abs().clamp(min=SQRT_FLOOR)), dot)
    gate = _Sigmoid.apply(gain * root + bias)
    # sqrt(max(1, |v|^2)), not max(1, sqrt(|v|^2)): the gradient at v = 0 is finite.
    shrink = torch.sqrt(squares_value.clamp(min=1.0))
    return (scale * mean_norm * gate / shrink).unsqueeze(-1) * value
