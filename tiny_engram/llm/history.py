"""What the cache of a decoder holds, as token ids: n-grams reach back over what earlier calls brought.

Imports torch, transformers (its Cache alone) and tiny_engram.errors. An id is kept for every key that a cache holds, 8 bytes beside
its kilobytes, so that a cache that is cropped to any length still knows the ids before its end. Whoever reorders, repeats, selects,
copies or resets the cache does so to the ids too, since they are the cache's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError

__all__ = ["BLOCKED", "TokenHistory", "history_of", "track"]

BLOCKED = -1  # in place of an id that no n-gram may read: padding, an image's token


class TokenHistory:
    """Raw ids of the tokens in one cache, and whose facts each of its rows may read.

    Attributes:
        ids: int64 ``[B, capacity]``, `BLOCKED` for padding; valid up to the cache's own length.
        owners: int64 ``[B]``, numbers of users, or None for nobody's; the first call says it, and `begun` that there was one.
        readers: `cache_key` of the readers that all tokens in the cache were computed with, of those that have one.
        states: by a reader's own key, ``[B, capacity, ...]``, which a convolution reads back: as many bytes a token as a hidden state has.
    """

    def __init__(self, capacity: int | None = None) -> None:
        """capacity: of a static cache, whose ids stay at one address; None grows."""
        self.capacity = capacity
        self.ids: torch.Tensor | None = None
        self.owners: torch.Tensor | None = None
        self.begun = False
        self.readers: tuple[str, ...] = ()
        self.states: dict[str, torch.Tensor] = {}
        self._seen = 0

    def extend(self, block: torch.Tensor, past: "int | torch.Tensor") -> None:
        """Note the ids of a call, behind the first `past` ones; what stood behind these (rejected drafts, say) is gone.

        Args:
            block: int64 ``[B, T]``.
            past: keys in the cache before the call; a tensor where it is static.

        Raises:
            TinyEngramError: the cache has keys of calls without its ids, or another batch.
        """
        if self.ids is not None and self.ids.shape[0] != block.shape[0]:
            raise TinyEngramError(
                f"this call has {block.shape[0]} rows, the cache's ids {self.ids.shape[0]}: expected as many; select or repeat rows by the "
                "cache's own batch_select_indices, batch_repeat_interleave or reorder_cache"
            )
        if isinstance(past, int):  # the length of a static cache is known to the device alone
            if past > self._seen:
                raise TinyEngramError(
                    f"the cache holds {past} tokens, and the ids of {self._seen} of them are known: expected all; fill it by calls of the "
                    "model with Engram attached"
                )
            self._seen = past + block.shape[1]
        self.ids = self._room(self.ids, block, past, BLOCKED)
        self.ids.index_copy_(1, _places(past, 0, block.shape[1], block.device), block)

    def read_by(self, readers: tuple[str, ...], past: "int | torch.Tensor") -> None:
        """Note which readers a call has; the first tokens of a cache may have any.

        Raises:
            TinyEngramError: what the cache holds was computed with others, so that no pass over the whole text gives what would come now.
        """
        if isinstance(past, int) and past == 0:
            self.readers = readers
        elif self.readers != readers:
            before = "without Engram layers that read now" if set(readers) - set(self.readers) else "with Engram layers that do not now"
            raise TinyEngramError(
                f"the tokens in the cache were computed {before} (`enabled` was switched, or layers attached or detached): expected the "
                "same ones for a whole text; begin with an empty cache, or switch back"
            )

    def before(self, past: "int | torch.Tensor", size: int) -> torch.Tensor:
        """The last `size` ids in front of place `past`, oldest first: int64 ``[B, size]``, `BLOCKED` where there is none."""
        assert self.ids is not None
        return _in_front(self.ids, past, size, BLOCKED)

    def extend_states(self, key: str, block: torch.Tensor, past: "int | torch.Tensor", size: int) -> torch.Tensor:
        """Note a reader's states ``[B, T, ...]`` of a call, without their gradient.

        Returns:
            those of the `size` places in front ``[B, size, ...]``, zeros where there is none.
        """
        held = self.states[key] = self._room(self.states.get(key), block, past, 0)
        before = _in_front(held, past, size, 0)
        held.index_copy_(1, _places(past, 0, block.shape[1], block.device), block.detach())
        return before

    def reset(self) -> None:
        """Nothing came before. The memory of a static cache stays."""
        self._seen, self.owners, self.begun = 0, None, False
        if self.capacity is None:
            self.ids, self.states = None, {}

    def change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `change` along the batch."""
        # Normal tensors, here and below: those made in inference mode could not be written by a later call outside it.
        with torch.inference_mode(False), torch.no_grad():
            if self.ids is not None:
                self.ids = change(self.ids)
            if self.owners is not None:
                self.owners = change(self.owners)
            self.states = {key: change(values) for key, values in self.states.items()}

    def _room(self, held: torch.Tensor | None, block: torch.Tensor, past: "int | torch.Tensor", empty: int) -> torch.Tensor:
        """`held`, made or grown so that the block has room behind `past`."""
        if held is None:
            with torch.inference_mode(False):
                shape = block.shape[0], self.capacity or 64, *block.shape[2:]
                held = torch.full(shape, empty, dtype=block.dtype, device=block.device)
            if self.capacity is not None and not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(held)
        if self.capacity is None:
            assert isinstance(past, int)
            lacking = past + block.shape[1] - held.shape[1]
            if lacking > 0:
                with torch.inference_mode(False), torch.no_grad():
                    more = held.new_full((held.shape[0], max(lacking, held.shape[1]), *held.shape[2:]), empty)
                    held = torch.cat((held, more), dim=1)
        return held


def _places(past: "int | torch.Tensor", start: int, stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, stop, device=device) + (past.to(device) if isinstance(past, torch.Tensor) else past)


def _in_front(held: torch.Tensor, past: "int | torch.Tensor", size: int, empty: int) -> torch.Tensor:
    """The last `size` columns in front of place `past`, `empty` where there is none."""
    places = _places(past, -size, 0, held.device)
    found = held.index_select(1, places.clamp(min=0))
    return found.masked_fill((places < 0).view(1, -1, *[1] * (held.ndim - 2)), empty)


class _Tracked:
    """Mixed into the class of a cache that has a history, in front of it."""

    engram_history: TokenHistory

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.change_rows(lambda values: values.index_select(0, beam_idx.to(values.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.change_rows(lambda values: values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.change_rows(lambda values: values[torch.as_tensor(indices, device=values.device)])

    def reset(self) -> None:
        super().reset()  # pyright: ignore[reportAttributeAccessIssue]
        self.engram_history.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made here and has no import path; a copy or a pickle of the cache makes it again.
        return _rebuilt, (type(self).__mro__[2], self.__dict__.copy())


def _rebuilt(kind: type, state: dict[str, Any]) -> Any:
    cache: Any = object.__new__(kind)
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
def _track(cache: Any) -> None:
    from transformers import Cache

    if not issubclass(type(cache), Cache):
        raise TinyEngramError(
            f"the cache is {type(cache).__name__}: expected a Cache of transformers, whose rows are the texts of a batch, as generate makes"
        )
    past = int(cache.get_seq_length())
    if past:
        raise TinyEngramError(
            f"the cache holds {past} tokens from calls without Engram: expected an empty one, or one that was filled with Engram attached; "
            "n-grams would not know what came before"
        )
    # One of sliding windows alone says how long the window is, not how long the text may get.
    fixed = bool(cache.layers) and cache.is_compileable and not all(cache.is_sliding)
    cache.engram_history = TokenHistory(cache.get_max_length() if fixed else None)
    cache.__class__ = _tracked(type(cache))


def track(cache: Any) -> TokenHistory:
    """The ids of a cache, which has them from now on.

    Raises:
        TinyEngramError: the cache holds keys whose ids nobody noted, or is of another kind (paged, say).
    """
    if history_of(cache) is None:
        _track(cache)
    return cache.engram_history
