"""Pictures of many runs at once, by the base's real pipeline: it samples, the method's hooks are in its denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from benchmarks.personalization.base import Base
from benchmarks.personalization.methods.method import Adapters, Rows

__all__ = ["draw"]

_BATCHES = {"cpu": 16, "cuda": 256}


@torch.no_grad()
def draw(
    base: Base,
    adapters: Adapters | None,
    rows: Rows,
    seeds: Sequence[int],
    *,
    steps: int = 25,
    guidance: float = 4.0,
    batch: int | None = None,
    autocast: torch.dtype | None = None,
) -> np.ndarray:
    """One picture for each row.

    Args:
        adapters: None draws with the untouched base.
        seeds: `[n]`; a picture starts from its own seed's noise, drawn on the CPU, whatever is drawn beside it.
        guidance: above 1. The unconditional half has the row's runs in it too, as a LoRA that is loaded into a pipeline has.
        batch: pictures of one call of the pipeline; the default is made for the device.
        autocast: lower precision of the products, such as torch.bfloat16.

    Returns:
        uint8 `[n, 128, 128, 3]` on the CPU.
    """
    if len(rows.ids) != len(seeds):
        raise ValueError(f"{len(rows.ids)} prompts, {len(seeds)} seeds; expected a seed for each")
    if guidance <= 1:
        raise ValueError(f"guidance {guidance:g}, expected more than 1: prompts are laid out for the two halves of guidance")
    size = batch or _BATCHES.get(base.device.type, 16)
    pictures = []
    for first in range(0, len(seeds), size):
        part = rows.part(first, first + size)
        both = base.empty(part).joined(part)
        with torch.autocast(base.device.type, autocast, enabled=autocast is not None):
            states = both.states if adapters is None else adapters.states(base, both)
            named = {"embeds": states}
            if (mask := base.mask(both.ids)) is not None:
                named["attention_mask"] = mask
            halves = {name: whole.chunk(2) for name, whole in named.items()}
            given = {f"{side}prompt_{name}": half[i] for name, half in halves.items() for i, side in enumerate(("negative_", ""))}
            with nullcontext() if adapters is None else adapters.attached(base, both, states):
                made = base.pipe(
                    **given,
                    **base.spec.drawing,
                    num_inference_steps=steps,
                    guidance_scale=guidance,
                    generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds[first : first + size]],
                    height=base.latent_shape[1] * base.pipe.vae_scale_factor,
                    width=base.latent_shape[2] * base.pipe.vae_scale_factor,
                    output_type="pt",
                    return_dict=False,
                )[0]
        pictures.append((made.float() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy())
    return np.concatenate(pictures) if pictures else np.empty((0, 128, 128, 3), np.uint8)
