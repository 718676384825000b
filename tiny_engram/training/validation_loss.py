"""The loss on draws that stay the same over a whole run, with the values that would be saved. Imports torch, objective and what accelerate
shares between processes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from tiny_engram.training import objective
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.run import Run

__all__ = ["ValidationLoss"]

# No step of training has it, so that no draw is one that is taught.
STEP = -1

Loss = Callable[[nn.Module, list[objective.Draw]], torch.Tensor]


class _With(nn.Module):
    """A module as it would be with these values; it is not changed."""

    def __init__(self, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._call = lambda *args: functional_call(module, values, args)

    def forward(self, *args: Any) -> Any:
        return self._call(*args)


class ValidationLoss:
    """Measures a run: `validation_loss_samples` draws over all timesteps, keyed by the seed alone.

    Neither random state nor modes nor gradients change, so that losses are the same with it and without it.
    """

    def __init__(self, loss: Loss, config: TrainConfig) -> None:
        self._loss, self._size = loss, config.train_batch_size
        count = config.validation_loss_samples
        draws = [objective.draw(config.seed, STEP, sample, count) for sample in range(count)]
        firsts = range(0, count, self._size)
        # Where pictures are of several sizes, a batch is of one: together they go through all.
        self._batches = [
            [replace(one, bucket=(k + 0.5) / len(firsts)) for one in draws[first : first + self._size]] for k, first in enumerate(firsts)
        ]

    @torch.no_grad()
    def __call__(self, run: Run) -> float:
        """The mean over the draws, with the averages of the run."""
        module, total = _With(run.module, run.average), 0.0
        for draws in self._batches:
            total += float(self._loss(module, draws)) * len(draws)
        return total / sum(map(len, self._batches))
