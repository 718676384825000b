"""The denoising loss: keyed draws, targets and weights against their formulas, the timestep without signal."""

import subprocess
import sys

import pytest
import torch
from diffusers import DDIMScheduler

from tiny_engram.errors import TinyEngramError
from tiny_engram.training.objective import add_noise, draw, loss_weights, noise_for, target_of

KINDS = ["epsilon", "v_prediction", "sample"]


def scheduler(kind: str, zero_snr: bool = False) -> DDIMScheduler:
    return DDIMScheduler(prediction_type=kind, rescale_betas_zero_snr=zero_snr, clip_sample=False)


def batch(*timesteps: int):
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(len(timesteps), 4, 8, 8, generator=generator) for _ in range(2))
    return latents, noise, torch.tensor(timesteps)


def test_draws_depend_on_the_key_alone():
    keys = [(s, t, i) for s in (0, 1) for t in range(3) for i in range(4)]
    forward, backward = [draw(*key, 4) for key in keys], [draw(*key, 4) for key in reversed(keys)]
    assert forward == backward[::-1] and len({d.noise_seed for d in forward}) == len(keys)
    for field in ("picture", "caption", "timestep", "drop"):
        assert len({getattr(d, field) for d in forward}) == len(keys), field
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(noise_for(forward[0], (2, 3)), noise_for(backward[-1], (2, 3)))
    assert not torch.equal(noise_for(forward[0], (2, 3)), noise_for(forward[1], (2, 3)))
    assert torch.equal(before, torch.get_rng_state())


def test_draws_are_equal_in_another_process():
    code = "from tiny_engram.training.objective import draw, noise_for as n; d = draw(3, 7, 1, 2); print(d, n(d, (4,)).tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}).stdout
    here = draw(3, 7, 1, 2)
    assert other.strip() == f"{here} {noise_for(here, (4,)).tolist()}"


def test_shares_fill_the_interval_and_timesteps_are_stratified():
    draws = [draw(0, step, i, 8) for step in range(200) for i in range(8)]
    for field in ("picture", "caption", "drop"):
        values = torch.tensor([getattr(d, field) for d in draws])
        assert 0 <= values.min() < 0.01 and 0.99 < values.max() < 1 and abs(values.mean() - 0.5) < 0.03, field
    for k, d in enumerate(draws):
        assert (k % 8) / 8 <= d.timestep < (k % 8 + 1) / 8


def test_shares_never_reach_one(monkeypatch):
    """Digests of all ones would round to 1.0, an index beyond the end."""
    import hashlib

    class Ones:
        def digest(self) -> bytes:
            return b"\xff" * 40

    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **kwargs: Ones())
    for sample in range(7):
        d = draw(0, 0, sample, 7)
        assert max(d.picture, d.caption, d.drop) < 1 and int(d.timestep * 1000) <= 999
    assert draw(0, 0, 6, 7).timestep < 1


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_target_against_the_scheduler(kind):
    plan = scheduler(kind)
    latents, noise, timesteps = batch(0, 400, 999)
    torch.testing.assert_close(add_noise(plan, latents, noise, timesteps), plan.add_noise(latents, noise, timesteps))
    expected = {"epsilon": noise, "sample": latents, "v_prediction": plan.get_velocity(latents, noise, timesteps)}[kind]
    torch.testing.assert_close(target_of(plan, latents, noise, timesteps), expected)


def test_an_unknown_prediction_type_is_named():
    plan = scheduler("epsilon")
    plan.register_to_config(prediction_type="flow")
    with pytest.raises(TinyEngramError, match="'flow' .*expected epsilon, sample, v_prediction or flow_prediction"):
        target_of(plan, *batch(1))


@pytest.mark.parametrize("kind", KINDS)
def test_min_snr_weights_against_the_formulas(kind):
    plan = scheduler(kind)
    timesteps = torch.tensor([0, 100, 300, 600, 999])
    alphas = plan.alphas_cumprod[timesteps].double()
    snr, gamma = alphas / (1 - alphas), 5.0
    expected = {
        "epsilon": torch.minimum(snr, torch.tensor(gamma)) / snr,
        "sample": torch.minimum(snr, torch.tensor(gamma)),
        "v_prediction": torch.minimum((gamma + 1) / (snr + 1), torch.tensor(1.0)),
    }[kind]
    assert snr.min() < 1 < gamma < snr.max()
    torch.testing.assert_close(loss_weights(plan, timesteps, gamma).double(), expected, rtol=1e-4, atol=0)
    assert torch.equal(loss_weights(plan, timesteps, None), torch.ones(5))


@pytest.mark.parametrize("kind", KINDS)
def test_the_timestep_without_signal_is_finite(kind):
    plan = scheduler(kind, zero_snr=True)
    latents, noise, timesteps = batch(999, 998, 0)
    assert plan.alphas_cumprod[-1] < 1e-6
    assert (
        torch.isfinite(add_noise(plan, latents, noise, timesteps)).all()
        and torch.isfinite(target_of(plan, latents, noise, timesteps)).all()
    )
    weights = loss_weights(plan, timesteps, 5.0)
    assert torch.isfinite(weights).all() and (weights >= 0).all()
    if kind != "sample":
        assert weights[0] == 1
