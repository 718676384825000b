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
from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.row_gather import Bounds
from tiny_engram.table import EngramTable
from tiny_engram.triggers import RowGroup

__all__ = ["RowBank", "salt_of"]

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


class RowBank:
    """The rows of all concepts of one shape at one mount: hasher + table + where each concept stands in it."""

    def __init__(self, config: ConceptConfig, *, width: int, mount_index: int, pad_id: int, compressed_vocab: int) -> None:
        self.width = width
        self.head_dim = config.head_dim
        self.basis_seed = config.basis_seed
        self.shape = self.shape_of(config, width)
        hash_config = config.hash_config(width=width, compressed_vocab=compressed_vocab, pad_id=pad_id, mounts=mount_index + 1)
        self.hasher = NgramHasher(hash_config, mount_index)
        self.table = EngramTable.virtual(config.head_dim)
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
        return _Placed(torch.tensor([s for part in salts for s in part]), torch.cat(rows), counter)

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

    def lookup(self, spans: Sequence[tuple[str, int, Sequence[int]]], *, bounds: Bounds = "fatal") -> torch.Tensor:
        """Rows of spans of any concepts in one pass: (name, offset among the concept's positions, the span's canonical ids) each.

        Returns float32 `[N, columns, head_dim]` for the N positions of all spans, span by span.
        """
        longest = max(len(ids) for _, _, ids in spans)
        # Padding stands on the right: a suffix n-gram looks back, so no position inside a span sees it.
        canonical = torch.tensor([[*ids, *[0] * (longest - len(ids))] for _, _, ids in spans])
        salts = np.zeros(canonical.shape, dtype=np.int64)
        for salt, (name, offset, ids) in zip(salts, spans, strict=True):
            salt[: len(ids)] = self._placed[name].salts.numpy()[offset : offset + len(ids)]
        inside = torch.tensor([k * longest + p for k, (_, _, ids) in enumerate(spans) for p in range(len(ids))])
        return self.table.lookup(
            self.hasher.rows(canonical, salt=torch.from_numpy(salts)).flatten(0, 1).index_select(0, inside), bounds=bounds
        )
