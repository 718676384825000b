"""What the tiny pipelines of all families share: the entry of one, real tokenizers, small encoders and VAEs with seeded random weights.

The tokenizers' files come with the package diffsynth, of which nothing is imported: its folder is found, and files are read.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import AutoencoderKL
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones
)
from transformers.convert_slow_tokenizer import import_protobuf


@dataclass(frozen=True)
class TinyPipeline:
    """One pipeline of real classes.

    Attributes:
        name: the family's name, and what is special of this one behind a colon: "stable-diffusion-3:no-t5".
        build: makes the pipeline, the same weights each time.
        call: arguments beside the prompt for a picture of two steps, whose first output is one tensor of latents.
        real_tokenizer: False where it is not the published one: another of the same class, or one trained on the embedded base's captions.
        prompt_keys: arguments that take a prompt, one for each tokenizer; a missing one takes the first one's.
        notes: what is unlike the published pipelines.
    """

    name: str
    build: Callable[[], Any]
    call: Mapping[str, Any]
    real_tokenizer: bool = True
    prompt_keys: tuple[str, ...] = ("prompt",)
    notes: str = ""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]


def picture(tiny: TinyPipeline, pipe: Any, prompt: Any, **more: Any) -> torch.Tensor:
    """Two steps from a fixed seed: latents `[pictures, ...]`. `more` goes before the entry's own arguments."""
    # By keyword: the first argument of some pipelines is a picture.
    return pipe(**{"prompt": prompt, "generator": torch.Generator().manual_seed(0), **tiny.call, **more})[0]


def needed(name: str) -> Any:
    """A class that not every release of diffusers has, or can import; whoever asks is skipped where there is none."""
    try:
        return getattr(diffusers, name)
    except AttributeError:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    except RuntimeError:  # what it imports is gone from transformers
        pytest.skip(f"diffusers {diffusers.__version__} cannot import {name} beside transformers {transformers.__version__}")


def tokenizer_folder(name: str) -> Path:
    """Folder of a real tokenizer, "flux/tokenizer_2"."""
    spec = importlib.util.find_spec("diffsynth")
    assert spec is not None and spec.origin is not None, "diffsynth is not installed: make test installs it"
    return Path(spec.origin).parent / "tokenizer_configs" / name


def clip_tokenizer(name: str = "stable_diffusion_3/tokenizer_1") -> CLIPTokenizer:
    """49,408 ids, padded with the end token as at clip_l. "stable_diffusion_3/tokenizer_2" is clip_g's: padded with id 0, "!"."""
    return CLIPTokenizer.from_pretrained(tokenizer_folder(name))


def t5_tokenizer() -> T5TokenizerFast:
    """32,100 ids; T5 v1.1 of FLUX, SD3, PixArt and others."""
    return T5TokenizerFast.from_pretrained(tokenizer_folder("flux/tokenizer_2"))


def sentencepiece_tokenizer(name: str, extra_ids: int) -> T5TokenizerFast:
    """A T5TokenizerFast from a folder that has only `spiece.model`; since transformers 5 read without the library sentencepiece."""
    if "vocab" not in inspect.signature(T5TokenizerFast.__init__).parameters:
        # before transformers 5, by the library sentencepiece
        return T5TokenizerFast(str(tokenizer_folder(name) / "spiece.model"), extra_ids=extra_ids, add_prefix_space=True)
    protobuf: Any = import_protobuf()
    model = protobuf.ModelProto()
    model.ParseFromString((tokenizer_folder(name) / "spiece.model").read_bytes())
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    return T5TokenizerFast(pieces, extra_ids=extra_ids, _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap)


def mt5_tokenizer() -> T5TokenizerFast:
    """250,100 ids, the last 100 sentinels; that of mT5. UMT5's own (256,300 ids) is of the same class."""
    return sentencepiece_tokenizer("hunyuan_dit/tokenizer_t5", extra_ids=0)


def clip_encoder(width: int, projection: int | None = None, *, layers: int = 4, act: str = "quick_gelu") -> Any:
    """CLIPTextModel, or with a projection CLIPTextModelWithProjection."""
    # As published: an end of 2 is older than the right number, and means that the largest id is pooled.
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = CLIPTextConfig(
        vocab_size=49408, max_position_embeddings=77, projection_dim=projection or width, hidden_act=act, **sizes, **ids
    )
    encoder = CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)
    # A trained encoder's states differ much from token to token; fresh weights hardly do.
    with torch.no_grad():
        encoder.get_input_embeddings().weight.mul_(30)
    return encoder


def t5_encoder(width: int, vocab: int = 32128, kind: Any = T5EncoderModel, config: Any = T5Config, *, layers: int = 4) -> Any:
    """T5EncoderModel, or another of its kind. T5 draws its token embeddings at scale 1: states differ as they are."""
    sizes = {"d_model": width, "d_kv": 8, "num_heads": 4, "d_ff": 2 * width, "num_layers": layers}
    return kind(config(vocab_size=vocab, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes))


def picture_vae(channels: int, **more: Any) -> AutoencoderKL:
    """A VAE of factor 8."""
    options: dict[str, Any] = {
        "latent_channels": channels,
        "block_out_channels": (8,) * 4,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return AutoencoderKL(**options, **more)


def finished(pipe: Any) -> Any:
    """Without a progress bar, all parts in evaluation mode, as diffusers and transformers load them."""
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe
