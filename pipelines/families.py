"""What each family of pipelines consists of: its encoders, their tokenizers, and what the denoiser consumes.

Data and small functions about objects that the user made; nothing of diffusers is imported, and nothing of tiny_engram.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "EncoderSpec", "Family", "family_of", "known_pipelines"]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One text encoder: attribute names on the pipeline, and the module that pipelines apply themselves with clip_skip."""

    role: str
    encoder: str
    tokenizer: str
    final_norm: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Pipelines that are alike for concepts.

    `encode` maps (pipe, prompts, negative prompts or None, images per prompt) to (prompt embeds, negative embeds or None): what the
    denoiser consumes. `consumed` maps each role to its states `[batch, time, width]` inside the prompt embeds.
    """

    name: str
    pipelines: tuple[str, ...]
    encoders: tuple[EncoderSpec, ...]
    denoiser: str
    encode: Callable[[Any, Sequence[str], Sequence[str] | None, int], tuple[Any, Any]]
    consumed: Callable[[Any], Mapping[str, Any]]


def _encode_stable_diffusion(pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int) -> tuple[Any, Any]:
    guided = negative is not None
    negative_prompt = list(negative) if negative is not None else None
    return pipe.encode_prompt(list(prompts), pipe._execution_device, images, guided, negative_prompt)


FAMILIES = (
    Family(
        name="stable-diffusion-1",
        pipelines=("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        encoders=(EncoderSpec("clip_l", "text_encoder", "tokenizer", "final_layer_norm"),),
        denoiser="unet",
        encode=_encode_stable_diffusion,
        consumed=lambda embeds: {"clip_l": embeds},
    ),
)


def known_pipelines() -> list[str]:
    """Class names of every pipeline that concepts can be attached to."""
    return sorted(name for family in FAMILIES for name in family.pipelines)


def family_of(pipe: Any) -> Family | None:
    """The family of a pipeline, by the names of its class and its bases."""
    names = {cls.__name__ for cls in type(pipe).__mro__}
    return next((family for family in FAMILIES if names & set(family.pipelines)), None)
