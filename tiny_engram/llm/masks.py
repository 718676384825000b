"""Which tokens of a call are padding, read from whatever attention mask a decoder was given. Imports torch and tiny_engram.errors."""

from typing import Any

import torch

from tiny_engram.errors import TinyEngramError

__all__ = ["padding"]


def padding(mask: Any, ids: torch.Tensor, past: "int | torch.Tensor", keys: int) -> torch.Tensor | None:
    """The tokens of a call that the attention mask hides: bool ``[B, T]``, or None where there is no mask.

    A two-dimensional mask says so itself, for the text from its beginning; as in transformers, what it is too short for is hidden. In
    a mask of four dimensions a token that does not attend to itself is padding: so says the diagonal, whatever window a layer has.

    Args:
        mask: ``[B, keys]`` of ones and zeros, ``[B or 1, heads, T or 1, keys]`` (bool, or added to scores), or a dictionary of those by
            the type of layer.
        ids: int64 ``[B, T]``.
        past: keys in the cache before the call; a tensor where it is static.
        keys: the most that a cache of this length can hold after the call.

    Raises:
        TinyEngramError: another kind of mask.
    """
    if isinstance(mask, dict):
        # A full one has a column for every key; a sliding one may have lost the first.
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    batch, length = ids.shape
    fits = isinstance(mask, torch.Tensor) and mask.ndim in (2, 4) and mask.shape[0] in (1, batch)
    if not fits or (mask.ndim == 4 and mask.shape[2] not in (1, length)):
        shown = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TinyEngramError(
            f"attention mask is {shown}, for ids {[batch, length]}: expected [B, keys] or [B, heads, T, keys]; pass the tokenizer's own"
        )
    if isinstance(past, torch.Tensor):
        past = past.to(mask.device)
    place = torch.arange(length, device=mask.device) + past
    if mask.ndim == 2:
        if mask.shape[1] < keys:
            mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
        seen = mask.index_select(1, place) != 0
    else:
        # A window's columns end with the newest token, whatever they begin with.
        gone = max(keys - mask.shape[3], 0) if isinstance(past, int) else 0
        places = (place - gone)[None, :, None].expand(mask.shape[0], -1, 1)
        seen = mask[:, 0].expand(-1, length, -1).gather(2, places)[..., 0]
        seen = seen if seen.dtype == torch.bool else seen == 0
    return ~seen.to(ids.device).expand(ids.shape)
