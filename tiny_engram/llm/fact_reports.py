"""What facts say of themselves: a fact that is there, one that fires in a text, and what adding did. Imports wording and fact_spelling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tiny_engram.wording import counted, shown

from .fact_spelling import Fact, Spelled

__all__ = ["FactReport", "FiredFact", "HeldFact"]


def _of(fact: Fact) -> str:
    whose = "" if fact.owner is None else f", owner={fact.owner!r}"
    return f"{shown(fact.trigger)} -> {shown(fact.answer)}{whose}"


@dataclass(frozen=True, slots=True, repr=False)
class HeldFact:
    """A fact that is there: `margin` by which the weakest token of its answer led when it was taught, in `steps`; its rows' slot."""

    spelled: Spelled
    margin: float
    steps: int
    slot: int

    @property
    def fact(self) -> Fact:
        return self.spelled.fact

    def __repr__(self) -> str:
        return f"HeldFact({_of(self.fact)}, margin={self.margin:.2f}, steps={self.steps})"


@dataclass(frozen=True, slots=True, repr=False)
class FiredFact:
    """Where a trigger ends in a text: the token's place, the fact, and why it does not fire, or None."""

    place: int
    fact: Fact
    reason: str | None

    def __repr__(self) -> str:
        said = "fires" if self.reason is None else f"does not fire: {self.reason}"
        return f"FiredFact({_of(self.fact)}, token {self.place}, {said})"


@dataclass(frozen=True, slots=True, repr=False)
class FactReport:
    """What adding did.

    Attributes:
        added: facts that are there now.
        unlearned: those that are not, since their answers did not come out on top.
        warnings: one line each, of triggers.
        moved: facts whose rows wanted an address that was taken.
        nbytes: of the rows added.
        seconds: of the teaching; 0 for facts from a file.
    """

    added: tuple[Fact, ...]
    unlearned: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()
    moved: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of_parts(cls, parts: "Sequence[FactReport]") -> Self:
        """Of facts that were added one part after the other."""
        return cls(
            added=tuple(fact for part in parts for fact in part.added),
            unlearned=tuple(fact for part in parts for fact in part.unlearned),
            warnings=tuple(warning for part in parts for warning in part.warnings),
            moved=sum(part.moved for part in parts),
            nbytes=sum(part.nbytes for part in parts),
            seconds=sum(part.seconds for part in parts),
        )

    def __repr__(self) -> str:
        return f"FactReport({str(self).partition(chr(10))[0]})"

    def __str__(self) -> str:
        total = len(self.added) + len(self.unlearned)
        took = f"{self.seconds:.1f} s ({self.seconds / max(total, 1):.2f} s each)"
        lines = [f"{len(self.added)} of {counted(total, 'fact')} learned in {took}, {self.nbytes:,} bytes"]
        lines += [f"  not learned: {shown(fact.prompt or fact.trigger)} -> {shown(fact.answer)}" for fact in self.unlearned]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)
