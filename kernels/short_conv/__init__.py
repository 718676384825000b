"""Depthwise causal convolution over the gated values (paper form only). Imports torch only."""

import torch

from .reference import short_conv_reference

__all__ = ["short_conv"]


def short_conv(v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, *, dilation: int, eps: float) -> torch.Tensor:
    """``v + SiLU(depthwise causal conv(rms(v) * norm_weight))``; a zero weight returns v unchanged.

    Args:
        v: ``[B, T, copies, D]`` gated values.
        weight: ``[copies, D, K]``; tap K - 1 reads the position itself, tap j the one ``(K - 1 - j) * dilation`` before.
        norm_weight: ``[copies, D]``.
        dilation: step between taps, the largest n-gram size in the paper.
        eps: added to the mean square.

    Returns:
        ``[B, T, copies, D]`` in v's dtype, computed in float32 (float64 stays float64).

    Raises:
        ValueError: shapes that do not belong together, or a dilation below 1.

    Source: Engram (arXiv 2601.07372), the short convolution after gating.
    """
    if v.ndim != 4 or weight.ndim != 3 or weight.shape[:2] != v.shape[2:] or norm_weight.shape != v.shape[2:]:
        raise ValueError(
            f"v {list(v.shape)}, weight {list(weight.shape)}, norm_weight {list(norm_weight.shape)}: "
            "expected [B, T, copies, D], [copies, D, K], [copies, D]"
        )
    if dilation < 1:
        raise ValueError(f"dilation {dilation}: expected 1 or more")
    return short_conv_reference(v, weight, norm_weight, dilation, eps)
