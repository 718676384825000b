"""Kernel tests run with memory that nobody filled: what an op forgets to write shows as NaN or as an absurd integer."""

import pytest
import torch


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    # A compiler traces with tensors that hold nothing, and may ask for leaves that require gradients.
    if type(tensor) is not torch.Tensor or tensor.requires_grad or torch.compiler.is_compiling():
        return tensor
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, original=original, **kwargs: _poison(original(*args, **kwargs)))


@pytest.fixture
def rms_error():
    """Root mean square of a - b, in float64."""

    def measure(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b.double()).square().mean().sqrt())

    return measure
