"""Image pipelines with a transformer that reads CLIP, T5 or BERT: SD3, FLUX.1, Chroma, PixArt, AuraFlow and HunyuanDiT."""

from collections.abc import Mapping, Sequence
from typing import Any

from tiny_engram.pipelines.attentions import auraflow, flux, hunyuan_dit, joint_blocks, masked_across_transformer_blocks
from tiny_engram.pipelines.family import WITH_MASKS, EncoderSpec, Family, cleans_captions
from tiny_engram.pipelines.latents import shifted
from tiny_engram.pipelines.predictions import (
    auraflow_prediction,
    chroma_prediction,
    flux_prediction,
    hunyuan_dit_prediction,
    pixart_prediction,
    stable_diffusion_3_prediction,
)
from tiny_engram.pipelines.texts import preprocessed, sequence_window

__all__ = ["AURAFLOW", "CHROMA", "FLUX", "HUNYUAN_DIT", "PIXART", "STABLE_DIFFUSION_3"]

CLIP_LENGTH = 77
# What HunyuanDiT reads of its two encoders.
BERT_LENGTH, T5_LENGTH = 77, 256
HUNYUAN_RETURNS = ("prompt_embeds", "negative_prompt_embeds", "prompt_attention_mask", "negative_prompt_attention_mask")


def two_clips_and_t5(pipe: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """SD3: both CLIPs side by side in the first 77 rows, zeros beside them; T5 behind them."""
    states = embeds["prompt_embeds"]
    first, second = pipe.text_encoder.config.hidden_size, pipe.text_encoder_2.config.hidden_size
    clips = states[:, :CLIP_LENGTH]
    return {"clip_l": clips[..., :first], "clip_g": clips[..., first : first + second], "t5": states[:, CLIP_LENGTH:]}


def t5_and_pooled(pipe: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """FLUX.1: T5's states, and of CLIP the pooled vector alone; a denoiser is given the same under other names."""
    return {"t5": embeds["prompt_embeds"], "clip_l": embeds.get("pooled_prompt_embeds")}


def bert_and_t5(pipe: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """HunyuanDiT: two tensors, which the denoiser puts one behind the other."""
    return {"bert": embeds["prompt_embeds"], "t5": embeds["prompt_embeds_2"]}


def encode_twice(pipe: Any, prompts: Sequence[str], negative: Sequence[str] | None, images: int) -> dict[str, Any]:
    """HunyuanDiT: `encode_prompt` once for each encoder."""
    found: dict[str, Any] = {}
    for number, (length, suffix) in enumerate(((BERT_LENGTH, ""), (T5_LENGTH, "_2"))):
        given = pipe.encode_prompt(
            list(prompts),
            device=pipe._execution_device,
            dtype=pipe.transformer.dtype,
            num_images_per_prompt=images,
            do_classifier_free_guidance=negative is not None,
            negative_prompt=None if negative is None else list(negative),
            max_sequence_length=length,
            text_encoder_index=number,
        )
        found |= {f"{name}{suffix}": value for name, value in zip(HUNYUAN_RETURNS, given, strict=True) if value is not None}
    return found


STABLE_DIFFUSION_3 = Family(
    name="stable-diffusion-3",
    pipelines=(
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
        "StableDiffusion3ControlNetPipeline",
        "StableDiffusion3ControlNetInpaintingPipeline",
        "StableDiffusion3PAGPipeline",
        "StableDiffusion3PAGImg2ImgPipeline",
    ),
    encoders=(
        EncoderSpec("clip_l", "text_encoder", "tokenizer", reads=-2),
        EncoderSpec("clip_g", "text_encoder_2", "tokenizer_2", reads=-2),
        EncoderSpec("t5", "text_encoder_3", "tokenizer_3", window=sequence_window, offset=CLIP_LENGTH),
    ),
    returns=("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    consumed=two_clips_and_t5,
    attentions=joint_blocks,
    predicts=stable_diffusion_3_prediction,
    latents=shifted,
)

FLUX = Family(
    name="flux-1",
    pipelines=(
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxFillPipeline",
        "FluxControlPipeline",
        "FluxControlImg2ImgPipeline",
        "FluxControlInpaintPipeline",
        "FluxControlNetPipeline",
        "FluxControlNetImg2ImgPipeline",
        "FluxControlNetInpaintPipeline",
        "FluxKontextPipeline",
        "FluxKontextInpaintPipeline",
    ),
    encoders=(
        EncoderSpec("t5", "text_encoder_2", "tokenizer_2", window=sequence_window),
        EncoderSpec("clip_l", "text_encoder", "tokenizer", pooled=True),
    ),
    returns=("prompt_embeds", "pooled_prompt_embeds", "_text_ids"),
    consumed=t5_and_pooled,
    per_timestep=lambda timestep, total: timestep * total,
    attentions=flux,
    predicts=flux_prediction,
    latents=shifted,
    patch=2,
)

CHROMA = Family(
    name="chroma",
    pipelines=("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"),
    encoders=(EncoderSpec("t5", "text_encoder", "tokenizer", window=sequence_window),),
    returns=(
        "prompt_embeds",
        "_text_ids",
        "prompt_attention_mask",
        "negative_prompt_embeds",
        "_negative_text_ids",
        "negative_prompt_attention_mask",
    ),
    per_timestep=lambda timestep, total: timestep * total,
    attentions=flux,
    predicts=chroma_prediction,
    no_checkpoints="diffusers leaves Chroma's mask out of blocks that are computed again",
    latents=shifted,
    patch=2,
)

PIXART = Family(
    name="pixart",
    pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline", "PixArtSigmaPAGPipeline"),
    encoders=(EncoderSpec("t5", "text_encoder", "tokenizer", text=preprocessed, lower_case=True, masked=True, window=sequence_window),),
    returns=WITH_MASKS,
    attentions=masked_across_transformer_blocks,
    # Bins are of the published sizes: other ones would be drawn larger and scaled down, or not at all. Cleaning without its libraries is
    # none, with a warning for each call.
    call={"use_resolution_binning": False, "clean_caption": cleans_captions()},
    predicts=pixart_prediction,
    plain=True,
)

AURAFLOW = Family(
    name="auraflow",
    pipelines=("AuraFlowPipeline",),
    encoders=(EncoderSpec("umt5", "text_encoder", "tokenizer", window=sequence_window),),
    returns=WITH_MASKS,
    per_timestep=lambda timestep, total: timestep * total,
    attentions=auraflow,
    predicts=auraflow_prediction,
)

HUNYUAN_DIT = Family(
    name="hunyuan-dit",
    pipelines=("HunyuanDiTPipeline", "HunyuanDiTControlNetPipeline", "HunyuanDiTPAGPipeline"),
    encoders=(
        EncoderSpec("bert", "text_encoder", "tokenizer", window=lambda pipe: BERT_LENGTH),
        EncoderSpec("t5", "text_encoder_2", "tokenizer_2", window=lambda pipe: T5_LENGTH, offset=BERT_LENGTH),
    ),
    returns=HUNYUAN_RETURNS,
    consumed=bert_and_t5,
    encode=encode_twice,
    given={"encoder_hidden_states": "prompt_embeds", "encoder_hidden_states_t5": "prompt_embeds_2"},
    attentions=hunyuan_dit,
    call={"use_resolution_binning": False},
    predicts=hunyuan_dit_prediction,
)
