"""Hooks on the projections that read text states, of all roles and all denoisers of a pipeline. May import following and hooks.

One hook serves all roles: what they add at a place is added in their order, whichever of them came first.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tiny_engram.following import FollowingHooks
from tiny_engram.hooks import CallHook, MountError

__all__ = ["PlaceHooks", "bring"]

Given = tuple[tuple[Any, ...], dict[str, Any]]


class Reader(Protocol):
    """What a role does at a place: another tensor for `tensor`, or None; `origin` is what was there before any role."""

    def read(self, place: str, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None: ...


class _Probing(threading.local):
    def __init__(self) -> None:
        self.other: torch.Tensor | None = None


class PlaceHooks:
    """One hook at each place of each denoiser, for the readers that it has.

    Args:
        denoisers: gives the pipeline's present ones.
        owner: of the hooks.
    """

    def __init__(self, *, denoisers: Callable[[], Sequence[nn.Module]], owner: Any) -> None:
        self.following = FollowingHooks(owner)
        self.denoisers = denoisers
        self._readers: dict[str, list[tuple[str, Reader]]] = {}
        self._wanted: list[Callable[[], bool]] = []
        self._probing = _Probing()

    def add(self, reader: Reader, wanted: Callable[[], bool], places: Mapping[str, Mapping[str, tuple[nn.Module, str]]]) -> None:
        """A reader at these places: prefix of a denoiser -> name of a place -> (module, attribute of the projection)."""
        self._wanted.append(wanted)
        for prefix, named in places.items():
            for name, (module, attribute) in named.items():
                key = prefix + name
                if key not in self._readers:
                    self._readers[key] = []
                    self.following.add(key, module, attribute, self._hook(self._readers[key]), pre=True)
                self._readers[key].append((name, reader))

    @property
    def hooks(self) -> Mapping[str, CallHook]:
        """The hooks that are in place, by the name of their place, with the denoiser's in front beyond the first."""
        return self.following.hooks

    def settle(self) -> None:
        """Hooks in place while any reader wants them; new ones are probed. Changes nothing if it raises MountError."""
        bring(self.following, any(wanted() for wanted in self._wanted), "context mounts", self._probe, self.denoisers())

    def drop(self) -> None:
        """Take all hooks out."""
        self.following.drop()

    def _hook(self, readers: Sequence[tuple[str, Reader]]) -> Callable[..., Given | None]:
        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
            if not args or not isinstance(args[0], torch.Tensor):
                return None  # said after the call, by what was not seen
            tensor = origin = args[0]
            if self._probing.other is not None:
                tensor = self._probing.other
            else:
                for name, reader in readers:
                    changed = reader.read(name, origin, tensor)
                    tensor = tensor if changed is None else changed
            return None if tensor is origin else ((tensor, *args[1:]), kwargs)

        return hook

    def _probe(self) -> list[str]:
        """Names of the projections that do not read what their hook gives."""

        def arm(name: str, read: torch.Tensor, other: torch.Tensor) -> None:
            self._probing.other = other

        try:
            return self.following.dead(arm)
        finally:
            self._probing.other = None


def bring(following: FollowingHooks, wanted: bool, what: str, probe: Callable[[], list[str]], denoisers: Sequence[nn.Module]) -> None:
    """Hooks in place if they are wanted, and out if not; new ones are probed. Changes nothing if it raises.

    Raises:
        MountError: a denoiser was compiled without them, or a module does not take what its hook gives.
    """
    compiled = wanted != bool(following) and any(_is_compiled(denoiser) for denoiser in denoisers)
    called = " and ".join(dict.fromkeys(type(denoiser).__name__ for denoiser in denoisers)) or "the denoiser"
    if wanted and not following:
        if compiled:
            raise MountError(
                f"{called} was compiled before a concept with {what} was loaded, so it would not see it; attach and load the "
                "first such concept before torch.compile"
            )
        following.follow()
        try:
            dead = probe()
            if dead:
                raise MountError(f"{called} does not follow the concepts at {', '.join(dead)}; detach what wraps it")
        except BaseException:
            following.drop()
            raise
    elif not wanted and following and not compiled:
        following.drop()


def _is_compiled(denoiser: nn.Module) -> bool:
    """Was torch.compile called on it or a part of it? Graphs keep the hooks that they were made with, and take no others."""
    parts = denoiser.modules()
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts)
