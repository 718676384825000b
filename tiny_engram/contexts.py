"""Context mounts: residuals in what the denoiser's cross-attentions read, at the trigger's positions only; and the maps there. May
import context_plan, encoded, following, hooks, map_mounts, maps, mounts and store; nothing of diffusers.

A pre-hook on each key and value projection puts another tensor in the place of the text states. All of them are made in one pass, once
for each prompt tensor that the denoiser is given; the steps after that find them by the tensor itself, each those of its timestep.
Where the trigger stands is told by the rows' content, never by their place in the batch; for the maps too.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tiny_engram.context_plan import ContextLayout, Contexts, PlannedContexts
from tiny_engram.following import FollowingHooks
from tiny_engram.hooks import CallHook, MountError
from tiny_engram.map_mounts import MapMounts
from tiny_engram.maps import GivenMaps
from tiny_engram.mounts import EncoderMounts

__all__ = ["ContextMounts"]

NOTHING = Contexts()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the mounts put in the place of one tensor, as long as tensor and concepts stay as they were."""

    tensor: Callable[[], torch.Tensor | None]
    state: tuple[Any, ...]
    contexts: Contexts


class _Thread(threading.local):
    """`seen` are the places that read something in this thread's denoiser call, `timestep` what it was called with and `timesteps` the
    same as numbers, `version` the store's when it began with all hooks in place, or -1; `given` is set while training gives contexts."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.given = self.probing = False
        self.timestep: Any = None
        self.timesteps: Sequence[float] | None = None
        self.version = -1


class ContextMounts:
    """The context mounts of one role on one denoiser.

    Hooks are in place while a concept with context mounts or maps is loaded, or inside `held()`; those of the maps while one with maps
    is, or maps were given. On a compiled denoiser they stay.

    Args:
        places: name of each place -> the module and the attribute under which its projection is found: PEFT and others put their own
            layers there, and the hook follows.
        attentions: the cross-attentions of these places, in running order: `.module`, the name of its `.block`, and the
            `.transformer` layer around it.
        denoiser: gives the pipeline's present one.
        training_timesteps: gives the number of timesteps of the pipeline's present scheduler.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[nn.Module, str]],
        mount: EncoderMounts,
        *,
        attentions: Sequence[Any],
        denoiser: Callable[[], nn.Module | None],
        training_timesteps: Callable[[], int],
        owner: Any,
    ) -> None:
        self.names = tuple(places)
        self.mount = mount
        self.layout = ContextLayout(mount.store.mounts, [a.block for a in attentions], training_timesteps=training_timesteps)
        self._seconds = 0.0
        self._denoiser = denoiser
        self._following = FollowingHooks(owner)
        for name, (module, attribute) in places.items():
            self._following.add(name, module, attribute, partial(self._read, name), pre=True)
        mapped = {i: a for i, a in enumerate(attentions) if f"attention.{i}" in mount.store.maps}
        feedforwards = {i: (a.transformer, "ff") for i, a in mapped.items() if f"feedforward.{i}" in mount.store.maps}
        self._maps = MapMounts({i: a.module for i, a in mapped.items()}, feedforwards, denoiser=self._called, owner=owner)
        # The place whose projection sees the text states as the denoiser was given them -> its cross-attention.
        self._keys = {f"context.{i}.key": i for i in mapped}
        self._entries: dict[int, _Entry] = {}
        self._last_given: int | None = None
        self._holders = 0
        self._maps_held = False
        self._verified = (-1, -1)  # version of the store, calls of the encoder
        self._thread = _Thread()

    @property
    def seconds(self) -> float:
        """Seconds spent in the hooks."""
        return self._seconds + self._maps.seconds

    @property
    def hooks(self) -> Mapping[str, CallHook]:
        """The hooks that are in place, by name of the place, those of the maps among them."""
        return {**self._following.hooks, **self._maps.following.hooks}

    def _called(self) -> str:
        return type(self._denoiser()).__name__

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the hooks in line with what is loaded; new ones are probed. Changes nothing if it raises.

        Raises:
            MountError: the denoiser was compiled without them, or a module does not take what its hook gives.
        """
        store = self.mount.store
        self._bring(self._following, bool(self._holders) or store.any_at_denoiser, "context mounts", self._probe)
        self._bring(self._maps.following, self._maps_held or store.has_maps, "maps", self._maps.probe)
        if not self._following:
            self._entries.clear()

    def _bring(self, following: FollowingHooks, wanted: bool, what: str, probe: Callable[[], list[str]]) -> None:
        if wanted and not following:
            if self._compiled():
                raise MountError(
                    f"{self._called()} was compiled before a concept with {what} was loaded, so it would not see it; attach and load the "
                    "first such concept before torch.compile"
                )
            following.follow()
            try:
                dead = probe()
                if dead:
                    raise MountError(f"{self._called()} does not follow the concepts at {', '.join(dead)}; detach what wraps it")
            except BaseException:
                following.drop()
                raise
        elif not wanted and following and not self._compiled():
            following.drop()

    def _compiled(self) -> bool:
        """Was torch.compile called on the denoiser or a part of it? Graphs keep the hooks that they were made with, and take no others."""
        denoiser = self._denoiser()
        parts = [] if denoiser is None else list(denoiser.modules())
        return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts)

    def detach(self) -> None:
        """Take all hooks out."""
        self._holders, self._maps_held = 0, False
        self._following.drop()
        self._maps.drop()
        self._entries.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hooks in place inside, whatever is loaded: for training. Those of the maps come when the first ones are given."""
        self._holders += 1
        try:
            self.settle()
            yield
        finally:
            self._holders -= 1
            if self._last_given is not None:
                self._entries.pop(self._last_given, None)
            self._maps_held = self._maps_held and bool(self._holders)
            self.settle()

    def _probe(self) -> list[str]:
        """Names of the projections that do not read what their hook gives."""
        self._thread.probing = True
        try:
            return self._following.dead(lambda name, read, other: self._keep(read, Contexts({name: other})), self.mount.store.width)
        finally:
            self._thread.probing = False

    # -- around the denoiser -------------------------------------------------------------------------------------------------

    def begin(self, timestep: Any) -> None:
        """Before a call of the denoiser at a timestep: a number, or a tensor `[]`, `[1]` or `[batch]`."""
        store, version = self.mount.store, self._version()
        self._thread.version = version if self._following and (self._maps.following or not store.has_maps) else -1
        if self._following:
            self._following.follow()
            self._maps.begin()
            self._thread.seen = set()
            self._thread.timestep, self._thread.timesteps = timestep, None

    def finish(self) -> None:
        """After it. Raises MountError if a place with rows or a map was passed by.

        Looked at once after each change of the concepts and each prompt: others skip layers in later steps, and mean to.
        """
        self._thread.timestep = self._thread.timesteps = None
        store = self.mount.store
        state = store.version, self.mount.calls
        if self._verified == state or self._thread.version != store.version or not store.active_at_denoiser:
            return  # what another thread loads meanwhile is looked at in the next call
        needed = {place for name in tuple(store.active_at_denoiser) for place in self.layout.places_of(name)}
        self._raise_unread(needed)
        self._verified = state

    def _raise_unread(self, needed: set[str]) -> None:
        passed = sorted(needed - self._thread.seen - self._maps.seen)
        if passed:
            raise MountError(
                f"{self._called()} ran without reading through {', '.join(passed)} of {self.mount.role}, so no concept reached it there; "
                "undo fused projections (pipe.unfuse_qkv_projections()), or use attention that calls to_q, to_k, to_v and to_out"
            )

    def _timesteps(self) -> Sequence[float]:
        """The timesteps of this thread's call of the denoiser; read off the device once in it, and only where bands ask for them."""
        thread = self._thread
        if thread.timesteps is None:
            if thread.timestep is None:
                raise MountError(
                    f"{self._called()} reads text states outside of a call that tells a timestep, so the band of a concept's rows is "
                    "unknown; call it whole, with timestep, and without gradient checkpoints, or disable_concepts()"
                )
            thread.timesteps = torch.as_tensor(thread.timestep).flatten().tolist()
        return thread.timesteps

    # -- contexts ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def giving(self, states: torch.Tensor, contexts: Mapping[str, torch.Tensor], maps: GivenMaps | None = None) -> Iterator[None]:
        """For training: inside, the denoiser is called with `states`, each named place reads its own context instead, and maps add.

        Contexts are like `states` `[batch, time, width]`, by name of the place, "context.{i}.key". They and the maps stay bound to that
        very tensor until the next ones are given, so that gradient checkpoints, which run parts of the denoiser again in the backward
        pass, read the same.

        Raises:
            MountError: the denoiser read other states, or did not read at one of the places.
        """
        if not contexts and maps is None:
            yield
            return
        if maps is not None and not self._maps_held:
            self._maps_held = bool(self._holders)
            self.settle()
        if self._last_given is not None:
            self._entries.pop(self._last_given, None)
        self._following.follow()
        self._maps.begin()
        self._last_given = id(states)
        self._keep(states, Contexts(contexts, () if maps is None else (maps,)))
        self._thread.given, self._thread.seen = True, set()
        try:
            yield
        finally:
            self._thread.given = False
        self._raise_unread({*contexts, *(() if maps is None else maps.factors)})

    def _read(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """One projection's pre-hook."""
        if not args or not isinstance(args[0], torch.Tensor):
            return None  # said after the call, by what was not seen
        begin, tensor = time.perf_counter(), args[0]
        self._thread.seen.add(name)
        contexts = self._contexts_of(tensor)
        changed = contexts.at(name, tensor, self._timesteps)
        if name in self._keys:
            self._maps.enter(self._keys[name], contexts.maps)
        self._seconds += time.perf_counter() - begin
        return None if changed is None else ((changed, *args[1:]), kwargs)

    def _contexts_of(self, tensor: torch.Tensor) -> Contexts:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.tensor() is tensor and entry.state in (_state_of(tensor), (*_state_of(tensor), self._version())):
            return entry.contexts
        if self._thread.probing:
            return NOTHING
        if self._thread.given:
            raise MountError(f"{self._called()} reads other text states than training gave it; take out what changes them on the way")
        if not self.mount.store.active_at_denoiser:
            return NOTHING
        version = self._version()
        contexts = self._make(tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()):  # a kept graph could be walked back once only
            self._keep(tensor, contexts, version)
        return contexts

    def _version(self) -> int:
        return self.mount.store.version

    def _keep(self, tensor: torch.Tensor, contexts: Contexts, *version: int) -> None:
        key, entries = id(tensor), self._entries
        entries[key] = _Entry(weakref.ref(tensor, lambda _: entries.pop(key, None)), (*_state_of(tensor), *version), contexts)

    def _make(self, tensor: torch.Tensor) -> Contexts:
        """Match rows to prompts, and add what fires there."""
        store = self.mount.store
        prompts = self.mount.encoded.find(tensor) if tensor.dim() == 3 else [None]
        ids = [row for row in prompts if row is not None]
        if len(ids) < len(prompts):
            raise MountError(
                f"row {next(k for k, row in enumerate(prompts) if row is None)} of the {list(tensor.shape)} text states that the denoiser "
                f"reads is no prompt that {self.mount.role} has encoded since a concept with context mounts was loaded, so where its "
                "trigger stands is unknown; make prompt embeds with adapter.encode(prompt, negative_prompt), or disable_concepts()"
            )
        plan = store.plan_at(store.context_mounts, torch.from_numpy(np.stack(ids)))
        return PlannedContexts(tensor, plan, self.layout) if plan.fired or plan.maps else NOTHING


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a tensor is written to; inference tensors do not count that, and cannot be used outside inference mode."""
    return (-1 if tensor.is_inference() else tensor._version), torch.is_inference_mode_enabled()
