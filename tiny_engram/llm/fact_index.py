"""Where the triggers of facts end in a batch of token ids: one vectorised search over all of them, on the ids' device.

Imports torch, numpy, boundaries, hashing (its multipliers) and errors. A decoder meets tokens one by one, so a trigger is known when
its last token is there, and no earlier: that is the one place where it fires, and a full pass finds the same places as decoding does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiny_engram.boundaries import DIGIT, LETTER, UNDERSCORE, EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.hashing import layer_multipliers

__all__ = ["FactIndex", "Key"]

NOWHERE = -1
_NO_TOKEN = -2  # beyond the length of a key; equal to no id, nor to BLOCKED
_SEEDS = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Key:
    """One token sequence that calls a fact: whose it is (0 for everybody's), its raw ids, and the fact's slot."""

    owner: int
    ids: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class _Tables:
    """On one device; K keys in the order of their hashes, L different lengths, longest M.

    hashes int64 `[K]`; ids `[K, M]`, newest first; length, owner, slot int64 `[K]`; starts_inside bool `[K]`: the first token would
    continue a word; ends bool `[vocab]`: is an id the last of any key; word bool `[vocab + 1]`: does an id end in a word's character, the
    last entry for none; multipliers int64 `[M]`; lengths int64 `[L]`, longest first, and salts int64 `[L]`.
    """

    hashes: torch.Tensor
    ids: torch.Tensor
    length: torch.Tensor
    owner: torch.Tensor
    slot: torch.Tensor
    starts_inside: torch.Tensor
    ends: torch.Tensor
    word: torch.Tensor
    multipliers: torch.Tensor
    lengths: torch.Tensor
    salts: torch.Tensor

    def to(self, device: torch.device) -> "_Tables":
        return _Tables(*(getattr(self, name).to(device) for name in self.__slots__))

    def hashed(self, newest: torch.Tensor) -> torch.Tensor:
        """Hash of the last tokens at every length: ids int64 `[N, M]`, newest first -> int64 `[N, L]`."""
        running, found = torch.zeros_like(newest[:, 0]), []
        for step in range(newest.shape[1]):
            running = running ^ (newest[:, step] + 1) * self.multipliers[step]
            found.append(running)
        return torch.stack(found, dim=1).index_select(1, self.lengths - 1) ^ self.salts

    def find(self, windows: torch.Tensor, owners: torch.Tensor | None) -> torch.Tensor:
        """Slot of the fact that fires at the end of each window, int64 `[N]`, NOWHERE where none does.

        Args:
            windows: int64 `[N, M + 1]` raw ids, oldest first, BLOCKED where nothing may be read.
            owners: int64 `[N]`: whose facts are read besides everybody's; None for nobody's.
        """
        newest = windows.flip(1)
        hashes = self.hashed(newest[:, :-1])
        length, owner = self.lengths.expand(hashes.shape), torch.zeros_like(hashes)
        if owners is not None:
            # One's own in front of everybody's, at each length.
            own = owners.unsqueeze(1).expand(hashes.shape)
            hashes = torch.stack((hashes ^ own, hashes), dim=2).flatten(1)
            owner = torch.stack((own, owner), dim=2).flatten(1)
            length = torch.stack((length, length), dim=2).flatten(1)
        place = torch.searchsorted(self.hashes, hashes.contiguous()).clamp(max=len(self.hashes) - 1)
        found = (self.hashes[place] == hashes) & (self.length[place] == length) & (self.owner[place] == owner)
        keys = self.ids[place]
        found = found & ((keys == newest[:, None, :-1]) | (keys == _NO_TOKEN)).all(dim=2)
        left = newest.gather(1, length)
        left = torch.where((left < 0) | (left >= len(self.word) - 1), len(self.word) - 1, left)
        found = found & ~(self.starts_inside[place] & self.word[left])
        best = found.to(torch.uint8).argmax(dim=1, keepdim=True)  # the first, which is the longest
        slot = self.slot[place].gather(1, best)[:, 0]
        return torch.where(found.any(dim=1), slot, NOWHERE)


@torch.compiler.disable
def _copied(tables: dict[torch.device, _Tables], device: torch.device) -> _Tables:
    """A graph that nobody went before is broken here, once after each change of the facts."""
    return tables.setdefault(device, tables[_CPU].to(device))


class FactIndex:
    """All triggers of one tokenizer; the longest that ends at a token wins, and one's own before everybody's of the same length."""

    def __init__(self, edges: EdgeTables) -> None:
        """Raises TinyEngramError for a vocabulary that marks where words end (CLIP's), which no causal LM has."""
        if edges.marks_ends:
            raise TinyEngramError("the tokenizer marks where words end: expected one that marks where they start, as causal LMs have")
        self.edges = edges
        self._word = (edges.last >= LETTER) & (edges.last <= UNDERSCORE) & ~edges.outer
        self._tables: dict[torch.device, _Tables] = {}

    def starts_inside(self, token: int) -> bool:
        """Would this token, behind a letter, digit or underscore, be the rest of a word? As `EdgeTables.between` decides it."""
        first = self.edges.first[token]
        return bool(self.edges.joins_previous[token] and not self.edges.outer[token] and first in (LETTER, DIGIT, UNDERSCORE))

    @property
    def longest(self) -> int:
        """Tokens of the longest key, 0 without any."""
        return self._tables[_CPU].ids.shape[1] if self._tables else 0

    @property
    def reach(self) -> int:
        """Tokens in front of one that decide whether a trigger ends there: all but its last, and its left neighbour."""
        return max(self.longest, 1)

    def rebuild(self, keys: Sequence[Key]) -> None:
        """Take these keys in place of all others; the same sequence of one owner may be given once.

        Raises:
            TinyEngramError: two different keys have one hash under every seed.
        """
        if not keys:
            self._tables = {}
            return
        longest = max(len(key.ids) for key in keys)
        ids = torch.full((len(keys), longest), _NO_TOKEN)
        for row, key in zip(ids.numpy(), keys, strict=True):
            row[: len(key.ids)] = key.ids[::-1]
        length = torch.tensor([len(key.ids) for key in keys])
        owner = torch.tensor([key.owner for key in keys])
        ends = np.zeros(max(len(self._word) - 1, int(ids.max()) + 1), dtype=bool)
        ends[ids[:, 0].numpy()] = True
        lengths = torch.unique(length).flip(0)
        column = (length.unsqueeze(1) == lengths).to(torch.uint8).argmax(dim=1, keepdim=True)
        for seed in range(_SEEDS):
            drawn = layer_multipliers(seed, 0, longest + len(lengths), len(ends))
            tables = _Tables(
                torch.empty(0, dtype=torch.int64),
                ids,
                length,
                owner,
                torch.tensor([key.slot for key in keys]),
                torch.tensor([self.starts_inside(key.ids[0]) for key in keys]),
                torch.from_numpy(ends),
                torch.from_numpy(self._word),
                drawn[:longest],
                lengths,
                drawn[longest:],
            )
            hashes = tables.hashed(torch.where(ids == _NO_TOKEN, 0, ids)).gather(1, column)[:, 0] ^ owner
            if len(torch.unique(hashes)) == len(hashes):
                break
        else:
            raise TinyEngramError("two triggers share a hash under every seed; remove one of the facts that were added last")
        order = hashes.argsort()
        moved = {name: getattr(tables, name)[order] for name in ("ids", "length", "owner", "slot", "starts_inside")}
        kept = {name: getattr(tables, name) for name in ("ends", "word", "multipliers", "lengths", "salts")}
        self._tables = {_CPU: _Tables(hashes=hashes[order], **moved, **kept)}

    def tables(self, device: torch.device) -> _Tables:
        """The tables on a device, copied when it first asks."""
        return self._tables[device] if device in self._tables else _copied(self._tables, device)  # pyright: ignore[reportCallIssue]

    def _windows(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """int64 `[B, T, M + 1]`: each token with those in front of it, oldest first."""
        return torch.cat((before[:, before.shape[1] - self.longest :], ids), dim=1).unfold(1, self.longest + 1, 1)

    def everywhere(self, ids: torch.Tensor, before: torch.Tensor, owners: torch.Tensor | None) -> torch.Tensor:
        """Slot that fires at each token, int64 `[B, T]`, NOWHERE where none does; no shape depends on what is found.

        Args:
            ids: int64 `[B, T]` raw ids, BLOCKED where nothing may be read.
            before: int64 `[B, reach or more]`, those in front, oldest first.
            owners: int64 `[B]`, or None.
        """
        windows = self._windows(ids, before)
        whose = None if owners is None else owners.unsqueeze(1).expand(ids.shape).reshape(-1)
        return self.tables(ids.device).find(windows.reshape(-1, self.longest + 1), whose).view(ids.shape)

    def places(
        self, ids: torch.Tensor, before: torch.Tensor, owners: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Batch row, time and slot of what fires, int64 `[N]` each on the CPU; None where nothing does. Arguments as in `everywhere`.

        Looks closely at tokens alone that end a trigger, so that text without any costs one look-up; waits for the device.
        """
        tables = self.tables(ids.device)
        known = (ids >= 0) & (ids < len(tables.ends))
        at = (known & tables.ends[torch.where(known, ids, 0)]).nonzero()
        if not len(at):
            return None
        batch, time = at.unbind(1)
        slot = tables.find(self._windows(ids, before)[batch, time], None if owners is None else owners[batch])
        fired = slot != NOWHERE
        if not bool(fired.any()):
            return None
        return batch[fired].cpu(), time[fired].cpu(), slot[fired].cpu()

    def cut_at(self, ids: torch.Tensor) -> list[tuple[int, int]]:
        """(time, slot) of triggers in one text, int64 `[T]`, that a word's letters in front keep from firing; on the CPU, any owner's."""
        found = []
        tables = self._tables.get(_CPU)
        if tables is None:
            return []
        for key, length, slot, inside in zip(
            tables.ids, tables.length.tolist(), tables.slot.tolist(), tables.starts_inside.tolist(), strict=True
        ):
            if not inside or length >= len(ids):
                continue
            windows = ids.unfold(0, length, 1)
            for start in (windows == key[:length].flip(0)).all(dim=1).nonzero()[:, 0].tolist():
                if start and bool(tables.word[int(ids[start - 1])]):
                    found.append((start + length - 1, slot))
        return sorted(found)
