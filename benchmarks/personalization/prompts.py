"""What is asked of every subject: nine prompts alone, and one for each pair of subjects.

One thing is new in each context: the background, the style, the company, or that nothing is said at all. Colours,
companions and sentences take turns by fixed rules, and a background is always one on which the things stand out. The
colours that were not taught are those of the backgrounds; everything else stands on a colour that was. Imports
subjects.py and scripts of assets/recipe only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal

# first, since it puts assets/recipe in reach
from benchmarks.personalization.subjects import Subject, load_subjects, taught_pictures

from captions import ALONE, COLOURS, PAIR, PARTIAL, STYLES, fill  # isort: skip
from examples import swallowed  # isort: skip

__all__ = ["COMPANIONS", "CONTEXTS", "Prompt", "Side", "pair_prompts", "prompts_for"]

Side = Literal["whole", "left", "right"]
BACKGROUNDS = ("background-1", "background-2", "background-3")
NEW_STYLES = STYLES[1:]
CONTEXTS: tuple[str, ...] = ("taught", *BACKGROUNDS, *(f"style-{style}" for style in NEW_STYLES), "left", "right", "bare")
# Known subjects that look like none of the twenty.
COMPANIONS: tuple[str, ...] = ("rocket", "castle", "strawberry", "pizza", "gift", "diamond", "cupcake", "crown", "tulip")
TAUGHT_STYLE = STYLES[0]
# A background is clear when less than this share of the thing's pixels lies this near to it, as RGB distance 0..441.
NEAR, SWALLOWED_MOST = 80, 0.1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and what a picture of it must show.

    Attributes:
        context: one of `CONTEXTS`, or "pair".
        text: with "{0}" where the subject's trigger goes; in a pair "{0}" is the LEFT thing, "{1}" the right one.
        style, colour: as the text names them; None where it does not.
        companion: a name the base knows, on the other side of the picture; None where the subject stands alone or in a pair.
        side: where subject {0} stands.
        subjects: 1, or 2 in a pair.
    """

    context: str
    text: str
    style: str | None
    colour: str | None
    companion: str | None
    side: Side
    subjects: int


@cache
def _given_shares(subject: Subject) -> dict[str, float]:
    return swallowed(subject.sprites[list(subject.given)], NEAR)


@cache
def _taught_colours(subject: Subject) -> tuple[str, ...]:
    return tuple(picture.colour for picture in taught_pictures(subject))


def _choose(colours: Iterable[str], shares: Sequence[dict[str, float]], turn: int) -> str:
    """Of the colours that swallow little of any of these things, the `turn`-th, counted round; if all do, the one that does least."""
    worst = {colour: max(share[colour] for share in shares) for colour in colours}
    clear = [colour for colour, share in worst.items() if share < SWALLOWED_MOST]
    return clear[turn % len(clear)] if clear else min(worst, key=worst.__getitem__)


def _new_backgrounds(subject: Subject, turn: int) -> list[str]:
    """Three colours that were not taught."""
    left = [colour for colour in COLOURS if colour not in _taught_colours(subject)]
    chosen: list[str] = []
    for number in range(len(BACKGROUNDS)):
        chosen.append(_choose((colour for colour in left if colour not in chosen), [_given_shares(subject)], turn + number))
    return chosen


def prompts_for(subject: Subject) -> tuple[Prompt, ...]:
    """The nine prompts of a subject, in the order of `CONTEXTS`."""
    peers = load_subjects(subject.split)
    turn = peers.index(subject)
    taught, given = _taught_colours(subject), _given_shares(subject)
    known = {companion.name: companion for companion in load_subjects("known")}
    found: list[Prompt] = []

    def add(text: str, style: str | None, colour: str | None, companion: str | None = None, side: Side = "whole") -> None:
        found.append(Prompt(CONTEXTS[len(found)], text, style, colour, companion, side, 1))

    def alone(style: str, colour: str) -> None:
        template = ALONE[(turn + len(found)) % len(ALONE)]
        add(fill(template, style, colour, ("{0}",)), style, colour)

    alone(TAUGHT_STYLE, taught[0])
    for colour in _new_backgrounds(subject, turn):
        alone(TAUGHT_STYLE, colour)
    for number, style in enumerate(NEW_STYLES):
        # an object has no drawing in another style: there, what is known of its colours must do
        drawn = [swallowed(subject.sprites[i], NEAR) for i, of in enumerate(subject.styles) if of == style]
        alone(style, _choose(taught, drawn or [given], turn + number))
    companions = [name for name in COMPANIONS if name != subject.name]
    sides: tuple[Side, Side] = ("left", "right")
    for number, side in enumerate(sides):
        companion = companions[(2 * turn + number) % len(companions)]
        colour = _choose(taught, [given, _given_shares(known[companion])], turn + number)
        names = ("{0}", companion) if side == "left" else (companion, "{0}")
        add(fill(PAIR[(turn + number) % len(PAIR)], TAUGHT_STYLE, colour, names), TAUGHT_STYLE, colour, companion, side)
    add(fill(PARTIAL[0], TAUGHT_STYLE, taught[0], ("{0}",)), None, None)
    return tuple(found)


def pair_prompts(subjects: Sequence[Subject]) -> tuple[tuple[Prompt, tuple[int, int]], ...]:
    """Every unordered pair of `subjects` once: (prompt, (index of the left one, index of the right one)).

    Of an odd number of subjects, each stands as often on the left as on the right.
    """
    found = []
    for number, (i, j) in enumerate(combinations(range(len(subjects)), 2)):
        left, right = (i, j) if (j - i) % 2 else (j, i)
        colour = _choose(COLOURS, [_given_shares(subjects[i]), _given_shares(subjects[j])], number)
        text = fill(PAIR[number % len(PAIR)], TAUGHT_STYLE, colour, ("{0}", "{1}"))
        found.append((Prompt("pair", text, TAUGHT_STYLE, colour, None, "whole", 2), (left, right)))
    return tuple(found)
