"""What the frozen base says about the data, computed once: latents of the pictures, text states of the captions.

In span mode the encoder needs no backward pass, so its output is as good as the text. May import torch, diffusers' image
processor, data and the adapter's parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiny_engram.concept import Concept
from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.residual import Spans
from tiny_engram.training.data import DataError, Example, load_picture

__all__ = ["CaptionStates", "cache_captions", "cache_latents"]


@dataclass(frozen=True, slots=True)
class CaptionStates:
    """Distinct captions with the base's text states `[captions, time, width]` and where the trigger stands in each."""

    texts: tuple[str, ...]
    states: torch.Tensor
    places: tuple[tuple[tuple[int, int, int], ...], ...]

    def batch(self, picks: Sequence[int]) -> tuple[torch.Tensor, Spans]:
        """States `[len(picks), time, width]` and spans of these captions."""
        spans = Spans.of((row, *place) for row, pick in enumerate(picks) for place in self.places[pick])
        return self.states[torch.tensor(picks, device=self.states.device)], spans


def cache_captions(adapter: EngramAdapter, concept: Concept, texts: Sequence[str], batch_size: int = 16) -> CaptionStates:
    """Encode each distinct caption once, with no concept firing. Raises DataError for one in which the trigger does not fire."""
    distinct = tuple(dict.fromkeys(texts))
    role, mount = next(iter(adapter.mounts.items()))
    length = mount.tokenizer.model_max_length
    ids = mount.tokenizer(list(distinct), padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    found = adapter.spans(concept, ids, role)
    places: list[list[tuple[int, int, int]]] = [[] for _ in distinct]
    for row, start, size, offset in zip(*(t.tolist() for t in (found.batch, found.start, found.length, found.offset)), strict=True):
        places[row].append((start, size, offset))
    for text, place in zip(distinct, places, strict=True):
        if not place:
            raise DataError(
                f"caption {text!r}: the trigger {concept.trigger!r} does not fire in it (cut off at {length} tokens, or a letter or digit "
                "touches it); shorten the caption or write the trigger as a word of its own"
            )
    states = []
    for start in range(0, len(distinct), batch_size):
        embeds, _ = adapter.encode(distinct[start : start + batch_size])
        states.append(embeds)
    return CaptionStates(distinct, torch.cat(states), tuple(tuple(p) for p in places))


@torch.no_grad()
def cache_latents(pipe: Any, examples: Sequence[Example], resolution: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each picture's latents, scaled for the denoiser: float32 `[pictures, channels, h, w]` each.

    Pictures are scaled so that the shorter side fits and cropped in the middle.
    """
    from diffusers.image_processor import VaeImageProcessor
    from PIL import ImageOps

    processor = VaeImageProcessor(vae_scale_factor=pipe.vae_scale_factor)
    vae = pipe.vae
    means, stds = [], []
    for example in examples:
        picture = ImageOps.fit(load_picture(example.path), (resolution, resolution))
        pixels = processor.preprocess(picture, height=resolution, width=resolution).to(vae.device, vae.dtype)
        latents = vae.encode(pixels).latent_dist
        means.append(latents.mean[0].float() * vae.config.scaling_factor)
        stds.append(latents.std[0].float() * vae.config.scaling_factor)
    return torch.stack(means), torch.stack(stds)
