"""Pictures that training may show beside the taught ones, made from those and the untouched base: the options prior and collage.

Only ever shown alone, a new thing learns to fill the picture, and swallows what the prompt puts beside it. A *prior* picture is the
base's own, of two things that it knows; the trigger stands in place of one, and the loss is over the half of the other: whatever
the trigger draws on its side, the rest is to stay as the base draws it. This follows the prior preservation of DreamBooth (Ruiz et al.
2022, arXiv 2208.12242), with a half of a picture in place of a class. A *collage* puts a taught picture at half size beside a thing
that the base drew. The names are none that the comparison asks for. Imports torch and parts of the bench that draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from benchmarks.personalization.base import Base
from benchmarks.personalization.draw import draw

# before the scripts of the recipe, which it puts in reach
from benchmarks.personalization.subjects import EMOJI, KNOWN, OBJECTS, Subject, TaughtPicture, known_names, taught_pictures

from captions import ALONE, COLOURS, PAIR, STYLES, fill  # isort: skip

__all__ = ["Extra", "Priors", "allowed_names", "collage", "half_masks"]

# Columns of latents in the middle that belong to neither half: things reach into them.
MIDDLE = 2
# Centres of the two things in a picture of a pair, and how far they stray: (x, y) in pixels, as assets/recipe/compose.py lays them.
CENTRES, STRAY = (34, 94), (2, 9)
# Noise that no picture of the comparison starts from.
FIRST_SEED = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Extra:
    """Pictures beside the taught ones.

    Attributes:
        means, stds: of their latents, float32 `[pictures, channels, h, w]` on the base's device.
        captions: of each picture, with {0} for the trigger.
        masks: weights of the loss, float32 `[pictures, 1, h, w]` with a mean of 1 each; None where every place counts alike.
    """

    means: torch.Tensor
    stds: torch.Tensor
    captions: list[list[str]]
    masks: torch.Tensor | None = None


@cache
def allowed_names() -> tuple[str, ...]:
    """Names the base was trained on that share no word with what the comparison asks for: subjects, class words, companions, known ones."""
    asked = {*KNOWN, *(name for entry in EMOJI + OBJECTS for name in (entry.name, entry.class_word))}
    words = {word for name in asked for word in name.split()}
    return tuple(name for name in known_names() if not words & set(name.split()))


def half_masks(height: int, width: int) -> torch.Tensor:
    """Weights of the left and of the right half of a grid, the columns of the middle left out: float32 `[2, 1, height, width]`, mean 1."""
    kept = (width - MIDDLE) // 2
    masks = torch.zeros(2, 1, height, width)
    masks[0, ..., :kept] = masks[1, ..., -kept:] = width / kept
    return masks


def _border(picture: np.ndarray) -> np.ndarray:
    """The median colour of the outermost pixels, float32 `[3]`."""
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    return np.median(np.concatenate(edges), axis=0).astype(np.float32)


def collage(pictures: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Two pictures `[128, 128, 3]` uint8 at half size, the first on the left, on the first's own background; strays by `rng`.

    What is pasted is each picture's difference from its own background, so that no edge shows where the two are not quite alike.
    """
    side = len(pictures[0])
    whole = np.empty((side, side, 3), np.float32)
    whole[:] = _border(pictures[0])
    for picture, centre in zip(pictures, CENTRES, strict=True):
        half = picture.astype(np.float32).reshape(side // 2, 2, side // 2, 2, 3).mean((1, 3)) - _border(picture)
        # outside the picture for no stray: the two halves have little room
        left = centre - side // 4 + int(rng.integers(-STRAY[0], STRAY[0] + 1))
        top = side // 4 + int(rng.integers(-STRAY[1], STRAY[1] + 1))
        whole[top : top + side // 2, left : left + side // 2] += half
    return np.rint(whole.clip(0, 255)).astype(np.uint8)


class Priors:
    """What an untouched base draws, once, for all runs. `count` pictures of two things, and a twelfth of it of one on each colour.

    Args:
        steps, guidance: of the pipeline that draws.
    """

    def __init__(self, base: Base, *, count: int, steps: int, guidance: float) -> None:
        if count < len(COLOURS):
            raise ValueError(f"{count} pictures of the base; expected at least {len(COLOURS)}, one for each colour")
        self.base, self.count, self.steps, self.guidance = base, count, steps, guidance
        self._things: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = {}
        self._collages: dict[str, Extra] = {}

    def _draw(self, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        rows = self.base.rows(texts, [()] * len(texts), torch.full((len(texts), 1), -1))
        return draw(self.base, None, rows, [FIRST_SEED + seed for seed in seeds], steps=self.steps, guidance=self.guidance)

    @cached_property
    def prior(self) -> Extra:
        """Every picture twice, for the trigger on either side; styles, colours and templates in equal shares."""
        rng, count = np.random.default_rng(0), self.count
        names = np.resize(rng.permutation(allowed_names()), (count, 2)).tolist()
        styles, colours, templates = (
            [kinds[i % len(kinds)] for i in rng.permutation(count)] for kinds in (STYLES, tuple(COLOURS), PAIR)
        )
        said = list(zip(templates, styles, colours, strict=True))
        drawn = self._draw([fill(*how, pair) for how, pair in zip(said, names, strict=True)], range(count))
        means, stds = self.base.latents(drawn)
        captions = [[fill(*how, ("{0}", right))] for how, (_, right) in zip(said, names, strict=True)]
        captions += [[fill(*how, (left, "{0}"))] for how, (left, _) in zip(said, names, strict=True)]
        # the trigger is named on the left first: there, the right half counts
        masks = half_masks(*means.shape[-2:]).flip(0).repeat_interleave(count, 0).to(means.device)
        return Extra(means.repeat(2, 1, 1, 1), stds.repeat(2, 1, 1, 1), captions, masks)

    def _things_on(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Draw single things for these (style, colour), as far as that is not done, all at once."""
        each, new = self.count // len(COLOURS), [key for key in dict.fromkeys(wanted) if key not in self._things]
        texts, names, seeds = [], [], []
        for style, colour in new:
            turn = STYLES.index(style) * len(COLOURS) + list(COLOURS).index(colour)
            # names and noise of its own for each, whatever else is drawn and when
            names += np.random.default_rng([1, turn]).permutation(allowed_names())[:each].tolist()
            texts += [fill(ALONE[(turn + i) % len(ALONE)], style, colour, (name,)) for i, name in enumerate(names[-each:])]
            seeds += range(1_000_000 + 1_000 * turn, 1_000_000 + 1_000 * turn + each)
        if not texts:
            return
        drawn = self._draw(texts, seeds)
        for i, key in enumerate(new):
            part = slice(i * each, (i + 1) * each)
            self._things[key] = list(zip(names[part], drawn[part], strict=True))

    def collages(self, subjects: Sequence[Subject]) -> dict[str, Extra]:
        """By the subject's name: each of its taught pictures beside each thing that was drawn on the same colour, on either side."""
        new = [subject for subject in subjects if subject.name not in self._collages]
        shown: dict[str, tuple[str, tuple[TaughtPicture, ...]]] = {s.name: (s.styles[s.given[0]], taught_pictures(s)) for s in new}
        self._things_on((style, picture.colour) for style, pictures in shown.values() for picture in pictures)
        for name, (style, pictures) in shown.items():
            rng, made, captions = np.random.default_rng([ord(letter) for letter in name]), [], []
            for picture in pictures:
                for thing, drawn in self._things[style, picture.colour]:
                    for order in (1, -1):
                        made.append(collage((picture.image, drawn)[::order], rng))
                        template = PAIR[len(captions) % len(PAIR)]
                        captions.append([fill(template, style, picture.colour, ("{0}", thing)[::order])])
            self._collages[name] = Extra(*self.base.latents(np.stack(made)), captions)
        return {subject.name: self._collages[subject.name] for subject in subjects}
