"""Hooks on what stands at a place now, whoever put it there. May import hooks.

PEFT and others put layers of their own where a module was; a hook that is to see what is called has to move there.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiny_engram.hooks import CallHook

__all__ = ["FollowingHooks"]


@dataclass(frozen=True, slots=True)
class _Place:
    module: weakref.ref[nn.Module]
    attribute: str
    call: Callable[..., Any]
    pre: bool


class FollowingHooks:
    """One hook for each place: a module, and the attribute under which the hooked one is found.

    Attributes:
        hooks: those that are in place, by the name of their place; empty after `drop`.
    """

    def __init__(self, owner: Any) -> None:
        self.hooks: dict[str, CallHook] = {}
        self._owner = owner
        self._places: dict[str, _Place] = {}

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def add(self, name: str, module: nn.Module, attribute: str, call: Callable[..., Any], *, pre: bool) -> None:
        """One more place; nothing is hooked before `follow`."""
        self._places[name] = _Place(weakref.ref(module), attribute, call, pre)

    def follow(self) -> None:
        """A hook on each module that stands at its place now. A place that is empty is left out: what it has to do is not done."""
        for name, place in self._places.items():
            module = getattr(place.module(), place.attribute, None)
            hook = self.hooks.get(name)
            if hook is None or hook.module is not module:
                if hook is not None:
                    hook.detach()
                if module is None:
                    continue
                hook = self.hooks[name] = CallHook(module, place.call, self._owner, pre=place.pre, strict=True)
            hook.attach()

    def drop(self) -> None:
        """Take all hooks out."""
        for hook in self.hooks.values():
            hook.detach()
        self.hooks.clear()

    def dead(self, arm: Callable[[str, torch.Tensor, torch.Tensor], object]) -> list[str]:
        """Names of the hooks whose module does not take, or does not give, what they put in the place of something else.

        Args:
            arm: told (name, read, other) before a module is called with `read`: its hook is to put `other` there.
        """
        found: list[str] = []
        for name, hook, module, weight in self.live():
            read, other = torch.zeros(2, 1, 2, weight.shape[-1], device=weight.device, dtype=weight.dtype).unbind(0)
            arm(name, read, other)
            got: list[Any] = []
            handle = module.register_forward_hook(lambda _, args, output, got=got, pre=hook.pre: got.append(args[0] if pre else output))
            try:
                with torch.no_grad():
                    module(read)
            finally:
                handle.remove()
            if len(got) != 1 or got[0] is not other:
                found.append(name)
        return found

    def live(self) -> Iterator[tuple[str, CallHook, nn.Module, torch.Tensor]]:
        """Name, hook, module and first weight of those hooks whose module can be called with the weight's type.

        Offloaded weights are elsewhere till then, and weights that are kept in 8 bits are cast first.
        """
        for name, hook in self.hooks.items():
            module = hook.module
            weight = next((p for p in module.parameters() if p.dim() > 1), None) if module is not None else None
            if module is not None and weight is not None and not weight.is_meta and weight.is_floating_point() and weight.itemsize > 1:
                yield name, hook, module, weight
