"""CollisionFreeTier: whole n-grams that are known have rows of their own, in the place of hashed ones.

An option, not a recommendation: Engram-Nine, which published this design, found no gain by it (loss 4.4799 +- .0123 against
4.4809 +- .0082 with hashed rows alone, at 11 to 12 % less throughput). Imports torch, kernels, tiny_engram.errors and its neighbours.
"""

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.hot_gather import mix
from tiny_engram.kernels.hot_gather.reference import STEP
from tiny_engram.kernels.row_gather import row_gather

from .perfect_hash import PerfectHash
from .storage import check_rows

__all__ = ["CollisionFreeTier"]

_POSITIVE = (1 << 63) - 1


class CollisionFreeTier:
    """Private rows of n-grams, found by a perfect hash of their fingerprints and a comparison of all their ids.

    Attributes:
        keys: int64 ``[slots, n]``, the n-gram of each slot, oldest id first; -1 where a slot has none.
        payload, scale: its rows, float8_e4m3fn ``[slots, columns, D]`` and uint8 ``[slots, columns, D / 32]``.
    """

    def __init__(
        self, keys: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor, *, pad_id: int, device: torch.device | str | None = None
    ) -> None:
        """Index the n-grams.

        Args:
            keys: int64 ``[K, n]`` canonical ids, oldest first; all n-grams different, n at least 2.
            payload: float8_e4m3fn ``[K, columns, D]``: rows for the last ``columns`` columns of a position, which are
                those of the largest n-grams: ``heads`` of them for the n-gram's own rows, all for everything that is read there.
            scale: uint8 ``[K, columns, D / 32]``.
            pad_id: the canonical id that stands for blocked look-backs; no key has it.
            device: where lookups take place; None is the payload's.

        Raises:
            TableError: n-grams are given twice, have the pad id or a negative one, or do not fit the rows.
        """
        if keys.dtype != torch.int64 or keys.ndim != 2 or keys.shape[1] < 2 or payload.ndim != 3 or not payload.shape[1]:
            raise TableError(
                f"keys are {keys.dtype} {list(keys.shape)}, payload {list(payload.shape)}: expected torch.int64 [K, n], n of 2 or more, "
                "and [K, columns, D], columns of 1 or more"
            )
        check_rows(payload, scale, lead=(keys.shape[0], payload.shape[1]))
        if keys.numel() and (int(keys.min()) < 0 or bool((keys == pad_id).any())):
            raise TableError(f"a key has a negative id or the pad id {pad_id}: expected whole n-grams; leave out those at a text's start")
        keys = keys.cpu()
        distinct = torch.unique(keys, dim=0).shape[0] if keys.numel() else 0
        if distinct != keys.shape[0]:
            raise TableError(f"{keys.shape[0] - distinct} of {keys.shape[0]} n-grams are given twice: expected different ones")
        self.pad_id, self.order = pad_id, keys.shape[1]
        self.columns, self.head_dim = payload.shape[1:]
        # Two n-grams with one fingerprint could not both be found; another seed tells them apart.
        self._seed = 0
        while (prints := self._fingerprints(keys)).unique().numel() != keys.shape[0]:
            self._seed += 1
        device = payload.device if device is None else device
        index = PerfectHash.build(prints)
        slots = index.slots(prints)
        self._index = index.to(device)
        count = index.keys.numel()
        with torch.inference_mode(False):
            self.keys = torch.full((count, self.order), -1, dtype=torch.int64).index_copy_(0, slots, keys).to(device)
            # As bytes: not every operation has a float8 kernel.
            values = torch.zeros((count, *payload.shape[1:]), dtype=torch.uint8).index_copy_(0, slots, payload.view(torch.uint8).cpu())
            self.payload = values.view(torch.float8_e4m3fn).to(device)
            self.scale = torch.zeros((count, *scale.shape[1:]), dtype=torch.uint8).index_copy_(0, slots, scale.cpu()).to(device)

    def find(
        self,
        canonical: torch.Tensor,
        *,
        blocked: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        history_blocked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slot of the n-gram that ends at each position, -1 where it is not known. Never synchronises.

        A position that is blocked, or whose look-backs are blocked, pad or before the text, never has one.

        Args:
            canonical: int64 ``[B, T]`` canonical ids; blocked, history, history_blocked as in ``NgramHasher.rows``.

        Returns:
            int64 ``[B, T]``.

        Raises:
            TableError: ids of another type or shape.
        """
        if canonical.dtype != torch.int64 or canonical.ndim != 2:
            raise TableError(f"canonical ids are {canonical.dtype} {list(canonical.shape)}: expected torch.int64 [B, T]")
        past = (canonical.shape[0], self.order - 1)
        if history is not None and (history.dtype != torch.int64 or tuple(history.shape) not in (past, past[1:], (1, past[1]))):
            raise TableError(
                f"history is {history.dtype} {list(history.shape)}: expected torch.int64 {list(past)}, one id less than the n-grams have"
            )
        for name, mask, like in (("blocked", blocked, canonical), ("history_blocked", history_blocked, history)):
            if mask is not None and (like is None or mask.dtype != torch.bool or mask.shape != like.shape):
                raise TableError(f"{name} is {mask.dtype} {list(mask.shape)}: expected torch.bool, of the shape of its ids")
        before = canonical.new_full(past, self.pad_id) if history is None else history.expand(past)
        if history is not None and history_blocked is not None:
            before = before.masked_fill(history_blocked.expand(past), self.pad_id)
        now = canonical if blocked is None else canonical.masked_fill(blocked, self.pad_id)
        # No key has the pad id, so that a gap anywhere in the window keeps it from being found.
        ids, length = torch.cat((before, now), dim=1), canonical.shape[1]
        windows = torch.stack([ids[:, place : place + length] for place in range(self.order)], dim=-1)
        slots = self._index.slots(self._fingerprints(windows))
        return torch.where((self.keys[slots.clamp(min=0)] == windows).all(dim=-1) & (slots >= 0), slots, -1)

    @torch.no_grad()
    def lookup(
        self,
        canonical: torch.Tensor,
        hashed_rows: torch.Tensor,
        *,
        blocked: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        history_blocked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put private rows in the place of hashed ones, at positions whose whole n-gram is known.

        Args:
            canonical: int64 ``[B, T]``, and the rest as in :meth:`find`.
            hashed_rows: ``[B, T, columns, D]`` as the hashed table gave them, with at least the tier's columns; not changed.

        Returns:
            ``[B, T, columns, D]`` in the same dtype; the tier's are the last columns.

        Raises:
            TableError: rows that do not belong to the ids or to the tier.
        """
        if hashed_rows.shape[:2] != canonical.shape or hashed_rows.ndim != 4 or hashed_rows.shape[3] != self.head_dim:
            raise TableError(f"rows are {list(hashed_rows.shape)}: expected {[*canonical.shape, 'columns', self.head_dim]}")
        kept = hashed_rows.shape[2] - self.columns
        if kept < 0:
            raise TableError(f"rows have {hashed_rows.shape[2]} columns: expected the tier's {self.columns} or more")
        slots = self.find(canonical, blocked=blocked, history=history, history_blocked=history_blocked)
        width = self.columns * self.head_dim
        own = row_gather(self.payload.view(-1, width), self.scale.view(-1, width // 32), slots, bounds="ignore", dtype=hashed_rows.dtype)
        replaced = torch.where((slots >= 0)[..., None, None], own.view(*slots.shape, self.columns, self.head_dim), hashed_rows[:, :, kept:])
        return torch.cat((hashed_rows[:, :, :kept], replaced), dim=2)

    def _fingerprints(self, ngrams: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]``, 0 or more, of n-grams int64 ``[..., n]``."""
        running = torch.full_like(ngrams[..., 0], self._seed)
        for place in range(self.order):
            running = mix((running ^ ngrams[..., place]) + STEP)
        return running & _POSITIVE
