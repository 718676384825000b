"""Video pipelines: Wan, LTX-Video, CogVideoX and HunyuanVideo."""

from collections.abc import Mapping
from typing import Any

from tiny_engram.pipelines.attentions import cogvideox, hunyuan_video, masked_across_transformer_blocks, wan
from tiny_engram.pipelines.family import WITH_MASKS, EncoderSpec, Family
from tiny_engram.pipelines.texts import cleaned_by_module, cropped_window, sequence_window

__all__ = ["COGVIDEOX", "HUNYUAN_VIDEO", "LTX", "WAN"]

PICTURES_ALONE = "it makes videos, and a concept is taught from pictures alone"


def llama_and_pooled(pipe: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """HunyuanVideo: the language model's states, and of CLIP the pooled vector alone."""
    return {"llm": embeds["prompt_embeds"], "clip_l": embeds.get("pooled_prompt_embeds")}


WAN = Family(
    name="wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"),
    encoders=(EncoderSpec("umt5", "text_encoder", "tokenizer", text=cleaned_by_module, window=sequence_window),),
    returns=("prompt_embeds", "negative_prompt_embeds"),
    denoisers=("transformer", "transformer_2"),
    attentions=wan,
    untaught=PICTURES_ALONE,
)

LTX = Family(
    name="ltx-video",
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
    encoders=(EncoderSpec("t5", "text_encoder", "tokenizer", window=sequence_window),),
    returns=WITH_MASKS,
    attentions=masked_across_transformer_blocks,
    untaught=PICTURES_ALONE,
)

COGVIDEOX = Family(
    name="cogvideox",
    pipelines=(
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
        "CogVideoXFunControlPipeline",
    ),
    encoders=(EncoderSpec("t5", "text_encoder", "tokenizer", window=sequence_window),),
    returns=("prompt_embeds", "negative_prompt_embeds"),
    attentions=cogvideox,
    untaught=PICTURES_ALONE,
)

HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    pipelines=("HunyuanVideoPipeline",),
    encoders=(
        EncoderSpec("llm", "text_encoder", "tokenizer", reads=-3, window=cropped_window),
        EncoderSpec("clip_l", "text_encoder_2", "tokenizer_2", pooled=True),
    ),
    returns=("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"),
    consumed=llama_and_pooled,
    attentions=hunyuan_video,
    untaught=PICTURES_ALONE,
)
