"""Loss of a causal LM on windows. Imports torch and, of this package, windows."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .windows import Windows

__all__ = ["Measured", "summed_loss", "validate"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Attributes: step: steps done. loss: mean over `tokens` predicted ones, in nats."""

    step: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summed_loss(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Cross-entropy of each next token, summed: a float32 scalar. ids int64 ``[B, T]``, mask int64 ``[B, T]`` or None."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.sum() if mask is None else (losses * mask[:, 1:].flatten()).sum()


@torch.no_grad()
def validate(model: Any, windows: Windows, batch_size: int, *, step: int = 0, rank: int = 0, ranks: int = 1) -> Measured:
    """Loss on all windows, as the model is: in its own type, with whatever is attached to it.

    Every rank takes every `ranks`-th batch; the sums, in float64, are added over ranks.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for places in torch.arange(len(windows)).split(batch_size)[rank::ranks]:
        ids, mask = windows.batch(places)
        total += summed_loss(model, ids.to(device), None if mask is None else mask.to(device)).double()
    if ranks > 1:
        torch.distributed.all_reduce(total)
    tokens = windows.targets(torch.arange(len(windows)))
    return Measured(step, float(total) / tokens, tokens)
