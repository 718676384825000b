"""Tiny pipelines that read the states of a language model: Sana, Z-Image, Qwen-Image, Lumina 2 and FLUX.2."""

import inspect
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from tests.pipelines.tiny.base import TinyPipeline, finished, needed, picture_vae
from tests.pipelines.tiny.decoders import decoder_sizes, gemma_2, telling
from tests.pipelines.tiny.vocabularies import QWEN_25_TOKENS, gemma, mistral_3, qwen, qwen_3


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
        vae=picture_vae(4, shift_factor=0.1),
        text_encoder=telling(Qwen3Model(Qwen3Config(vocab_size=151936, **decoder_sizes(48, 4)))),
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
    text: dict[str, Any] = {**decoder_sizes(48, 4), "head_dim": 12, "vocab_size": 152064}
    text["rope_parameters" if hasattr(Qwen2_5_VLTextConfig(), "rope_parameters") else "rope_scaling"] = rope
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
            text_encoder=telling(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))),
            tokenizer=qwen(QWEN_25_TOKENS),
            transformer=QwenImageTransformer2DModel(**transformer),
        )
    )


def lumina_2() -> Lumina2Pipeline:
    """Pictures of 32x32: 2 x 2 places. Gemma 2 of width 48, a denoiser of width 32 with one layer of each refiner."""
    torch.manual_seed(0)
    tokenizer = gemma()
    transformer: dict[str, Any] = {
        "sample_size": 4,
        "in_channels": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 16,
        "axes_dim_rope": (4, 6, 6),
        "axes_lens": (300, 16, 16),
        "cap_feat_dim": 48,
    }
    return finished(
        Lumina2Pipeline(
            transformer=Lumina2Transformer2DModel(**transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=picture_vae(4, shift_factor=0.1),
            text_encoder=gemma_2(len(tokenizer), 48),
            tokenizer=tokenizer,
        )
    )


def _flux_2_parts(width: int, guidance: bool) -> dict[str, Any]:
    """What both FLUX.2 have in common; `width` is that of three states side by side."""
    transformer: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": width,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    if "guidance_embeds" in inspect.signature(Flux2Transformer2DModel.__init__).parameters:
        transformer["guidance_embeds"] = guidance  # which older releases always have
    vae: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": AutoencoderKLFlux2(**vae),
        "transformer": Flux2Transformer2DModel(**transformer),
    }


def flux_2_klein() -> Any:
    """Pictures of 32x32: 2 x 2 places. Qwen 3 of width 24 with 28 layers, of which three are read."""
    kind = needed("Flux2KleinPipeline")
    torch.manual_seed(0)
    encoder = telling(Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, tie_word_embeddings=True, **decoder_sizes(24, 28))))
    return finished(kind(text_encoder=encoder, tokenizer=qwen_3(), **_flux_2_parts(72, guidance=False)))


def flux_2() -> Flux2Pipeline:
    """Pictures of 32x32: 2 x 2 places. The language half of Mistral Small 3 of width 24 with 31 layers, of which three are read."""
    torch.manual_seed(0)
    tokenizer = mistral_3()
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), "sliding_window": None, **decoder_sizes(24, 31)}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Mistral3Config(text_config=text, vision_config={**vision, "head_dim": 8, "image_size": 28, "patch_size": 14})
    encoder = telling(Mistral3ForConditionalGeneration(config))
    return finished(Flux2Pipeline(text_encoder=encoder, tokenizer=tokenizer, **_flux_2_parts(72, guidance=True)))


def _call(size: int, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": 2, "height": size, "width": size, "output_type": "latent", **more}


LANGUAGE = (
    TinyPipeline("sana", sana, _call(64, use_resolution_binning=False), real_tokenizer=False),
    TinyPipeline("z-image", z_image, _call(32), notes="Its chat template knows plain messages alone, without tools."),
    TinyPipeline("qwen-image", qwen_image, _call(32)),
    TinyPipeline("lumina-2", lumina_2, _call(32), real_tokenizer=False),
    # The logits of all 512 positions, which nobody reads, would take most of the time.
    TinyPipeline("flux-2-klein", flux_2_klein, _call(32, max_sequence_length=128)),
    TinyPipeline(
        "flux-2",
        flux_2,
        _call(32),
        real_tokenizer=False,
        notes="Its tokenizer has no PixtralProcessor around it, as that needs torchvision. Its chat template knows no tools.",
    ),
)
