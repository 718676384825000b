"""What tells the two embedded bases apart: their parts, how a caption becomes ids, how the parts are called. All else here serves both.

May import torch, diffusers, transformers and its siblings `compose` and `models` only.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, PixArtSigmaPipeline, StableDiffusionPipeline
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import CLIPTokenizer, T5Tokenizer

from compose import BUILD
from models import build_scheduler, build_t5, build_text_encoder, build_transformer, build_unet, build_vae

FOLDER = Path(__file__).resolve().parents[1] / "bases"


class Base(ABC):
    """One embedded base."""

    name: str
    denoiser: str
    """The denoiser's name in the pipeline."""
    tokens: int
    """Places of a caption in training."""
    run: Path
    """Where the training scripts leave their work."""
    call: dict[str, Any] = {}
    """Keywords a call of the pipeline needs beside the usual ones."""
    vae_of: str = ""
    """The base whose autoencoder serves this one too and is kept there. Empty: it has its own, trained in `run`."""
    tokenizer_class: type
    word_start: str = ""
    """What a token that begins a word begins with."""
    word_end: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def tokenizer(self) -> Any:
        return self.tokenizer_class.from_pretrained(self.folder / "tokenizer")

    def backend(self, tokenizer: Any) -> Tokenizer:
        """The tokenizer's fast part, cutting and padding to `tokens` places."""
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.enable_truncation(self.tokens)
        backend.enable_padding(length=self.tokens, pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
        return backend

    def whole_words(self, tokenizer: Any) -> list[str]:
        """The vocabulary's tokens that are words of their own, in lower case."""
        start, end = self.word_start, self.word_end
        whole = (token for token in tokenizer.get_vocab() if token.startswith(start) and token.endswith(end))
        words = {token.removeprefix(start).removesuffix(end) for token in whole}
        return sorted(w for w in words if w.isascii() and w.isalpha() and w.islower() and len(w) > 2)

    def vae(self, run: Path) -> AutoencoderKL:
        """The autoencoder its latents are of, in fp32: another base's, or what training left in `run`."""
        if self.vae_of:
            return AutoencoderKL.from_pretrained(FOLDER / self.vae_of / "vae").float()
        vae = build_vae()
        vae.load_state_dict(load_file(run / "vae.safetensors"))
        return vae

    @abstractmethod
    def build(self) -> tuple[Any, Any]:
        """Text encoder and denoiser with fresh weights, ready to be trained."""

    @abstractmethod
    def empty(self) -> torch.Tensor:
        """Ids `[1, 1 or tokens]` whose states stand in for those behind the end of a caption."""

    @abstractmethod
    def encode(self, text_encoder: Any, ids: torch.Tensor) -> torch.Tensor:
        """States `[B, T, width]` of ids `[B, T]`."""

    @abstractmethod
    def predict(self, denoiser: Any, noisy: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The denoiser's output, of the shape of `noisy`. `ids`: those that `states` belong to."""

    @abstractmethod
    def pipeline(self, **parts: Any) -> DiffusionPipeline:
        """The pipeline of vae, text encoder and denoiser."""


class EmojiSD(Base):
    name, denoiser, tokens = "emoji-sd", "unet", 77
    run = BUILD / "run"
    tokenizer_class, word_end = CLIPTokenizer, "</w>"

    def backend(self, tokenizer: Any) -> Tokenizer:
        backend = super().backend(tokenizer)
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        special = [(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=special)
        return backend

    def build(self) -> tuple[Any, Any]:
        """Token embeddings of CLIP's own deviation; position embeddings smaller."""
        denoiser, text_encoder = build_unet(), build_text_encoder()
        nn.init.normal_(text_encoder.get_input_embeddings().weight, std=0.35)
        nn.init.normal_(text_encoder.embeddings.position_embedding.weight, std=0.1)
        return text_encoder, denoiser

    def empty(self) -> torch.Tensor:
        ids = torch.full((1, self.tokens), 49407)
        ids[0, 0] = 49406
        return ids

    def encode(self, text_encoder: Any, ids: torch.Tensor) -> torch.Tensor:
        return text_encoder(ids)[0]

    def predict(self, denoiser: Any, noisy: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return denoiser(noisy, timestep, states, return_dict=False)[0]

    def pipeline(self, **parts: Any) -> DiffusionPipeline:
        return StableDiffusionPipeline(
            **parts,
            tokenizer=self.tokenizer(),
            scheduler=build_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


class EmojiPixArt(Base):
    name, denoiser, vae_of = "emoji-pixart", "transformer", "emoji-sd"
    # one caption in thousands is longer; a multiple of sixteen, which the attention kernels ask of a mask
    tokens = 32
    run = BUILD / "run-pixart"
    # the bins begin at 256 pixels; cleaning a caption needs two more packages and changes none of ours
    call = {"use_resolution_binning": False, "clean_caption": False}
    tokenizer_class, word_start = T5Tokenizer, "\u2581"
    pad, end = 0, 1

    def build(self) -> tuple[Any, Any]:
        """T5's own start, whose query projections make up for its unscaled attention, with smaller token embeddings: they learn faster.

        The transformer starts as PixArt was trained: nothing read from the caption and nothing put out at the first step.
        """
        denoiser, text_encoder = build_transformer(), build_t5()
        nn.init.normal_(text_encoder.get_input_embeddings().weight, std=0.5)
        for module in denoiser.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                nn.init.zeros_(module.bias)
        nn.init.normal_(denoiser.adaln_single.linear.weight, std=0.02)
        for block in denoiser.transformer_blocks:
            nn.init.zeros_(block.attn2.to_out[0].weight)
        nn.init.zeros_(denoiser.proj_out.weight)
        return text_encoder, denoiser

    def empty(self) -> torch.Tensor:
        """The end token alone: padding is masked, so nothing but this one stands behind a caption's words."""
        return torch.tensor([[self.end]])

    def encode(self, text_encoder: Any, ids: torch.Tensor) -> torch.Tensor:
        return text_encoder(ids, attention_mask=(ids != self.pad).long())[0]

    def predict(self, denoiser: Any, noisy: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = ids != self.pad
        return denoiser(noisy, encoder_hidden_states=states, encoder_attention_mask=mask, timestep=timestep, return_dict=False)[0]

    def pipeline(self, **parts: Any) -> DiffusionPipeline:
        return PixArtSigmaPipeline(**parts, tokenizer=self.tokenizer(), scheduler=build_scheduler())


BASES: dict[str, Base] = {base.name: base for base in (EmojiSD(), EmojiPixArt())}


def add_base(parser: argparse.ArgumentParser) -> None:
    """The option every stage takes that is run once for each base."""
    parser.add_argument("--base", choices=BASES, default="emoji-sd", help="which base model (default: %(default)s)")


def kind_of(pipe: DiffusionPipeline) -> Base:
    """The base whose pipeline class `pipe` is of."""
    return next(base for base in BASES.values() if hasattr(pipe, base.denoiser))
