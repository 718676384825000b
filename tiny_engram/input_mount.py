"""Running a text encoder with its token embeddings changed on the way in: what the `input` mount does, served or taught.

The change is a function of the embeddings, and what it does belongs to one call in one thread: hooks that stay on the module cost
nothing in all others. Imports torch and errors only.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiny_engram.errors import TinyEngramError

__all__ = ["encode_with_input", "moved_embeddings", "token_embeddings"]


class _Call(threading.local):
    """The change that this thread's call of an encoder asks for, until the embeddings took it."""

    def __init__(self) -> None:
        self.moved: Callable[[torch.Tensor], torch.Tensor] | None = None


_call = _Call()


def token_embeddings(encoder: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a transformers encoder that may look its tokens up: several where one weight is shared (T5), one of which runs.

    Raises:
        TinyEngramError: the encoder names no embeddings.
    """
    try:
        named: Any = encoder.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        named = None
    if not isinstance(named, nn.Module):
        raise TinyEngramError(
            f"{type(encoder).__name__} names no token embeddings, so concepts with rows at the mount 'input' cannot be added; "
            "use mounts without it, such as 'span'"
        )
    # by shape: an offloaded weight is a tensor of its own in each of them
    shape = named.weight.shape
    same = (m for m in encoder.modules() if type(m) is type(named) and m.weight.shape == shape)
    return tuple(dict.fromkeys((named, *same)))


def moved_embeddings(output: torch.Tensor) -> torch.Tensor | None:
    """For a hook on `token_embeddings`: their output as this thread's `encode_with_input` wants it, or None to leave it alone."""
    moved, _call.moved = _call.moved, None
    return None if moved is None else moved(output)


def _hook(_module: nn.Module, _args: Any, output: Any) -> torch.Tensor | None:
    return moved_embeddings(output)


def encode_with_input(
    encoder: nn.Module,
    ids: torch.Tensor,
    moved: Callable[[torch.Tensor], torch.Tensor],
    *,
    hooked: bool = False,
    **options: Any,
) -> Any:
    """`encoder(ids, **options)` with `moved` applied to its token embeddings; differentiable.

    Args:
        encoder: a transformers text encoder (CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel, ...).
        ids: int64 `[batch, time]`.
        moved: embeddings `[batch, time, width]`, without positions, to what takes their place.
        hooked: hooks that call `moved_embeddings` are on `token_embeddings(encoder)` already; otherwise they are there for this call.

    Returns:
        What the encoder returns.

    Raises:
        TinyEngramError: the encoder has no token embeddings, or did not run them.
    """
    handles = []
    before = _call.moved
    try:
        if not hooked:
            for module in token_embeddings(encoder):
                handles.append(module.register_forward_hook(_hook))
        _call.moved = moved
        result = encoder(ids, **options)
        if _call.moved is not None:
            raise TinyEngramError(
                f"{type(encoder).__name__} ran without looking its tokens up where it says that it does, so what concepts add at the "
                "mount 'input' is not in; take out what replaces its embeddings"
            )
        return result
    finally:
        _call.moved = before
        for handle in handles:
            handle.remove()
