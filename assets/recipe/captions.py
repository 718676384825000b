"""The language of the embedded base models: twelve background colours, three styles, caption templates.

The sprite recipe, the trainer and the benchmarks share this module, so that a caption always means the same
picture. It imports nothing but the standard library's types: any object with numpy's `random` and `integers`
serves as the random source.
"""

from collections.abc import Sequence
from typing import Protocol

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (12, 12, 12),
    "gray": (140, 140, 140),
    "red": (210, 40, 40),
    "orange": (245, 145, 40),
    "yellow": (245, 212, 58),
    "green": (50, 165, 80),
    "cyan": (70, 208, 216),
    "blue": (45, 92, 222),
    "purple": (132, 66, 188),
    "pink": (245, 148, 190),
    "brown": (122, 80, 50),
}

STYLES: tuple[str, ...] = ("3d", "flat", "outlined")

# "{thing:a}" is the thing with its indefinite article, "{thing:style}" with style and article: "an outlined owl".
ALONE: tuple[str, ...] = (
    "{thing:style} on {colour:a} background",
    "{style:a} drawing of {thing:a} on {colour}",
    "{style} {thing}, {colour} background",
    "a picture of {thing:a}, {style} style, {colour} background",
    "{thing:a} in {style} style on {colour:a} background",
)

# Users type short prompts as well: what these leave out, the model must choose by itself.
PARTIAL: tuple[str, ...] = (
    "{thing:a}",
    "{thing:style}",
    "{thing:a} on {colour:a} background",
)
PARTIAL_SHARE = 0.12

# `left` and `right` are the sides in the picture, whichever is named first in the sentence.
PAIR: tuple[str, ...] = (
    "{left:style} next to {right:a} on {colour:a} background",
    "{left:style} left of {right:a} on {colour:a} background",
    "{right:style} right of {left:a} on {colour:a} background",
    "{left:style} beside {right:a}, {colour} background",
    "{left:a} and {right:a} in {style} style on {colour:a} background",
)

# Spelt with a vowel but spoken with a consonant: "a unicorn"; and the other way round.
_CONSONANT_SOUND = ("uni", "ufo", "use", "uku", "euro", "one ")
_VOWEL_SOUND = ("hour", "honest", "xray", "x-ray")
# Mass nouns and plurals take no article: "a drawing of scissors".
_NO_ARTICLE = frozenset(
    {
        "bacon", "bread", "broccoli", "butter", "cheese", "chopsticks", "corn", "cutlery", "fire", "french fries",
        "garlic", "ginger", "glasses", "gloves", "grapes", "headphones", "jeans", "lettuce", "milk", "noodle soup",
        "paella", "popcorn", "poop", "pudding", "salad", "scissors", "shaved ice", "shorts", "soap",
        "soft ice cream", "spaghetti", "sunglasses", "sushi", "tennis", "toilet paper", "yarn", "cherries",
        "blueberries", "peanuts", "beans", "pancakes", "champagne glasses", "fireworks", "sparkles", "japanese dolls",
        "bowling pins", "skis", "nesting dolls", "theater masks", "socks", "briefs", "shopping bags", "ballet shoes",
        "prayer beads", "maracas", "books", "crossed swords", "lungs", "bubbles", "lips", "paw prints", "dry leaves",
        "dna", "thread",
    }
)  # fmt: skip


class Random(Protocol):
    """The part of `numpy.random.Generator` that a caption needs."""

    def random(self) -> float: ...

    def integers(self, high: int, /) -> int: ...


def with_article(words: str) -> str:
    """`words` after "a" or "an", or bare when English puts no article before them."""
    low = words.lower()
    if low in _NO_ARTICLE:
        return words
    vowel = low.startswith(_VOWEL_SOUND) or (low[:1] in tuple("aeiou") and not low.startswith(_CONSONANT_SOUND))
    return f"{'an' if vowel else 'a'} {words}"


class _Words(str):
    """Words whose format spec "a" puts the indefinite article before them."""

    def __format__(self, spec: str) -> str:
        return with_article(self) if spec == "a" else str(self)


class _Thing(_Words):
    """The name of a thing; its format spec "style" puts the style before it, and an article if the thing takes one."""

    style = ""

    def __format__(self, spec: str) -> str:
        if spec != "style":
            return super().__format__(spec)
        styled = f"{self.style} {self}"
        return styled if self.lower() in _NO_ARTICLE else with_article(styled)


def fill(template: str, style: str, colour: str, names: Sequence[str]) -> str:
    """The sentence that `template`, one of this module's, makes of a style, a colour and one or two names."""
    if style not in STYLES or colour not in COLOURS:
        raise ValueError(f"style {style!r}, colour {colour!r}: expected one of {STYLES} and one of {tuple(COLOURS)}")
    things = [_Thing(name) for name in names]
    for thing in things:
        thing.style = style
    fields = dict(zip(("left", "right") if len(things) == 2 else ("thing",), things, strict=True))
    return template.format(style=_Words(style), colour=_Words(colour), **fields)


def caption(rng: Random, style: str, colour: str, names: Sequence[str]) -> str:
    """One sentence for a picture in `style` on background `colour`.

    `names` holds one name, or two: the first is then the LEFT thing in the picture, the second the right one, in
    every template. Styles and colours are keys of this module's tables; names may be any words, made-up ones or a
    placeholder such as "{trigger}" too.
    """
    templates = PAIR if len(names) == 2 else PARTIAL if rng.random() < PARTIAL_SHARE else ALONE
    return fill(templates[int(rng.integers(len(templates)))], style, colour, names)
