"""The frozen side of a step: what depends on pictures and captions alone, made once, and which part of it a sample shows.

May import torch, numpy, everything of training but loop, and the adapter's parts.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageOps

from tiny_engram.concept import Concept
from tiny_engram.deep_mounts import layer_of
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.training import objective
from tiny_engram.training.cache import CaptionBatch, CaptionStates, cache_captions, checked_places, encode_picture, find_places
from tiny_engram.training.collages import draw_collages
from tiny_engram.training.conditions import ConditionBatch, Conditions, cache_conditions
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data import Example, bucket_of, bucket_sizes, fitted_mask, fitted_picture, open_picture, varied
from tiny_engram.training.latent_files import LatentFiles
from tiny_engram.training.validation import native_size

__all__ = ["Latents", "TrainingData", "least_step", "places_of", "prepare"]

logger = logging.getLogger(__name__)

# Height and width as found, top and left edge of the crop, height and width of the crop.
Frame = tuple[float, float, float, float, float, float]
_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Latents:
    """Of a batch: mean and deviation float32 `[batch, channels, h, w]`, and how much each place counts, float32 `[batch, 1, h, w]` with a
    mean of 1 in each sample, None where all count alike; and frames float32 `[batch, 6]`, on the CPU, as `Family.predicts` has them."""

    means: torch.Tensor
    stds: torch.Tensor
    weights: torch.Tensor | None
    frames: torch.Tensor


@dataclass(slots=True)
class TrainingData:
    """Everything that depends on the data alone, picture by picture. The last `collages` of the pictures are collages.

    Attributes:
        means, stds: of the latents, float32 `[channels, h, w]` each. choices: of each picture, which of `captions` it is shown with.
        bare: which of `captions` are the trigger alone.
        mirrored: means and deviations of the taught pictures' mirror images, none where nothing is mirrored.
        weights: of the taught pictures, how much each place counts, float32 `[1, h, w]` of mean 1; None for a picture without a mask.
        repeats: how often each taught picture stands in the pool that is drawn from; empty for once each.
        bucketed: a step shows pictures of one size; `draw(..., others=0)` belongs to it, the collages are one more bucket.
        share: of samples that show a collage, where bucketed.
        frames: of each picture, what the base may be told of its size: see `Family.predicts`; empty where it is told nothing.
    """

    means: Sequence[torch.Tensor] | torch.Tensor
    stds: Sequence[torch.Tensor] | torch.Tensor
    captions: CaptionStates | Conditions
    choices: list[list[int]]
    bare: list[int]
    family: Any
    collages: int = 0
    mirrored: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    weights: Sequence[torch.Tensor | None] = ()
    repeats: Sequence[int] = ()
    bucketed: bool = False
    share: float = 0.0
    frames: Sequence[Frame] = ()

    # of a batch; see `joint.JointData`
    concepts = 1

    @property
    def taught(self) -> int:
        """How many pictures are no collages; they come first."""
        return len(self.choices) - self.collages

    def picture(self, drawn: objective.Draw) -> int:
        """Which picture a sample shows."""
        if drawn.other is not None or (self.bucketed and drawn.bucket < self.share):
            return self.taught + int(drawn.picture * self.collages)
        pool = [k for k, count in enumerate(self.repeats or [1] * self.taught) for _ in range(count)]
        if self.bucketed:
            # a picture of the step's bucket: one that is drawn for the whole step says which that is
            first = pool[min(int((drawn.bucket - self.share) / (1 - self.share) * len(pool)), len(pool) - 1)]
            pool = [k for k in pool if self.means[k].shape == self.means[first].shape]
        return pool[int(drawn.picture * len(pool))]

    def latents(self, draws: Sequence[objective.Draw], pictures: Sequence[int]) -> Latents:
        """What the samples show, each the picture that `picture` says; half of the taught ones mirrored where there are mirror images."""
        means, stds, weights = [], [], []
        for drawn, k in zip(draws, pictures, strict=True):
            flipped = bool(self.mirrored) and k < self.taught and drawn.flip < 0.5
            mean, std = self.mirrored[k] if flipped else (self.means[k], self.stds[k])
            weight = self.weights[k] if self.weights and k < self.taught else None
            means.append(mean)
            stds.append(std)
            weights.append(weight if weight is None or not flipped else weight.flip(-1))
        masked = any(weight is not None for weight in weights)
        whole = [torch.ones_like(mean[:1]) if weight is None else weight for mean, weight in zip(means, weights, strict=True)]
        frames = torch.tensor([self.frames[k] if self.frames else (0.0,) * 6 for k in pictures])
        return Latents(torch.stack(means), torch.stack(stds), torch.stack(whole) if masked else None, frames)

    def picks(self, draws: Sequence[objective.Draw], pictures: Sequence[int], dropout: float) -> list[int]:
        """Which of `captions` each sample is shown with; `dropout` is the share of those that are cut down to the trigger."""
        return [
            # a collage's caption names both things: cut down to the trigger, it would be wrong
            _choose(self.bare if picture < self.taught and drawn.drop < dropout else self.choices[picture], drawn.caption)
            for drawn, picture in zip(draws, pictures, strict=True)
        ]

    def batch(self, draws: Sequence[objective.Draw], dropout: float) -> tuple[Latents, CaptionBatch | ConditionBatch]:
        """What the samples show, and their captions."""
        pictures = [self.picture(drawn) for drawn in draws]
        return self.latents(draws, pictures), self.captions.batch(self.picks(draws, pictures, dropout))


def _choose(items: list[int], share: float) -> int:
    return items[int(share * len(items))]


def least_step(pipe: Any, family: Any) -> int:
    """The pixels by which a picture's sides must grow for the base: of one latent, times those that its denoiser takes together."""
    config = getattr(pipe, family.denoiser).config
    patch = getattr(config, "patch_size", None) if family.patch is None else family.patch
    # a UNet halves its latents from block to block
    together = patch if isinstance(patch, int) else 2 ** (len(getattr(config, "block_out_channels", (1,))) - 1)
    return pipe.vae_scale_factor * together


def places_of(pipe: Any, family: Any, latents: torch.Tensor) -> int:
    """How many places the denoiser makes of a picture's latents `[batch, channels, h, w]`."""
    patch = getattr(getattr(pipe, family.denoiser).config, "patch_size", None) if family.patch is None else family.patch
    return latents.shape[-2] * latents.shape[-1] // (patch if isinstance(patch, int) else 1) ** 2


def _sizes(pipe: Any, family: Any, config: TrainConfig, examples: Sequence[Example], resolution: int) -> list[tuple[int, int]]:
    """(width, height) of each picture as it is taught."""
    if not config.buckets:
        return [(resolution, resolution)] * len(examples)
    least = least_step(pipe, family)
    step = config.bucket_steps or least
    if step % least:
        raise ConfigError(f"bucket_steps is {step}, expected a multiple of {least}, which this base needs; pass --bucket_steps {least}")
    every = bucket_sizes(resolution, step)
    seen = [open_picture(example.source, str(example.path)).picture.size for example in examples]
    return [bucket_of(size, every, step=step, upscale=not config.bucket_no_upscale) for size in seen]


def _frame(example: Example, size: tuple[int, int]) -> Frame:
    """Of a picture that is scaled until it covers (width, height), and cropped in the middle to it."""
    found, (width, height) = open_picture(example.source, str(example.path)).picture.size, size
    scale = max(width / found[0], height / found[1])
    left, top = (float((round(side * scale) - end) // 2) for side, end in zip(found, size, strict=True))
    return found[1], found[0], max(top, 0.0), max(left, 0.0), height, width


def _check_channels(pipe: Any, family: Any, latents: torch.Tensor) -> None:
    """Raises TinyEngramError where the denoiser reads more than noisy latents `[channels, h, w]`."""
    reads, own = getattr(getattr(pipe, family.denoiser).config, "in_channels", None), len(latents)
    if reads not in (None, own, own * (family.patch or 1) ** 2):
        raise TinyEngramError(
            f"the denoiser of {type(pipe).__name__} reads {reads} channels, expected the {own} of its VAE's latents: it wants a picture or "
            "a mask beside them, as inpainting does; teach on the base that draws from text alone, and load the concept here"
        )


def _weights(example: Example, size: tuple[int, int], latent: torch.Tensor, outside: float) -> torch.Tensor | None:
    """How much each latent counts: the share of it that the mask holds, float32 `[1, h, w]` of mean 1, so that the loss of a picture does
    not depend on how large its mask is."""
    mask = fitted_mask(example, size)
    if mask is None:
        return None
    pixels = torch.from_numpy(np.asarray(mask, np.float32) / 255)[None, None]
    held = torch.nn.functional.interpolate(pixels, latent.shape[-2:], mode="area")[0]
    weights = outside + (1 - outside) * held
    return (weights / weights.mean()).to(latent.device)


def prepare(
    pipe: Any, adapter: Any, concept: Concept, config: TrainConfig, examples: Sequence[Example], progress: bool = False
) -> TrainingData:
    """Latents of the pictures and of the collages, which are drawn first, and states of all captions.

    Raises:
        TinyEngramError: no resolution is known, or the base cannot take it. DataError: of captions, collages and masks.
    """
    spellings = (concept.trigger, *concept.aliases)
    resolution = config.resolution or native_size(pipe)
    if resolution is None:
        raise TinyEngramError(f"the denoiser of {type(pipe).__name__} does not say what size it was made for; pass --resolution")
    sizes = _sizes(pipe, adapter.family, config, examples, resolution)
    if config.caption_tag_dropout or config.shuffle_tags:
        vary = partial(varied, spellings=spellings, seed=config.seed, dropout=config.caption_tag_dropout, shuffle=config.shuffle_tags)
        examples = [replace(example, captions=vary(example.captions)) for example in examples]
        if not any("," in text for example in examples for text in example.captions):
            logger.warning("no caption has commas in it, so that caption_tag_dropout and shuffle_tags change nothing")
    shown = [example.captions for example in examples]
    sided = next((text for texts in shown for text in texts if _SIDES.search(text)), None)
    if config.random_flip and sided is not None:
        logger.warning("caption %r tells left from right, which --random_flip mixes up", sided)
    for role in concept.roles:  # before anything is drawn
        checked_places(adapter, concept, list(dict.fromkeys(text for texts in shown for text in texts)), role)
    encode: Callable[..., tuple[torch.Tensor, torch.Tensor]] = partial(encode_picture, pipe)
    if config.cache_dir is not None:
        encode = LatentFiles(pipe, Path(config.cache_dir)).encode
    latents, mirrored = [], []
    for example, size in zip(examples, sizes, strict=True):
        picture = fitted_picture(example, size)
        latents.append(encode(picture, size))
        if config.random_flip:
            mirrored.append(encode(ImageOps.mirror(picture), size))
    if latents:
        _check_channels(pipe, adapter.family, latents[0][0])
    weights = [_weights(e, size, mean, config.unmasked_weight) for e, size, (mean, _) in zip(examples, sizes, latents, strict=True)]
    if (config.alpha_mask or config.unmasked_weight) and all(weight is None for weight in weights):
        logger.warning("no picture has a mask, so that alpha_mask and unmasked_weight change nothing")
    made = []
    if config.collages:
        made = draw_collages(pipe, config, examples, resolution, partial(_fires_once, adapter, concept), progress=progress)
        shown += [(one.caption,) for one in made]
        # not kept: they are drawn by the base, and another run draws others
        latents += [encode_picture(pipe, one.picture, (resolution, resolution)) for one in made]
    told = [caption for texts in shown for caption in texts] + list(spellings)
    # rows inside an encoder move more than the spans, which the plain cache does not know
    deep = any(layer_of(mount) is not None for place in concept.roles.values() for mount in place.mounts)
    if adapter.family.plain and not deep:
        captions = cache_captions(adapter, concept, told)
    else:
        captions = cache_conditions(adapter, concept, told, recomputed=config.gradient_checkpointing)
    index = {text: i for i, text in enumerate(captions.texts)}
    return TrainingData(
        [mean for mean, _ in latents],
        [std for _, std in latents],
        captions,
        [[index[c] for c in texts] for texts in shown],
        [index[s] for s in spellings],
        adapter.family,
        len(made),
        mirrored,
        weights,
        [example.repeats for example in examples],
        config.buckets,
        config.collages / objective.EVERY if made else 0.0,
        [_frame(example, size) for example, size in zip(examples, sizes, strict=True)]
        + [(resolution, resolution, 0.0, 0.0, resolution, resolution)] * len(made),
    )


def _fires_once(adapter: Any, concept: Concept, text: str) -> bool:
    return all(len(find_places(adapter, concept, [text], role)[1][0]) == 1 for role in concept.roles)
