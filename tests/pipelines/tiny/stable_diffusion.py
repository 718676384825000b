"""Tiny pipelines of Stable Diffusion: those with a UNet (1.5, 2, XL) and those with joint attention (3, 3.5)."""

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from tests.pipelines.tiny.base import TinyPipeline, clip_encoder, clip_tokenizer, finished, picture_vae, t5_encoder, t5_tokenizer

CLIP_L, CLIP_G, T5 = 32, 48, 96
CLIP_G_TOKENIZER = "stable_diffusion_3/tokenizer_2"
UNET: dict[str, Any] = {
    "sample_size": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "latent"}


def stable_diffusion(width: int, tokenizer: str, scheduler: Any, *, act: str = "quick_gelu", **unet: Any) -> Any:
    """1.5 and 2 differ in the encoder, its tokenizer's padding, and details of the UNet."""
    torch.manual_seed(0)
    return finished(
        StableDiffusionPipeline(
            vae=picture_vae(4),
            text_encoder=clip_encoder(width, act=act),
            tokenizer=clip_tokenizer(tokenizer),
            unet=UNet2DConditionModel(**UNET, block_out_channels=(16, 32), cross_attention_dim=width, **unet),
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


def version_1() -> Any:
    return stable_diffusion(CLIP_L, "stable_diffusion/tokenizer", DDIMScheduler(clip_sample=False, steps_offset=1), attention_head_dim=8)


def version_2() -> Any:
    """OpenCLIP's encoder without its last layer, so `last_hidden_state` is what others call the next to last; v-prediction."""
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1, prediction_type="v_prediction")
    return stable_diffusion(CLIP_G, CLIP_G_TOKENIZER, scheduler, act="gelu", attention_head_dim=(2, 4), use_linear_projection=True)


def xl() -> Any:
    torch.manual_seed(0)
    unet: dict[str, Any] = {
        **UNET,
        "block_out_channels": (32, 64),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
        "transformer_layers_per_block": (1, 2),
        "cross_attention_dim": CLIP_L + CLIP_G,
    }
    return finished(
        StableDiffusionXLPipeline(
            vae=picture_vae(4),
            text_encoder=clip_encoder(CLIP_L),
            text_encoder_2=clip_encoder(CLIP_G, 32, act="gelu"),
            tokenizer=clip_tokenizer("stable_diffusion/tokenizer"),
            tokenizer_2=clip_tokenizer(CLIP_G_TOKENIZER),
            unet=UNet2DConditionModel(**unet),
            scheduler=EulerDiscreteScheduler(),
            add_watermarker=False,
        )
    )


def version_3(*, t5: bool = True, **transformer: Any) -> Any:
    """T5 is wider than both CLIPs together, as it must be: they are padded to its width."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": T5,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 24 + 40,
        "pos_embed_max_size": 16,
    }
    return finished(
        StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**sizes, **transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=picture_vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1),
            text_encoder=clip_encoder(CLIP_L, 24),
            tokenizer=clip_tokenizer("stable_diffusion_3/tokenizer_1"),
            text_encoder_2=clip_encoder(CLIP_G, 40, act="gelu"),
            tokenizer_2=clip_tokenizer(CLIP_G_TOKENIZER),
            text_encoder_3=t5_encoder(T5) if t5 else None,
            tokenizer_3=t5_tokenizer() if t5 else None,
        )
    )


TWO, THREE = ("prompt", "prompt_2"), ("prompt", "prompt_2", "prompt_3")
PIPELINES = (
    TinyPipeline("stable-diffusion-1", version_1, CALL),
    TinyPipeline("stable-diffusion-2", version_2, CALL),
    TinyPipeline("stable-diffusion-xl", xl, CALL, prompt_keys=TWO),
    TinyPipeline("stable-diffusion-3", version_3, CALL, prompt_keys=THREE),
    TinyPipeline("stable-diffusion-3:no-t5", lambda: version_3(t5=False), CALL, prompt_keys=TWO),
    TinyPipeline(
        "stable-diffusion-3:3.5-medium",
        lambda: version_3(qk_norm="rms_norm", dual_attention_layers=(0, 1)),
        CALL,
        prompt_keys=THREE,
        notes="3.5 large has qk_norm alone",
    ),
)
