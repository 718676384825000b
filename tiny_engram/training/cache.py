"""What the frozen base says about the data, computed once: latents of the pictures, text states of the captions.

Behind the encoder its output is as good as the text. Only rows on the token embeddings need the encoder again, at each step, and
then no more of it than what they reach. May import torch, diffusers' image processor, data and the adapter's parts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import pad

from tiny_engram.adapter import find_family
from tiny_engram.concept import Concept
from tiny_engram.config import INPUT
from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.input_mount import encode_with_input
from tiny_engram.residual import Spans
from tiny_engram.training.data import DataError, Example, fitted_picture
from tiny_engram.training.reading import Tokens, read_texts

__all__ = [
    "CaptionBatch",
    "CaptionStates",
    "cache_captions",
    "cache_latents",
    "checked_places",
    "encode_picture",
    "encode_pictures",
    "find_places",
    "joined_captions",
]


@dataclass(frozen=True, slots=True)
class CaptionBatch:
    """The captions of one step.

    Attributes:
        states: of the base's encoder, `[batch, time, width]`. spans: where the trigger stands.
        ids: int64 `[distinct, up to time]`, each distinct caption once; `inner` are the spans in these. Where the encoder reads from left
            to right, they end with the last span: nothing behind it reaches one.
        row: of each caption of the batch, which of `ids` it is. role: of the encoder.
        mask: int64 `[batch, time]`, 1 where a caption stands, where the encoder is given one; `inner_mask` is that of `ids`.
    """

    states: torch.Tensor
    spans: Spans
    encoder: nn.Module
    ids: torch.Tensor
    inner: Spans
    row: tuple[int, ...]
    mask: torch.Tensor | None = None
    inner_mask: torch.Tensor | None = None
    role: str = ""

    @property
    def parts(self) -> dict[str, "CaptionBatch"]:
        """By role, as `ConditionBatch.parts`."""
        return {self.role: self}

    def embeds(self, states: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What `pipe(...)` takes, with these states."""
        return {"prompt_embeds": states[self.role]} | ({} if self.mask is None else {"prompt_attention_mask": self.mask})

    @property
    def fired(self) -> torch.Tensor:
        """1 where the trigger stands and 0 elsewhere, float32 `[batch, time]` on the CPU."""
        return self.spans.marks(self.states.shape[:2])

    def read_again(self, move: Callable[[torch.Tensor, Spans], torch.Tensor]) -> torch.Tensor:
        """States with those at the spans from an encoder whose token embeddings go through `move(embeddings, spans)`; differentiable."""
        options: dict[str, Any] = {} if self.inner_mask is None else {"attention_mask": self.inner_mask}
        again = encode_with_input(self.encoder, self.ids, lambda x: move(x, self.inner), **options)[0]
        batch, time, _ = self.spans.flat()
        rows = torch.tensor(self.row)[batch]
        device = self.states.device
        new = again[rows.to(device), time.to(device)].to(self.states.dtype)
        return self.states.index_put((batch.to(device), time.to(device)), new)


@dataclass(frozen=True, slots=True)
class CaptionStates:
    """Distinct captions with the base's text states `[captions, time, width]`, their ids int64 `[captions, time]`, and where the trigger
    stands in each. `onward` says that the encoder reads from left to right; `mask`, like the ids, is given to some.
    """

    texts: tuple[str, ...]
    states: torch.Tensor
    places: tuple[tuple[tuple[int, int, int], ...], ...]
    ids: torch.Tensor
    encoder: nn.Module = field(repr=False)
    onward: bool
    mask: torch.Tensor | None = None
    role: str = ""

    def batch(self, picks: Sequence[int]) -> CaptionBatch:
        """These captions."""
        number: dict[int, int] = {}
        for pick in picks:
            number.setdefault(pick, len(number))
        distinct = list(number)
        end = max(start + size for pick in distinct for start, size, _ in self.places[pick])
        ids, mask = self.ids[distinct], self.mask
        return CaptionBatch(
            states=self.states[torch.tensor(picks, device=self.states.device)],
            spans=self._spans(picks),
            encoder=self.encoder,
            ids=ids[:, :end] if self.onward else ids,
            inner=self._spans(distinct),
            row=tuple(number[pick] for pick in picks),
            mask=None if mask is None else mask[list(picks)],
            inner_mask=None if mask is None else mask[distinct, : end if self.onward else None],
            role=self.role,
        )

    def _spans(self, picks: Sequence[int]) -> Spans:
        return Spans.of((row, *place) for row, pick in enumerate(picks) for place in self.places[pick])


def joined_captions(parts: Sequence[CaptionStates], positions: Sequence[int]) -> CaptionStates:
    """The captions of several concepts as one, one concept behind the other; offsets count through the positions of all.

    Args:
        parts: of one encoder. positions: of each concept's rows.
    """
    if len(parts) == 1:
        return parts[0]
    longest = max(part.states.shape[1] for part in parts)

    def longer(x: torch.Tensor) -> torch.Tensor:
        """`[captions, time, ...]` with zeros behind, which the mask hides."""
        return pad(x, (0, 0) * (x.dim() - 2) + (0, longest - x.shape[1]))

    ahead = [sum(positions[:k]) for k in range(len(parts))]
    masks = [longer(part.mask) for part in parts if part.mask is not None]
    return CaptionStates(
        tuple(text for part in parts for text in part.texts),
        torch.cat([longer(part.states) for part in parts]),
        tuple(
            tuple((start, size, offset + before) for start, size, offset in place)
            for part, before in zip(parts, ahead, strict=True)
            for place in part.places
        ),
        torch.cat([longer(part.ids) for part in parts]),
        parts[0].encoder,
        parts[0].onward,
        torch.cat(masks) if masks else None,
        parts[0].role,
    )


def find_places(
    adapter: EngramAdapter, concept: Concept, texts: Sequence[str], role: str | None = None
) -> tuple[Tokens, list[list[tuple[int, int, int]]]]:
    """Tokens as the pipeline makes them at a role (None: the concept's first), and where the trigger fires in each text: (start, length,
    offset)."""
    role = next(iter(concept.roles)) if role is None else role
    tokens = read_texts(adapter, role, texts)
    found = adapter.spans(concept, tokens.ids, role)
    places: list[list[tuple[int, int, int]]] = [[] for _ in texts]
    for row, start, size, offset in zip(*(t.tolist() for t in (found.batch, found.start, found.length, found.offset)), strict=True):
        places[row].append((start, size, offset))
    return tokens, places


def checked_places(
    adapter: EngramAdapter, concept: Concept, texts: Sequence[str], role: str | None = None
) -> tuple[Tokens, list[list[tuple[int, int, int]]]]:
    """The same of captions. Raises DataError for one in which the trigger does not fire."""
    tokens, places = find_places(adapter, concept, texts, role)
    for text, place in zip(texts, places, strict=True):
        if not place:
            raise DataError(
                f"caption {text!r}: the trigger {concept.trigger!r} does not fire in it (cut off at {tokens.window} tokens, or a letter or "
                "digit touches it); shorten the caption or write the trigger as a word of its own"
            )
    return tokens, places


def cache_captions(adapter: EngramAdapter, concept: Concept, texts: Sequence[str], batch_size: int = 16) -> CaptionStates:
    """Encode each distinct caption once, with no concept firing. Raises DataError for one in which the trigger does not fire."""
    distinct = tuple(dict.fromkeys(texts))
    role, mount = next(iter(adapter.mounts.items()))
    tokens, places = checked_places(adapter, concept, distinct)
    states = []
    for start in range(0, len(distinct), batch_size):
        embeds, _ = adapter.encode(distinct[start : start + batch_size])
        states.append(embeds)
    states, encoder = torch.cat(states), mount.module
    tokens = tokens.at(range(len(distinct)), states.device)
    ids = tokens.ids
    onward = INPUT in concept.roles[role].mounts and _reads_onward(encoder, ids[:1])
    # what a mask hides behind all captions is cut off
    states = states[:, : ids.shape[1]]
    return CaptionStates(distinct, states, tuple(tuple(p) for p in places), ids, encoder, onward, tokens.mask, role)


@torch.no_grad()
def _reads_onward(encoder: nn.Module, ids: torch.Tensor) -> bool:
    """Does an encoder read from left to right: do states keep their bits whatever stands behind them? ids int64 `[1, time]`."""
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids[:, :1].expand(-1, ids.shape[1] - half)], 1)
    return torch.equal(encoder(ids)[0][:, :half], encoder(other)[0][:, :half])


def cache_latents(pipe: Any, examples: Sequence[Example], resolution: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each picture's latents, scaled for the denoiser: float32 `[pictures, channels, h, w]` each.

    Pictures are scaled so that the shorter side fits and cropped in the middle.
    """
    return encode_pictures(pipe, (fitted_picture(example, resolution) for example in examples), resolution)


def encode_pictures(pipe: Any, pictures: Iterable[Image.Image], resolution: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of pictures that have that size, or nearly."""
    means, stds = zip(*(encode_picture(pipe, picture, (resolution, resolution)) for picture in pictures), strict=True)
    return torch.stack(means), torch.stack(stds)


@torch.no_grad()
def encode_picture(pipe: Any, picture: Image.Image, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of one picture at (width, height): float32 `[channels, h, w]` each, as the pipeline's family has them.

    Raises TinyEngramError for latents that are no numbers, or a pipeline of no known family.
    """
    from diffusers.image_processor import VaeImageProcessor

    vae, (width, height) = pipe.vae, size
    pixels = VaeImageProcessor(vae_scale_factor=pipe.vae_scale_factor).preprocess(picture, height=height, width=width)
    family = find_family(pipe)
    if family is None:
        raise TinyEngramError(f"{type(pipe).__name__} is of no known family, so how its latents are scaled is unknown; attach to it first")
    with _precise(vae):
        mean, std = family.latents(pipe, pixels.to(vae.device, vae.dtype))
    if not (mean.isfinite().all() and std.isfinite().all()):
        raise TinyEngramError(f"the VAE gives latents that are no numbers in {vae.dtype}; load it in float32 or bfloat16")
    return mean[0], std[0]


@contextmanager
def _precise(vae: Any) -> Iterator[None]:
    """A VAE in float32 inside, where its config asks for that and it is in float16: Stable Diffusion XL's runs over there. Its weights
    keep their bits."""
    upcast = vae.dtype == torch.float16 and bool(getattr(vae.config, "force_upcast", False))
    try:
        if upcast:
            vae.to(torch.float32)
        yield
    finally:
        if upcast:
            vae.to(torch.float16)
