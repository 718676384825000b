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

    `contexts` lists a denoiser's context mounts at a role, in running order: name -> (module, attribute that holds the projection).
    What those projections read must be the role's states as `encode` gives them.

    `encode` maps (pipe, prompts, negative prompts or None, images per prompt) to (prompt embeds, negative embeds or None): what the
    denoiser consumes. `consumed` maps each role to its states `[batch, time, width]` inside the prompt embeds.
    """

    name: str
    pipelines: tuple[str, ...]
    encoders: tuple[EncoderSpec, ...]
    denoiser: str
    encode: Callable[[Any, Sequence[str], Sequence[str] | None, int], tuple[Any, Any]]
    consumed: Callable[[Any], Mapping[str, Any]]
    contexts: Callable[[Any, str], Mapping[str, tuple[Any, str]]]


def _encode_stable_diffusion(pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int) -> tuple[Any, Any]:
    guided = negative is not None
    negative_prompt = list(negative) if negative is not None else None
    return pipe.encode_prompt(list(prompts), pipe._execution_device, images, guided, negative_prompt)


def _unet_contexts(unet: Any, role: str) -> dict[str, tuple[Any, str]]:
    """Keys and values of a UNet's cross-attentions; one encoder's states, as they are, go to all of them."""
    # The UNet registers its middle block last and runs it between the others.
    blocks = (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    attentions = [m for block in blocks if block is not None for name, m in block.named_modules() if name.endswith("attn2")]
    return {
        f"context.{i}.{kind}": (attention, attribute)
        for i, attention in enumerate(attentions)
        for kind, attribute in (("key", "to_k"), ("value", "to_v"))
    }


FAMILIES = (
    Family(
        name="stable-diffusion-1",
        pipelines=("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        encoders=(EncoderSpec("clip_l", "text_encoder", "tokenizer", "final_layer_norm"),),
        denoiser="unet",
        encode=_encode_stable_diffusion,
        consumed=lambda embeds: {"clip_l": embeds},
        contexts=_unet_contexts,
    ),
)


def known_pipelines() -> list[str]:
    """Class names of every pipeline that concepts can be attached to."""
    return sorted(name for family in FAMILIES for name in family.pipelines)


def family_of(pipe: Any) -> Family | None:
    """The family of a pipeline, by the names of its class and its bases."""
    names = {cls.__name__ for cls in type(pipe).__mro__}
    return next((family for family in FAMILIES if names & set(family.pipelines)), None)
