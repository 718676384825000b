"""The trainable side of a concept: masters of its rows and gates at all of its mounts. May import torch and the core of concepts."""

import torch
from torch import nn

from tiny_engram.concept import Concept
from tiny_engram.config import SPAN
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept, apply_mounts

__all__ = ["ConceptRows"]


class ConceptRows(nn.Module):
    """Masters of one concept at its mounts: rows float32 `[mounts, positions, columns, head_dim]`, gain and bias `[mounts, positions]`."""

    def __init__(self, concept: Concept, role: str) -> None:
        super().__init__()
        starts = concept.roles[role].mounts
        self.span = SPAN in starts
        self.contexts = tuple(name for name in starts if name != SPAN)
        self.mounts = (SPAN, *self.contexts) if self.span else self.contexts
        self.rho, self.basis_seed = [starts[name].rho for name in self.mounts], concept.config.basis_seed
        self.rows = nn.Parameter(torch.stack([starts[name].rows() for name in self.mounts]))
        self.gain = nn.Parameter(torch.stack([starts[name].gain for name in self.mounts]))
        self.bias = nn.Parameter(torch.stack([starts[name].bias for name in self.mounts]))

    def forward(self, states: torch.Tensor, spans: Spans, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Text states with the concept in, as it would be served: rows go through the quantiser, gradients straight past it.

        Args:
            states: of the encoder, `[batch, time, width]`. dtype: what the denoiser reads them in.

        Returns:
            What the denoiser is given, and what each of its context mounts reads instead, like it.
        """
        rows = fake_quantize(self.rows)
        if self.span:
            states = apply_concept(states, spans, rows[0], self.gain[0], self.bias[0], rho=self.rho[0], basis_seed=self.basis_seed)
        states = states.to(dtype)
        if not self.contexts:
            return states, {}
        part = slice(int(self.span), None)
        stacked = apply_mounts(
            states, spans, rows[part], self.gain[part], self.bias[part], rho=self.rho[part], basis_seed=self.basis_seed
        )
        return states, dict(zip(self.contexts, stacked, strict=True))
