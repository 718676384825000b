"""Image pipelines whose prompt a language model reads: Sana, Lumina 2, Qwen-Image, Z-Image and FLUX.2."""

from tiny_engram.pipelines.attentions import joint_blocks, lumina, sana, z_image
from tiny_engram.pipelines.family import WITH_MASKS, EncoderSpec, Family, cleans_captions
from tiny_engram.pipelines.latents import compressed, normalized, shifted
from tiny_engram.pipelines.predictions import lumina_prediction, qwen_image_prediction, sana_prediction, z_image_prediction
from tiny_engram.pipelines.texts import behind_system_message, chat_window, preprocessed, sequence_window, window_behind

__all__ = ["FLUX_2", "FLUX_2_KLEIN", "LUMINA_2", "QWEN_IMAGE", "SANA", "Z_IMAGE"]

SANA = Family(
    name="sana",
    pipelines=("SanaPipeline", "SanaPAGPipeline", "SanaControlNetPipeline"),
    encoders=(EncoderSpec("llm", "text_encoder", "tokenizer", text=preprocessed, lower_case=True, window=sequence_window),),
    returns=WITH_MASKS,
    attentions=sana,
    call={"use_resolution_binning": False, "clean_caption": cleans_captions()},
    predicts=sana_prediction,
    latents=compressed,
)

LUMINA_2 = Family(
    name="lumina-2",
    pipelines=("Lumina2Pipeline",),
    encoders=(
        EncoderSpec(
            "llm", "text_encoder", "tokenizer", reads=-2, window=window_behind(lambda pipe: f"{pipe.system_prompt} <Prompt Start> ")
        ),
    ),
    returns=WITH_MASKS,
    probe_length=None,
    per_timestep=lambda timestep, total: (1 - timestep) * total,
    attentions=lumina,
    predicts=lumina_prediction,
    latents=shifted,
)

QWEN_IMAGE = Family(
    name="qwen-image",
    pipelines=("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImageControlNetPipeline"),
    encoders=(EncoderSpec("llm", "text_encoder", "tokenizer", reads=-1, window=sequence_window),),
    returns=("prompt_embeds", "prompt_embeds_mask"),
    per_timestep=lambda timestep, total: timestep * total,
    attentions=joint_blocks,
    predicts=qwen_image_prediction,
    latents=normalized,
    patch=2,
)

Z_IMAGE = Family(
    name="z-image",
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ZImageControlNetPipeline"),
    encoders=(
        EncoderSpec(
            "llm",
            "text_encoder",
            "tokenizer",
            reads=-2,
            window=chat_window({"add_generation_prompt": True, "enable_thinking": True}),
        ),
    ),
    returns=("prompt_embeds", "negative_prompt_embeds"),
    given={"cap_feats": "prompt_embeds"},
    per_timestep=lambda timestep, total: (1 - timestep) * total,
    attentions=z_image,
    predicts=z_image_prediction,
    latents=shifted,
    patch=2,
    timestep="t",
)

# What teaching FLUX.2 would take.
THREE_LAYERS = "rows would have to be taught at three layers' states at once, and its latents are normed by statistics of its VAE"

FLUX_2 = Family(
    name="flux-2",
    pipelines=("Flux2Pipeline",),
    encoders=(
        EncoderSpec(
            "llm",
            "text_encoder",
            "tokenizer",
            reads=(10, 20, 30),
            window=chat_window({"add_generation_prompt": False}, behind_system_message),
        ),
    ),
    returns=("prompt_embeds", "_text_ids"),
    probe_length=None,
    per_timestep=lambda timestep, total: timestep * total,
    attentions=joint_blocks,
    untaught=THREE_LAYERS,
)

FLUX_2_KLEIN = Family(
    name="flux-2-klein",
    pipelines=("Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
    encoders=(
        EncoderSpec(
            "llm",
            "text_encoder",
            "tokenizer",
            reads=(9, 18, 27),
            window=chat_window({"add_generation_prompt": True, "enable_thinking": False}),
        ),
    ),
    returns=("prompt_embeds", "_text_ids"),
    per_timestep=lambda timestep, total: timestep * total,
    attentions=joint_blocks,
    untaught=THREE_LAYERS,
)
