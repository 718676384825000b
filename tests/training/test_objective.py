"""The denoising loss: keyed draws, targets and weights against their formulas, the timestep without signal."""

import subprocess
import sys

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from tiny_engram.errors import TinyEngramError
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.objective import add_noise, draw, loss_weights, noise_for, target_of, timesteps_for

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


# -- flow matching, and which timesteps are drawn ----------------------------------------------------------------------------


def told(**changes) -> TrainConfig:
    return TrainConfig(train_data_dir="pictures", trigger="zqx", **changes)


SHARES = [(k + 0.5) / 1000 for k in range(1000)]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_against_the_formulas_and_the_scheduler_s_own_grid(shift):
    plan = FlowMatchEulerDiscreteScheduler(shift=shift)
    timesteps = timesteps_for(plan, SHARES, told())
    assert timesteps.dtype == torch.float32
    torch.testing.assert_close(timesteps.flip(0), plan.timesteps, rtol=1e-5, atol=1e-3)
    some = timesteps[[0, 300, 999]]
    latents, noise, _ = batch(0, 1, 2)
    sigma = (some / 1000).view(3, 1, 1, 1)
    torch.testing.assert_close(add_noise(plan, latents, noise, some), (1 - sigma) * latents + sigma * noise)
    torch.testing.assert_close(add_noise(plan, latents, noise, some), plan.scale_noise(latents, some, noise))
    assert torch.equal(target_of(plan, latents, noise, some), noise - latents)
    # the target is the way from the picture to the noise: what is noisy, less sigma of it, is the picture
    torch.testing.assert_close(add_noise(plan, latents, noise, some) - sigma * target_of(plan, latents, noise, some), latents)
    assert torch.equal(loss_weights(plan, some, 5.0), torch.ones(3))


def test_a_given_shift_takes_the_place_of_the_scheduler_s():
    plan = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sigma = torch.tensor([(k + 1) / 1000 for k in range(1000)], dtype=torch.float64)
    for given in (1.0, 5.0):
        expected = given * sigma / (1 + (given - 1) * sigma) * 1000
        torch.testing.assert_close(timesteps_for(plan, SHARES, told(timestep_shift=given)).double(), expected, rtol=1e-5, atol=1e-3)
    moving = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    with pytest.raises(TinyEngramError, match="timestep_shift is None, .*depends on the picture's size; pass --timestep_shift"):
        timesteps_for(moving, SHARES, told())
    assert timesteps_for(moving, SHARES, told(timestep_shift=1.0))[-1] == 1000
    # of other schedules too, and 1 is what they have without it
    assert torch.equal(timesteps_for(scheduler("epsilon"), SHARES, told(timestep_shift=1.0)), torch.arange(1000))
    assert timesteps_for(scheduler("epsilon"), SHARES, told(timestep_shift=3.0)).double().mean() > 600


def test_timesteps_without_any_option_are_equal_shares():
    assert torch.equal(timesteps_for(scheduler("epsilon"), SHARES, told()), torch.arange(1000))
    assert timesteps_for(scheduler("epsilon"), [0.0, 1 - 2.0**-53], told()).tolist() == [0, 999]


def test_logit_normal_has_the_shares_of_its_density():
    config = told(timestep_sampling="logit_normal", logit_mean=0.5, logit_std=0.75)
    t = torch.sigmoid(0.5 + 0.75 * torch.randn(400_000, generator=torch.Generator().manual_seed(0)))
    found = timesteps_for(scheduler("epsilon"), SHARES, config).double() / 1000
    for share in (0.1, 0.5, 0.9):
        assert abs(found.quantile(share).item() - t.double().quantile(share).item()) < 0.005, share
    assert (found.diff() >= 0).all() and 0 <= timesteps_for(scheduler("epsilon"), [0.0], config) < 20


def test_mode_has_the_shares_of_its_formula():
    """Stable Diffusion 3's f(u; s) = 1 - u - s (cos^2(pi u / 2) - 1 + u), of uniform u."""
    u = torch.rand(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = 1 - u - 1.29 * (torch.cos(torch.pi / 2 * u) ** 2 - 1 + u)
    found = timesteps_for(scheduler("epsilon"), SHARES, told(timestep_sampling="mode")).double() / 1000
    for share in (0.1, 0.3, 0.5, 0.9):
        assert abs(found.quantile(share).item() - t.quantile(share).item()) < 0.005, share
    for scale in (-1.0, 1.75):
        assert (timesteps_for(scheduler("epsilon"), SHARES, told(timestep_sampling="mode", mode_scale=scale)).diff() >= 0).all()


def test_the_offset_of_noise_is_one_value_a_channel_and_leaves_the_rest():
    drawn = draw(0, 1, 2, 4)
    plain, moved = noise_for(drawn, (2, 4, 8, 8)), noise_for(drawn, (2, 4, 8, 8), 0.1)
    assert torch.equal(plain[1], moved[1])
    offset = (moved[0] - plain[0]) / 0.1
    torch.testing.assert_close(offset, offset[:, :1, :1].expand(4, 8, 8), rtol=0, atol=1e-4)
    values = torch.stack(
        [noise_for(d, (2, 4, 1, 1), 1.0)[0] - noise_for(d, (2, 4, 1, 1))[0] for d in (draw(0, s, 0, 1) for s in range(500))]
    )
    assert abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.1
