"""The gate between the hidden state and what the table says. Imports torch only."""

from typing import Literal

import torch

from .reference import engram_gate_reference

__all__ = ["engram_gate"]


def engram_gate(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    eps: float,
    form: Literal["v41", "paper"],
    mask: torch.Tensor | None = None,
    residual: bool = True,
) -> torch.Tensor:
    """``x + sigmoid(signed sqrt(<rms(x) q, rms(key) k> / sqrt(D))) * value``, in float32 with one rounding at the end.

    Args:
        x: ``[..., copies, D]`` hidden states (float64 is computed in float64, all else in float32).
        key: ``[..., copies, D]``, one key per hyper-connection copy.
        value: ``[..., D]``, shared by the copies.
        q_weight: ``[copies, D]`` RMSNorm weight of the query side.
        k_weight: ``[copies, D]`` RMSNorm weight of the key side.
        eps: added to both mean squares (1e-20 in V4.1, torch's default in the paper's demo).
        form: ``"v41"`` (copysign: a dot of +-0 gives sigmoid(+-0.001)) or ``"paper"`` (sign: exactly 0.5).
        mask: bool ``[...]``; a token marked True keeps its x bit for bit.
        residual: False returns ``gate * value`` alone (zeros at masked tokens), which the paper's convolution reads.

    Returns:
        ``[..., copies, D]`` in x's dtype.

    Raises:
        ValueError: unknown form, or shapes that do not belong together.

    Source: Engram (arXiv 2601.07372), context-aware gating; DeepSeek V4.1 for the fused form.
    """
    if form not in ("v41", "paper"):
        raise ValueError(f"form {form!r}: expected 'v41' or 'paper'")
    expected_value = (*x.shape[:-2], x.shape[-1])
    if key.shape != x.shape or tuple(value.shape) != expected_value:
        raise ValueError(
            f"x {list(x.shape)}, key {list(key.shape)}, value {list(value.shape)}: expected [..., copies, D] twice and [..., D]"
        )
    if q_weight.shape != x.shape[-2:] or k_weight.shape != x.shape[-2:]:
        raise ValueError(f"q_weight {list(q_weight.shape)}, k_weight {list(k_weight.shape)}: expected [copies, D] = {list(x.shape[-2:])}")
    return engram_gate_reference(x, key, value, q_weight, k_weight, eps, form, mask, residual)
