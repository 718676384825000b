"""The frozen base as the bench uses it: prompts into rows of ids, states and spans, pictures into latents.

Imports torch, diffusers and the shape of a method's batch; nothing here is trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from torch import nn

from benchmarks.personalization.methods.method import Rows

if TYPE_CHECKING:
    from benchmarks.personalization.priors import Extra
    from benchmarks.personalization.subjects import Subject

__all__ = ["EMOJI_SD", "STAND_IN", "Base", "Taught"]

EMOJI_SD = Path(__file__).resolve().parents[2] / "assets" / "bases" / "emoji-sd"
# One CLIP token that no caption of the base holds: where a method replaces the whole trigger by its own vectors.
STAND_IN = "sks"
_PLACE = re.compile(r"\{(\d)\}")
_CHUNK = 128


class _Picture(Protocol):
    @property
    def image(self) -> np.ndarray: ...

    @property
    def captions(self) -> Sequence[str]: ...


def _fill(text: str, words: Sequence[str]) -> tuple[str, list[tuple[int, int, int]]]:
    """`text` with its words put in, and (slot, first character, end) of each."""
    filled, places, read = "", [], 0
    for found in _PLACE.finditer(text):
        slot = int(found[1])
        if slot >= len(words):
            raise ValueError(f"prompt {text!r} names subject {{{slot}}}, but {len(words)} words were given; give one word for each")
        filled += text[read : found.start()]
        places.append((slot, len(filled), len(filled) + len(words[slot])))
        filled += words[slot]
        read = found.end()
    return filled + text[read:], places


class Base:
    """A `StableDiffusionPipeline`, frozen and in eval mode.

    Attributes:
        cross_attentions: (mount prefix "context.{i}", module) of the denoiser's cross-attentions, in the order in which it
            runs them. A method's mounts are "context.{i}.key" and "context.{i}.value", what `to_k` and `to_v` read, and
            "span", the residual on the encoder's last hidden states.
        subjects: all of the bench's, by name, for methods that ask for a run's trigger or class word; may be set to others.
    """

    def __init__(self, pipe: StableDiffusionPipeline) -> None:
        self.pipe = pipe
        self.unet: Any = pipe.unet
        self.text_encoder: Any = pipe.text_encoder
        self.vae: Any = pipe.vae
        self.tokenizer: Any = pipe.tokenizer
        self.scheduler: Any = pipe.scheduler
        self.device = self.unet.device
        for part in (self.unet, self.text_encoder, self.vae):
            part.requires_grad_(False).eval()
        self.vae.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        pipe.set_progress_bar_config(disable=True)
        self.width: int = self.text_encoder.config.hidden_size
        self.length: int = self.tokenizer.model_max_length
        self.cross_attentions: tuple[tuple[str, nn.Module], ...] = self._trace()

    @classmethod
    def load(cls, device: str | torch.device = "cpu", folder: str | Path = EMOJI_SD, *, tf32: bool = False) -> Base:
        """The pipeline in `folder` in float32 on `device`. `tf32` lets CUDA round the factors of products, for this whole process."""
        if torch.device(device).type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
        return cls(StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32).to(device))

    @cached_property
    def subjects(self) -> Mapping[str, Subject]:
        # imported here: most of what uses the base brings subjects of its own
        from benchmarks.personalization.subjects import load_subjects

        return {subject.name: subject for subject in load_subjects("development", "final", "known")}

    def subject(self, name: str) -> Subject:
        """The subject that a run is named after. Raises ValueError with the known names."""
        if name not in self.subjects:
            raise ValueError(f"subject {name!r} is not known; expected one of {', '.join(self.subjects)}")
        return self.subjects[name]

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one picture's latents."""
        size = self.unet.config.sample_size
        return self.unet.config.in_channels, size, size

    @torch.no_grad()
    def _trace(self) -> tuple[tuple[str, nn.Module], ...]:
        ran: list[nn.Module] = []
        modules = [module for name, module in self.unet.named_modules() if name.endswith("attn2")]
        hooks = [m.register_forward_hook(lambda module, _args, _out: ran.append(module)) for m in modules]
        try:
            latents = torch.zeros(1, *self.latent_shape, device=self.device)
            self.unet(latents, torch.zeros(1, dtype=torch.long, device=self.device), self.encode(self.tokenize([""])[0].to(self.device)))
        finally:
            for hook in hooks:
                hook.remove()
        if len(ran) != len(modules) or len(set(ran)) != len(ran):
            raise ValueError(f"the denoiser ran {len(ran)} cross-attentions of its {len(modules)}; expected each once")
        return tuple((f"context.{i}", module) for i, module in enumerate(ran))

    def tokenize(self, texts: Sequence[str]) -> tuple[torch.Tensor, np.ndarray]:
        """ids int64 `[batch, 77]` on the CPU, as the pipeline makes them, and characters `[batch, 77, 2]` that each token covers."""
        out = self.tokenizer(
            list(texts), padding="max_length", max_length=self.length, truncation=True, return_offsets_mapping=True, return_tensors="pt"
        )
        return out.input_ids, np.asarray(out.offset_mapping)

    def word_ids(self, word: str) -> list[int]:
        """The word's own token ids, without the sequence's ends."""
        return self.tokenizer(word, add_special_tokens=False).input_ids

    @torch.no_grad()
    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """The untouched encoder's last hidden states `[batch, 77, width]` of ids `[batch, 77]` on the device; no gradients."""
        return torch.cat([self.text_encoder(chunk)[0] for chunk in ids.split(_CHUNK)])

    def rows(
        self,
        texts: Sequence[str],
        words: Sequence[tuple[str, ...]],
        run: torch.Tensor,
        vectors: int | None = None,
    ) -> Rows:
        """A batch of prompts, each with its words put in for {0}, {1}.

        Args:
            texts: `[batch]` prompts with {0}, {1} where a subject's word goes; a prompt may name none.
            words: `[batch]` of one word for each slot: a trigger, or a name.
            run: int64 `[batch, slots]`, which run fills each slot; a slot of -1 gets its word, but no span.
            vectors: None leaves the words as they are; otherwise a stand-in of so many tokens takes the place of each word
                that a run fills, and its span has that length.

        Raises:
            ValueError: a word is cut off at 77 tokens, or shares a token with its neighbours.
        """
        if not len(texts) == len(words) == len(run) or run.ndim != 2:
            raise ValueError(f"{len(texts)} prompts, {len(words)} tuples of words, runs {list(run.shape)}; expected [batch, slots] runs")
        stand_in = None if vectors is None else " ".join([STAND_IN] * vectors)
        filled, spans = [], []
        known: dict[str, int] = {}
        for text, given, owners in zip(texts, words, run.tolist(), strict=True):
            if len(owners) < len(given):
                raise ValueError(f"prompt {text!r}: {len(given)} words, but {len(owners)} slots of runs")
            put = given if stand_in is None else tuple(w if o < 0 else stand_in for w, o in zip(given, owners, strict=False))
            filled.append((*_fill(text, put), owners))
            known.setdefault(filled[-1][0], len(known))
        ids, characters = self.tokenize(list(known))
        for row, (text, places, owners) in enumerate(filled):
            for slot, first, end in places:
                if owners[slot] >= 0:
                    spans.append((row, slot, *self._span(text, first, end, characters[known[text]])))
        picks = torch.tensor([known[text] for text, _, _ in filled], device=self.device)
        ids = ids.to(self.device)
        return Rows(ids[picks], self.encode(ids)[picks], run.to(self.device), tuple(spans))

    def _span(self, text: str, first: int, end: int, characters: np.ndarray) -> tuple[int, int]:
        """(first token, tokens) that cover these characters of `text`."""
        begins, ends = characters[:, 0], characters[:, 1]
        inside = np.flatnonzero((ends > begins) & (begins < end) & (ends > first))
        word = text[first:end]
        if not len(inside) or ends[inside[-1]] < end:
            raise ValueError(f"{word!r} is cut off at {self.length} tokens in {text!r}; shorten the prompt")
        if begins[inside[0]] < first or ends[inside[-1]] > end:
            raise ValueError(f"{word!r} shares a token with what stands beside it in {text!r}; put spaces around it")
        return int(inside[0]), len(inside)

    def empty(self, rows: Rows) -> Rows:
        """The unconditional half of guidance: the empty prompt in every row, the same runs, no spans."""
        ids = self.tokenize([""])[0].to(self.device)
        batch = len(rows.ids)
        return Rows(ids.expand(batch, -1), self.encode(ids).expand(batch, -1, -1), rows.run, ())

    @torch.no_grad()
    def latents(self, images: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, deviation) of the latents of uint8 pictures `[n, 128, 128, 3]`, scaled for the denoiser: float32 `[n, 12, 16, 16]`."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(f"pictures of {images.dtype} {list(images.shape)}, expected uint8 [n, height, width, 3]")
        means, deviations = [], []
        for chunk in torch.from_numpy(images).split(1):  # one at a time, as training caches them: the same bits
            pixels = chunk.to(self.device).permute(0, 3, 1, 2).float() / 255 * 2 - 1
            found = self.vae.encode(pixels.contiguous(memory_format=torch.channels_last)).latent_dist
            means.append(found.mean)
            deviations.append(found.std)
        scale = self.vae.config.scaling_factor
        return (torch.cat(means) * scale).contiguous(), (torch.cat(deviations) * scale).contiguous()


@dataclass(frozen=True, slots=True)
class Taught:
    """One subject's pictures as training reads them.

    Attributes:
        means, stds: of the pictures' latents, float32 `[pictures, channels, h, w]` on the base's device.
        captions: of each picture, with {0} for the trigger.
        extras: by the name of the option that asks for them, pictures beside these.
    """

    subject: Subject
    means: torch.Tensor
    stds: torch.Tensor
    captions: list[list[str]]
    extras: Mapping[str, Extra] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Base, subject: Subject, pictures: Sequence[_Picture]) -> Taught:
        """Encode the pictures that `taught_pictures` makes of a subject."""
        means, stds = base.latents(np.stack([picture.image for picture in pictures]))
        return cls(subject, means, stds, [list(picture.captions) for picture in pictures])
