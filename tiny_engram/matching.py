"""Where registered triggers stand in a batch of token ids: one vectorised match over all concepts.

Per trigger length the keys' hashes are sorted; each window that could start a trigger is looked up by binary search and then
checked against the full key, so the cost grows with the logarithm of the number of concepts. May import triggers, boundaries and errors.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiny_engram.boundaries import FREE, EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.triggers import CompiledTrigger, RowGroup, Variant

__all__ = ["Blocked", "Entry", "Matches", "TriggerIndex"]

# Up to so many places times lengths a dictionary is quicker than arithmetic on whole arrays.
FEW = 128
EMPTY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Entry:
    """One id sequence of one concept."""

    name: str
    variant: Variant
    group: RowGroup


@dataclass(frozen=True, slots=True)
class Matches:
    """Fired spans, ordered by (batch, start); all arrays int64 `[spans]`. `entry` indexes `TriggerIndex.entries`."""

    batch: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    entry: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A place where the ids of a trigger stand but the span does not fire; `code` is one of boundaries.REASONS."""

    batch: int
    start: int
    length: int
    entry: int
    code: int


NO_MATCHES = Matches(EMPTY, EMPTY, EMPTY, EMPTY)


@dataclass(slots=True)
class _Table:
    """Sorted keys of one length."""

    hashes: NDArray[np.uint64]
    keys: NDArray[np.int64]
    entries: NDArray[np.int64]


class TriggerIndex:
    """All triggers of one tokenizer.

    Adding and removing are cheap; the sorted tables are rebuilt at the next match. A raw id sequence belongs to one concept only.
    """

    def __init__(self, edges: EdgeTables) -> None:
        self.edges = edges
        self.entries: list[Entry] = []
        self._owner: dict[tuple[int, ...], str] = {}
        self._compiled: dict[str, CompiledTrigger] = {}
        self._stale = True
        self._tables: dict[int, _Table] = {}
        self._entry_of: dict[tuple[int, ...], int] = {}
        self._active: NDArray[np.bool_] = np.empty(0, dtype=bool)
        self._silent: set[str] = set()
        # Held by whoever reads or changes the tables, and by ConceptStore around a whole plan: threads share one pipeline.
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, name: str) -> bool:
        return name in self._compiled

    def owner(self, ids: tuple[int, ...]) -> str | None:
        """The concept that has this very id sequence."""
        return self._owner.get(ids)

    def conflicts(self, compiled: CompiledTrigger) -> dict[str, str]:
        """Concepts that already own one of this trigger's id sequences: name -> the spelling in question."""
        return {self._owner[v.ids]: v.text for v in compiled.variants if v.ids in self._owner}

    def add(self, name: str, compiled: CompiledTrigger) -> None:
        """Register a concept's sequences. Raises TinyEngramError if the name or one of the sequences is taken."""
        if name in self._compiled:
            raise TinyEngramError(f"concept {name!r} is already in the index; give another name or remove it first")
        for owner, text in self.conflicts(compiled).items():
            raise TinyEngramError(f"trigger {text!r} of concept {name!r} is already registered by concept {owner!r}; rename one of them")
        self._compiled[name] = compiled
        self._owner.update((variant.ids, name) for variant in compiled.variants)
        self._stale = True

    def remove(self, name: str) -> None:
        """Forget a concept's sequences. Raises TinyEngramError for an unknown name."""
        if name not in self._compiled:
            raise TinyEngramError(f"concept {name!r} is not in the index; known: {sorted(self._compiled)}")
        for variant in self._compiled.pop(name).variants:
            del self._owner[variant.ids]
        self._silent.discard(name)
        self._stale = True

    def set_silent(self, name: str, silent: bool) -> None:
        """A silent concept does not match and does not stand in the way of others: as if it were not there."""
        if silent != (name in self._silent):
            (self._silent.add if silent else self._silent.discard)(name)
            self._stale = True

    def compiled(self, name: str) -> CompiledTrigger:
        """The compiled trigger of a concept."""
        return self._compiled[name]

    # -- matching ------------------------------------------------------------------------------------------------------------

    def match(self, input_ids: Any) -> Matches:
        """Spans that fire: exact ids, word boundaries on both sides, leftmost first, longest of those, never overlapping.

        Args:
            input_ids: int64 `[batch, time]`, numpy or a CPU tensor, as the encoder gets them (special tokens included).
        """
        ids = self._as_ids(input_ids)
        batch, start, length, entry = self._candidates(ids)
        if not len(batch):
            return NO_MATCHES
        free = self._codes(ids, batch, start, length) == FREE
        batch, start, length, entry = batch[free], start[free], length[free], entry[free]
        order = np.lexsort((-length, start, batch))
        kept, row, stop = [], -1, 0
        for k in order.tolist():
            if batch[k] != row:
                row, stop = batch[k], 0
            if start[k] >= stop:
                kept.append(k)
                stop = start[k] + length[k]
        return Matches(batch[kept], start[kept], length[kept], entry[kept])

    def near(self, input_ids: Any) -> list[Blocked]:
        """Places whose ids are a trigger's but where a word boundary, or what ids cannot tell, keeps it from firing."""
        ids = self._as_ids(input_ids)
        batch, start, length, entry = self._candidates(ids)
        codes = self._codes(ids, batch, start, length)
        places = zip(batch.tolist(), start.tolist(), length.tolist(), entry.tolist(), codes.tolist(), strict=True)
        return sorted((Blocked(*p) for p in places if p[4] != FREE), key=lambda b: (b.batch, b.start, -b.length))

    @staticmethod
    def _as_ids(input_ids: Any) -> NDArray[np.int64]:
        ids = np.asarray(input_ids, dtype=np.int64)
        if ids.ndim != 2:
            raise TinyEngramError(f"input_ids has shape {list(ids.shape)}, expected [batch, time]")
        return ids

    def _candidates(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """All windows whose ids are exactly a registered sequence (boundaries not looked at)."""
        with self.lock:
            return self._find(ids)

    def _find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """`_candidates`, the lock held."""
        if self._stale:
            self._rebuild()
        if not self._tables or not ids.size:
            return EMPTY, EMPTY, EMPTY, EMPTY
        rows, time = ids.shape
        flat = ids.reshape(-1)
        within = (flat >= 0) & (flat < len(self._starts))
        positions = np.flatnonzero(self._starts[np.where(within, flat, 0)] & within)
        if not len(positions):
            return EMPTY, EMPTY, EMPTY, EMPTY
        if len(positions) * len(self._tables) <= FEW:
            return self._found_one_by_one(flat, positions, time)
        column = positions % time
        # Prefix sums of id * base^j, modulo 2^64: a window's hash needs one subtraction and one product with base^-start.
        prefix = np.zeros(len(flat) + 1, dtype=np.uint64)
        powers, inverses = self._powers(len(flat))
        np.cumsum(self._mix(flat) * powers, out=prefix[1:])
        found: list[tuple[NDArray[np.int64], ...]] = []
        for length, table in self._tables.items():
            at = positions[column + length <= time]
            if not len(at):
                continue
            hashes = (prefix[at + length] - prefix[at]) * inverses[at]
            slot = np.searchsorted(table.hashes, hashes)
            slot[slot == len(table.hashes)] = 0
            hit = np.flatnonzero(table.hashes[slot] == hashes)
            if not len(hit):
                continue
            at, slot = at[hit], slot[hit]
            same = (flat[at[:, None] + np.arange(length)] == table.keys[slot]).all(axis=1)
            at, slot = at[same], slot[same]
            found.append((at // time, at % time, np.full(len(at), length, dtype=np.int64), table.entries[slot]))
        if not found:
            return EMPTY, EMPTY, EMPTY, EMPTY
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))

    def _found_one_by_one(self, flat: NDArray[np.int64], positions: NDArray[np.int64], time: int) -> tuple[NDArray[np.int64], ...]:
        """`_find` for a few places: no sums to prepare, one look into a dictionary for each place and length."""
        ids, found = flat.tolist(), []
        for at in positions.tolist():
            for length in self._tables:
                if at % time + length > time:
                    break  # lengths ascend
                entry = self._entry_of.get(tuple(ids[at : at + length]))
                if entry is not None:
                    found.append((at // time, at % time, length, entry))
        table = np.array(found, dtype=np.int64).reshape(-1, 4)
        return tuple(table.T)

    def _codes(self, ids: NDArray[np.int64], batch: NDArray, start: NDArray, length: NDArray) -> NDArray[np.uint8]:
        """boundaries code of each window: the left edge's, or the right edge's where the left one is free."""
        padded = np.full((ids.shape[0], ids.shape[1] + 2), -1, dtype=np.int64)
        padded[:, 1:-1] = ids
        stop = start + length
        left = self.edges.between(padded[batch, start], padded[batch, start + 1], trigger_on_left=False)
        right = self.edges.between(padded[batch, stop], padded[batch, stop + 1], trigger_on_left=True)
        return np.where(left != FREE, left, right)

    # -- tables --------------------------------------------------------------------------------------------------------------

    _BASES: Sequence[int] = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB)

    def _rebuild(self) -> None:
        """Sort all keys of all active concepts by hash, per length; another base is taken should two keys share a hash."""
        self.entries = [
            Entry(name, variant, compiled.groups[variant.group])
            for name, compiled in self._compiled.items()
            if name not in self._silent
            for variant in compiled.variants
        ]
        by_length: dict[int, list[int]] = {}
        self._entry_of = {entry.variant.ids: k for k, entry in enumerate(self.entries)}
        for k, entry in enumerate(self.entries):
            by_length.setdefault(len(entry.variant.ids), []).append(k)
        size = max((max(e.variant.ids) for e in self.entries), default=0) + 1
        self._starts = np.zeros(size, dtype=bool)
        self._starts[[e.variant.ids[0] for e in self.entries]] = True
        for base in self._BASES:
            self._base, self._power_cache = base, (np.ones(1, dtype=np.uint64), np.ones(1, dtype=np.uint64))
            self._tables = {}
            for length, members in sorted(by_length.items()):
                keys = np.array([self.entries[k].variant.ids for k in members], dtype=np.int64)
                powers, _ = self._powers(length)
                hashes = (self._mix(keys) * powers).sum(axis=1, dtype=np.uint64)
                order = np.argsort(hashes, kind="stable")
                self._tables[length] = _Table(hashes[order], keys[order], np.array(members, dtype=np.int64)[order])
            if all((t.hashes[1:] != t.hashes[:-1]).all() for t in self._tables.values()):
                break
        else:
            raise TinyEngramError("two triggers share a hash under every base; remove one of the last two concepts")
        self._stale = False

    @staticmethod
    def _mix(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Spread ids over 64 bits, so that small ids do not give related window hashes."""
        x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        return x ^ (x >> np.uint64(31))

    def _powers(self, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """base^0.. and base^-0.. modulo 2^64 (the base is odd, so it has an inverse)."""
        powers, inverses = self._power_cache
        if len(powers) < count:
            inverse = pow(self._base, -1, 2**64)
            p, q, ps, qs = 1, 1, [], []
            for _ in range(max(count, 512)):
                ps.append(p)
                qs.append(q)
                p, q = p * self._base % 2**64, q * inverse % 2**64
            self._power_cache = np.array(ps, dtype=np.uint64), np.array(qs, dtype=np.uint64)
            powers, inverses = self._power_cache
        return powers[:count], inverses[:count]
