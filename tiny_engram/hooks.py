"""Hooks that come and go, and that a copied or unpickled module drops. Imports torch and tiny_engram.errors; knows no concept.

Hooks are plain callables in torch's hook dictionaries, never modules: a module's tree and state dict stay as they were. A hook that finds
itself on another module (a deep copy, an unpickled one) has lost its concepts and says so.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiny_engram.errors import TinyEngramError

__all__ = ["CallHook", "HookSet", "MountError", "hooks_of", "remove_strays"]


class MountError(TinyEngramError):
    """A mount that cannot do its work: what the pipeline consumes would not hold the concepts."""


class CallHook:
    """One entry in a module's hook dictionary. `strict` hooks raise on a module that is not theirs, others stay silent there; a pre-hook
    that is `first` runs before those that are there when it is attached.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        owner: Any,
        *,
        pre: bool,
        strict: bool,
        always: bool = False,
        first: bool = False,
    ) -> None:
        self._module = weakref.ref(module)
        self._call: Callable[..., Any] | None = call
        self.owner = owner
        self.pre, self.strict, self.always, self.first = pre, strict, always, first
        self._handle: Any = None

    @torch.compiler.disable  # what a hook does depends on the prompt: it runs outside the graph
    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        if self._call is not None and self._module() is module:
            return self._call(*arguments)
        if self.strict:
            raise MountError(
                f"this {type(module).__name__} is a copy of a module with concepts attached, and the copy has none; "
                "call tiny_engram.attach on its pipeline (and load the concepts there) or detach before copying"
            )
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallHook":
        return self._stray(self.strict, self.pre)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallHook._stray, (self.strict, self.pre)

    @staticmethod
    def _stray(strict: bool, pre: bool) -> "CallHook":
        """A hook without module and owner, as copies and pickles get."""
        hook = CallHook.__new__(CallHook)
        hook._module, hook._call, hook.owner, hook._handle = (lambda: None), None, None, None
        hook.pre, hook.strict, hook.always, hook.first = pre, strict, False, False
        return hook

    @property
    def module(self) -> nn.Module | None:
        """The module that the hook is for, if it is still there."""
        return self._module()

    @property
    def attached(self) -> bool:
        """Is the hook still in its module's dictionary?"""
        module = self._module()
        return module is not None and any(hook is self for hook in _hooks(module, self.pre).values())

    def attach(self) -> None:
        """Put the hook (back) into its module's dictionary; nothing happens if it is there."""
        module = self._module()
        if module is None or self.attached:
            return
        hook: Any = self
        if self.pre:
            self._handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=self.first)
        else:
            self._handle = module.register_forward_hook(hook, with_kwargs=True, always_call=self.always)

    def detach(self) -> None:
        """Take the hook out of its module's dictionary."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _hooks(module: nn.Module, pre: bool) -> dict[int, Any]:
    return module._forward_pre_hooks if pre else module._forward_hooks


def hooks_of(module: nn.Module) -> list[CallHook]:
    """Our hooks on a module and its children."""
    return [h for m in module.modules() for pre in (True, False) for h in _hooks(m, pre).values() if isinstance(h, CallHook)]


def remove_strays(module: nn.Module) -> int:
    """Remove hooks that a copy or a pickle left behind; returns how many."""
    count = 0
    for child in module.modules():
        for hooks, with_kwargs in (
            (child._forward_pre_hooks, child._forward_pre_hooks_with_kwargs),
            (child._forward_hooks, child._forward_hooks_with_kwargs),
        ):
            for key in [k for k, hook in hooks.items() if isinstance(hook, CallHook) and hook._module() is not child]:
                del hooks[key]
                with_kwargs.pop(key, None)
                child._forward_hooks_always_called.pop(key, None)
                count += 1
    return count


class HookSet:
    """What owns `hooks` that come and go together."""

    hooks: list[CallHook]

    @property
    def attached(self) -> bool:
        """Are all hooks still registered?"""
        return all(hook.attached for hook in self.hooks)

    def attach(self) -> None:
        """Register the hooks that are not."""
        for hook in self.hooks:
            hook.attach()

    def detach(self) -> None:
        """Remove them; the modules are as they were."""
        for hook in self.hooks:
            hook.detach()
