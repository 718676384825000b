"""How a concept's strength goes over the steps of a run: factors at shares of the steps. Imports errors and store's check of numbers.

A step is drawn with the factor at the share of steps that are done before it: step i of n is at i / n, so the first one is at 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.store import checked_strength

__all__ = ["CONSTANT", "LINEAR", "Schedule"]

CONSTANT, LINEAR = "constant", "linear"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Points (share of the steps done, factor of the concept's strength), the first at share 0.

    Attributes:
        points: shares rise, and are below 1; of a linear schedule the last may be 1, which is what it goes towards.
        interpolation: "constant", a factor holds up to the next point; or "linear", it goes there in equal steps.

    Raises:
        TinyEngramError: points or interpolation make no sense.
    """

    points: tuple[tuple[float, float], ...]
    interpolation: str = CONSTANT

    def __post_init__(self) -> None:
        if self.interpolation not in (CONSTANT, LINEAR):
            raise TinyEngramError(f"interpolation is {self.interpolation!r}, expected {CONSTANT!r} or {LINEAR!r}")
        object.__setattr__(self, "points", tuple(_point(one) for one in _listed(self.points)))
        if not self.points:
            raise TinyEngramError("a schedule has no points, expected some such as [(0.0, 1.0), (0.5, 0.0)]; None removes a schedule")
        shares = [share for share, _ in self.points]
        if shares[0] != 0.0:
            raise TinyEngramError(f"a schedule's first point is at {shares[0]:g}, expected 0.0: say what holds from the first step on")
        for before, after in zip(shares, shares[1:], strict=False):
            if after <= before:
                raise TinyEngramError(f"a schedule's point at {after:g} follows the one at {before:g}, expected shares that rise")
        if shares[-1] == 1.0 and self.interpolation == CONSTANT:
            raise TinyEngramError("a schedule's point at 1 comes after the last step, so its factor is never used; expected shares below 1")

    @classmethod
    def of(cls, points: Any, interpolation: str = CONSTANT) -> "Schedule":
        """A schedule of points of any kind; a schedule stays as it is. Raises TinyEngramError as the class does."""
        return points if isinstance(points, Schedule) else cls(points, interpolation)

    @classmethod
    def between(cls, start: float = 0.0, end: float = 1.0) -> "Schedule":
        """Factor 1 while at least `start` and less than `end` of the steps are done, 0 before and after.

        Raises TinyEngramError: not 0 <= start < end <= 1.
        """
        first, last = _number(start, "start"), _number(end, "end")
        if not 0.0 <= first < last <= 1.0:
            raise TinyEngramError(f"start is {first:g} and end {last:g}, expected shares of the steps with 0 <= start < end <= 1")
        points = [(0.0, 0.0), (first, 1.0)] if first else [(0.0, 1.0)]
        return cls(tuple(points + [(last, 0.0)] * (last < 1.0)))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """A schedule as a command line writes it: "0:1,0.5:0", "linear,0:1,1:0", or "0.1..0.4" for `between`.

        Raises TinyEngramError: a text of another form, or points that make no sense.
        """
        try:
            start, dots, end = text.partition("..")
            if dots:
                return cls.between(float(start), float(end))
            words = [word.strip() for word in text.split(",")]
            kind = words.pop(0) if words[0] in (CONSTANT, LINEAR) else CONSTANT
            pairs = [word.partition(":") for word in words]
            points = tuple((float(share), float(factor)) for share, _, factor in pairs)
        except ValueError as error:
            if isinstance(error, TinyEngramError):
                raise
            raise TinyEngramError(
                f"schedule {text!r}, expected 0:1,0.5:0 or linear,0:1,1:0 or a range of the steps such as 0..0.4"
            ) from error
        return cls(points, kind)

    def factor(self, share: float) -> float:
        """The factor at a share of the steps done, in [0, 1)."""
        at = max(k for k, (begin, _) in enumerate(self.points) if begin <= share)
        begin, factor = self.points[at]
        if self.interpolation == CONSTANT or at + 1 == len(self.points) or begin == share:
            return factor
        end, target = self.points[at + 1]
        return factor + (target - factor) * ((share - begin) / (end - begin))

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each point."""
        return tuple(factor for _, factor in self.points)

    @property
    def changes(self) -> bool:
        """Is there more than one factor?"""
        return len(set(self.factors)) > 1

    @property
    def moves(self) -> bool:
        """Does a step's factor depend on how many steps there are?"""
        return self.changes and self.interpolation == LINEAR

    def __str__(self) -> str:
        words = [f"factor {self.points[0][1]:g}"]
        for share, factor in self.points[1:]:
            at = f"{100 * share:.4g} % of the steps"
            words.append(f"to {factor:g} at {at}" if self.interpolation == LINEAR else f"from {at} {factor:g}")
        return ", ".join(words)


def _listed(points: Any) -> list[Any]:
    if isinstance(points, str) or not isinstance(points, Iterable):
        raise TinyEngramError(f"a schedule is {str(points)[:40]!r}, expected points such as [(0.0, 1.0), (0.5, 0.0)]")
    return list(points)


def _number(value: Any, what: str) -> float:
    try:
        return checked_strength(value)
    except TinyEngramError:
        raise TinyEngramError(f"a schedule's {what} is {repr(value)[:40]}, expected a finite number") from None


def _point(value: Any) -> tuple[float, float]:
    pair = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
    if len(pair) != 2:
        raise TinyEngramError(f"a schedule's point is {str(value)[:40]}, expected (share of the steps, factor) such as (0.5, 0.0)")
    share, factor = _number(pair[0], "share of the steps"), _number(pair[1], "factor")
    if not 0.0 <= share <= 1.0:
        raise TinyEngramError(f"a schedule's point is at {share:g}, expected a share of the steps from 0 to below 1")
    return share, factor
