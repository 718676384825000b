"""Mounts inside an encoder: a residual in what one of its layers reads, at the spans, in the encoder's one pass. Whatever attends to a span
behind that layer moves too: later positions in a causal encoder, all of them in others, and a pooled vector.

May import config, hooks and store.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tiny_engram.config import DEEP
from tiny_engram.fired import Fired
from tiny_engram.hooks import CallHook, HookSet, MountError

__all__ = ["DeepMounts", "encoder_layers", "layer_of", "reading_inside"]

SIZES = ("num_hidden_layers", "num_layers")


def layer_of(mount: str) -> int | None:
    """The number of the layer that a mount "deep.{i}" is at; None for another name."""
    kind, _, number = mount.partition(".")
    return int(number) if kind == DEEP and number.isdigit() and str(int(number)) == number else None


def encoder_layers(encoder: nn.Module) -> tuple[nn.Module, ...]:
    """The layers of a text encoder, in running order: the list of modules that is as long as its configuration says; () without one.

    Of an encoder of pictures and text, those of the text.
    """
    config: Any = getattr(encoder, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = next((getattr(text, name) for name in SIZES if isinstance(getattr(text, name, None), int)), None)
    lists = [
        module
        for name, module in encoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not any(part.startswith("vis") for part in name.split("."))
    ]
    return tuple(lists[0]) if len(lists) == 1 else ()


def _states_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a layer reads."""
    return args[0] if args else kwargs.get("hidden_states")


def _with_states(args: tuple[Any, ...], kwargs: dict[str, Any], states: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


@contextmanager
def reading_inside(encoder: nn.Module, moved: Mapping[int, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """For training: inside, these layers of the encoder read what is made of their states `[batch, time, width]`, by number of the layer.

    Raises:
        MountError: one of them was not read.
    """
    layers, seen = encoder_layers(encoder), set[int]()

    def read(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen.add(number)
        return _with_states(args, kwargs, moved[number](_states_of(args, kwargs)))

    handles = [layers[number].register_forward_pre_hook(partial(read, number), with_kwargs=True) for number in moved]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if missed := sorted(moved.keys() - seen):
        raise MountError(f"{type(encoder).__name__} ran without its layer {missed[0]}, so nothing can be taught at '{DEEP}.{missed[0]}'")


class _Call(threading.local):
    """What this thread's call of the encoder adds, by number of the layer, and which layers have added it."""

    def __init__(self) -> None:
        self.fired: Mapping[int, Sequence[Fired]] = {}
        self.seen: set[int] = set()
        self.inside = False


class DeepMounts(HookSet):
    """Hooks on an encoder's layers; in place while a concept has rows there."""

    def __init__(self, encoder: nn.Module, *, role: str, owner: Any) -> None:
        self.hooks = [
            CallHook(layer, partial(self._read, i), owner, pre=True, strict=False) for i, layer in enumerate(encoder_layers(encoder))
        ]
        self.role = role
        self.seconds = 0.0
        self._call = _Call()
        # What was added to a layer's input, by that tensor: checkpoints run layers again in the backward pass, outside of any call.
        self._added: Any = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self.hooks)

    def begin(self, fired: Mapping[int, Sequence[Fired]]) -> None:
        """Before the encoder runs: what fires, by number of the layer."""
        self._call.fired, self._call.seen, self._call.inside = fired, set(), True
        if fired:
            self.attach()

    def finish(self) -> None:
        """After it. Raises MountError if a layer did not read what was to be added."""
        missed = sorted(self._call.fired.keys() - self._call.seen)
        self._call.fired, self._call.inside = {}, False
        if missed:
            raise MountError(
                f"the encoder of role {self.role!r} ran without its layer {missed[0]}, so no concept reached it at the mount "
                f"'{DEEP}.{missed[0]}'; was it compiled or replaced? attach to the plain pipeline first"
            )

    def _read(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        states = _states_of(args, kwargs)
        if not isinstance(states, torch.Tensor):
            return None
        fired = self._call.fired.get(number) if self._call.inside else self._added.get(states, {}).get(number)
        if not fired:
            return None
        begin = time.perf_counter()
        if self._call.inside and torch.is_grad_enabled():
            self._added[states] = {number: fired}
        self._call.seen.add(number)
        for one in fired:
            states = one.apply(states)
        self.seconds += time.perf_counter() - begin
        return _with_states(args, kwargs, states)
