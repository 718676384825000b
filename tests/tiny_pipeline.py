"""A small but real StableDiffusionPipeline with seeded random weights and the real CLIP tokenizer; used by tests through fixtures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

TOKENIZER = Path(__file__).resolve().parent.parent / "assets" / "bases" / "emoji-sd" / "tokenizer"
WIDTH = 128


def load_tokenizer() -> CLIPTokenizer:
    """The real CLIP tokenizer, a fresh object."""
    return CLIPTokenizer.from_pretrained(TOKENIZER)


def build(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> StableDiffusionPipeline:
    """Two text layers, a UNet with cross-attention at one scale, a VAE of factor 8; pictures of 64x64."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=49407,
        )
    )
    # A trained encoder's states differ much from token to token; fresh weights hardly do.
    with torch.no_grad():
        text_encoder.get_input_embeddings().weight.mul_(30)
    unet_options: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": width,
        "attention_head_dim": 8,
    }
    vae_options: dict[str, Any] = {
        "latent_channels": 4,
        "block_out_channels": (16, 16, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    parts: dict[str, Any] = {
        "vae": AutoencoderKL(**vae_options),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "unet": UNet2DConditionModel(**unet_options),
        "scheduler": DDIMScheduler(clip_sample=False, steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
    }
    pipe = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    for module in (pipe.text_encoder, pipe.unet, pipe.vae):
        module.eval()
    return pipe.to(dtype=dtype)


def picture(pipe, prompt, **options) -> torch.Tensor:
    """Two steps at a fixed seed: float32 `[pictures, 3, 64, 64]`."""
    options = {"num_inference_steps": 2, "output_type": "pt", "generator": torch.Generator().manual_seed(0), **options}
    return pipe(prompt, **options).images


def blocks_of(unet) -> list[Any]:
    """The transformer blocks of a UNet, each with a cross-attention, as they run."""
    parts = (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    return [block for part in parts for attention in getattr(part, "attentions", ()) for block in attention.transformer_blocks]


class Reads:
    """Inside, what the projections of an adapter's denoiser read, after all hooks that were there before: by name, call by call."""

    def __init__(self, adapter) -> None:
        hooks = adapter.contexts["clip_l"].hooks
        self.modules = {name: hook.module for name, hook in hooks.items() if name.startswith("context")}
        self.seen: dict[str, list[torch.Tensor]] = {name: [] for name in self.modules}

    def __enter__(self) -> dict[str, list[torch.Tensor]]:
        self.handles = [
            module.register_forward_pre_hook(lambda _, args, name=name: self.seen[name].append(args[0]))
            for name, module in self.modules.items()
        ]
        return self.seen

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()


def concept(adapter, trigger: str, *, aliases=(), name: str | None = None, seed: int = 0, size: float = 1.0, config=None):
    """A concept of random rows at all of its mounts, and random maps, for an attached adapter; not loaded."""
    made = adapter.new_concept(trigger, aliases, name, config)
    generator = torch.Generator().manual_seed(seed)
    for role, place in made.roles.items():
        for mount, old in place.mounts.items():
            rows = torch.randn(old.payload.shape, generator=generator) * size
            made = made.with_rows(role, rows, old.gain + 0.1, old.bias + 0.3, mount=mount)
        for what, old in place.maps.items():
            into, out = old.factors()
            made = made.with_map(role, what, into, torch.randn(out.shape, generator=generator) * size)
    return made


def unload_inversions(pipe: Any, **options: Any) -> None:
    """`unload_textual_inversion`, or the test is left out: diffusers before 0.42 can do it with slow tokenizers alone, which
    transformers 5 has not."""
    try:
        pipe.unload_textual_inversion(**options)
    except AttributeError as error:
        if "_update_trie" not in str(error):
            raise
        pytest.skip("this release of diffusers unloads textual inversions of slow tokenizers alone, and this one of transformers has none")
