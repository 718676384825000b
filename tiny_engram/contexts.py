"""Context mounts: residuals in what the denoiser's attentions read of a text, at the trigger's positions only; and the maps there. May
import context_plan, denoiser_call, encoded_positions, hooks, map_mounts, maps, mounts, place_hooks, store and stream_contexts.

A pre-hook on each key and value projection puts another tensor in the place of the text states. Where all of them read one tensor, what
they read is made in one pass, once for each prompt tensor that the denoiser is given; the steps after that find it by the tensor itself,
each those of its timestep. Where they read another one each, rows and spans are found once for each prompt tensor, and added as it is read.
Where the trigger stands is told by the rows' content, never by their place in the batch; for the maps too.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tiny_engram.context_plan import ContextLayout, Contexts, PlannedContexts
from tiny_engram.denoiser_call import DenoiserCall, tensors_in
from tiny_engram.encoded import EncodedPrompts
from tiny_engram.encoded_positions import EncodedPositions
from tiny_engram.hooks import CallHook, MountError
from tiny_engram.map_mounts import MapMounts
from tiny_engram.maps import GivenMaps
from tiny_engram.mounts import EncoderMounts
from tiny_engram.place_hooks import PlaceHooks, bring
from tiny_engram.stream_contexts import GivenRows, StreamContexts, state_of, where_consumed

__all__ = ["ContextMounts"]

NOTHING = Contexts()
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the mounts put in the place of one tensor, or make of several, as long as tensors and concepts stay as they were."""

    tensors: tuple[Callable[[], torch.Tensor | None], ...]
    state: tuple[Any, ...]
    contexts: Contexts


class _Thread(threading.local):
    """`seen` are the places that read something in this thread's denoiser call, `call` that call, `timesteps` its timesteps as numbers and
    `contexts` what fires in its text, where places add as they read; `version` is the store's when it began with all hooks in place, or -1;
    `given` is set while training gives contexts."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.given = False
        self.call: DenoiserCall | None = None
        self.timesteps: Sequence[float] | None = None
        self.contexts: Contexts | None = None
        self.version = -1


class ContextMounts:
    """The context mounts of one role on the denoisers of a pipeline.

    Hooks are in place while a concept with context mounts or maps is loaded, or inside `held()`; those of the maps while one with maps
    is, or maps were given. On a compiled denoiser they stay.

    Args:
        mount: of the role's encoder.
        layout: which mounts each place reads, and how text stands there.
        places: of each denoiser, by the attribute of the pipeline under which it is found: name of each place -> the module, and the
            attribute under which its projection is found: PEFT and others put their own layers there, and the hook follows. Denoisers of
            one pipeline have the same, and a concept's rows serve all of them.
        attentions: of each denoiser, those that the places lie in, in running order, for maps.
        hooks: of the denoisers, for all roles.
        consumed: embeds as the denoiser is given them -> the role's own states, `[batch, time, width]` or a list of `[time, width]`.
        scheduled: timestep of the denoiser's call -> the scheduler's.
        owner: of the maps' hooks.
    """

    def __init__(
        self,
        mount: EncoderMounts,
        layout: ContextLayout,
        *,
        places: Mapping[str, Mapping[str, tuple[nn.Module, str]]],
        attentions: Mapping[str, Sequence[Any]],
        hooks: PlaceHooks,
        consumed: Callable[[Mapping[str, Any]], Any],
        scheduled: Callable[[float], float],
        owner: Any,
    ) -> None:
        self.mount, self.layout = mount, layout
        self._seconds = 0.0
        self._consumed, self._scheduled = consumed, scheduled
        self._hooks = hooks
        prefixes = {name: f"{name}/" if k else "" for k, name in enumerate(attentions)}
        hooks.add(self, self._wants_hooks, {prefixes[name]: found for name, found in places.items()})
        self.names = tuple(next(iter(places.values()), ()))
        each = {prefixes[name]: found for name, found in attentions.items()}
        self._maps = MapMounts(each, mount.store.maps, denoiser=self._called, owner=owner)
        # The place whose projection sees the text states as the denoiser was given them -> its cross-attention.
        self._keys = {f"context.{i}.key": i for i in self._maps.numbers}
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._last_given: tuple[int, ...] | None = None
        self._given: tuple[GivenRows, torch.Tensor] | None = None
        self._holders = 0
        self._maps_held = False
        self._verified: dict[str | None, tuple[int, int]] = {}  # by denoiser: version of the store, calls of the encoder
        self._thread = _Thread()

    @property
    def seconds(self) -> float:
        """Seconds spent in the hooks."""
        return self._seconds + self._maps.seconds

    @property
    def hooks(self) -> Mapping[str, CallHook]:
        """The hooks that are in place, by name of the place, those of the maps among them."""
        return {**self._hooks.hooks, **self._maps.hooks}

    def _called(self) -> str:
        denoisers = self._hooks.denoisers()
        return type(denoisers[0] if denoisers else None).__name__

    def consumed(self, call: DenoiserCall) -> Any:
        """The role's own states in what a denoiser is given."""
        return self._consumed(call.embeds)

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the hooks in line with what is loaded; new ones are probed. Changes nothing if it raises.

        Raises:
            MountError: the denoiser was compiled without them, or a module does not take what its hook gives.
        """
        self._hooks.settle()
        wanted = self._maps_held or self.mount.store.has_maps
        bring(self._maps.following, wanted, "maps", self._maps.probe, self._hooks.denoisers())
        self._maps.settled()
        if not self._hooks.following:
            self._entries.clear()

    def _wants_hooks(self) -> bool:
        return bool(self._holders) or self.mount.store.any_at_denoiser

    def detach(self) -> None:
        """Take all hooks out."""
        self._holders, self._maps_held = 0, False
        self._forget_given()
        self._hooks.drop()
        self._maps.drop()
        self._entries.clear()

    @contextmanager
    def held(self, *, maps: bool = False) -> Iterator[None]:
        """Hooks in place inside, whatever is loaded: for training. Those of the maps come with `maps`, or when the first ones are given."""
        self._holders += 1
        self._maps_held = self._maps_held or maps
        try:
            self.settle()
            yield
        finally:
            self._holders -= 1
            self._forget_given()
            self._maps_held = self._maps_held and bool(self._holders)
            self.settle()

    def hold_maps(self) -> None:
        """Inside `held()`: the hooks of the maps too. Where several roles give maps at once, before the first of them does: hooks that come
        are probed, and read through the others."""
        if not self._maps_held:
            self._maps_held = bool(self._holders)
            self.settle()

    # -- around the denoiser -------------------------------------------------------------------------------------------------

    def begin(self, call: DenoiserCall) -> None:
        """Before a call of a denoiser.

        Raises:
            MountError: places add as they read, and a row of the text that it is given is no prompt that was encoded; or training gave
                another text.
        """
        store, version, thread = self.mount.store, self._version(), self._thread
        thread.version = version if self._hooks.following and (self._maps.following or not store.has_maps) else -1
        thread.contexts = None
        if not self._hooks.following:
            return
        self._hooks.following.follow()
        self._maps.begin()
        thread.seen = set()
        thread.call, thread.timesteps = call, None
        if thread.given and self._given is not None and not any(tensor is self._given[1] for tensor in tensors_in(call.embeds)):
            raise self._given_others()
        if self.layout.readings and not thread.given:
            thread.contexts = self._contexts_of_call(call) if store.active_at_denoiser else NOTHING

    def finish(self) -> None:
        """After it. Raises MountError if a place with rows or a map was passed by.

        Looked at once after each change of the concepts and each prompt: others skip layers in later steps, and mean to.
        """
        thread, store = self._thread, self.mount.store
        denoiser = None if thread.call is None else thread.call.denoiser
        thread.call = thread.timesteps = thread.contexts = None
        state = store.version, self.mount.calls
        if self._verified.get(denoiser) == state or thread.version != store.version or not store.active_at_denoiser:
            return  # what another thread loads meanwhile is looked at in the next call
        needed = {place for name in tuple(store.active_at_denoiser) for place in self.layout.places_of(name)}
        self._raise_unread(needed)
        self._verified[denoiser] = state

    def _raise_unread(self, needed: set[str]) -> None:
        passed = sorted(needed - self._thread.seen - self._maps.seen)
        if passed:
            raise MountError(
                f"{self._called()} ran without reading through {', '.join(passed)} of {self.mount.role}, so no concept reached it there; "
                "undo fused projections (pipe.unfuse_qkv_projections()), or use attention that calls to_q, to_k, to_v and to_out"
            )

    def _timesteps(self) -> Sequence[float]:
        """The scheduler's timesteps of this thread's call of the denoiser; read off the device once in it, and only where bands ask for
        them. Where each place of a picture has its own, a row has its latest."""
        thread = self._thread
        if thread.timesteps is None:
            if thread.call is None or thread.call.timestep is None:
                raise MountError(
                    f"{self._called()} reads text states outside of a call that tells a timestep, so the band of a concept's rows is "
                    "unknown; call it whole, with timestep, and without gradient checkpoints, or disable_concepts()"
                )
            told = torch.as_tensor(thread.call.timestep)
            told = told.flatten(1).amax(1) if told.dim() > 1 else told.flatten()
            thread.timesteps = [self._scheduled(t) for t in told.tolist()]
        return thread.timesteps

    # -- contexts ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def giving(
        self, states: torch.Tensor, contexts: Mapping[str, torch.Tensor] | GivenRows, maps: GivenMaps | None = None
    ) -> Iterator[None]:
        """For training: inside, the denoiser is called with `states`, each named place reads its own context instead, and maps add.

        Contexts are like `states` `[batch, time, width]`, by name of the place, "context.{i}.key"; or rows that are added to whatever the
        places read. Contexts stay bound to that very tensor, rows to what is read outside of other calls, both with their maps, until the
        next ones are given, so that gradient checkpoints, which run parts of the denoiser again in the backward pass, read the same.

        Raises:
            MountError: the denoiser read other states, or did not read at one of the places.
        """
        needed = {*(contexts.rows if isinstance(contexts, GivenRows) else contexts), *(() if maps is None else maps.factors)}
        if not needed:
            yield
            return
        if maps is not None:
            self.hold_maps()
        self._forget_given()
        self._hooks.following.follow()
        self._maps.begin()
        given = () if maps is None else (maps,)
        if isinstance(contexts, GivenRows):
            self._given = contexts.with_maps(given), states
        else:
            self._last_given = (id(states),)
            self._keep((states,), Contexts(contexts, given))
        self._thread.given, self._thread.seen = True, set()
        try:
            yield
        finally:
            self._thread.given = False
        self._raise_unread(needed)

    def _forget_given(self) -> None:
        if self._last_given is not None:
            self._entries.pop(self._last_given, None)
        self._last_given, self._given = None, None

    def read(self, place: str, origin: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a place reads instead of `tensor`, which is `origin` with what other roles put there; None for `tensor` itself."""
        begin = time.perf_counter()
        self._thread.seen.add(place)
        contexts = self._contexts_at(origin)
        changed = contexts.at(place, tensor, self._timesteps)
        if place in self._keys:
            self._maps.enter(self._keys[place], contexts.maps_in(place, origin))
        self._seconds += time.perf_counter() - begin
        return changed

    def _contexts_at(self, tensor: torch.Tensor) -> Contexts:
        thread = self._thread
        if self._maps.probing:
            return NOTHING
        if self._given is not None and (thread.given or thread.call is None):
            return self._given[0]
        if not self.layout.readings:
            return self._contexts_of(tensor)
        if thread.contexts is not None or not self.mount.store.active_at_denoiser:
            return thread.contexts or NOTHING
        raise MountError(
            f"{self._called()} reads text states outside of a call, so where the trigger of a concept stands is unknown; call it whole, "
            "and without gradient checkpoints, or disable_concepts()"
        )

    def _contexts_of(self, tensor: torch.Tensor) -> Contexts:
        """Where all places read one tensor."""
        found = self._kept((tensor,))
        if found is not None:
            return found
        if self._thread.given:
            raise self._given_others()
        if not self.mount.store.active_at_denoiser:
            return NOTHING
        version = self._version()
        contexts = self._make(tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()):  # a kept graph could be walked back once only
            self._keep((tensor,), contexts, version)
        return contexts

    def _contexts_of_call(self, call: DenoiserCall) -> Contexts:
        """Where each place reads a tensor of its own."""
        tensors = tensors_in(call.embeds)
        found = self._kept(tensors)
        if found is None:
            version = self._version()
            found = self._make_streams(call)
            self._keep(tensors, found, version)
        return found

    def _given_others(self) -> MountError:
        return MountError(f"{self._called()} reads other text states than training gave it; take out what changes them on the way")

    def _version(self) -> int:
        return self.mount.store.version

    def _kept(self, tensors: tuple[torch.Tensor, ...]) -> Contexts | None:
        entry = self._entries.get(tuple(map(id, tensors)))
        if entry is None or any(kept() is not tensor for kept, tensor in zip(entry.tensors, tensors, strict=True)):
            return None
        state = tuple(map(state_of, tensors))
        return entry.contexts if entry.state in (state, (*state, self._version())) else None

    def _keep(self, tensors: tuple[torch.Tensor, ...], contexts: Contexts, *version: int) -> None:
        key, entries = tuple(map(id, tensors)), self._entries
        refs = tuple(weakref.ref(tensor, lambda _: entries.pop(key, None)) for tensor in tensors)
        entries[key] = _Entry(refs, (*map(state_of, tensors), *version), contexts)

    def _make(self, tensor: torch.Tensor) -> Contexts:
        """Match rows to prompts, and add what fires there."""
        store, columns, encoded = self.mount.store, self.layout.columns, self.mount.encoded
        assert isinstance(encoded, EncodedPrompts)
        own = tensor if columns is None else tensor[..., slice(*columns)]
        ids = self._all_known(encoded.find(own) if tensor.dim() == 3 else [None], tensor)
        plan = store.plan_at(store.context_mounts, torch.from_numpy(np.stack(ids)))
        return PlannedContexts(tensor, plan, self.layout) if plan.fired or plan.maps else NOTHING

    def _make_streams(self, call: DenoiserCall) -> Contexts:
        """Match rows to prompts, and find what fires where in the text."""
        store, encoded = self.mount.store, self.mount.encoded
        states = self._consumed(call.embeds) if call.embeds else torch.zeros(0)
        assert isinstance(encoded, EncodedPositions)
        whole = not isinstance(states, torch.Tensor) or states.dim() == 3
        rows = self._all_known(encoded.find(states) if whole else [None], states)
        lengths = [len(row) for row in states]
        ids = np.full((len(rows), max(len(row.ids) for row in rows)), -1, dtype=np.int64)
        for k, row in enumerate(rows):
            ids[k, : len(row.ids)] = row.ids
        plan = store.plan_at(store.context_mounts, torch.from_numpy(ids))
        fired, maps = where_consumed(plan, rows, self.layout.offset)
        return StreamContexts(fired, maps, self.layout, lengths, self._called) if fired or maps else NOTHING

    def _all_known(self, found: Sequence[Row | None], states: Any) -> list[Row]:
        known = [row for row in found if row is not None]
        if len(known) < len(found):
            shape = list(states.shape) if isinstance(states, torch.Tensor) else [list(row.shape) for row in states]
            raise MountError(
                f"row {next(k for k, row in enumerate(found) if row is None)} of the {shape} text states that the denoiser "
                f"reads is no prompt that {self.mount.role} has encoded since a concept with context mounts was loaded, so where its "
                "trigger stands is unknown; make prompt embeds with adapter.encode(prompt, negative_prompt), or disable_concepts()"
            )
        return known
