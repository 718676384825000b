"""Tiny pipelines of FLUX.1 and of Chroma, which is FLUX without the pooled vector."""

from typing import Any

import torch
from diffusers import (
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from tests.pipelines.tiny.base import TinyPipeline, clip_encoder, clip_tokenizer, finished, picture_vae, t5_encoder, t5_tokenizer

CLIP, T5 = 24, 40
SIZES: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": T5,
    "axes_dims_rope": (4, 6, 6),
}
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "latent"}


def flux(kind: Any = FluxPipeline, *, guidance: bool = True, shifting: bool = True) -> Any:
    """FLUX.1 dev; without guidance embeddings and the shift of timesteps it is schnell."""
    torch.manual_seed(0)
    return finished(
        kind(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=shifting),
            vae=picture_vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1),
            text_encoder=clip_encoder(CLIP),
            tokenizer=clip_tokenizer("flux/tokenizer_1"),
            text_encoder_2=t5_encoder(T5),
            tokenizer_2=t5_tokenizer(),
            transformer=FluxTransformer2DModel(**SIZES, pooled_projection_dim=CLIP, guidance_embeds=guidance),
        )
    )


def chroma() -> Any:
    torch.manual_seed(0)
    approximator = {"approximator_num_channels": 32, "approximator_hidden_dim": 16, "approximator_layers": 1}
    return finished(
        ChromaPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=picture_vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1),
            text_encoder=t5_encoder(T5),
            tokenizer=t5_tokenizer(),
            transformer=ChromaTransformer2DModel(**SIZES, **approximator),
        )
    )


def _picture_to_edit() -> torch.Tensor:
    return torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


BOTH = ("prompt", "prompt_2")
PIPELINES = (
    TinyPipeline("flux:dev", flux, CALL, prompt_keys=BOTH),
    TinyPipeline("flux:schnell", lambda: flux(guidance=False, shifting=False), {**CALL, "max_sequence_length": 256}, prompt_keys=BOTH),
    TinyPipeline(
        "flux:kontext",
        lambda: flux(FluxKontextPipeline),
        {**CALL, "image": _picture_to_edit(), "max_area": 32 * 32, "_auto_resize": False},
        prompt_keys=BOTH,
    ),
    TinyPipeline("chroma", chroma, CALL),
)
