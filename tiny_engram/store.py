"""What is loaded at one encoder: trigger index, row banks, gates and strengths; token ids in, spans with rows out.

May import the core, boundaries, triggers, matching, addressing, concept and residual; knows no module and no pipeline.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tiny_engram.addressing import RowBank
from tiny_engram.boundaries import EdgeTables
from tiny_engram.concept import MountRows
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.matching import Entry, TriggerIndex
from tiny_engram.residual import Spans, apply_spans
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import CompiledTrigger

__all__ = ["ConceptStore", "Fired", "checked_strength"]


def checked_strength(value: object) -> float:
    """A finite number, or TinyEngramError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise TinyEngramError(f"strength is {value!r}, expected a finite number such as 1.0 (0 switches a concept off)")
    return float(value)


@dataclass(slots=True)
class _Member:
    bank: RowBank
    gain: list[float]
    bias: list[float]
    rho: float
    strength: float


@dataclass(frozen=True, slots=True)
class Fired:
    """The spans that fire in a batch, of all concepts in one bank, with the rows read for their N positions.

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


class ConceptStore:
    """All concepts at one mount of one encoder."""

    def __init__(self, edges: EdgeTables, compressed: CompressedTokenizer, *, width: int, mount_index: int = 0) -> None:
        self.index = TriggerIndex(edges)
        self.width = width
        self.mount_index = mount_index
        self.compressed = compressed
        self._canonical = compressed.canonical.cpu().numpy()
        self._banks: dict[tuple[int, ...], RowBank] = {}
        self._members: dict[str, _Member] = {}

    def empty(self) -> "ConceptStore":
        """A store for the same mount with nothing loaded."""
        return ConceptStore(self.index.edges, self.compressed, width=self.width, mount_index=self.mount_index)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows in the tables."""
        return sum(bank.table.nbytes for bank in self._banks.values())

    def bank_for(self, config: ConceptConfig) -> RowBank:
        """The bank that concepts of this shape share; made on demand."""
        key = (config.max_ngram, config.heads_at(self.width), config.head_dim, config.vocab, config.basis_seed)
        if key not in self._banks:
            self._banks[key] = RowBank(
                config,
                width=self.width,
                mount_index=self.mount_index,
                pad_id=self.compressed.pad_id,
                compressed_vocab=self.compressed.size,
            )
        return self._banks[key]

    def bank_of(self, name: str) -> RowBank:
        """The bank that holds a loaded concept's rows."""
        return self._members[name].bank

    def add(self, name: str, compiled: CompiledTrigger, rows: MountRows, config: ConceptConfig, strength: float = 1.0) -> int:
        """Load one concept; returns the collision counter that its rows took. Nothing is changed if it raises."""
        with self.index.lock:
            bank = self.bank_for(config)
            self.index.add(name, compiled)
            try:
                counter = bank.add(name, compiled.groups, rows.payload, rows.scale)
            except Exception:
                self.index.remove(name)
                raise
            self._members[name] = _Member(bank, rows.gain.tolist(), rows.bias.tolist(), rows.rho, strength)
            self.set_strength(name, strength)
            return counter

    def remove(self, name: str) -> None:
        """Unload one concept: its rows, gates and sequences are gone."""
        with self.index.lock:
            self.index.remove(name)
            self._members.pop(name).bank.remove(name)
            self._banks = {key: bank for key, bank in self._banks.items() if len(bank)}

    def set_strength(self, name: str, strength: float) -> None:
        """0 makes the concept silent: as if it were not loaded."""
        with self.index.lock:
            self._members[name].strength = strength
            self.index.set_silent(name, strength == 0.0)

    def plan(self, input_ids: torch.Tensor) -> list[Fired]:
        """What fires where, with the rows read from the table: input_ids int64 `[batch, time]`, any device; one entry per bank."""
        if not self._members:
            return []
        ids = input_ids.detach().cpu().numpy()
        with self.index.lock:
            matches = self.index.match(ids)
            by_bank: dict[int, list[tuple[int, int, int, Entry]]] = {}
            for b, s, n, e in zip(*(a.tolist() for a in (matches.batch, matches.start, matches.length, matches.entry)), strict=True):
                entry = self.index.entries[e]
                by_bank.setdefault(id(self._members[entry.name].bank), []).append((b, s, n, entry))
            return [self._read(places, ids) for places in by_bank.values()]

    def _read(self, places: list[tuple[int, int, int, Entry]], ids: np.ndarray) -> Fired:
        """Ids -> canonical ids -> row ids -> rows, for all spans of one bank at once."""
        # Clipped: ids beyond the base's vocabulary (a user's added tokens) are in no trigger, but may stand beside one.
        canonical = self._canonical.take(ids, mode="clip").tolist()
        asked = [(entry.name, entry.group.offset, canonical[b][s : s + n]) for b, s, n, entry in places]
        own = [(self._members[name], slice(o, o + len(span))) for name, o, span in asked]
        bank = own[0][0].bank
        return Fired(
            tuple(name for name, _, _ in asked),
            Spans.of((b, s, n, entry.group.offset) for b, s, n, entry in places),
            bank.lookup(asked),
            torch.tensor([g for m, at in own for g in m.gain[at]], dtype=torch.float32),
            torch.tensor([g for m, at in own for g in m.bias[at]], dtype=torch.float32),
            torch.tensor([m.strength * m.rho for m, at in own for _ in m.gain[at]], dtype=torch.float32),
            bank.basis_seed,
        )
