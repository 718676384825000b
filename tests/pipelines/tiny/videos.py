"""Tiny pipelines that make videos: LTX-Video, CogVideoX and HunyuanVideo."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import LlamaConfig, LlamaModel

from tests.pipelines.tiny.base import TinyPipeline, clip_encoder, clip_tokenizer, finished, t5_encoder, t5_tokenizer
from tests.pipelines.tiny.decoders import decoder_sizes, telling
from tests.pipelines.tiny.vocabularies import llama_3


def ltx() -> LTXPipeline:
    """Videos of 9 frames of 64x64: 2 x 2 x 2 places. T5 of width 48, a denoiser of width 32."""
    torch.manual_seed(0)
    transformer: dict[str, Any] = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 48,
    }
    vae: dict[str, Any] = {
        "latent_channels": 8,
        "block_out_channels": (8,) * 4,
        "decoder_block_out_channels": (8,) * 4,
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
    }
    return finished(
        LTXPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=AutoencoderKLLTXVideo(**vae),
            text_encoder=t5_encoder(48),
            tokenizer=t5_tokenizer(),
            transformer=LTXVideoTransformer3DModel(**transformer),
        )
    )


def cogvideox() -> CogVideoXPipeline:
    """Videos of 5 frames of 32x32: 2 x 2 x 2 places. T5 of width 48, a denoiser of width 32."""
    torch.manual_seed(0)
    transformer: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "text_embed_dim": 48,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 5,
    }
    vae: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return finished(
        CogVideoXPipeline(
            tokenizer=t5_tokenizer(),
            text_encoder=t5_encoder(48),
            vae=AutoencoderKLCogVideoX(**vae),
            transformer=CogVideoXTransformer3DModel(**transformer),
            scheduler=CogVideoXDDIMScheduler(),
        )
    )


def hunyuan_video() -> HunyuanVideoPipeline:
    """Videos of 5 frames of 32x32: 2 x 2 x 2 places. Llama of width 48 and CLIP of width 32, a denoiser of width 32."""
    torch.manual_seed(0)
    transformer: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 48,
        "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 6, 6),
    }
    vae: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return finished(
        HunyuanVideoPipeline(
            text_encoder=telling(LlamaModel(LlamaConfig(vocab_size=128320, **decoder_sizes(48, 4)))),
            tokenizer=llama_3(),
            transformer=HunyuanVideoTransformer3DModel(**transformer),
            vae=AutoencoderKLHunyuanVideo(**vae),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            text_encoder_2=clip_encoder(32),
            tokenizer_2=clip_tokenizer("hunyuan_video/tokenizer_1"),
        )
    )


def _call(frames: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": 2, "height": size, "width": size, "num_frames": frames, "output_type": "latent", **more}


VIDEOS = (
    TinyPipeline("ltx", ltx, _call(9, 64)),
    TinyPipeline("cogvideox", cogvideox, _call(5, 32)),
    TinyPipeline("hunyuan-video", hunyuan_video, _call(5, 32), notes="Both encoders get `prompt`: diffusers 0.42 drops `prompt_2`."),
)
