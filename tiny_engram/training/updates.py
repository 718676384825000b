"""Gradients of concepts that are taught side by side: shared between processes, cut for each, and what is told of them read back at once.

A step of a small base waits for launches, not for numbers: whatever can be is done for all concepts in one call. May import torch and
accelerate.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn

__all__ = ["average_gradients", "clip_gradients", "told_losses"]


def average_gradients(accelerator: Accelerator, modules: Sequence[nn.Module]) -> None:
    """The mean over all processes. What no sample read has a gradient of zero, for which the others do not wait in vain."""
    parameters = [p for module in modules for p in module.parameters()]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if accelerator.num_processes == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    mean = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
    assert isinstance(mean, torch.Tensor)
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(modules: Sequence[nn.Module], limits: Sequence[float]) -> torch.Tensor:
    """Cut each module's gradients to its limit, as `torch.nn.utils.clip_grad_norm_` does; the norms before, float32 `[modules]`.

    Modules have as many parameters each, all with gradients.
    """
    each = [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]
    of_tensors = torch._foreach_norm([gradient for gradients in each for gradient in gradients], 2.0)
    norms = torch.linalg.vector_norm(torch.stack(list(of_tensors)).view(len(modules), -1), 2.0, 1)
    factors = ((norms + 1e-6).reciprocal() * torch.tensor(limits, device=norms.device)).clamp(max=1.0)
    for gradients, factor in zip(each, factors.unbind(), strict=True):
        torch._foreach_mul_(gradients, factor)
    return norms


def told_losses(accelerator: Accelerator, parts: Sequence[torch.Tensor], norms: torch.Tensor) -> list[tuple[float, float]]:
    """(mean loss, norm) of each concept, from the losses `[concepts]` of a step's passes, in one transfer from the device."""
    table = torch.stack([part.float() for part in parts])
    if accelerator.num_processes > 1:
        mean = accelerator.reduce(table, "mean")
        assert isinstance(mean, torch.Tensor)
        table = mean
    *losses, lengths = torch.cat([table, norms[None]]).tolist()
    return [(sum(loss / len(parts) for loss in column), norm) for *column, norm in zip(*losses, lengths, strict=True)]
