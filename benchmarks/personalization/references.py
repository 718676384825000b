"""How a subject really looks, as the judges' networks see it: the vectors that generated pictures are set against.

A reference is a drawing or view of the subject on the background of the picture that it is compared with, at about the size
at which the subject stands there, sent through the base's autoencoder: whatever is drawn comes out of its decoder, whose
texture would else be mistaken for a trait of the subject, the more the smaller that is. Sizes and backgrounds are taken
from short lists, so that vectors are made once and kept. Imports torch and parts of the bench.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.personalization.crops import crop_sprites
from benchmarks.personalization.subjects import Subject

from captions import COLOURS  # isort: skip

# Pixels of a subject's longer side: small, in a half of the picture, alone in it. The nearest one by ratio is taken.
LENGTHS = (36.0, 56.0, 96.0)
# A background this near to a named colour, in each channel, counts as that colour; any other is rounded to STEPS levels.
NEAR, STEPS = 0.15, 5
# Vectors of both networks take 1 MB a reference.
KEPT_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}

Networks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Autoencoder = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class References:
    """One subject's references under one style, size and background.

    Attributes:
        views: the subject's view behind each, `count` of them.
        effnet: float32 `[count, 1280]`, squeeze: float16 `[count, D]`, rows of length 1.
        looks: float32 `[count, 3]`, log-probabilities of the styles.
    """

    views: tuple[int, ...]
    effnet: torch.Tensor
    squeeze: torch.Tensor
    looks: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.effnet, self.squeeze))


def chosen_views(subject: Subject, style: str | None) -> tuple[tuple[int, bool], ...]:
    """(view, mirrored) of what a picture of `subject` in `style` is compared with.

    An emoji has one drawing in each style, which counts mirrored too, since mirrored ones were taught; a style that it
    lacks, or none, means the taught one. An object has one look in whatever style is asked: all of its views.
    """
    if subject.kind == "object":
        return tuple((view, False) for view in range(len(subject.styles)))
    wanted = style if style in subject.styles else subject.styles[subject.given[0]]
    return tuple((view, mirrored) for view, of in enumerate(subject.styles) if of == wanted for mirrored in (False, True))


def nearest_length(longest: float) -> float:
    """The entry of LENGTHS by which a subject of `longest` pixels is judged."""
    return min(LENGTHS, key=lambda length: max(length / longest, longest / length))


def named_colour(colour: Sequence[float]) -> tuple[float, float, float]:
    """The background, red, green and blue in 0..1, that stands for `colour` in references."""
    named = min(COLOURS.values(), key=lambda rgb: sum((c - x / 255) ** 2 for c, x in zip(colour, rgb, strict=True)))
    if max(abs(c - x / 255) for c, x in zip(colour, named, strict=True)) <= NEAR:
        red, green, blue = (x / 255 for x in named)
    else:
        red, green, blue = (round(c * STEPS) / STEPS for c in colour)
    return red, green, blue


class ReferenceBank:
    """References made when first asked for; those that were not asked for the longest go when room is short."""

    def __init__(self, networks: Networks, autoencoder: Autoencoder, device: torch.device, kept_bytes: int | None = None) -> None:
        """`networks`: crops `[n, 3, 128, 128]` in 0..1 -> rows of length 1 of both networks, and looks. `autoencoder`: pictures to such."""
        self.networks, self.autoencoder, self.device = networks, autoencoder, device
        self.kept_bytes = kept_bytes or KEPT_BYTES.get(device.type, KEPT_BYTES["cpu"])
        self._kept: OrderedDict[tuple, References] = OrderedDict()
        self._sprites: dict[Subject, torch.Tensor] = {}
        self.nbytes = 0

    def of(self, subjects: Sequence[Subject], style: str | None, length: float, colour: tuple[float, float, float]) -> list[References]:
        """The references of each subject at `length` pixels on `colour`; all that are missing are made in one batch."""
        keys = [(subject, chosen_views(subject, style), length, colour) for subject in subjects]
        missing = [key for key in dict.fromkeys(keys) if key not in self._kept]
        if missing:
            drawings = [self._drawing(subject, view, mirrored) for subject, views, _, _ in missing for view, mirrored in views]
            crops = crop_sprites(torch.stack(drawings), torch.tensor(colour, device=self.device), length, self.autoencoder)
            effnet, squeeze, looks = self.networks(crops)
            counts = [len(views) for _, views, _, _ in missing]
            parts = (effnet.split(counts), squeeze.half().split(counts), looks.cpu().split(counts))
            for key, e, s, look in zip(missing, *parts, strict=True):
                self._kept[key] = References(tuple(view for view, _ in key[1]), e.clone(), s.clone(), look.numpy())
                self.nbytes += self._kept[key].nbytes
        found = []
        for key in keys:
            self._kept.move_to_end(key)
            found.append(self._kept[key])
        while self.nbytes > self.kept_bytes and len(self._kept) > len(set(keys)):
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _drawing(self, subject: Subject, view: int, mirrored: bool) -> torch.Tensor:
        """float32 `[4, 128, 128]` in 0..1."""
        if subject not in self._sprites:
            self._sprites[subject] = torch.tensor(subject.sprites).to(self.device).permute(0, 3, 1, 2).float() / 255
        drawing = self._sprites[subject][view]
        return drawing.flip(2) if mirrored else drawing
