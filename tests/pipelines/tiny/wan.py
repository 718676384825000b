"""Tiny pipelines of Wan: 2.1, and 2.2 with a denoiser for each half of the steps or one time step for each place."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import UMT5Config, UMT5EncoderModel

from tests.pipelines.tiny.base import TinyPipeline, finished, mt5_tokenizer, t5_encoder

UMT5 = 32
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "num_frames": 5, "output_type": "latent"}


def _denoiser() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=UMT5,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
    )


def wan(*, denoisers: int = 1, **more: Any) -> Any:
    """`more` goes to WanPipeline: boundary_ratio, expand_timesteps."""
    try:
        prompt_clean("a cat")
    except NameError:
        pytest.skip(f"Wan of diffusers {diffusers.__version__} does not run without the library ftfy")
    torch.manual_seed(0)
    statistics = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return finished(
        WanPipeline(
            tokenizer=mt5_tokenizer(),
            text_encoder=t5_encoder(UMT5, vocab=250112, kind=UMT5EncoderModel, config=UMT5Config),
            vae=AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=_denoiser(),
            transformer_2=_denoiser() if denoisers == 2 else None,
            **more,
        )
    )


UNLIKE: dict[str, Any] = {"real_tokenizer": False, "notes": "mT5's tokenizer; the published UMT5 has 256,300 ids of the same kind"}
PIPELINES = (
    TinyPipeline("wan:2.1", wan, CALL, **UNLIKE),
    # Of two steps the first is above the boundary, the second below.
    TinyPipeline("wan:2.2-a14b", lambda: wan(denoisers=2, boundary_ratio=0.875), CALL, **UNLIKE),
    TinyPipeline("wan:2.2-ti2v", lambda: wan(expand_timesteps=True), CALL, **UNLIKE),
)
