"""What the cache of a decoder holds, as token ids: n-grams reach back over what earlier calls brought.

Imports torch, transformers (its Cache alone) and tiny_engram.errors. An id is kept for every key that a cache holds, 8 bytes beside
its kilobytes, so that a cache that is cropped to any length still knows the ids before its end. Whoever reorders, repeats, selects,
copies or resets the cache does so to the ids too, since they are the cache's own.
"""

import functools
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError

__all__ = ["BLOCKED", "TokenHistory", "history_of", "track"]

BLOCKED = -1  # in place of an id that no n-gram may read: padding, an image's token


class TokenHistory:
    """Raw ids of the tokens in one cache, and whose facts each of its rows may read.

    Attributes:
        ids: int64 ``[B, capacity]``, `BLOCKED` where nothing may be read; valid up to the cache's own length.
        owners: int64 ``[B]``, numbers of users, or None for nobody's.
        states: a layer's own ``[B, capacity, ...]``, which a convolution reads back: as many bytes a token as a hidden state has.
    """

    def __init__(self, capacity: int | None = None) -> None:
        """capacity: of a static cache, whose ids stay at one address; None grows."""
        self.capacity = capacity
        self.ids: torch.Tensor | None = None
        self.owners: torch.Tensor | None = None
        self.states: dict[int, torch.Tensor] = {}
        self._seen = 0

    def allocate(self, batch: int, device: torch.device) -> None:
        """Take the memory that a static cache's ids have, before a call is compiled; the first `extend` does it otherwise."""
        with torch.inference_mode(False):
            self.ids = torch.full((batch, self.capacity or 64), BLOCKED, dtype=torch.int64, device=device)
        if self.capacity is not None:
            torch._dynamo.mark_static_address(self.ids)

    def extend(self, block: torch.Tensor, past: "int | torch.Tensor") -> None:
        """Note the ids of a call, behind the first `past` ones; what stood behind these (rejected drafts, say) is gone.

        Args:
            block: int64 ``[B, T]``.
            past: keys in the cache before the call; a tensor where it is static.

        Raises:
            TinyEngramError: the cache has keys of calls without its ids, or another batch.
        """
        if self.ids is None:
            self.allocate(block.shape[0], block.device)
        assert self.ids is not None
        if self.ids.shape[0] != block.shape[0]:
            raise TinyEngramError(
                f"this call has {block.shape[0]} rows, the cache's ids {self.ids.shape[0]}: expected as many; select or repeat rows by the "
                "cache's own batch_select_indices, batch_repeat_interleave or reorder_cache"
            )
        if self.capacity is None:
            assert isinstance(past, int)
            if past > self._seen:
                raise TinyEngramError(
                    f"the cache holds {past} tokens, and the ids of {self._seen} of them are known: expected all; fill it by calls of the model "
                    "with Engram attached"
                )
            lacking = past + block.shape[1] - self.ids.shape[1]
            if lacking > 0:
                more = self.ids.new_full((self.ids.shape[0], max(lacking, self.ids.shape[1])), BLOCKED)
                self.ids = torch.cat((self.ids, more), dim=1)
            self._seen = past + block.shape[1]
        place = torch.arange(block.shape[1], device=block.device) + past
        self.ids.index_copy_(1, place, block)

    def before(self, past: "int | torch.Tensor", size: int) -> torch.Tensor:
        """The last `size` ids in front of place `past`, oldest first: int64 ``[B, size]``, `BLOCKED` where there is none."""
        assert self.ids is not None
        place = torch.arange(-size, 0, device=self.ids.device) + past
        found = self.ids.index_select(1, place.clamp(min=0))
        return torch.where(place < 0, BLOCKED, found)

    def extend_states(self, layer: int, block: torch.Tensor, past: "int | torch.Tensor", size: int) -> torch.Tensor:
        """Note a layer's states ``[B, T, ...]`` of a call; those of the `size` places in front ``[B, size, ...]``, zeros where there is none."""
        held = self.states.get(layer)
        if held is None:
            with torch.inference_mode(False):
                held = torch.zeros((block.shape[0], self.capacity or 64, *block.shape[2:]), dtype=block.dtype, device=block.device)
            if self.capacity is not None:
                torch._dynamo.mark_static_address(held)
        if self.capacity is None:
            lacking = past + block.shape[1] - held.shape[1]
            if lacking > 0:
                held = torch.cat((held, held.new_zeros((held.shape[0], max(int(lacking), held.shape[1]), *held.shape[2:]))), dim=1)
        self.states[layer] = held
        place = torch.arange(-size, 0, device=block.device) + past
        before = held.index_select(1, place.clamp(min=0))
        before = torch.where((place < 0).view(1, -1, *[1] * (block.ndim - 2)), torch.zeros_like(before), before)
        held.index_copy_(1, torch.arange(block.shape[1], device=block.device) + past, block.detach())
        return before

    def reset(self) -> None:
        """Nothing came before; the memory stays."""
        self._seen, self.owners = 0, None

    def rows(self, change: Any) -> None:
        """Apply `change` (a function of a tensor) along the batch."""
        if self.ids is not None:
            self.ids = change(self.ids)
        if self.owners is not None:
            self.owners = change(self.owners)
        self.states = {layer: change(values) for layer, values in self.states.items()}


class _Tracked:
    """Mixed into the class of a cache that has a history, in front of it."""

    engram_history: TokenHistory

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.rows(lambda values: values.index_select(0, beam_idx.to(values.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.rows(lambda values: values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.rows(lambda values: values[indices.to(values.device)])

    def reset(self) -> None:
        super().reset()  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made here and has no import path; a copy or a pickle of the cache makes it again.
        return _rebuilt, (type(self).__mro__[2], self.__dict__.copy())


def _rebuilt(kind: type, state: dict[str, Any]) -> Any:
    cache = kind.__new__(kind)
    cache.__dict__.update(state)
    cache.__class__ = _tracked(kind)
    return cache


@functools.cache
def _tracked(kind: type) -> type:
    # By its own name: transformers and its users ask for the names of caches in a place or two.
    return type(kind.__name__, (_Tracked, kind), {"__module__": kind.__module__})


def history_of(cache: Any) -> TokenHistory | None:
    """The ids of a cache that was seen before."""
    return cache.engram_history if isinstance(cache, _Tracked) else None


@torch.compiler.disable
def track(cache: Any) -> TokenHistory:
    """The ids of a cache, which has them from now on.

    Raises:
        TinyEngramError: the cache holds keys whose ids nobody noted.
    """
    found = history_of(cache)
    if found is not None:
        return found
    past = int(cache.get_seq_length())
    if past:
        raise TinyEngramError(
            f"the cache holds {past} tokens from calls without Engram: expected an empty one, or one that was filled with Engram attached; "
            "n-grams would not know what came before"
        )
    cache.engram_history = TokenHistory(cache.get_max_length() if cache.layers and cache.is_compileable else None)
    cache.__class__ = _tracked(type(cache))
    return cache.engram_history
