"""Tiny pipelines of pictures that read T5, mT5 or UMT5: PixArt, AuraFlow, and HunyuanDiT, which reads BERT beside it."""

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanDiT2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones
    UMT5Config,
    UMT5EncoderModel,
)

from tests.pipelines.tiny.base import TinyPipeline, finished, mt5_tokenizer, needed, picture_vae, t5_encoder, t5_tokenizer, tokenizer_folder

T5, BERT, MT5 = 40, 24, 32
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "latent"}


def pixart(kind: Any = PixArtAlphaPipeline, *, conditions: bool = True) -> Any:
    """Alpha tells its denoiser the picture's size too; Sigma does not."""
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=T5,
        sample_size=128,
        use_additional_conditions=conditions,
    )
    return finished(
        kind(
            tokenizer=t5_tokenizer(),
            text_encoder=t5_encoder(T5),
            vae=picture_vae(4),
            transformer=transformer,
            scheduler=DPMSolverMultistepScheduler(),
        )
    )


def auraflow() -> Any:
    torch.manual_seed(0)
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return finished(
        AuraFlowPipeline(
            tokenizer=t5_tokenizer(),
            text_encoder=t5_encoder(T5, kind=UMT5EncoderModel, config=UMT5Config),
            vae=picture_vae(4),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        )
    )


def hunyuandit() -> Any:
    kind = needed("HunyuanDiTPipeline")
    torch.manual_seed(0)
    tokenizer = BertTokenizerFast.from_pretrained(tokenizer_folder("hunyuan_dit/tokenizer"))
    bert = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=BERT,
        intermediate_size=2 * BERT,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        # At the usual 0.02 layers of this width hardly move a state.
        initializer_range=0.1,
    )
    transformer = HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        num_layers=4,
        mlp_ratio=2.0,
        cross_attention_dim=BERT,
        cross_attention_dim_t5=MT5,
        pooled_projection_dim=16,
    )
    return finished(
        kind(
            vae=picture_vae(4),
            text_encoder=BertModel(bert),
            tokenizer=tokenizer,
            transformer=transformer,
            scheduler=DDPMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            text_encoder_2=t5_encoder(MT5, vocab=250112),
            tokenizer_2=mt5_tokenizer(),
        )
    )


UNBINNED = {**CALL, "use_resolution_binning": False}
PIPELINES = (
    TinyPipeline("pixart:alpha", pixart, UNBINNED),
    TinyPipeline("pixart:sigma", lambda: pixart(PixArtSigmaPipeline, conditions=False), UNBINNED),
    TinyPipeline(
        "auraflow", auraflow, CALL, real_tokenizer=False, notes="T5's tokenizer, of the same size; the published one is of Pile-T5"
    ),
    TinyPipeline("hunyuandit", hunyuandit, UNBINNED),
)
