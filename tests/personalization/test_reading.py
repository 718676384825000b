"""What a step of ours reads of its parameters: once for the encoder and the denoiser, and never what is no longer so."""

import pytest
import torch

from benchmarks.personalization.methods import ours as module
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.optim import StackedAdamW


@pytest.fixture
def step(base, run):
    """Ours on the disc, not at zero, and a batch; `predict` runs the denoiser on states."""
    made = Ours(base, [run("ours", "disc", mounts="input+value", bands=2, maps="attention:1+feedforward:1")])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    rows = base.rows(["a 3d {0}"], [(base.subject("disc").trigger,)], torch.tensor([[0]]))
    latents = torch.randn(1, *base.latent_shape, generator=generator)

    def predict(states: torch.Tensor) -> torch.Tensor:
        with made.attached(base, rows, states):
            return base.denoiser(latents, torch.full((1,), 400), states, return_dict=False)[0]

    return made, rows, predict


def test_the_quantiser_runs_once_a_step(base, step, monkeypatch):
    made, rows, predict = step
    calls, plain = [], module.fake_quantize
    monkeypatch.setattr(module, "fake_quantize", lambda x: calls.append(x.shape) or plain(x))
    predict(made.states(base, rows)).square().sum().backward()
    assert len(calls) == 1 and all(p.grad is not None and bool(p.grad.ne(0).any()) for p in made.parameters())
    predict(made.states(base, rows))
    assert len(calls) == 2


def test_what_changed_meanwhile_is_read_anew(base, step):
    made, rows, predict = step
    with torch.no_grad():
        states = made.states(base, rows)
    assert predict(states).requires_grad  # read without gradients, it is no good for them
    states = made.states(base, rows).detach()
    first = predict(states)
    states = made.states(base, rows).detach()
    with torch.no_grad():
        made.rows["value"] += 1.0
    changed = predict(states)
    assert not torch.equal(changed, first) and torch.equal(changed, predict(states))


def test_a_step_of_the_optimiser_is_a_change(base, step):
    made, rows, predict = step
    optimizer = StackedAdamW(made, 1)
    states = made.states(base, rows).detach()
    with torch.no_grad():
        for p in made.parameters():
            assert p.grad is not None
            p.grad.fill_(1.0)
    optimizer.step()
    changed = predict(states)
    assert torch.equal(changed, predict(states))
