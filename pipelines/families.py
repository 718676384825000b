"""What each family of pipelines consists of: its encoders, their tokenizers, and what the denoiser consumes.

Data and small functions about objects that the user made; nothing of diffusers is imported, and nothing of tiny_engram.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "CrossAttention", "EncoderSpec", "Family", "family_of", "known_pipelines"]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One text encoder: attribute names on the pipeline, and what pipelines read of its output.

    Attributes:
        final_norm: the module that pipelines apply themselves with clip_skip.
        reads: the entry of `hidden_states` that they read, counted from the end, with clip_skip an earlier one; None: the last.
    """

    role: str
    encoder: str
    tokenizer: str
    final_norm: str | None = None
    reads: int | None = None


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """One cross-attention of a denoiser.

    Attributes:
        module: has `to_q`, `to_k`, `to_v` and `to_out`. What others put in the place of one of these later is found under the attribute
            again, so hooks go by module and attribute.
        block: name of the block that it lies in, "down1" or "mid".
        transformer: the transformer layer around it, whose feed-forward layer runs after it.
    """

    module: Any
    block: str
    transformer: Any

    @property
    def channels(self) -> int | None:
        """Values that `to_q` reads at each place of the picture; None where the projection does not say."""
        return getattr(getattr(self.module, "to_q", None), "in_features", None)

    @property
    def feedforward(self) -> Any | None:
        """The feed-forward layer that its transformer layer runs after it, as it is now; it reads as many channels. None without one."""
        return getattr(self.transformer, "ff", None)


@dataclass(frozen=True, slots=True)
class Family:
    """Pipelines that are alike for concepts.

    `attentions` lists a denoiser's cross-attentions at a role, in running order. What their keys and values read must be the role's
    states as `encode` gives them.

    `encode` maps (pipe, prompts, negative prompts or None, images per prompt) to (prompt embeds, negative embeds or None): what the
    denoiser consumes, without the pooled vectors that some have beside them. `consumed` maps (pipe, prompt embeds) to each role's states
    `[batch, time, width]` inside the prompt embeds.
    """

    name: str
    pipelines: tuple[str, ...]
    encoders: tuple[EncoderSpec, ...]
    denoiser: str
    encode: Callable[[Any, Sequence[str], Sequence[str] | None, int], tuple[Any, Any]]
    consumed: Callable[[Any, Any], Mapping[str, Any]]
    attentions: Callable[[Any, str], Sequence[CrossAttention]]

    def contexts(self, denoiser: Any, role: str) -> dict[str, tuple[Any, str]]:
        """A denoiser's own context mounts at a role, in running order: name -> (module, attribute that holds the projection)."""
        return {
            f"context.{i}.{kind}": (attention.module, attribute)
            for i, attention in enumerate(self.attentions(denoiser, role))
            for kind, attribute in (("key", "to_k"), ("value", "to_v"))
        }


def _encode_stable_diffusion(pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int) -> tuple[Any, Any]:
    guided = negative is not None
    negative_prompt = list(negative) if negative is not None else None
    return pipe.encode_prompt(list(prompts), pipe._execution_device, images, guided, negative_prompt)


def _encode_xl(pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int) -> tuple[Any, Any]:
    guided = negative is not None
    negative_prompt = list(negative) if negative is not None else None
    embeds, negative_embeds, *_ = pipe.encode_prompt(
        list(prompts),
        device=pipe._execution_device,
        num_images_per_prompt=images,
        do_classifier_free_guidance=guided,
        negative_prompt=negative_prompt,
    )
    return embeds, negative_embeds


def _side_by_side(pipe: Any, embeds: Any) -> dict[str, Any]:
    """Two encoders' states, one beside the other in width; the refiner has the second alone."""
    first = 0 if pipe.text_encoder is None else pipe.text_encoder.config.hidden_size
    return {"clip_l": embeds[..., :first], "clip_g": embeds[..., first:]}


def _unet_attentions(unet: Any, role: str) -> tuple[CrossAttention, ...]:
    """The cross-attentions of a UNet; one encoder's states, as they are, go to all of them."""
    # The UNet registers its middle block last and runs it between the others.
    downs, ups = (
        [(f"{side}{i}", part) for i, part in enumerate(parts)] for side, parts in (("down", unet.down_blocks), ("up", unet.up_blocks))
    )
    blocks = (*downs, ("mid", unet.mid_block), *ups)
    return tuple(
        CrossAttention(module, block, part.get_submodule(name.rpartition(".")[0]))
        for block, part in blocks
        if part is not None
        for name, module in part.named_modules()
        if name.endswith("attn2")
    )


FAMILIES = (
    Family(
        name="stable-diffusion-1",
        pipelines=("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        encoders=(EncoderSpec("clip_l", "text_encoder", "tokenizer", "final_layer_norm"),),
        denoiser="unet",
        encode=_encode_stable_diffusion,
        consumed=lambda pipe, embeds: {"clip_l": embeds},
        attentions=_unet_attentions,
    ),
    Family(
        name="stable-diffusion-xl",
        pipelines=(
            "StableDiffusionXLPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "StableDiffusionXLControlNetPipeline",
            "StableDiffusionXLControlNetImg2ImgPipeline",
            "StableDiffusionXLControlNetInpaintPipeline",
        ),
        encoders=(
            EncoderSpec("clip_l", "text_encoder", "tokenizer", reads=-2),
            EncoderSpec("clip_g", "text_encoder_2", "tokenizer_2", reads=-2),
        ),
        denoiser="unet",
        encode=_encode_xl,
        consumed=_side_by_side,
        attentions=_unet_attentions,
    ),
)


def known_pipelines() -> list[str]:
    """Class names of every pipeline that concepts can be attached to."""
    return sorted(name for family in FAMILIES for name in family.pipelines)


def family_of(pipe: Any) -> Family | None:
    """The family of a pipeline, by the names of its class and its bases."""
    names = {cls.__name__ for cls in type(pipe).__mro__}
    return next((family for family in FAMILIES if names & set(family.pipelines)), None)
