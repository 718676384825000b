"""What is trained: a run is one method on one subject, with a seed and a learning rate. Imports the standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. `options` are the method's own, (name, JSON value) pairs in the order of their names."""

    method: str
    subject: str
    seed: int
    learning_rate: float
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        if list(self.options) != sorted(self.options):
            raise ValueError(f"options {self.options!r} of {self.method}: expected them in the order of their names")

    @property
    def key(self) -> str:
        """16 hex digits that name this run in file names."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How many of every 8 samples show something else than the taught pictures; options that any method takes.

    Both are made from the same five pictures and the untouched base; see `priors.py`.

    Attributes:
        prior: the base's own pictures of two things, captioned with the trigger in place of one; the loss is over the half of the other.
        collage: a taught picture at half size beside a thing that the base drew, for which the loss is over the whole.
    """

    prior: int = 0
    collage: int = 0

    def __post_init__(self) -> None:
        for name, count in asdict(self).items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} is {count!r}; expected how many of 8 samples, a whole number from 0")
        if self.prior + self.collage > 7:
            raise ValueError(f"prior {self.prior} and collage {self.collage} of 8 samples; expected at most 7, since one is taught")

    @classmethod
    def of_stack(cls, runs: Sequence[Run]) -> Shares:
        """The shares of runs that are trained together. Raises ValueError where they differ."""
        each = {cls(**{f.name: run.option(f.name, 0) for f in fields(cls)}) for run in runs}
        if len(each) > 1:
            raise ValueError(f"runs of one stack may not differ in prior and collage, got {', '.join(map(str, each))}")
        return each.pop() if each else cls()

    @property
    def asked(self) -> dict[str, int]:
        """Of every eight samples, those of each kind that there are any of."""
        return {name: count for name, count in asdict(self).items() if count}
