"""What a concept adds to the hidden state at its trigger's positions. Imports torch only."""

import torch

from .reference import span_residual_reference

__all__ = ["span_residual"]


def span_residual(
    h: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    gain: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    mean_norm: torch.Tensor,
) -> torch.Tensor:
    """``scale * mean_norm * a * v / max(1, |v|)`` with ``a = sigmoid(gain * ssqrt(dot) + bias)``.

    ``dot = <rms(h), rms(key)> / sqrt(width)`` with eps 1e-6, ``ssqrt(x) = copysign(sqrt(max(|x|, 1e-6)), x)``; a zero
    key gives dot 0 and so ``a = sigmoid(0.001 * gain + bias)``. In float32; a row's bits do not depend on the other rows.
    Gradients are finite everywhere, also where key and value are zero (there the value's gradient is not zero).

    Args:
        h: float ``[N, width]`` hidden states at the N positions of all spans.
        key: float ``[N, width]``.
        value: float ``[N, width]``.
        gain: float ``[N]``, factor before the gate's sigmoid.
        bias: float ``[N]``.
        scale: float ``[N]``, strength * rho of the position's concept.
        mean_norm: float ``[N]``, mean of ``|h|`` over the position's span.

    Returns:
        float32 ``[N, width]``, to be added to h.

    Raises:
        ValueError: shapes that do not belong together.

    Source: the gate of Engram (arXiv 2601.07372), bounded by the span's own norm so that one concept cannot drown a prompt.
    """
    if h.ndim != 2 or key.shape != h.shape or value.shape != h.shape:
        raise ValueError(f"h {list(h.shape)}, key {list(key.shape)}, value {list(value.shape)}: expected three times [N, width]")
    for name, factor in {"gain": gain, "bias": bias, "scale": scale, "mean_norm": mean_norm}.items():
        if tuple(factor.shape) != (h.shape[0],):
            raise ValueError(f"{name} {list(factor.shape)}: expected [N] = [{h.shape[0]}]")
    return span_residual_reference(h, key, value, gain, bias, scale, mean_norm)
