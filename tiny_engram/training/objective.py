"""The denoising loss, with every random choice keyed by (seed, step, sample). Imports torch and errors only.

Keys instead of generator state: a resumed run, a run on another number of processes and a run with validation in it
draw the same pictures, captions, timesteps and noise.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError

__all__ = ["EVERY", "Draw", "add_noise", "draw", "loss_weights", "noise_for", "other_picture", "target_of"]

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


def noise_for(drawn: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal noise, float32, drawn on the CPU so that every device gets the same."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(drawn.noise_seed))


def signal_noise(scheduler: Any, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of picture and noise at each timestep: float32 `[B, 1, 1, 1]` each."""
    alphas = scheduler.alphas_cumprod.to(timesteps.device, torch.float32)[timesteps]
    return alphas.sqrt().view(-1, 1, 1, 1), (1 - alphas).sqrt().view(-1, 1, 1, 1)


def add_noise(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """Latents `[B, channels, h, w]` as noisy as the scheduler has them at each timestep."""
    signal, level = signal_noise(scheduler, timesteps)
    return signal * latents + level * noise


def target_of(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """What the denoiser should say, by the scheduler's prediction type."""
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return noise
    if kind == "sample":
        return latents
    if kind == "v_prediction":
        signal, level = signal_noise(scheduler, timesteps)
        return signal * noise - level * latents
    raise TinyEngramError(f"prediction_type {kind!r} of the scheduler, expected epsilon, sample or v_prediction")


def loss_weights(scheduler: Any, timesteps: torch.Tensor, gamma: float | None) -> torch.Tensor:
    """Min-SNR weights `[B]` (Hang et al. 2023, arXiv 2303.09556).

    For v-prediction in the soft form min(1, (gamma + 1) / (snr + 1)), which does not vanish where the SNR does: the
    layout of a picture is decided there. Sample prediction takes min(gamma, snr), epsilon min(1, gamma / snr).
    """
    if gamma is None:
        return torch.ones(len(timesteps), device=timesteps.device)
    alphas = scheduler.alphas_cumprod.to(timesteps.device, torch.float32)[timesteps]
    snr = alphas / (1 - alphas).clamp(min=1e-12)
    kind = scheduler.config.prediction_type
    if kind == "v_prediction":
        return ((gamma + 1) / (snr + 1)).clamp(max=1)
    return snr.clamp(max=gamma) if kind == "sample" else (gamma / snr.clamp(min=1e-12)).clamp(max=1)
