"""The gate between the hidden state and what the table says. Imports torch only; Triton when its kernel first runs."""

from typing import Literal

import torch

from ..backend import carries_tangents, implementation_for
from .reference import engram_gate_backward_reference, engram_gate_reference, engram_gate_statistics

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

    Inputs may be strided. What leaves the last dimension contiguous and lets the leading ones be seen as one is read in place:
    key and value as parts of one projection ``[..., (copies + 1) * D]``, for one.

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
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-2]):
        raise ValueError(f"mask {list(mask.shape)} of {mask.dtype}: expected bool {list(x.shape[:-2])}")
    # A plain call on the CPU takes the shortest way; a compiled one must not look inside.
    if not torch.compiler.is_compiling() and (_reads_reference(x) or carries_tangents(x, key, value, q_weight, k_weight)):
        return engram_gate_reference(x, key, value, q_weight, k_weight, eps, form, mask, residual)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, key, value, q_weight, k_weight))
    return _gate_op(x, key, value, q_weight, k_weight, eps, form, mask, residual, learns)[0]


def _reads_reference(x: torch.Tensor) -> bool:
    return x.dtype == torch.float64 or implementation_for(x) == "reference"


@torch.library.custom_op("tiny_engram::engram_gate", mutates_args=())
def _gate_op(
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    form: str,
    mask: torch.Tensor | None,
    residual: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate, and with `keep` what its gradient needs: ``[..., copies, 3]``, dot and both inverse norms (else empty)."""
    if not _reads_reference(x):
        from .fused import forward

        return forward(x, key, value, q_weight, k_weight, eps, form, mask, residual, keep)
    out = engram_gate_reference(x, key, value, q_weight, k_weight, eps, form, mask, residual).contiguous()
    stats = engram_gate_statistics(x, key, q_weight, k_weight, eps, mask) if keep else _empty_statistics(x, keep)
    return out, stats


def _empty_statistics(x: torch.Tensor, keep: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], 3) if keep else (0,), dtype=torch.promote_types(x.dtype, torch.float32))


@_gate_op.register_fake
def _(x, key, value, q_weight, k_weight, eps, form, mask, residual, keep):
    return x.new_empty(x.shape), _empty_statistics(x, keep)


@torch.library.custom_op("tiny_engram::engram_gate_backward", mutates_args=())
def _gate_backward_op(
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
    """Gradients of x, key, value and of ``q_weight * k_weight``; `need` says which, the others are empty."""
    if not _reads_reference(x):
        from .fused_backward import backward

        return backward(grad, x, key, value, q_weight, k_weight, stats, form, mask, residual, need)
    return engram_gate_backward_reference(grad, x, key, value, q_weight, k_weight, stats, form, mask, residual, need)


@_gate_backward_op.register_fake
def _(grad, x, key, value, q_weight, k_weight, stats, form, mask, residual, need):
    inputs = [t.new_empty(t.shape if n else (0,)) for t, n in zip((x, key, value), need[:3], strict=True)]
    return *inputs, stats.new_empty(q_weight.shape if need[3] else (0,))


def _save(ctx, inputs, output):
    x, key, value, q_weight, k_weight, _eps, form, mask, residual, _keep = inputs
    ctx.save_for_backward(x, key, value, q_weight, k_weight, mask, output[1])
    ctx.form, ctx.residual = form, residual
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _grad_stats):
    x, key, value, q_weight, k_weight, mask, stats = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:5])
    if grad is None:
        return (None,) * 10
    need = [*want[:3], want[3] or want[4]]
    grad_x, grad_key, grad_value, grad_weight = _gate_backward_op(
        grad, x, key, value, q_weight, k_weight, stats, ctx.form, mask, ctx.residual, need
    )
    grad_q = (grad_weight * k_weight).to(q_weight.dtype) if want[3] else None
    grad_k = (grad_weight * q_weight).to(k_weight.dtype) if want[4] else None
    found = (grad_x if want[0] else None, grad_key if want[1] else None, grad_value if want[2] else None)
    return *found, grad_q, grad_k, None, None, None, None, None


_gate_op.register_autograd(_differentiate, setup_context=_save)
