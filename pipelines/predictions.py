"""How a step of training calls each denoiser: with what the pipeline's own step gives it where it draws without a negative prompt.
Functions about the user's own objects; nothing of diffusers is imported.

Each takes (pipe, noisy latents `[batch, channels, h, w]`, the scheduler's timesteps `[batch]`, embeds by name as `Family.embeds` gives
them, frames float `[batch, 6]`) and gives what the denoiser says, `[batch, channels or more, h, w]`, the direction from picture to noise
where the scheduler is of flow matching. Text states go on as they are: what adds to them knows them by the very tensor.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.family import call_default

__all__ = [
    "auraflow_prediction",
    "chroma_prediction",
    "flux_prediction",
    "hunyuan_dit_prediction",
    "lumina_prediction",
    "pixart_prediction",
    "qwen_image_prediction",
    "sana_prediction",
    "stable_diffusion_3_prediction",
    "unet_prediction",
    "xl_unet_prediction",
    "z_image_prediction",
]

Embeds = Mapping[str, Any]


def unet_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """Stable Diffusion 1.x and 2.x, which read padding too."""
    return pipe.unet(noisy, timesteps, embeds["prompt_embeds"], return_dict=False)[0]


def xl_unet_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """Stable Diffusion XL, which is told the picture's size before it was scaled, what was cropped off, and its size now."""
    if pipe.config.get("requires_aesthetics_score"):
        raise TinyEngramError(
            f"this {type(pipe).__name__} refines what another one drew, and is told how beautiful that is, which no picture says; teach "
            "the base, and load the concept here"
        )
    pooled = embeds["pooled_prompt_embeds"]
    conditions = {"text_embeds": pooled, "time_ids": frames.to(pooled.dtype)}
    return pipe.unet(noisy, timesteps, embeds["prompt_embeds"], added_cond_kwargs=conditions, return_dict=False)[0]


def pixart_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """PixArt; Alpha at 1,024 pixels says the picture's size too."""
    conditions = None
    if pipe.transformer.use_additional_conditions:
        batch, _, height, width = noisy.shape
        size = noisy.new_tensor([height, width]) * pipe.vae_scale_factor
        conditions = {"resolution": size.expand(batch, 2), "aspect_ratio": (size[:1] / size[1:]).expand(batch, 1)}
    return pipe.transformer(
        noisy,
        encoder_hidden_states=embeds["prompt_embeds"],
        timestep=timesteps,
        added_cond_kwargs=conditions,
        encoder_attention_mask=embeds["prompt_attention_mask"],
        return_dict=False,
    )[0]


def stable_diffusion_3_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    return pipe.transformer(
        hidden_states=noisy,
        timestep=timesteps,
        encoder_hidden_states=embeds["prompt_embeds"],
        pooled_projections=embeds["pooled_prompt_embeds"],
        return_dict=False,
    )[0]


def _shares(timesteps: Any, noisy: Any) -> Any:
    """Timesteps from 0 to 1, in the latents' type, as FLUX.1 and others round them."""
    return timesteps.to(noisy.dtype) / 1000


def _packed(noisy: Any) -> Any:
    """Latents as places of 2 x 2, `[batch, h/2 * w/2, 4 * channels]`."""
    batch, channels, height, width = noisy.shape
    squares = noisy.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(batch, (height // 2) * (width // 2), 4 * channels)


def _unpacked(places: Any, noisy: Any) -> Any:
    """The other way round, for latents shaped as `noisy`."""
    batch, _, height, width = noisy.shape
    squares = places.view(batch, height // 2, width // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(batch, -1, height, width)


def _positions(noisy: Any, states: Any) -> dict[str, Any]:
    """Where pictures and texts stand, as FLUX.1 and Chroma number them: rows and columns of places, and nowhere."""
    height, width = noisy.shape[2] // 2, noisy.shape[3] // 2
    places = noisy.new_zeros(height, width, 3)
    places[..., 1] += noisy.new_tensor(range(height))[:, None]
    places[..., 2] += noisy.new_tensor(range(width))
    return {"img_ids": places.reshape(-1, 3), "txt_ids": states.new_zeros(states.shape[1], 3)}


def flux_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """FLUX.1; dev and those made of it are told the guidance that `pipe(...)` draws with by default."""
    states = embeds["prompt_embeds"]
    guided = pipe.transformer.config.guidance_embeds
    guidance = noisy.new_full((len(noisy),), call_default(pipe, "guidance_scale", 3.5)).float() if guided else None
    said = pipe.transformer(
        hidden_states=_packed(noisy),
        timestep=_shares(timesteps, noisy),
        guidance=guidance,
        pooled_projections=embeds["pooled_prompt_embeds"],
        encoder_hidden_states=states,
        **_positions(noisy, states),
        return_dict=False,
    )[0]
    return _unpacked(said, noisy)


def chroma_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """FLUX.1 with a mask over text and picture in the place of the pooled vector."""
    states, packed, mask = embeds["prompt_embeds"], _packed(noisy), embeds["prompt_attention_mask"]
    said = pipe.transformer(
        hidden_states=packed,
        timestep=_shares(timesteps, noisy),
        encoder_hidden_states=states,
        attention_mask=torch.cat([mask, mask.new_ones(packed.shape[:2])], 1),
        **_positions(noisy, states),
        return_dict=False,
    )[0]
    return _unpacked(said, noisy)


def auraflow_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    return pipe.transformer(
        noisy, encoder_hidden_states=embeds["prompt_embeds"], timestep=(timesteps / 1000).to(noisy.dtype), return_dict=False
    )[0]


def sana_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    return pipe.transformer(
        noisy,
        encoder_hidden_states=embeds["prompt_embeds"],
        encoder_attention_mask=embeds["prompt_attention_mask"],
        timestep=timesteps * pipe.transformer.config.timestep_scale,
        return_dict=False,
    )[0]


def lumina_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """Lumina 2 counts from noise to picture, and says the way there."""
    said = pipe.transformer(
        hidden_states=noisy,
        timestep=1 - timesteps / pipe.scheduler.config.num_train_timesteps,
        encoder_hidden_states=embeds["prompt_embeds"],
        encoder_attention_mask=embeds["prompt_attention_mask"],
        return_dict=False,
    )[0]
    return -said


def z_image_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """Lists of pictures and texts; it counts from noise to picture, and says the way there."""
    said = pipe.transformer(list(noisy.unsqueeze(2)), (1000 - timesteps) / 1000, embeds["prompt_embeds"])[0]
    return -torch.stack([one.float() for one in said]).squeeze(2)


def qwen_image_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """No mask where all texts are as long as the longest."""
    mask = embeds.get("prompt_embeds_mask")
    said = pipe.transformer(
        hidden_states=_packed(noisy),
        timestep=_shares(timesteps, noisy),
        encoder_hidden_states_mask=None if mask is None or mask.all() else mask,
        encoder_hidden_states=embeds["prompt_embeds"],
        img_shapes=[[(1, noisy.shape[2] // 2, noisy.shape[3] // 2)]] * len(noisy),
        return_dict=False,
    )[0]
    return _unpacked(said, noisy)


def hunyuan_dit_prediction(pipe: Any, noisy: Any, timesteps: Any, embeds: Embeds, frames: Any) -> Any:
    """HunyuanDiT is told where each place lies in a picture of 512 pixels, the sizes, and a style that is always the same."""
    transformer, states = pipe.transformer, embeds["prompt_embeds"]
    grid = tuple(side // transformer.config.patch_size for side in noisy.shape[2:])
    # by the pipeline's own functions
    modules = [sys.modules[cls.__module__] for cls in type(pipe).__mro__]
    owner: Any = next(module for module in modules if hasattr(module, "get_resize_crop_region_for_grid"))
    region = owner.get_resize_crop_region_for_grid(grid, 512 // 8 // transformer.config.patch_size)
    width = transformer.inner_dim // transformer.num_heads
    turned = owner.get_2d_rotary_pos_embed(width, region, grid, device=noisy.device, output_type="pt")
    return transformer(
        noisy,
        timesteps.to(noisy.dtype),
        encoder_hidden_states=states,
        text_embedding_mask=embeds["prompt_attention_mask"],
        encoder_hidden_states_t5=embeds["prompt_embeds_2"],
        text_embedding_mask_t5=embeds["prompt_attention_mask_2"],
        image_meta_size=frames[:, [0, 1, 4, 5, 2, 3]].to(states.dtype),
        style=timesteps.new_zeros(len(noisy)),
        image_rotary_emb=turned,
        return_dict=False,
    )[0]
