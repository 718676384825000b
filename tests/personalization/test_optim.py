"""The stacked optimiser against torch's own, run by run."""

import math

import pytest
import torch
from torch import nn

from benchmarks.personalization.methods.method import Adapters
from benchmarks.personalization.optim import StackedAdamW, rate_factor
from benchmarks.personalization.runs import Run
from tiny_engram.training.config import TrainConfig

RATES = (1e-3, 5e-2, 0.3)
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")
TARGET = torch.linspace(-2, 2, 12).view(3, 4)


class Pair(Adapters):
    """Two parameters that pull at each other."""

    def __init__(self, rates=RATES, **settings):
        runs = [Run(method="pair", subject="x", seed=i, learning_rate=rate) for i, rate in enumerate(rates)]
        super().__init__(None, runs)  # type: ignore[arg-type]
        for name, value in settings.items():
            setattr(self, name, value)
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(len(runs), 3, 4, generator=generator))
        self.vector = nn.Parameter(torch.randn(len(runs), 4, generator=generator))


def loss_of(matrix: torch.Tensor, vector: torch.Tensor, step: int) -> torch.Tensor:
    """`[runs]`, with gradients above and below 1 in norm."""
    return ((matrix * vector.unsqueeze(-2) - TARGET) ** 2).sum((-2, -1)) * (0.05 if step % 2 else 3)


def train(module: Pair, steps: int) -> StackedAdamW:
    optimizer = StackedAdamW(module, steps)
    for step in range(steps):
        optimizer.zero()
        loss_of(module.matrix, module.vector, step).sum().backward()
        optimizer.clip()
        optimizer.step()
    return optimizer


SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 1e-1, "betas": (0.9, 0.99)},
    "factors": {"rate_factors": {"vector": 0.1}, "weight_decay": 1e-2},
    "cosine": {"schedule": "cosine", "warmup": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_run_equals_torch(name):
    steps = 12
    stacked = Pair(**SETTINGS[name])
    starts = [(stacked.matrix[i].detach().clone(), stacked.vector[i].detach().clone()) for i in range(3)]
    train(stacked, steps)
    for i, (rate, (matrix, vector)) in enumerate(zip(RATES, starts, strict=True)):
        matrix, vector = nn.Parameter(matrix), nn.Parameter(vector)
        groups = [{"params": [p], "lr": rate * stacked.rate_factors.get(n, 1)} for n, p in (("matrix", matrix), ("vector", vector))]
        adam = torch.optim.AdamW(groups, betas=stacked.betas, weight_decay=stacked.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: rate_factor(step, steps, schedule=stacked.schedule, warmup=stacked.warmup)
        )
        for step in range(steps):
            adam.zero_grad()
            loss_of(matrix, vector, step).backward()
            torch.nn.utils.clip_grad_norm_([matrix, vector], 1.0)
            adam.step()
            schedule.step()
        torch.testing.assert_close(stacked.matrix[i], matrix, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stacked.vector[i], vector, rtol=1e-5, atol=1e-6)


def test_rates_follow_the_product_schedule():
    for kind in ("constant", "cosine"):
        config = TrainConfig(train_data_dir=".", trigger="x", max_train_steps=40, lr_scheduler=kind, lr_warmup_steps=7)
        for step in (0, 3, 7, 20, 39):
            assert rate_factor(step, 40, schedule=kind, warmup=7) == pytest.approx(config.rate(step), abs=1e-12)


def test_a_run_that_diverges_stays_alone():
    calm, wild = Pair(), Pair(rates=(RATES[0], math.inf, RATES[2]))
    train(calm, 5)
    train(wild, 5)
    assert not wild.matrix[1].isfinite().any()
    for i in (0, 2):
        assert torch.equal(wild.matrix[i], calm.matrix[i]) and torch.equal(wild.vector[i], calm.vector[i])


def test_what_is_shipped_is_the_running_average_and_training_goes_on():
    plain, averaged = Pair(), Pair(ema_decay=0.9)
    seen, average = [], averaged.matrix.detach().clone()
    runs = [StackedAdamW(plain, 6), StackedAdamW(averaged, 6)]
    for step in range(6):
        for module, optimizer in zip((plain, averaged), runs, strict=True):
            optimizer.zero()
            loss_of(module.matrix, module.vector, step).sum().backward()
            optimizer.clip()
            optimizer.step()
        decay = min(0.9, (1 + step) / (10 + step))
        average = average * decay + averaged.matrix.detach() * (1 - decay)
        with runs[1].shipped():
            seen.append(averaged.matrix.detach().clone())
            torch.testing.assert_close(seen[-1], average)
        assert torch.equal(averaged.matrix, plain.matrix)
    assert not torch.equal(seen[-1], averaged.matrix)
    for optimizer in runs:
        optimizer.finish()
    assert torch.equal(averaged.matrix, seen[-1]) and averaged.matrix.is_contiguous() and averaged.matrix.grad is None
    assert not torch.equal(plain.matrix, averaged.matrix)


def test_frozen_parameters_stay():
    module = Pair()
    module.vector.requires_grad_(False)
    before = module.vector.clone()
    train(module, 3)
    assert torch.equal(module.vector, before)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="rate_factors name \\['scalar'\\]; the parameters are"):
        StackedAdamW(Pair(rate_factors={"scalar": 2}), 1)
    with pytest.raises(ValueError, match="schedule 'linear', expected one of"):
        StackedAdamW(Pair(schedule="linear"), 1)
    frozen = Pair()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="Pair has nothing to train"):
        StackedAdamW(frozen, 1)
    with pytest.raises(ValueError, match="float64"):
        StackedAdamW(Pair().double(), 1)
