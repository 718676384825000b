"""The frozen base as the bench uses it: prompts into rows of ids, states and spans, pictures into latents.

Imports torch, diffusers and the shape of a method's batch; nothing here is trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import nn

from benchmarks.personalization.bases import EMOJI_SD, BaseSpec
from benchmarks.personalization.methods.method import Rows
from tiny_engram.input_mount import token_embeddings

if TYPE_CHECKING:
    from benchmarks.personalization.priors import Extra
    from benchmarks.personalization.subjects import Subject

__all__ = ["Base", "Taught"]

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
    """A pipeline, frozen and in eval mode. What differs between bases is asked of its `BaseSpec`.

    Attributes:
        denoiser: the UNet or the transformer.
        width: of the encoder's states; context_width: of the states that the cross-attentions read, see `read`.
        embedding: the encoder's module that looks tokens up.
        cross_attentions: (mount prefix "context.{i}", module) of the denoiser's cross-attentions, in the order in which it
            runs them. A method's mounts are "context.{i}.key" and "context.{i}.value", what `to_k` and `to_v` read, and
            "span", the residual on the encoder's last hidden states.
        subjects: all of the bench's, by name, for methods that ask for a run's trigger or class word; may be set to others.
    """

    def __init__(self, pipe: Any, spec: BaseSpec = EMOJI_SD) -> None:
        self.pipe, self.spec = pipe, spec
        self.denoiser: Any = getattr(pipe, spec.denoiser)
        self.text_encoder: Any = pipe.text_encoder
        self.vae: Any = pipe.vae
        self.tokenizer: Any = pipe.tokenizer
        self.scheduler: Any = pipe.scheduler
        self.device = self.denoiser.device
        for part in (self.denoiser, self.text_encoder, self.vae):
            part.requires_grad_(False).eval()
        self.vae.to(memory_format=torch.channels_last)  # twice as fast on a CPU
        pipe.set_progress_bar_config(disable=True)
        self.width: int = self.text_encoder.config.hidden_size
        self.length: int = spec.length or self.tokenizer.model_max_length
        self._blank = frozenset(i for token, i in self.tokenizer.get_vocab().items() if not token.strip("\u2581"))
        self.cross_attentions: tuple[tuple[str, nn.Module], ...] = self._trace()
        attention: Any = self.cross_attentions[0][1]
        self.context_width: int = attention.to_k.in_features

    @classmethod
    def load(cls, device: str | torch.device = "cpu", spec: BaseSpec = EMOJI_SD, *, tf32: bool = False) -> Base:
        """The pipeline of `spec` in float32 on `device`. `tf32` lets CUDA round the factors of products, for this whole process."""
        if torch.device(device).type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
        return cls(DiffusionPipeline.from_pretrained(spec.folder, dtype=torch.float32).to(device), spec)

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
        size = self.denoiser.config.sample_size
        return self.denoiser.config.in_channels, size, size

    @torch.no_grad()
    def _trace(self) -> tuple[tuple[str, nn.Module], ...]:
        ran: list[nn.Module] = []
        modules = [module for name, module in self.denoiser.named_modules() if name.endswith("attn2")]
        looked_up: list[nn.Module] = []
        hooks = [m.register_forward_hook(lambda module, _args, _out: ran.append(module)) for m in modules]
        embeddings = token_embeddings(self.text_encoder)
        hooks += [m.register_forward_hook(lambda module, _args, _out: looked_up.append(module)) for m in embeddings]
        try:
            latents = torch.zeros(1, *self.latent_shape, device=self.device)
            ids = self.tokenize([""])[0].to(self.device)
            self.predict(latents, torch.zeros(1, dtype=torch.long, device=self.device), self.encode(ids), self.mask(ids))
        finally:
            for hook in hooks:
                hook.remove()
        if len(ran) != len(modules) or len(set(ran)) != len(ran):
            raise ValueError(f"the denoiser ran {len(ran)} cross-attentions of its {len(modules)}; expected each once")
        self.embedding: Any = looked_up[0]
        return tuple((f"context.{i}", module) for i, module in enumerate(ran))

    def mask(self, ids: torch.Tensor) -> torch.Tensor | None:
        """1 where a text stands in ids `[batch, time]`, its end included, int64; None where encoder and denoiser are not told."""
        return (ids != self.tokenizer.pad_token_id).long() if self.spec.masked else None

    def encoded(self, ids: torch.Tensor) -> torch.Tensor:
        """The encoder's last hidden states `[batch, time, width]` of ids `[batch, time]` on the device, with what is hooked into it."""
        mask = self.mask(ids)
        return self.text_encoder(ids)[0] if mask is None else self.text_encoder(ids, attention_mask=mask)[0]

    def predict(self, noisy: torch.Tensor, timesteps: torch.Tensor, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The denoiser's prediction `[batch, channels, h, w]`, with what is hooked into it; `mask` is that of the states' ids."""
        if mask is None:
            return self.denoiser(noisy, timesteps, states, return_dict=False)[0]
        told = {"encoder_hidden_states": states, "timestep": timesteps, "encoder_attention_mask": mask}
        return self.denoiser(noisy, **told, return_dict=False)[0]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """What the cross-attentions read of the states `[batch, time, width]`: `[batch, time, context_width]`; differentiable."""
        return states if self.spec.projection is None else self.denoiser.get_submodule(self.spec.projection)(states)

    def tokenize(self, texts: Sequence[str]) -> tuple[torch.Tensor, np.ndarray]:
        """ids int64 `[batch, time]` on the CPU, as the pipeline makes them, and characters `[batch, time, 2]` that each token covers; a
        token that is a space and nothing else covers none."""
        out = self.tokenizer(
            list(texts), padding="max_length", max_length=self.length, truncation=True, return_offsets_mapping=True, return_tensors="pt"
        )
        characters = np.asarray(out.offset_mapping)
        characters[np.isin(out.input_ids.numpy(), list(self._blank))] = 0
        return out.input_ids, characters

    def word_ids(self, word: str) -> list[int]:
        """The word's own token ids, without the sequence's ends and a space in front."""
        return [i for i in self.tokenizer(word, add_special_tokens=False).input_ids if i not in self._blank]

    @torch.no_grad()
    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """The untouched encoder's last hidden states `[batch, time, width]` of ids `[batch, time]` on the device; no gradients."""
        return torch.cat([self.encoded(chunk) for chunk in ids.split(_CHUNK)])

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
            ValueError: a word is cut off at the prompt's length, or shares a token with its neighbours.
        """
        if not len(texts) == len(words) == len(run) or run.ndim != 2:
            raise ValueError(f"{len(texts)} prompts, {len(words)} tuples of words, runs {list(run.shape)}; expected [batch, slots] runs")
        stand_in = None if vectors is None else " ".join([self.spec.stand_in] * vectors)
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
