"""What is taught: twenty subjects that the base has never seen, and fifteen trained ones that show what it does at best.

Everything comes from `subjects.npz`, which `make_subjects.py` makes from the data of assets/recipe; a clean checkout needs
nothing else. An emoji has one drawing in each style, of which the first is taught; an object has twelve views, of which
five are. Imports numpy, Pillow and scripts of assets/recipe only.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

RECIPE = Path(__file__).resolve().parents[2] / "assets" / "recipe"
if str(RECIPE) not in sys.path:
    sys.path.insert(0, str(RECIPE))

from captions import ALONE, PARTIAL, STYLES, fill  # noqa: E402
from examples import MIRRORED, PICTURES, RENDERS, pictures  # noqa: E402

__all__ = ["ASSET", "OBJECTS", "EMOJI", "KNOWN", "SPLITS", "Subject", "TaughtPicture", "drawn_names", "known_names", "load_subjects",
           "taught_pictures"]  # fmt: skip

ASSET = Path(__file__).with_name("subjects.npz")
Kind = Literal["emoji", "object"]
Split = Literal["development", "final", "known"]
SPLITS: tuple[Split, ...] = ("development", "final", "known")
SIDE, VIEWS = 128, 12


class Entry(NamedTuple):
    """One line of the tables below. `views`: which of an object's twelve are taught."""

    name: str
    split: Split
    trigger: str
    class_word: str
    lookalikes: str | None = None
    views: tuple[int, ...] = (0,)


# Triggers are made up, four CLIP tokens each, none of which but the hyphen occurs twice; none begins like the tail of an
# English contraction ('t, 'd, 'm ...), which CLIP would cut off after a quote. A class word is what someone who may only use
# names that the base was trained on would call the thing.
EMOJI: tuple[Entry, ...] = (
    Entry("robot", "final", "kuvak-lin", "alien"),
    Entry("hedgehog", "final", "rogak-dem", "mouse"),
    Entry("kangaroo", "final", "fidok-lum", "deer"),
    Entry("owl", "final", "bufi-nek", "bird"),
    Entry("dragon", "final", "kodu-vik", "dinosaur"),
    Entry("cactus", "final", "luvo-gam", "potted plant"),
    Entry("teapot", "final", "hapuk-ri", "coffee cup"),
    Entry("violin", "final", "zibe-rok", "guitar"),
    Entry("octopus", "development", "rugo-zan", "jellyfish"),
    Entry("snowman", "development", "neto-kop", "ghost"),
)
_MUG, _DUCK = RENDERS["blue mug"], RENDERS["duck"]
OBJECTS: tuple[Entry, ...] = (
    Entry("white mug", "final", "pemi-von", "beer mug", "mug", _MUG),
    Entry("red mug", "final", "vuki-dex", "beer mug", "mug", _MUG),
    Entry("green mug", "final", "zogi-lak", "beer mug", "mug", _MUG),
    Entry("yellow mug", "final", "rinu-bex", "beer mug", "mug", _MUG),
    Entry("blue duck", "final", "gafo-mik", "duck", None, _DUCK),
    Entry("toy race car", "final", "gupa-fen", "race car", None, (0, 2, 5, 7, 9)),
    Entry("rover", "final", "kipo-rik", "jeep", None, (0, 2, 5, 7, 10)),
    Entry("duck", "development", "foze-tup", "duck", None, _DUCK),
    Entry("blue mug", "development", "lazu-pim", "beer mug", "mug", _MUG),
    Entry("droid", "development", "beku-nox", "postbox", None, RENDERS["droid"]),
)
# Trained names that the base draws well in every style, like none of the subjects and unlike one another.
KNOWN: tuple[str, ...] = (
    "fox", "panda", "whale", "strawberry", "pizza", "hamburger", "cupcake", "rocket", "castle", "bicycle", "crown", "diamond",
    "drum", "gift", "tulip",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One thing, with all that is known of how it looks; compared by identity.

    Attributes:
        trigger: the made-up word of four CLIP tokens that names it in prompts; a known subject's own name.
        class_word: a name that the base was trained on and a user would give for such a thing.
        lookalikes: the name of the group of subjects that differ from this one in colour alone.
        sprites: uint8 `[views, 128, 128, 4]`, straight alpha, black where transparent, read-only.
        styles: each view's style; an emoji's are "3d", "flat" and "outlined", an object's all "3d".
        given: the views that are taught.
    """

    name: str
    kind: Kind
    split: Split
    trigger: str
    class_word: str
    lookalikes: str | None
    sprites: np.ndarray
    styles: tuple[str, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TaughtPicture:
    """`image` uint8 `[128, 128, 3]`, read-only; `captions` hold "{0}" where the trigger goes; `colour` names the background."""

    image: np.ndarray
    captions: tuple[str, ...]
    colour: str


@cache
def _asset() -> tuple[dict[str, np.ndarray], dict[str, bool]]:
    """Sprites by name, and whether the base was trained on it for every name of the judges, in their order."""
    if not ASSET.exists():
        raise FileNotFoundError(f"{ASSET} is not there: it belongs to the checkout, and benchmarks.personalization.make_subjects makes it")
    with np.load(ASSET) as file:
        index = json.loads(file["index"].tobytes())
        sheet = np.array(Image.open(io.BytesIO(file["sheet"].tobytes())).convert("RGBA"))
    rows, columns = sheet.shape[0] // SIDE, sheet.shape[1] // SIDE
    cells = sheet.reshape(rows, SIDE, columns, SIDE, 4).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 4)
    cells.setflags(write=False)
    sprites, start = {}, 0
    for name, views in index["sprites"]:
        sprites[name] = cells[start : start + views]
        start += views
    return sprites, dict(index["names"])


def drawn_names() -> tuple[str, ...]:
    """The 666 names that benchmarks/classifiers.safetensors tells apart, in its order."""
    return tuple(_asset()[1])


def known_names() -> tuple[str, ...]:
    """The names among `drawn_names` that the base was trained on."""
    return tuple(name for name, trained in _asset()[1].items() if trained)


def load_subjects(*splits: str) -> tuple[Subject, ...]:
    """The subjects of these splits, in the tables' order: "final" 15, "development" 5, "known" 15; without a split, all.

    Raises ValueError for a split that does not exist.
    """
    for split in splits:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    return tuple(subject for subject in _subjects() if not splits or subject.split in splits)


@cache
def _subjects() -> tuple[Subject, ...]:
    known = tuple(Entry(name, "known", name, name) for name in KNOWN)
    emoji = [_subject("emoji", STYLES, entry) for entry in EMOJI + known]
    return (*emoji, *(_subject("object", ("3d",) * VIEWS, entry) for entry in OBJECTS))


def _subject(kind: Kind, styles: tuple[str, ...], entry: Entry) -> Subject:
    name, split, trigger, class_word, lookalikes, views = entry
    return Subject(name, kind, split, trigger, class_word, lookalikes, _asset()[0][name], styles, views)


@cache
def taught_pictures(subject: Subject) -> tuple[TaughtPicture, ...]:
    """Five pictures, the same ones that assets/recipe/examples.py makes of a subject of that name.

    A drawing is shown on five backgrounds at different places and sizes, twice mirrored; of an object five views are.
    Every caption tells style and colour, but for one in six: these are short, as users write them.
    """
    one = len(subject.given) == 1
    sprites = [subject.sprites[view] for view in (subject.given * PICTURES if one else subject.given)]
    taught = []
    for number, (image, colour, _) in enumerate(pictures(subject.name, sprites, MIRRORED if one else frozenset())):
        style = subject.styles[subject.given[0]]
        # "a {0}" in one picture, "a 3d {0}" in the next
        templates = (*ALONE, PARTIAL[number % 2])
        image.setflags(write=False)
        taught.append(TaughtPicture(image, tuple(fill(template, style, colour, ("{0}",)) for template in templates), colour))
    return tuple(taught)
