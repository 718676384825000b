"""Pipelines whose denoiser is a UNet with cross-attentions: Stable Diffusion 1.x, 2.x and XL."""

from collections.abc import Mapping
from typing import Any

from tiny_engram.pipelines.family import Attention, EncoderSpec, Family
from tiny_engram.pipelines.latents import scaled_by_channel
from tiny_engram.pipelines.predictions import unet_prediction, xl_unet_prediction

__all__ = ["STABLE_DIFFUSION", "STABLE_DIFFUSION_XL"]


def unet_attentions(unet: Any, role: str) -> tuple[Attention, ...]:
    """The cross-attentions of a UNet, in running order; all of them read what the denoiser is given."""
    # The UNet registers its middle block last and runs it between the others.
    downs, ups = (
        [(f"{side}{i}", part) for i, part in enumerate(parts)] for side, parts in (("down", unet.down_blocks), ("up", unet.up_blocks))
    )
    blocks = (*downs, ("mid", unet.mid_block), *ups)
    return tuple(
        Attention(module, block, part.get_submodule(name.rpartition(".")[0]))
        for block, part in blocks
        if part is not None
        for name, module in part.named_modules()
        if name.endswith("attn2")
    )


def side_by_side(pipe: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """Two encoders' states, one beside the other in width; the refiner has the second alone."""
    states = embeds["prompt_embeds"]
    first = 0 if pipe.text_encoder is None else pipe.text_encoder.config.hidden_size
    return {"clip_l": states[..., :first], "clip_g": states[..., first:]}


STABLE_DIFFUSION = Family(
    name="stable-diffusion-1",
    pipelines=(
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline",
        "StableDiffusionControlNetInpaintPipeline",
        "StableDiffusionPAGPipeline",
        "StableDiffusionPAGImg2ImgPipeline",
        "StableDiffusionPAGInpaintPipeline",
        "StableDiffusionControlNetPAGPipeline",
        "StableDiffusionControlNetPAGInpaintPipeline",
        "StableDiffusionSAGPipeline",
        "StableDiffusionPanoramaPipeline",
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
    ),
    encoders=(EncoderSpec("clip_l", "text_encoder", "tokenizer", "final_layer_norm"),),
    returns=("prompt_embeds", "negative_prompt_embeds"),
    denoisers=("unet",),
    attentions=unet_attentions,
    projected=False,
    predicts=unet_prediction,
    plain=True,
)

STABLE_DIFFUSION_XL = Family(
    name="stable-diffusion-xl",
    pipelines=(
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
        "StableDiffusionXLControlNetInpaintPipeline",
        "StableDiffusionXLPAGPipeline",
        "StableDiffusionXLPAGImg2ImgPipeline",
        "StableDiffusionXLPAGInpaintPipeline",
        "StableDiffusionXLControlNetPAGPipeline",
        "StableDiffusionXLControlNetPAGImg2ImgPipeline",
    ),
    encoders=(
        EncoderSpec("clip_l", "text_encoder", "tokenizer", reads=-2),
        EncoderSpec("clip_g", "text_encoder_2", "tokenizer_2", reads=-2),
    ),
    returns=("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    denoisers=("unet",),
    consumed=side_by_side,
    attentions=unet_attentions,
    projected=False,
    predicts=xl_unet_prediction,
    latents=scaled_by_channel,
)
