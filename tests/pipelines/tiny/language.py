"""Tiny pipelines that read the states of a language model: Sana, Z-Image and Qwen-Image."""

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
)

from tests.pipelines.tiny.base import TinyPipeline, finished, picture_vae
from tests.pipelines.tiny.decoders import decoder_sizes, gemma_2
from tests.pipelines.tiny.vocabularies import QWEN_25_TOKENS, gemma, qwen, qwen_3


def sana() -> SanaPipeline:
    """Pictures of 64x64: 2 x 2 places. Gemma 2 of width 48, a denoiser of width 32."""
    torch.manual_seed(0)
    tokenizer = gemma()
    vae: dict[str, Any] = {
        "latent_channels": 4,
        "attention_head_dim": 2,
        "encoder_block_out_channels": (8,) * 6,
        "decoder_block_out_channels": (8,) * 6,
        "encoder_layers_per_block": (1,) * 6,
        "decoder_layers_per_block": (1,) * 6,
        "encoder_qkv_multiscales": ((),) * 6,
        "decoder_qkv_multiscales": ((),) * 6,
    }
    transformer: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 48,
        "sample_size": 32,
    }
    return finished(
        SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_2(len(tokenizer), 48),
            vae=AutoencoderDC(**vae),
            transformer=SanaTransformer2DModel(**transformer),
            scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        )
    )


def z_image() -> ZImagePipeline:
    """Pictures of 32x32: 2 x 2 places. Qwen 3 of width 48, a denoiser of width 32 with one layer of each refiner."""
    torch.manual_seed(0)
    transformer: dict[str, Any] = {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 48,
        "axes_dims": [4, 6, 6],
        "axes_lens": [1024, 16, 16],
    }
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=picture_vae(4),
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=151936, **decoder_sizes(48, 4))),
        tokenizer=qwen_3(),
        transformer=ZImageTransformer2DModel(**transformer),
    )
    # Zeros when made, learnt in a published model.
    for token in (pipe.transformer.x_pad_token, pipe.transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return finished(pipe)


def qwen_image() -> QwenImagePipeline:
    """Pictures of 32x32: 2 x 2 places. The language half of Qwen 2.5 VL of width 48, a denoiser of width 32."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2]}
    # Heads are as wide as the width allows: this model does not read `head_dim` everywhere.
    text: dict[str, Any] = {**decoder_sizes(48, 4), "head_dim": 12, "vocab_size": 152064, "rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    transformer: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "axes_dims_rope": (4, 6, 6),
    }
    vae: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return finished(
        QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=AutoencoderKLQwenImage(**vae),
            text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
            tokenizer=qwen(QWEN_25_TOKENS),
            transformer=QwenImageTransformer2DModel(**transformer),
        )
    )


def _call(size: int, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": 2, "height": size, "width": size, "output_type": "latent", **more}


LANGUAGE = (
    TinyPipeline("sana", sana, _call(64, use_resolution_binning=False), real_tokenizer=False),
    TinyPipeline("z-image", z_image, _call(32), notes="Its chat template knows plain messages alone, without tools."),
    TinyPipeline("qwen-image", qwen_image, _call(32)),
)
