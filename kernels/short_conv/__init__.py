"""Depthwise causal convolution over the gated values (paper form only). Imports torch only; Triton when its kernel first runs."""

import torch

from ..backend import carries_tangents, implementation_for
from .reference import short_conv_backward_reference, short_conv_reference

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
    fits = v.ndim == 4 and weight.ndim == 3 and weight.shape[:2] == v.shape[2:] and norm_weight.shape == v.shape[2:]
    if not fits or weight.shape[2] < 1:
        raise ValueError(
            f"v {list(v.shape)}, weight {list(weight.shape)}, norm_weight {list(norm_weight.shape)}: "
            "expected [B, T, copies, D], [copies, D, K] with K of 1 or more, [copies, D]"
        )
    if dilation < 1:
        raise ValueError(f"dilation {dilation}: expected 1 or more")
    # A plain call on the CPU takes the shortest way; a compiled one must not look inside.
    if not torch.compiler.is_compiling() and (_reads_reference(v) or carries_tangents(v, weight, norm_weight)):
        return short_conv_reference(v, weight, norm_weight, dilation, eps)
    return _conv_op(v, weight, norm_weight, dilation, eps)[0]


def _reads_reference(v: torch.Tensor) -> bool:
    return v.dtype == torch.float64 or implementation_for(v) == "reference"


@torch.library.custom_op("tiny_engram::short_conv", mutates_args=())
def _conv_op(
    v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, dilation: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution, and the inverse norms ``[B, T, copies]`` that its gradient reads."""
    if not _reads_reference(v):
        from .fused import forward

        return forward(v, weight, norm_weight, dilation, eps)
    inverse = torch.rsqrt(v.to(torch.promote_types(v.dtype, torch.float32)).square().mean(dim=-1) + eps)
    return short_conv_reference(v, weight, norm_weight, dilation, eps).contiguous(), inverse.contiguous()


@_conv_op.register_fake
def _(v, weight, norm_weight, dilation, eps):
    return v.new_empty(v.shape), v.new_empty(v.shape[:-1], dtype=torch.promote_types(v.dtype, torch.float32))


@torch.library.custom_op("tiny_engram::short_conv_backward", mutates_args=())
def _conv_backward_op(
    grad: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse: torch.Tensor,
    dilation: int,
    need: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v and (unrounded) of weight and norm_weight; `need` says which, the others are empty."""
    if not _reads_reference(v):
        from .fused import backward

        return backward(grad, v, weight, norm_weight, inverse, dilation, need)
    return short_conv_backward_reference(grad, v, weight, norm_weight, inverse, dilation, need)


@_conv_backward_op.register_fake
def _(grad, v, weight, norm_weight, inverse, dilation, need):
    weights = [inverse.new_empty(w.shape if n else (0,)) for w, n in zip((weight, norm_weight), need[1:], strict=True)]
    return v.new_empty(v.shape if need[0] else (0,)), *weights


def _save(ctx, inputs, output):
    v, weight, norm_weight, dilation, _eps = inputs
    ctx.save_for_backward(v, weight, norm_weight, output[1])
    ctx.dilation = dilation
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _grad_inverse):
    if grad is None:
        return (None,) * 5
    v, weight, norm_weight, inverse = ctx.saved_tensors
    need = list(ctx.needs_input_grad[:3])
    found = _conv_backward_op(grad, v, weight, norm_weight, inverse, ctx.dilation, need)
    return *(g.to(t.dtype) if n else None for g, t, n in zip(found, (v, weight, norm_weight), need, strict=True)), None, None


_conv_op.register_autograd(_differentiate, setup_context=_save)
