"""What is loaded at one encoder: trigger index, row banks, gates and strengths; token ids in, spans with rows out.

May import the core, boundaries, triggers, matching, addressing, concept and residual; knows no module and no pipeline.
"""

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiny_engram.addressing import Asked, RowBank, lookup
from tiny_engram.boundaries import EdgeTables
from tiny_engram.concept import MountRows
from tiny_engram.config import SPAN, ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.matching import Entry, TriggerIndex
from tiny_engram.residual import Spans, apply_spans
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import CompiledTrigger

__all__ = ["ConceptStore", "Fired", "Plan", "checked_strength"]


def checked_strength(value: object) -> float:
    """A finite number, or TinyEngramError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise TinyEngramError(f"strength is {value!r}, expected a finite number such as 1.0 (0 switches a concept off)")
    return float(value)


@dataclass(frozen=True, slots=True)
class _Held:
    """A concept at one mount."""

    bank: RowBank
    gain: list[float]
    bias: list[float]
    rho: float


@dataclass(slots=True)
class _Member:
    mounts: dict[str, _Held]
    strength: float


@dataclass(frozen=True, slots=True)
class Fired:
    """The spans that fire in a batch, of all concepts of one shape, with the rows read for their N positions.

    `names` holds the concept of each span; rows float32 `[N, columns, head_dim]`; gain, bias and scale (strength * rho) float32 `[N]`.
    """

    names: tuple[str, ...]
    spans: Spans
    rows: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor
    basis_seed: int

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[batch, time, width]` with the residual at the spans."""
        return apply_spans(hidden, self.spans, self.rows, self.gain, self.bias, self.scale, basis_seed=self.basis_seed)


@dataclass(frozen=True, slots=True)
class Plan:
    """What fires where: (name, batch row, start, length) of each span, the mounts that have rows for any of them, and the rows.

    For several mounts the batch is stacked: row b of mount k is row k * batch + b of what `fired` is applied to.
    """

    places: tuple[tuple[str, int, int, int], ...]
    mounts: tuple[str, ...]
    fired: tuple[Fired, ...]


def _count(counter: Counter[str], mounts: Iterable[str], change: int) -> None:
    """Add to the counts of the context mounts among these; a count of 0 is taken out."""
    for mount in mounts:
        if mount != SPAN and change:
            counter[mount] += change
            if not counter[mount]:
                del counter[mount]


NOTHING = Plan((), (), ())
_Places = list[tuple[int, int, int, Entry]]


class ConceptStore:
    """All concepts at one encoder, over all of its mounts.

    `mounts` are all that the pipeline has at this role; a mount's place among them takes the place of a layer id in the hash.
    `version` changes with whatever could change a plan.
    """

    def __init__(self, edges: EdgeTables, compressed: CompressedTokenizer, *, width: int, mounts: Sequence[str] = (SPAN,)) -> None:
        self.index = TriggerIndex(edges)
        self.width = width
        self.mounts = tuple(mounts)
        self.compressed = compressed
        self.version = 0
        self._canonical = compressed.canonical.cpu().numpy()
        self._banks: dict[tuple[str, tuple[int, ...]], RowBank] = {}
        self._members: dict[str, _Member] = {}
        # Concepts with rows at each context mount: all of them, and those that are not silent.
        self._loaded: Counter[str] = Counter()
        self._active: Counter[str] = Counter()

    def empty(self) -> "ConceptStore":
        """A store for the same mounts with nothing loaded."""
        return ConceptStore(self.index.edges, self.compressed, width=self.width, mounts=self.mounts)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows in the tables."""
        return sum(table.nbytes for table in {id(bank.table): bank.table for bank in self._banks.values()}.values())

    @property
    def has_contexts(self) -> bool:
        """Does any loaded concept have context mounts, silent or not?"""
        return bool(self._loaded)

    @property
    def active_contexts(self) -> KeysView[str]:
        """Context mounts at which a concept that is not silent has rows."""
        return self._active.keys()

    def mounts_of(self, name: str) -> tuple[str, ...]:
        """The mounts at which a loaded concept has rows."""
        return tuple(self._members[name].mounts)

    def bank_for(self, config: ConceptConfig, mount: str = SPAN) -> RowBank:
        """The bank that concepts of this shape share at a mount; made on demand."""
        shape = RowBank.shape_of(config, self.width)
        key = (mount, shape)
        if key not in self._banks:
            table = next((bank.table for bank in self._banks.values() if bank.shape == shape), None)
            self._banks[key] = RowBank(
                config,
                width=self.width,
                mount_index=self.mounts.index(mount),
                pad_id=self.compressed.pad_id,
                compressed_vocab=self.compressed.size,
                table=table,
            )
        return self._banks[key]

    def bank_of(self, name: str, mount: str = SPAN) -> RowBank:
        """The bank that holds a loaded concept's rows at a mount."""
        return self._members[name].mounts[mount].bank

    def add(
        self, name: str, compiled: CompiledTrigger, rows: Mapping[str, MountRows], config: ConceptConfig, strength: float = 1.0
    ) -> int:
        """Load one concept, `rows` by mount; returns how often its rows' addresses had to move. Nothing is changed if it raises."""
        with self.index.lock:
            self.index.add(name, compiled)
            held: dict[str, _Held] = {}
            moved = 0
            try:
                for mount, at in rows.items():
                    bank = self.bank_for(config, mount)
                    moved += bank.add(name, compiled.groups, at.payload, at.scale)
                    held[mount] = _Held(bank, at.gain.tolist(), at.bias.tolist(), at.rho)
            except Exception:
                for kept in held.values():
                    kept.bank.remove(name)
                self.index.remove(name)
                self._drop_empty_banks()
                raise
            self._members[name] = _Member(held, 0.0)
            _count(self._loaded, held, 1)
            self.set_strength(name, strength)
            return moved

    def remove(self, name: str) -> None:
        """Unload one concept: its rows, gates and sequences are gone."""
        with self.index.lock:
            self.index.remove(name)
            member = self._members.pop(name)
            _count(self._loaded, member.mounts, -1)
            if member.strength != 0.0:
                _count(self._active, member.mounts, -1)
            for held in member.mounts.values():
                held.bank.remove(name)
            self._drop_empty_banks()
            self.version += 1

    def _drop_empty_banks(self) -> None:
        self._banks = {key: bank for key, bank in self._banks.items() if len(bank)}

    def set_strength(self, name: str, strength: float) -> None:
        """0 makes the concept silent: as if it were not loaded."""
        with self.index.lock:
            member = self._members[name]
            _count(self._active, member.mounts, (strength != 0.0) - (member.strength != 0.0))
            member.strength = strength
            self.index.set_silent(name, strength == 0.0)
            self.version += 1

    # -- what fires ----------------------------------------------------------------------------------------------------------

    def plan(self, input_ids: torch.Tensor) -> list[Fired]:
        """What fires at the span mount, with the rows read: input_ids int64 `[batch, time]`, any device; one entry per shape."""
        return list(self.plan_at((SPAN,), input_ids).fired)

    def plan_at(self, mounts: Sequence[str], input_ids: torch.Tensor) -> Plan:
        """What fires at any of these mounts, with the rows read from their tables: input_ids int64 `[batch, time]`, any device."""
        if not self._members:
            return NOTHING
        ids = input_ids.detach().cpu().numpy()
        with self.index.lock:
            matches = self.index.match(ids)
            columns = (a.tolist() for a in (matches.batch, matches.start, matches.length, matches.entry))
            places = [(b, s, n, self.index.entries[e]) for b, s, n, e in zip(*columns, strict=True)]
            used = tuple(m for m in mounts if any(m in self._members[entry.name].mounts for *_, entry in places))
            by_shape: dict[tuple[int, ...], dict[str, list[int]]] = {}
            for mount in used:
                for k, (*_, entry) in enumerate(places):
                    held = self._members[entry.name].mounts.get(mount)
                    if held is not None:
                        by_shape.setdefault(held.bank.shape, {}).setdefault(mount, []).append(k)
            fired = [self._read(places, parts, used, ids) for parts in by_shape.values()]
        return Plan(tuple((entry.name, b, s, n) for b, s, n, entry in places), used, tuple(fired))

    def _read(self, places: _Places, parts: Mapping[str, list[int]], used: Sequence[str], ids: np.ndarray) -> Fired:
        """Ids -> canonical ids -> row ids -> rows, for the spans of one shape at once; `parts` says which places, by mount."""
        # Clipped: ids beyond the base's vocabulary (a user's added tokens) are in no trigger, but may stand beside one.
        canonical = self._canonical.take(ids, mode="clip").tolist()
        prepared: dict[tuple[int, ...], Asked] = {}
        asked: list[tuple[RowBank, Asked]] = []
        names: list[str] = []
        spans: list[tuple[int, int, int, int]] = []
        gates: list[tuple[float, float, float]] = []
        for mount, chosen in parts.items():
            first, key = used.index(mount) * len(ids), tuple(chosen)
            if key not in prepared:
                at = [places[k] for k in chosen]
                prepared[key] = Asked.of([(entry.name, entry.group.offset, canonical[b][s : s + n]) for b, s, n, entry in at])
            bank = self._members[places[chosen[0]][3].name].mounts[mount].bank
            asked.append((bank, prepared[key]))
            for b, s, n, entry in (places[k] for k in chosen):
                member, offset = self._members[entry.name], entry.group.offset
                held = member.mounts[mount]
                names.append(entry.name)
                spans.append((first + b, s, n, offset))
                scale = member.strength * held.rho
                gates += [(held.gain[p], held.bias[p], scale) for p in range(offset, offset + n)]
        gain, bias, scale = torch.tensor(gates, dtype=torch.float32).T.contiguous()
        return Fired(tuple(names), Spans.of(spans), lookup(asked), gain, bias, scale, asked[0][0].basis_seed)
