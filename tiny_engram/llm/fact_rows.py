"""The rows of all facts: addresses by the salted hash of concepts, values in a virtual table. Imports torch, the core and addressing.

A fact has one set of rows at each layer, whatever spelling calls it. Their address is the hash of its trigger's canonical ids at the
last of them, begun from a salt of the whole trigger, its owner and a counter. Should an address be taken, the counter is raised: rows
move, values do not, and nobody else's change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiny_engram.addressing import MAX_COUNTER, salt_of
from tiny_engram.errors import TinyEngramError
from tiny_engram.hashing import NgramHasher
from tiny_engram.table import EngramTable

from .fact_config import FactsConfig

__all__ = ["Address", "FactRows"]


@dataclass(frozen=True, slots=True)
class Address:
    """What the hash of a fact's rows begins from: canonical ids of its trigger, and its owner's number."""

    canonical: tuple[int, ...]
    owner: int


class FactRows:
    """Rows by slot, a small number that a fact keeps while it is there.

    Attributes:
        table: the rows, at their addresses.
        row_ids: int64 `[slots, layers, columns]`, on the CPU; -1 in slots that are free.
    """

    def __init__(self, config: FactsConfig) -> None:
        """config: completed."""
        assert config.layers is not None
        hash_config = config.hash_config
        self._hashers = [NgramHasher(hash_config, k) for k in range(len(config.layers))]
        totals = [hasher.rows_total for hasher in self._hashers]
        self._first = [sum(totals[:k]) for k in range(len(totals))]
        self.table = EngramTable.virtual(config.head_dim)
        self.row_ids = torch.empty((0, len(config.layers), hash_config.columns), dtype=torch.int64)
        self._free: list[int] = []
        self._packed: dict[torch.device, EngramTable] = {}

    def _hashed(self, addresses: Sequence[Address], counters: Sequence[int]) -> torch.Tensor:
        """int64 `[facts, layers, columns]`."""
        size = self._hashers[0].config.max_ngram
        tails = torch.zeros((len(addresses), size), dtype=torch.int64)
        outside = torch.ones((len(addresses), size), dtype=torch.bool)
        salts = torch.zeros((len(addresses), size), dtype=torch.int64)
        for k, (address, counter) in enumerate(zip(addresses, counters, strict=True)):
            tail = address.canonical[-size:]
            tails[k, size - len(tail) :] = torch.tensor(tail)
            outside[k, size - len(tail) :] = False
            salts[k, -1] = salt_of((address.owner, *address.canonical), len(address.canonical) - 1, counter)
        parts = [h.rows(tails, blocked=outside, salt=salts)[:, -1] + first for h, first in zip(self._hashers, self._first, strict=True)]
        return torch.stack(parts, dim=1)

    def find(self, addresses: Sequence[Address]) -> tuple[torch.Tensor, int]:
        """Free row ids int64 `[facts, layers, columns]` for new facts, and how many of these had to move; nothing is added.

        Raises:
            TinyEngramError: no free address.
        """
        counters = [0] * len(addresses)
        for _ in range(MAX_COUNTER):
            ids = self._hashed(addresses, counters)
            flat = ids.flatten(1)
            order = flat.reshape(-1).argsort(stable=True)
            same = flat.reshape(-1)[order]
            again = torch.zeros(len(same), dtype=torch.bool)
            again[order[1:][same[1:] == same[:-1]]] = True  # every one but the first that wants it
            taken = (again.view(flat.shape) | self.table.contains(flat)).any(dim=1)
            if not bool(taken.any()):
                return ids, sum(counter > 0 for counter in counters)
            counters = [counter + int(moved) for counter, moved in zip(counters, taken.tolist(), strict=True)]
        raise TinyEngramError(f"no free rows after {MAX_COUNTER} tries; expected a free address; use a larger vocab")

    def add(self, addresses: Sequence[Address], payload: torch.Tensor, scale: torch.Tensor) -> list[int]:
        """Store rows: payload float8_e4m3fn `[facts, layers, columns, head_dim]`, scale uint8 `[..., head_dim / 32]`; returns their slots.

        Nothing is changed if it raises.
        """
        ids, _ = self.find(addresses)
        if tuple(payload.shape[:-1]) != tuple(ids.shape):
            raise TinyEngramError(
                f"rows have shape {list(payload.shape)}, expected {list(ids.shape)} of them; were they made for another model?"
            )
        self.table.add(ids, payload, scale)
        lacking = len(ids) - len(self._free)
        if lacking > 0:
            count = len(self.row_ids)
            more = max(lacking, count // 2)
            self.row_ids = torch.cat((self.row_ids, self.row_ids.new_full((more, *self.row_ids.shape[1:]), -1)))
            self._free += range(count, count + more)
        slots, self._free = self._free[: len(ids)], self._free[len(ids) :]
        self.row_ids[slots] = ids
        self._packed = {}
        return slots

    def remove(self, slots: Sequence[int]) -> None:
        """Drop the rows of facts."""
        self.table.remove(self.row_ids[list(slots)])
        self.row_ids[list(slots)] = -1
        self._free = sorted({*self._free, *slots})
        self._packed = {}

    def lookup(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 `[layers, N, columns, head_dim]` of int64 `[N]` slots on the CPU; those rows alone are read."""
        return self.table.lookup(self.row_ids[slots].transpose(0, 1).contiguous())

    def stored(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload and scale of facts, as `add` takes them."""
        return self.table.stored(self.row_ids[list(slots)])

    @torch.inference_mode(False)
    def pack(self, device: torch.device) -> EngramTable:
        """All rows on a device, that of fact s, layer k and column c at ((s * layers) + k) * columns + c, for a compiled graph."""
        if device not in self._packed:
            held = (self.row_ids[:, 0, 0] != -1).nonzero()[:, 0].tolist()
            payload = torch.zeros((*self.row_ids.shape, self.table.head_dim), dtype=torch.uint8)
            scale = torch.full((*self.row_ids.shape, self.table.head_dim // 32), 127, dtype=torch.uint8)
            if held:
                values, scales = self.stored(held)
                payload[held], scale[held] = values.view(torch.uint8), scales
            payload = payload.flatten(0, 2).view(torch.float8_e4m3fn)
            self._packed[device] = EngramTable.dense(payload.to(device), scale.flatten(0, 2).to(device))
        return self._packed[device]

    def packed(self, device: torch.device) -> EngramTable | None:
        """What `pack` made since the last change."""
        return self._packed.get(device)
