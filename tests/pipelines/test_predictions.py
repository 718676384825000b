"""How training calls denoisers and makes latents, against the pipelines' own calls of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pipelines.conformance.cases import THERE, each_pipeline, family_named, settings, takes, teachable
from tests.pipelines.tiny.base import TinyPipeline, picture
from tiny_engram.denoiser_call import _parameters

DEFAULT = (
    "stable-diffusion-1",
    "stable-diffusion-2",
    "stable-diffusion-xl",
    "stable-diffusion-3",
    "flux:dev",
    "flux:schnell",
    "pixart:alpha",
)
TEXTS = ["a photo of a green dog on a table", "a cat"]


@pytest.fixture
def tiny_case(request):
    return request.param


@pytest.fixture
def pipe(tiny_case):
    return tiny_case.build()


def alone(tiny: TinyPipeline) -> dict[str, Any]:
    """Arguments for steps without a negative prompt; FLUX.1's guidance is none of that kind."""
    if tiny.family == "flux" or not takes(tiny, "guidance_scale"):
        return settings(tiny)
    return {**settings(tiny), "guidance_scale": 0.0 if tiny.family == "z-image" else 1.0}


def told(call: dict[str, Any]) -> dict[str, Any]:
    """What says something of the picture: neither None nor a mapping of nothing else, nor how the answer is wrapped."""
    kept = {name: told(value) if isinstance(value, dict) else value for name, value in call.items() if name != "return_dict"}
    return {name: value for name, value in kept.items() if value is not None and not (isinstance(value, dict) and not value)}


def drawn(tiny: TinyPipeline, pipe: Any, **more: Any) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """The latents that the pipeline ends with, and what its denoiser is given and says at the first step."""
    seen: list[tuple[dict[str, Any], Any]] = []
    denoiser = getattr(pipe, family_named(tiny).denoiser)

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((dict(zip(_parameters(type(module)), args, strict=False)) | kwargs, output[0]))

    handle = denoiser.register_forward_hook(hook, with_kwargs=True)
    try:
        latents = picture(tiny, pipe, list(TEXTS), **alone(tiny), **more)
    finally:
        handle.remove()
    return latents, *seen[0]


def square(tiny: TinyPipeline, pipe: Any, latents: Any) -> torch.Tensor:
    """Latents `[batch, channels, h, w]` of what a denoiser is given, or says."""
    if isinstance(latents, list):
        latents = torch.stack(latents).squeeze(2)
    if latents.dim() == 3:
        side = tiny.call["height"]
        latents = pipe._unpack_latents(latents, side, side, pipe.vae_scale_factor)
    return latents[:, :, 0] if latents.dim() == 5 else latents


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.float(), other.float())
    return one == other


@each_pipeline(teachable, default=DEFAULT)
def test_a_step_of_training_calls_the_denoiser_as_the_pipeline_does(tiny_case, pipe):
    family = family_named(tiny_case)
    _, given, said = drawn(tiny_case, pipe)
    timesteps = pipe.scheduler.timesteps[:1].expand(2)
    noisy = square(tiny_case, pipe, given.get("hidden_states", given.get("sample", given.get("x"))))
    side = tiny_case.call["height"]
    # what the pipelines say of sizes by default
    before = 1024 if tiny_case.family == "hunyuandit" else side
    frames = torch.tensor([[before, before, 0.0, 0.0, side, side]] * 2)
    calls: list[dict[str, Any]] = []
    denoiser = getattr(pipe, family.denoiser)
    handle = denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(dict(zip(_parameters(type(module)), args, strict=False)) | kwargs), with_kwargs=True
    )
    assert family.predicts is not None
    with torch.no_grad():
        embeds = family.embeds(pipe, TEXTS)
        found = family.predicts(pipe, noisy, timesteps, embeds, frames)
    handle.remove()
    (call,) = calls
    given[family.timestep] = torch.as_tensor(given[family.timestep]).expand(2)  # some pipelines give one for all
    given, call = told(given), told(call)
    assert not [name for name in given | call if not equal(given.get(name), call.get(name))]
    sign = -1 if tiny_case.family in ("lumina-2", "z-image") else 1
    assert torch.equal(found, sign * square(tiny_case, pipe, said))
    assert found.shape[2:] == noisy.shape[2:] and found.shape[1] >= noisy.shape[1]


@each_pipeline(teachable, default=DEFAULT)
def test_latents_are_those_that_the_pipeline_would_decode(tiny_case, pipe, monkeypatch):
    family = family_named(tiny_case)
    if tiny_case.family == "stable-diffusion-xl":
        pipe.vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[1.5, 0.5, 2.0, 1.0])
    if tiny_case.family == "qwen-image":
        pipe.vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[1.5, 0.5, 2.0, 1.0])
    latents = square(tiny_case, pipe, drawn(tiny_case, pipe)[0])
    decoded: list[torch.Tensor] = []
    decode = pipe.vae.decode

    def spy(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded.append(z)
        return decode(z, *args, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", spy)
    drawn(tiny_case, pipe, output_type="pt")
    known = SimpleNamespace(mean=decoded[0], std=torch.full_like(decoded[0], 0.5))
    monkeypatch.setattr(pipe.vae, "encode", lambda pixels: SimpleNamespace(latent_dist=known, latent=decoded[0]))
    mean, std = family.latents(pipe, torch.zeros(2, 3, 64, 64))
    torch.testing.assert_close(mean, latents.float(), rtol=1e-5, atol=1e-5)
    known.mean = decoded[0] + 0.5
    moved, _ = family.latents(pipe, torch.zeros(2, 3, 64, 64))
    drawn_with = torch.zeros_like(std) if tiny_case.family == "sana" else moved - mean
    torch.testing.assert_close(std, drawn_with, rtol=1e-4, atol=1e-4)


def test_every_family_can_be_taught_or_says_why_not():
    families = {family_named(tiny).name: family_named(tiny) for tiny in THERE}
    untaught = {name for name, family in families.items() if family.predicts is None}
    assert untaught == {"flux-2", "flux-2-klein", "wan", "ltx-video", "cogvideox", "hunyuan-video"} & families.keys()
    assert all(" " in families[name].untaught and "yet" not in families[name].untaught for name in untaught)
