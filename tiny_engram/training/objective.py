"""The denoising loss, with every random choice keyed by (seed, step, sample). Imports torch, config and errors only.

Keys instead of generator state: a resumed run, a run on another number of processes and a run with validation in it
draw the same pictures, captions, timesteps and noise.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.training.config import TrainConfig

__all__ = ["EVERY", "Draw", "add_noise", "draw", "loss_weights", "noise_for", "other_picture", "target_of", "timesteps_for"]

_BELOW_ONE = 1 - 2.0**-53
# Samples in a row of which a number may show other pictures than the taught ones.
EVERY = 8


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample's choices: shares in [0, 1) of pictures, captions and timesteps, the draw for dropout, a seed for the noise, which of
    the other pictures' places in every `EVERY` samples it takes, if any, and shares for mirroring and for the bucket, which is the same
    for all samples of a step."""

    picture: float
    caption: float
    timestep: float
    drop: float
    noise_seed: int
    other: int | None = None
    flip: float = 0.0
    bucket: float = 0.0


def _keyed(*key: object) -> float:
    """A share in [0, 1) that depends on the key alone."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def draw(seed: int, step: int, sample: int, samples: int, *, others: int = 0) -> Draw:
    """The choices of sample number `sample` of `samples` in the global batch at `step`; `others` of every `EVERY` show others.

    Timesteps are stratified over the batch: sample i takes the i-th of equal shares of the schedule.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{sample}".encode(), digest_size=40).digest()
    words = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 40, 8)]
    # 53 bits fit a double: more would round up to 1
    picture, caption, timestep, drop = ((w >> 11) / 2**53 for w in words[:4])
    other = other_picture(step, sample, samples, others) if others else None
    # of digests of their own, so that the choices above stay what they were
    flip, bucket = _keyed(seed, step, sample, "flip"), _keyed(seed, step, "bucket")
    return Draw(picture, caption, min((sample + timestep) / samples, _BELOW_ONE), drop, words[4] >> 1, other, flip, bucket)


def other_picture(step: int, sample: int, samples: int, others: int) -> int | None:
    """Which of `others` places in every `EVERY` samples this one takes, 0..others-1; None for a sample that shows a taught picture.

    Samples are counted over all steps, so that a batch of any size has its share in the long run. The places move on with every `EVERY`
    samples: a sample's number in its batch is its share of the timesteps, and each of the others must see all of them.
    """
    block, place = divmod(step * samples + sample, EVERY)
    turn = block // max(1, samples // EVERY)
    at = [(turn + other * EVERY // others) % EVERY for other in range(others)]
    return at.index(place) if place in at else None


def noise_for(drawn: Draw, shape: tuple[int, ...], offset: float = 0.0) -> torch.Tensor:
    """Standard normal noise, float32 `[2, channels, h, w]`, drawn on the CPU so that every device gets the same: what is added to the
    picture's latents, with `offset` times a normal value for each whole channel on it, and what the latents are drawn with."""
    noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(drawn.noise_seed))
    if offset:
        # numbers of their own: with an offset the noise under it stays the same
        whole = torch.randn((shape[1], 1, 1), generator=torch.Generator("cpu").manual_seed(drawn.noise_seed ^ 1 << 62))
        noise[0] += offset * whole
    return noise


def _share(u: float, config: TrainConfig) -> float:
    """The share of the schedule that lies below the timesteps of a share `u` of the samples: rising, from 0 to below 1."""
    if config.timestep_sampling == "logit_normal":
        normal = NormalDist(config.logit_mean, config.logit_std).inv_cdf(max(u, 1e-12))
        u = 1 / (1 + math.exp(-normal)) if normal > -700 else 0.0
    elif config.timestep_sampling == "mode":
        u -= config.mode_scale * (math.sin(math.pi * u / 2) ** 2 - u)
    return u


def flow_matching(scheduler: Any) -> bool:
    """Does the scheduler lead from noise to pictures in straight lines, its denoiser told along which?"""
    return type(scheduler).__name__.startswith("FlowMatch") or scheduler.config.get("prediction_type") == "flow_prediction"


def _shift_at(config: Any, places: int) -> float:
    """A scheduler's shift for pictures of so many places: FLUX.1 and others draw a straight line through two sizes."""
    (few, many), (least, most) = (
        [config.get(f"{end}_{what}", default) for end, default in zip(("base", "max"), defaults, strict=True)]
        for what, defaults in (("image_seq_len", (256, 4096)), ("shift", (0.5, 1.15)))
    )
    mu = least + (most - least) * (places - few) / (many - few)
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)


def timesteps_for(scheduler: Any, shares: Sequence[float], config: TrainConfig, places: int | None = None) -> torch.Tensor:
    """The timesteps `[B]`, on the CPU, of shares in [0, 1) of the samples: int64, or float32 where the scheduler is of flow matching.

    places: of a picture, as the denoiser counts them, which the shift of some flows depends on.

    Raises:
        TinyEngramError: the shift of a flow depends on the picture's size, and neither that nor a shift was given.
    """
    flow, steps, shift = flow_matching(scheduler), scheduler.config.num_train_timesteps, config.timestep_shift
    if shift is None and flow:
        if scheduler.config.get("use_dynamic_shifting"):
            if places is None:
                raise TinyEngramError(
                    "timestep_shift is None, and the scheduler's own depends on the picture's size; pass --timestep_shift 3"
                )
            shift = _shift_at(scheduler.config, places)
        else:
            shift = scheduler.config.get("shift") or scheduler.config.get("flow_shift")
    found = [_share(u, config) for u in shares]
    if flow:
        # the scheduler's own grid, which begins above 0: without noise there is nothing to learn
        found = [(min(int(t * steps), steps - 1) + 1) / steps for t in found]
    if shift is not None:
        found = [shift * t / (1 + (shift - 1) * t) for t in found]
    if flow:
        return torch.tensor(found, dtype=torch.float32) * steps
    return torch.tensor([min(int(t * steps), steps - 1) for t in found])


def signal_noise(scheduler: Any, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of picture and noise at each timestep: float32 `[B, 1, 1, 1]` each."""
    if flow_matching(scheduler):
        level = (timesteps.float() / scheduler.config.num_train_timesteps).view(-1, 1, 1, 1)
        return 1 - level, level
    alphas = scheduler.alphas_cumprod.to(timesteps.device, torch.float32)[timesteps]
    return alphas.sqrt().view(-1, 1, 1, 1), (1 - alphas).sqrt().view(-1, 1, 1, 1)


def add_noise(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """Latents `[B, channels, h, w]` as noisy as the scheduler has them at each timestep."""
    signal, level = signal_noise(scheduler, timesteps)
    return signal * latents + level * noise


def target_of(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """What the denoiser should say, by the scheduler's prediction type."""
    if flow_matching(scheduler):
        return noise - latents
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return noise
    if kind == "sample":
        return latents
    if kind == "v_prediction":
        signal, level = signal_noise(scheduler, timesteps)
        return signal * noise - level * latents
    raise TinyEngramError(f"prediction_type {kind!r} of the scheduler, expected epsilon, sample, v_prediction or flow_prediction")


def loss_weights(scheduler: Any, timesteps: torch.Tensor, gamma: float | None) -> torch.Tensor:
    """Min-SNR weights `[B]` (Hang et al. 2023, arXiv 2303.09556).

    For v-prediction in the soft form min(1, (gamma + 1) / (snr + 1)), which does not vanish where the SNR does: the
    layout of a picture is decided there. Sample prediction takes min(gamma, snr), epsilon min(1, gamma / snr). Flow matching weighs
    all alike, as its own papers do: which timesteps it draws is what weighs them.
    """
    if gamma is None or flow_matching(scheduler):
        return torch.ones(len(timesteps), device=timesteps.device)
    alphas = scheduler.alphas_cumprod.to(timesteps.device, torch.float32)[timesteps]
    snr = alphas / (1 - alphas).clamp(min=1e-12)
    kind = scheduler.config.prediction_type
    if kind == "v_prediction":
        return ((gamma + 1) / (snr + 1)).clamp(max=1)
    return snr.clamp(max=gamma) if kind == "sample" else (gamma / snr.clamp(min=1e-12)).clamp(max=1)
