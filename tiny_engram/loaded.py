"""Which concepts are loaded, under which names, and what their switches say. Knows no hook and no pipeline.

May import concept, schedules, store, triggers and what is below.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.schedules import Schedule
from tiny_engram.store import checked_strength
from tiny_engram.triggers import CompiledTrigger

__all__ = ["Loaded", "LoadedConcepts"]


@dataclass(slots=True)
class Loaded:
    """A concept, its trigger by role, its own strength, whether it is among the active ones, and its schedule."""

    concept: Concept
    compiled: Mapping[str, CompiledTrigger]
    strength: float
    active: bool = True
    schedule: Schedule | None = None

    @property
    def changes(self) -> bool:
        """Has it a schedule of more than one factor?"""
        return self.schedule is not None and self.schedule.changes

    @property
    def silent(self) -> bool:
        """Is its strength 0 in all steps?"""
        return self.strength == 0.0 or (self.schedule is not None and not any(self.schedule.factors))


class LoadedConcepts:
    """Concepts by name, in the order of loading; `loaded[name]` raises TinyEngramError for one that is not there.

    Attributes:
        enabled: the switch of all of them at once.
        share: of the steps of a run that are done: where schedules are read now.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Loaded] = {}
        self.enabled = True
        self.share = 0.0

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Loaded:
        if name not in self._entries:
            raise TinyEngramError(f"no concept {name!r}; known: {', '.join(map(repr, self._entries)) or 'none loaded'}")
        return self._entries[name]

    def __setitem__(self, name: str, entry: Loaded) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def require(self, *names: str) -> None:
        """Raises TinyEngramError if one of them is not there."""
        for name in names:
            self[name]

    def free_name(self, name: str, rename: bool) -> str:
        """The name, or with `rename` the first free one of "name-2" and so on. Raises TinyEngramError if it is taken, or no text."""
        if not isinstance(name, str):
            raise TinyEngramError(f"name is {str(name)[:60]}, expected text")
        if name not in self._entries:
            return name
        if not rename:
            raise TinyEngramError(f"concept {name!r} is already loaded; give name='another', rename=True, or unload it first")
        return next(f"{name}-{k}" for k in range(2, len(self._entries) + 3) if f"{name}-{k}" not in self._entries)

    def choose(self, names: Sequence[str], strengths: float | Sequence[float] | None) -> None:
        """Make exactly these active; strengths None keeps each one's own. Changes nothing if it raises TinyEngramError."""
        chosen = [self[name] for name in names]
        if strengths is None:
            values = [entry.strength for entry in chosen]
        elif isinstance(strengths, Iterable):
            values = [checked_strength(value) for value in strengths]
        else:
            values = [checked_strength(strengths)] * len(names)
        if len(values) != len(names):
            raise TinyEngramError(f"{len(values)} strengths for {len(names)} concepts, expected one each")
        for entry in self._entries.values():
            entry.active = False
        for entry, value in zip(chosen, values, strict=True):
            entry.active, entry.strength = True, value

    def active(self) -> list[str]:
        """Names of those that can fire, in some step: enabled, active, strength not 0."""
        return [name for name, entry in self._entries.items() if self.enabled and entry.active and not entry.silent]

    def strength_now(self, name: str) -> float:
        """A concept's strength as its switches stand: 0 where one of them is off."""
        return self.strength_at(name, self.share)

    def strength_at(self, name: str, share: float) -> float:
        """The same at a share of the steps done. Raises TinyEngramError for strength and factor whose product is not finite."""
        entry = self[name]
        if not (entry.active and self.enabled):
            return 0.0
        return entry.strength if entry.schedule is None else checked_strength(entry.strength * entry.schedule.factor(share))

    def why_off(self, name: str) -> str:
        """Why a concept cannot fire, in words, of one that is not among `active()`."""
        if not self.enabled:
            return "all concepts are disabled (enable_concepts)"
        if self[name].active and self[name].strength:
            return "its schedule is 0 in all steps (set_schedule)"
        return "strength is 0" if self[name].active else "not among the active concepts (set_concepts)"
