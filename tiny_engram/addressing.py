"""Where a concept's rows live: salts, row ids, and the table that one mount reads. May import the core and triggers.

Row ids depend on the trigger alone: look-backs stop at the span's start, and the running XOR of each position starts from a salt made
of the whole canonical trigger, the position and a counter. Should two concepts (or two positions of one) want the same row, the
counter of the newcomer is raised until they do not: rows move, values do not.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hashing import NgramHasher, next_primes
from tiny_engram.kernels.row_gather import Bounds
from tiny_engram.table import EngramTable
from tiny_engram.triggers import RowGroup

__all__ = ["Asked", "RowBank", "lookup", "salt_of"]

MAX_COUNTER = 64


def salt_of(canonical: tuple[int, ...], position: int, counter: int) -> int:
    """62-bit start of the running XOR at one position of a trigger."""
    text = ",".join(map(str, canonical)) + f"|{position}|{counter}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


@dataclass(frozen=True, slots=True)
class _Placed:
    """A concept's place in the bank: salts int64 `[positions]`, row ids int64 `[positions, columns]`, and the counter taken."""

    salts: torch.Tensor
    row_ids: torch.Tensor
    counter: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Spans whose rows are wanted: (concept, offset among its positions, canonical ids) each, and the same as tensors.

    `canonical` is int64 `[spans, longest]`, padded on the right: a suffix n-gram looks back, so no position inside a span sees it.
    `inside` int64 `[N]` picks the spans' own positions out of it, span by span.
    """

    spans: tuple[tuple[str, int, Sequence[int]], ...]
    canonical: torch.Tensor
    inside: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[str, int, Sequence[int]]]) -> "Asked":
        longest = max(len(ids) for _, _, ids in spans)
        canonical = torch.tensor([[*ids, *[0] * (longest - len(ids))] for _, _, ids in spans])
        inside = torch.tensor([k * longest + p for k, (_, _, ids) in enumerate(spans) for p in range(len(ids))])
        return cls(tuple(spans), canonical, inside)


class RowBank:
    """The rows of all concepts of one shape at one mount: hasher, table and where each concept stands in it.

    Banks of one shape at several mounts share a table, in which each has a range of row ids of its own.
    """

    def __init__(
        self,
        config: ConceptConfig,
        *,
        width: int,
        mount_index: int,
        pad_id: int,
        compressed_vocab: int,
        table: EngramTable | None = None,
    ) -> None:
        self.width = width
        self.head_dim = config.head_dim
        self.basis_seed = config.basis_seed
        self.shape = self.shape_of(config, width)
        hash_config = config.hash_config(width=width, compressed_vocab=compressed_vocab, pad_id=pad_id, mounts=mount_index + 1)
        self.hasher = NgramHasher(hash_config, mount_index)
        self.first_row = sum(next_primes(config.vocab, mount_index * hash_config.columns)) if mount_index else 0
        self.table = EngramTable.virtual(config.head_dim) if table is None else table
        self._placed: dict[str, _Placed] = {}

    @staticmethod
    def shape_of(config: ConceptConfig, width: int) -> tuple[int, ...]:
        """What concepts must have in common to share a bank."""
        return config.max_ngram, config.heads_at(width), config.head_dim, config.vocab, config.basis_seed

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, groups: tuple[RowGroup, ...], counter: int) -> _Placed:
        """Salts and row ids that these groups have with a counter; touches nothing."""
        salts = [[salt_of(g.canonical, p, counter) for p in range(len(g.canonical))] for g in groups]
        rows = [self.hasher.rows(torch.tensor([g.canonical]), salt=torch.tensor([salt]))[0] for g, salt in zip(groups, salts, strict=True)]
        return _Placed(torch.tensor([s for part in salts for s in part]), torch.cat(rows) + self.first_row, counter)

    def find_place(self, groups: tuple[RowGroup, ...]) -> _Placed:
        """The first counter whose row ids are free and all different."""
        for counter in range(MAX_COUNTER):
            placed = self.place(groups, counter)
            flat = placed.row_ids.reshape(-1)
            if len(torch.unique(flat)) == len(flat) and not bool(self.table.contains(flat).any()):
                return placed
        raise TinyEngramError(f"no free rows for {groups[0].text!r} after {MAX_COUNTER} tries; expected a free address; use a larger vocab")

    def add(self, name: str, groups: tuple[RowGroup, ...], payload: torch.Tensor, scale: torch.Tensor) -> int:
        """Store a concept's rows; returns the counter taken (0 without a collision).

        payload float8_e4m3fn `[positions, columns, head_dim]`, scale uint8 `[positions, columns, head_dim / 32]`.
        """
        placed = self.find_place(groups)
        expected = [*placed.row_ids.shape, self.head_dim]
        if list(payload.shape) != expected:
            raise TinyEngramError(f"rows of {name!r} have shape {list(payload.shape)}, expected {expected}; was it made for another base?")
        self.table.add(placed.row_ids.reshape(-1), payload.reshape(-1, self.head_dim), scale.reshape(-1, scale.shape[-1]))
        self._placed[name] = placed
        return placed.counter

    def remove(self, name: str) -> None:
        """Drop a concept's rows."""
        self.table.remove(self._placed.pop(name).row_ids.reshape(-1))

    def counter(self, name: str) -> int:
        return self._placed[name].counter

    def row_ids(self, name: str) -> torch.Tensor:
        """int64 `[positions, columns]`: the concept's addresses as of now."""
        return self._placed[name].row_ids

    def hashed(self, asked: Asked) -> torch.Tensor:
        """Row ids int64 `[N, columns]` of the N positions of all spans, hashed from their canonical ids."""
        salts = np.zeros(asked.canonical.shape, dtype=np.int64)
        for salt, (name, offset, ids) in zip(salts, asked.spans, strict=True):
            salt[: len(ids)] = self._placed[name].salts.numpy()[offset : offset + len(ids)]
        rows = self.hasher.rows(asked.canonical, salt=torch.from_numpy(salts)).flatten(0, 1).index_select(0, asked.inside)
        return rows.add_(self.first_row) if self.first_row else rows


def lookup(parts: Sequence[tuple[RowBank, Asked]], *, bounds: Bounds = "fatal") -> torch.Tensor:
    """Rows of spans at banks that share a table, in one pass: float32 `[N, columns, head_dim]`, part by part and span by span."""
    ids = [bank.hashed(asked) for bank, asked in parts]
    return parts[0][0].table.lookup(torch.cat(ids) if len(ids) > 1 else ids[0], bounds=bounds)
