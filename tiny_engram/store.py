"""What is loaded at one encoder: trigger index, row banks, gates, maps and strengths; token ids in, spans with rows out.

May import the core, boundaries, triggers, matching, addressing, concept, mount_names, residual and fired; knows no module and no pipeline.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, KeysView, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from tiny_engram.addressing import Asked, RowBank, lookup
from tiny_engram.boundaries import EdgeTables
from tiny_engram.concept import MapFactors, MountRows
from tiny_engram.config import DEEP, SPAN, ConceptConfig, at_encoder
from tiny_engram.errors import TinyEngramError
from tiny_engram.fired import NOTHING, Fired, FiredMaps, Plan, RowsRead
from tiny_engram.matching import Entry, TriggerIndex
from tiny_engram.residual import Spans
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import CompiledTrigger

__all__ = ["ConceptStore", "checked_strength"]


def checked_strength(value: object) -> float:
    """A finite number, or TinyEngramError."""
    number = float("nan")
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            number = float(value)
    if not np.isfinite(number):
        raise TinyEngramError(f"strength is {repr(value)[:40]}, expected a finite number such as 1.0 (0 switches a concept off)")
    return number


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
    maps: Mapping[str, MapFactors]
    strength: float

    @property
    def at_denoiser(self) -> list[str]:
        """Its context mounts and maps."""
        return [m for m in self.mounts if not at_encoder(m)] + list(self.maps)

    @property
    def inside(self) -> list[str]:
        """Its mounts inside the encoder."""
        return [m for m in self.mounts if m.partition(".")[0] == DEEP]


def _count(counter: Counter[str], names: Iterable[str], change: int) -> None:
    """Add to the counts of these; a count of 0 is taken out."""
    for name in names:
        if change:
            counter[name] += change
            if not counter[name]:
                del counter[name]


# What was read for so many combinations of spans is kept until a concept comes or goes.
MOST_READ = 64
_Places = list[tuple[int, int, int, Entry]]


class ConceptStore:
    """All concepts at one encoder, over all of its mounts.

    `mounts` are all that the pipeline has at this role; a mount's place among them takes the place of a layer id in the hash.
    `widths` holds, by mount, the width of those that read another one than the encoder's; `maps` the channels of all maps that it can have,
    by name. `version` changes with whatever could change a plan.
    """

    def __init__(
        self,
        edges: EdgeTables,
        compressed: CompressedTokenizer,
        *,
        width: int,
        mounts: Sequence[str] = (SPAN,),
        maps: Mapping[str, int] | None = None,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self.index = TriggerIndex(edges)
        self.width = width
        self.widths = {mount: of for mount, of in (widths or {}).items() if of != width}
        self.mounts = tuple(mounts)
        self.maps = dict(maps or {})
        self._place = {mount: k for k, mount in enumerate(self.mounts)}
        self.compressed = compressed
        self.version = 0
        self._canonical = compressed.canonical.cpu().numpy()
        self._banks: dict[tuple[str, tuple[int, ...]], RowBank] = {}
        self._members: dict[str, _Member] = {}
        # Concepts that have rows at each context mount, or each map: all of them, and those that are not silent.
        self._loaded: Counter[str] = Counter()
        self._active: Counter[str] = Counter()
        self._deep: Counter[str] = Counter()
        self._read_before: OrderedDict[tuple[tuple[str, str, int, int], ...], RowsRead] = OrderedDict()

    def empty(self) -> "ConceptStore":
        """A store for the same mounts with nothing loaded."""
        return ConceptStore(self.index.edges, self.compressed, width=self.width, mounts=self.mounts, maps=self.maps, widths=self.widths)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows in the tables."""
        return sum(table.nbytes for table in {id(bank.table): bank.table for bank in self._banks.values()}.values())

    @property
    def any_at_denoiser(self) -> bool:
        """Does any loaded concept have context mounts or maps, silent or not?"""
        return bool(self._loaded)

    @property
    def has_maps(self) -> bool:
        """Does any loaded concept have maps, silent or not?"""
        return any(name in self.maps for name in self._loaded)

    @property
    def loaded_deep(self) -> tuple[str, ...]:
        """The mounts "deep.{i}" at which any loaded concept has rows."""
        return tuple(self._deep)

    @property
    def context_mounts(self) -> tuple[str, ...]:
        """All context mounts of the role: its mounts but those at the encoder."""
        return tuple(m for m in self.mounts if not at_encoder(m))

    @property
    def active_at_denoiser(self) -> KeysView[str]:
        """Context mounts at which a concept that is not silent has rows, and the names of such concepts' maps."""
        return self._active.keys()

    def mounts_of(self, name: str) -> tuple[str, ...]:
        """The mounts at which a loaded concept has rows."""
        return tuple(self._members[name].mounts)

    def maps_of(self, name: str) -> tuple[str, ...]:
        """The maps that a loaded concept has."""
        return tuple(self._members[name].maps)

    def width_at(self, mount: str) -> int:
        """Width of the states that a mount adds to."""
        return self.widths.get(mount, self.width)

    def bank_for(self, config: ConceptConfig, mount: str = SPAN) -> RowBank:
        """The bank that concepts of this shape share at a mount; made on demand."""
        width = self.width_at(mount)
        shape = RowBank.shape_of(config, width)
        key = (mount, shape)
        if key not in self._banks:
            table = next((bank.table for bank in self._banks.values() if bank.shape == shape), None)
            self._banks[key] = RowBank(
                config,
                width=width,
                mount_index=self._place[mount],
                pad_id=self.compressed.pad_id,
                compressed_vocab=self.compressed.size,
                table=table,
            )
        return self._banks[key]

    def bank_of(self, name: str, mount: str = SPAN) -> RowBank:
        """The bank that holds a loaded concept's rows at a mount."""
        return self._members[name].mounts[mount].bank

    def add(
        self,
        name: str,
        compiled: CompiledTrigger,
        rows: Mapping[str, MountRows],
        config: ConceptConfig,
        strength: float = 1.0,
        *,
        maps: Mapping[str, MapFactors] | None = None,
    ) -> int:
        """Load one concept, `rows` by mount, `maps` by name; returns how often its rows' addresses had to move.

        Nothing is changed if it raises.
        """
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
            member = self._members[name] = _Member(held, dict(maps or {}), 0.0)
            _count(self._loaded, member.at_denoiser, 1)
            _count(self._deep, member.inside, 1)
            self.set_strength(name, strength)
            return moved

    def remove(self, name: str) -> None:
        """Unload one concept: its rows, gates and sequences are gone."""
        with self.index.lock:
            self.index.remove(name)
            member = self._members.pop(name)
            _count(self._loaded, member.at_denoiser, -1)
            _count(self._deep, member.inside, -1)
            if member.strength != 0.0:
                _count(self._active, member.at_denoiser, -1)
            for held in member.mounts.values():
                held.bank.remove(name)
            self._drop_empty_banks()
            self.forget_read()
            self.version += 1

    def forget_read(self) -> None:
        """Read all rows from their tables again, as after tables or hashes were changed from outside."""
        self._read_before.clear()

    def _drop_empty_banks(self) -> None:
        self._banks = {key: bank for key, bank in self._banks.items() if len(bank)}

    def set_strength(self, name: str, strength: float) -> None:
        """0 makes the concept silent: as if it were not loaded."""
        with self.index.lock:
            member = self._members[name]
            _count(self._active, member.at_denoiser, (strength != 0.0) - (member.strength != 0.0))
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
            names = dict.fromkeys(entry.name for *_, entry in places)
            anywhere = frozenset(mount for name in names for mount in self._members[name].mounts)
            used = tuple(m for m in mounts if m in anywhere)
            by_shape: dict[tuple[int, ...], dict[str, list[int]]] = {}
            for mount in used:
                for k, (*_, entry) in enumerate(places):
                    held = self._members[entry.name].mounts.get(mount)
                    if held is not None:
                        by_shape.setdefault(held.bank.shape, {}).setdefault(mount, []).append(k)
            fired = [self._read(places, parts, used, ids) for parts in by_shape.values()]
            maps = [
                FiredMaps(name, tuple((b, s, n) for b, s, n, entry in places if entry.name == name), member.strength, member.maps)
                for name in names
                if (member := self._members[name]).maps
            ]
        return Plan(tuple((entry.name, b, s, n) for b, s, n, entry in places), used, tuple(fired), tuple(maps), anywhere)

    def _read(self, places: _Places, parts: Mapping[str, list[int]], used: Sequence[str], ids: np.ndarray) -> Fired:
        """The spans of one shape at once, with their rows; `parts` says which places, by mount."""
        wanted: list[tuple[str, str, int, int]] = []
        spans: list[tuple[int, int, int, int]] = []
        gates: list[tuple[float, float, float]] = []
        for mount, chosen in parts.items():
            first = used.index(mount) * len(ids)
            for b, s, n, entry in (places[k] for k in chosen):
                member, offset = self._members[entry.name], entry.group.offset
                held = member.mounts[mount]
                wanted.append((mount, entry.name, offset, n))
                spans.append((first + b, s, n, offset))
                scale = member.strength * held.rho
                gates += [(held.gain[p], held.bias[p], scale) for p in range(offset, offset + n)]
        key = tuple(wanted)
        read = self._read_before.get(key)
        if read is None:
            with torch.inference_mode(False):
                read = self._look_up(places, parts, ids)
            self._read_before[key] = read
            if len(self._read_before) > MOST_READ:
                self._read_before.popitem(last=False)
        else:
            self._read_before.move_to_end(key)
        gain, bias, scale = torch.tensor(gates, dtype=torch.float32).T.contiguous()
        return Fired(tuple(name for _, name, _, _ in wanted), Spans.of(spans), read, gain, bias, scale)

    def _look_up(self, places: _Places, parts: Mapping[str, list[int]], ids: np.ndarray) -> RowsRead:
        """Ids -> canonical ids -> row ids -> rows, mount by mount and span by span."""
        # Clipped: ids beyond the base's vocabulary (a user's added tokens) are in no trigger, but may stand beside one.
        canonical = self._canonical.take(ids, mode="clip").tolist()
        prepared: dict[tuple[int, ...], Asked] = {}
        asked: list[tuple[RowBank, Asked]] = []
        for mount, chosen in parts.items():
            key = tuple(chosen)
            if key not in prepared:
                at = [places[k] for k in chosen]
                prepared[key] = Asked.of([(entry.name, entry.group.offset, canonical[b][s : s + n]) for b, s, n, entry in at])
            asked.append((self._members[places[chosen[0]][3].name].mounts[mount].bank, prepared[key]))
        return RowsRead(lookup(asked), asked[0][0].basis_seed)
