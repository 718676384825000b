"""DreamBooth-style fine-tuning of the whole denoiser (Ruiz et al. 2022, arXiv 2208.12242), without a prior term: an upper bound.

Set up as diffusers' `train_dreambooth.py` without its text encoder option: AdamW, weight decay 1e-2, a constant rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.runs import Run

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Full"]

_DOT = "__"  # parameter names may not hold a dot


class Full(Adapters):
    """A copy of the denoiser's weights, `[1, ...]` each, which the denoiser reads in place of its own."""

    stackable = False
    weight_decay = 1e-2

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        if len(self.runs) != 1:
            raise ValueError(f"full fine-tuning holds one run at a time, not {len(self.runs)}")
        # Every weight's module, its name there, and the copy's here: to look them up in each step would take as long as to run some.
        self._places: list[tuple[nn.Module, str, str]] = []
        for path, module in base.denoiser.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                own = f"{path}.{name}".lstrip(".").replace(".", _DOT)
                self.register_parameter(own, nn.Parameter(weight.detach().float().clone()[None]))
                self._places.append((module, name, own))

    @contextmanager
    def attached(self, base: Base, rows: Rows, states: torch.Tensor) -> Iterator[None]:
        """The base's own weights are set aside, never written; rows of run -1 are drawn with the trained ones too."""
        own: list[tuple[nn.Module, str, Any]] = []
        try:
            for module, name, trained in self._places:
                own.append((module, name, module._parameters[name]))
                # past nn.Module's check that only a Parameter may stand here: the gradient must reach the copy,
                # and as a view, whose gradient needs no copy: there are hundreds of weights
                module._parameters[name] = getattr(self, trained).squeeze(0)
            yield
        finally:
            for module, name, weight in own:
                module._parameters[name] = weight

    def values(self, run: int) -> dict[str, torch.Tensor]:
        """The denoiser's state dict in float16."""
        return {name.replace(_DOT, "."): tensor for name, tensor in super().values(run).items()}
