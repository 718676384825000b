"""AdamW over many runs at once: every run has its own rate and its own gradient norm, and none sees another's.

All parameters lie in one matrix `[runs, values]`, so that a step takes a handful of kernels however many parameters a
method has. Imports torch and the shape of a method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.personalization.methods.method import Adapters

__all__ = ["StackedAdamW", "rate_factor"]

_EPS = 1e-8
SCHEDULES = ("constant", "cosine")


def rate_factor(step: int, steps: int, *, schedule: str, warmup: int) -> float:
    """Share of the full learning rate at a step counted from 0, as `tiny_engram.training.config.TrainConfig.rate` has it."""
    warm = min(1.0, (step + 1) / max(1, warmup))
    return warm if schedule == "constant" else warm * 0.5 * (1 + math.cos(math.pi * step / steps))


class StackedAdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter 2019) of each run of `adapters`, and the running average of its values.

    The parameters' memory is moved into one matrix; their gradients are views of another. Parameters that ask for no
    gradient are left alone.

    Raises:
        ValueError: nothing to train, an unknown schedule, a parameter that is not float32 `[runs, ...]`.
    """

    def __init__(self, adapters: Adapters, steps: int) -> None:
        if adapters.schedule not in SCHEDULES:
            raise ValueError(f"schedule {adapters.schedule!r}, expected one of {SCHEDULES}")
        self.adapters, self.steps, self.done = adapters, steps, 0
        named = {name: p for name, p in adapters.named_parameters() if p.requires_grad}
        runs = len(adapters.runs)
        for name, p in named.items():
            if p.dtype != torch.float32 or p.shape[0] != runs:
                raise ValueError(f"parameter {name} is {p.dtype} {list(p.shape)}, expected float32 with {runs} runs first")
        if not named:
            raise ValueError(f"{type(adapters).__name__} has nothing to train")
        unknown = set(adapters.rate_factors) - {name for name, _ in adapters.named_parameters()}
        if unknown:
            raise ValueError(f"rate_factors name {sorted(unknown)}; the parameters are {[n for n, _ in adapters.named_parameters()]}")
        self._values = torch.cat([p.detach().reshape(runs, -1) for p in named.values()], 1)
        self._gradient = torch.zeros_like(self._values)
        self._first, self._second = torch.zeros_like(self._values), torch.zeros_like(self._values)
        self._average = self._values.clone() if adapters.ema_decay else None
        self._parameters = named
        self._attach()
        factors = [float(adapters.rate_factors.get(name, 1.0)) for name in named]
        rates = torch.tensor([run.learning_rate for run in adapters.runs], dtype=torch.float32)[:, None]
        if len(set(factors)) > 1:
            sizes = torch.tensor([p[0].numel() for p in named.values()])
            rates = rates * torch.tensor(factors).repeat_interleave(sizes)
        else:
            rates = rates * factors[0]
        self._rates = rates.to(self._values.device)

    def _attach(self) -> None:
        at = 0
        for p in self._parameters.values():
            size = p[0].numel()
            p.data = self._values[:, at : at + size].view(p.shape)
            p.grad = self._gradient[:, at : at + size].view(p.shape)
            at += size

    def _changed(self) -> None:
        """Let the parameters say that their values were written: through the matrix that holds them, they would not notice."""
        torch.autograd.graph.increment_version(self._parameters.values())

    def zero(self) -> None:
        """Forget the gradients."""
        self._gradient.zero_()

    @torch.no_grad()
    def clip(self, norm: float = 1.0) -> None:
        """Scale each run's gradient down to at most this norm, over all its parameters, as `clip_grad_norm_` does."""
        norms = torch.linalg.vector_norm(self._gradient, dim=1, keepdim=True)
        self._gradient.mul_((norm / (norms + 1e-6)).clamp(max=1))

    @torch.no_grad()
    def step(self) -> None:
        """One step of every run, then of the running averages."""
        method = self.adapters
        rates = self._rates * rate_factor(self.done, self.steps, schedule=method.schedule, warmup=method.warmup)
        beta1, beta2 = method.betas
        count = self.done + 1
        if method.weight_decay:
            self._values.mul_(1 - rates * method.weight_decay)
        self._first.lerp_(self._gradient, 1 - beta1)
        self._second.mul_(beta2).addcmul_(self._gradient, self._gradient, value=1 - beta2)
        width = (self._second.sqrt() / math.sqrt(1 - beta2**count)).add_(_EPS)
        self._values.addcmul_(self._first / width, rates / (1 - beta1**count), value=-1)
        self._changed()
        if self._average is not None:
            # early steps count more, so that it forgets where it began
            decay = min(method.ema_decay, (1 + self.done) / (10 + self.done))
            self._average.lerp_(self._values, 1 - decay)
        self.done = count

    @contextmanager
    def shipped(self) -> Iterator[None]:
        """Inside, the parameters hold what would be saved now: the running averages, where the method keeps them."""
        if self._average is None:
            yield
            return
        trained = self._values.clone()
        self._values.copy_(self._average)
        self._changed()
        try:
            yield
        finally:
            self._values.copy_(trained)
            self._changed()

    def finish(self) -> None:
        """Leave in the parameters what would be saved, and let go of gradients and moments."""
        if self._average is not None:
            self._values.copy_(self._average)
            self._changed()
        for p in self._parameters.values():
            p.grad = None
            p.data = p.data.clone()
