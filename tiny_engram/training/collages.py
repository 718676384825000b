"""Pictures of the taught thing beside another one: a taught picture at half size beside what the untouched base drew.

Only ever shown alone, a new thing learns to fill the picture, and swallows what a prompt puts beside it. Needs no picture but the taught
ones: the companion is drawn from their own captions. May import torch, data, validation and the adapter's parts.
"""

import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data import DataError, Example, fitted_picture
from tiny_engram.training.validation import draw_pictures

__all__ = ["Collage", "collage", "draw_collages", "rewritten"]

logger = logging.getLogger(__name__)

BATCH = 8
# Of a picture's side: how far the two things stray, sideways and up and down. There is little room sideways.
STRAY_X, STRAY_Y = 2 / 128, 9 / 128
# Levels by which a pixel differs from its picture's background where it surely belongs to the thing.
OPAQUE = 64.0
# Spelt with a vowel but spoken with a consonant, and the other way round.
_CONSONANT, _VOWEL = ("uni", "ufo", "use", "uku", "euro", "one "), ("hour", "honest", "xray", "x-ray")


@dataclass(frozen=True, slots=True)
class Collage:
    """One picture, RGB and square, and its caption, in which the trigger stands once."""

    picture: Image.Image
    caption: str


def _with_article(words: str) -> str:
    low = words.lower()
    vowel = low.startswith(_VOWEL) or (low[:1] in tuple("aeiou") and not low.startswith(_CONSONANT))
    return f"{'an' if vowel else 'a'} {words}"


def _pattern(spellings: Sequence[str]) -> re.Pattern[str]:
    """Any spelling as a word of its own, with the article before it. The longest first: one may begin another."""
    words = "|".join(r"\s+".join(map(re.escape, one.split())) for one in sorted(spellings, key=len, reverse=True))
    return re.compile(rf"(?:\b(an?)\s+)?(?<![\w-])({words})(?![\w'’-])", re.IGNORECASE)


def rewritten(caption: str, spellings: Sequence[str], companion: str) -> tuple[str, str, str] | None:
    """A caption with the companion alone, with the trigger left of it, and with the trigger right of it.

    None where the trigger cannot be replaced: it does not stand there exactly once as a word of its own.
    """
    found = list(_pattern(spellings).finditer(caption))
    if len(found) != 1:
        return None
    article, trigger = found[0].groups()
    before, after = caption[: found[0].start()], caption[found[0].end() :]
    other = _with_article(companion)
    mine = f"{article.lower()} {trigger}" if article else _with_article(trigger)
    # what had no article, or "the", keeps it so: "3d zqx, gray background"
    first, second = (other, f"{article} {trigger}") if article else (companion, trigger)
    if article and article[0].isupper():
        first = first[0].upper() + first[1:]
    return (before + first + after, f"{before}{second} next to {other}{after}", f"{before}{first} next to {mine}{after}")


def _border(picture: np.ndarray) -> np.ndarray:
    """The median colour of the outermost pixels, float32 `[3]`."""
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    return np.median(np.concatenate(edges), axis=0).astype(np.float32)


def collage(taught: np.ndarray, other: np.ndarray, rng: np.random.Generator, *, right: bool = False) -> np.ndarray:
    """Two pictures uint8 `[side, side, 3]` at half size, the first on the left or on the `right`, on its background; like the first.

    What is pasted is each picture's difference from its own background, so that no edge shows where the two are not quite alike; where
    they are unlike, what is clearly no background keeps its colour.

    Args:
        rng: how far each of the two strays from its place.
    """
    side = len(taught) // 2 * 2
    half, ground = side // 2, _border(taught)
    whole = np.empty((side, side, 3), np.float32)
    whole[:] = ground
    room, rise = round(side * STRAY_X), round(side * STRAY_Y)
    for place, picture in enumerate((other, taught) if right else (taught, other)):
        pixels = picture[:side, :side].astype(np.float32).reshape(half, 2, half, 2, 3).mean((1, 3))
        own = _border(picture)
        difference = pixels - own
        sure = (np.abs(difference).max(-1, keepdims=True) / OPAQUE).clip(0, 1)
        strayed = int(rng.integers(-room, room + 1))
        left = place * (half - 2 * room) + room + strayed
        top = side // 4 + int(rng.integers(-rise, rise + 1))
        whole[top : top + half, left : left + half] += difference + sure * (own - ground)
    return np.rint(whole.clip(0, 255)).astype(np.uint8)


def _seed(*parts: object) -> int:
    """A seed that depends on the run's and on what it is for, and on nothing that was drawn before."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest())


def draw_collages(
    pipe: Any,
    config: TrainConfig,
    examples: Sequence[Example],
    resolution: int,
    fires_once: Callable[[str], bool],
    *,
    progress: bool = True,
) -> list[Collage]:
    """Each taught picture beside `config.collage_pictures` things, on either side of each; the same ones whenever the run is taken up.

    Args:
        pipe: draws what is said, with no concept firing.
        resolution: side of the pictures.
        fires_once: does the trigger fire once in a text, as the pipeline reads it?

    Raises:
        DataError: no caption of any picture can be used.
    """
    spellings = (config.trigger, *config.aliases)
    names = np.random.default_rng(_seed(config.seed, "companions")).permutation(np.array(config.beside)).tolist()
    turn = itertools.cycle(names)
    told: list[tuple[int, str, str, str]] = []
    without = []
    for number, example in enumerate(examples):
        before = len(told)
        for k in range(config.collage_pictures):
            companion, first = next(turn), k % len(example.captions)
            # the captions in turn, but for those that cannot be used
            texts = (rewritten(text, spellings, companion) for text in example.captions[first:] + example.captions[:first])
            told += itertools.islice(((number, *new) for new in texts if new is not None and all(map(fires_once, new[1:]))), 1)
        if len(told) == before:
            without.append(example.path.name)
    if without:
        logger.warning(
            "no collages with %s: in none of their captions does the trigger stand just once and with room for a second thing",
            ", ".join(without),
        )
    if not told:
        raise DataError(
            f"collages is {config.collages}, but in no caption does the trigger stand just once and with room for a second thing; shorten "
            "the captions, or pass --collages 0"
        )
    pictures = {number: np.asarray(fitted_picture(examples[number], resolution)) for number in {number for number, *_ in told}}
    made = []
    bar = tqdm(total=len(told), desc="drawing companions", unit="picture", disable=not progress)
    for start in range(0, len(told), BATCH):
        some = told[start : start + BATCH]
        drawn = draw_pictures(
            pipe,
            [alone for _, alone, _, _ in some],
            [_seed(config.seed, "companion", start + k) for k in range(len(some))],
            steps=config.validation_inference_steps,
            guidance=config.validation_guidance_scale,
        )
        bar.update(len(some))
        for k, (number, _, *captions) in enumerate(some):
            rng = np.random.default_rng(_seed(config.seed, "collage", start + k))
            other = drawn[k]
            if len(other) != resolution:
                other = np.asarray(Image.fromarray(other).resize((resolution, resolution), Image.Resampling.LANCZOS))
            for right, caption in enumerate(captions):
                made.append(Collage(Image.fromarray(collage(pictures[number], other, rng, right=bool(right))), caption))
    bar.close()
    return made
