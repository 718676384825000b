"""Context mounts: residuals in what the denoiser's cross-attentions read, at the trigger's positions only. May import encoded, mounts,
residual and store; nothing of diffusers.

A pre-hook on each key and value projection puts another tensor in the place of the text states. All of them are made in one pass, once
for each prompt tensor that the denoiser is given; the steps after that find them by the tensor itself. Where the trigger stands is
told by the rows' content, never by their place in the batch.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tiny_engram.mounts import CallHook, MountError, SpanMount

__all__ = ["ContextMounts"]

NOTHING: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the mounts put in the place of one tensor, as long as tensor and concepts stay as they were."""

    tensor: Callable[[], torch.Tensor | None]
    state: tuple[Any, ...]
    contexts: Mapping[str, torch.Tensor]


class _Thread(threading.local):
    """`seen` are the mounts that read something in this thread's denoiser call; `given` is set while training gives the contexts."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.given = self.probing = False


class ContextMounts:
    """The context mounts of one role on one denoiser.

    `places` maps each mount's name to the module and the attribute under which its projection is found: PEFT and others put their own
    layers there, and the hook follows. `denoiser` gives the pipeline's present one. Hooks are in place while a concept with context mounts
    is loaded, or inside `held()`; on a compiled denoiser they stay.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[nn.Module, str]],
        mount: SpanMount,
        *,
        denoiser: Callable[[], nn.Module | None],
        owner: Any,
    ) -> None:
        self.names = tuple(places)
        self.mount = mount
        self.seconds = 0.0
        self._denoiser = denoiser
        self._places = {name: (weakref.ref(module), attribute) for name, (module, attribute) in places.items()}
        self._owner = owner
        self._hooks: dict[str, CallHook] = {}
        self._entries: dict[int, _Entry] = {}
        self._last_given: int | None = None
        self._holders = 0
        self._verified = -1
        self._thread = _Thread()

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the hooks in line with what is loaded; new ones are probed. Changes nothing if it raises.

        Raises:
            MountError: the denoiser was compiled without them, or a projection does not read what its hook gives.
        """
        wanted = bool(self._holders) or self.mount.store.has_contexts
        if wanted and not self._hooks:
            if self._compiled():
                raise MountError(
                    f"{type(self._denoiser()).__name__} was compiled before a concept with context mounts was loaded, so it would not "
                    "see it; attach and load the first such concept before torch.compile"
                )
            self._follow()
            try:
                self._probe()
            except BaseException:
                self._drop()
                raise
        elif not wanted and self._hooks and not self._compiled():
            self._drop()

    def _compiled(self) -> bool:
        """Was torch.compile called on the denoiser or a part of it? Graphs keep the hooks that they were made with, and take no others."""
        denoiser = self._denoiser()
        parts = [] if denoiser is None else list(denoiser.modules())
        return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts)

    def detach(self) -> None:
        """Take all hooks out."""
        self._holders = 0
        self._drop()

    def _drop(self) -> None:
        for hook in self._hooks.values():
            hook.detach()
        self._hooks.clear()
        self._entries.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hooks in place inside, whatever is loaded: for training."""
        self._holders += 1
        try:
            self.settle()
            yield
        finally:
            self._holders -= 1
            if self._last_given is not None:
                self._entries.pop(self._last_given, None)
            self.settle()

    def _follow(self) -> None:
        """A hook on each projection that stands at its place now."""
        for name, (place, attribute) in self._places.items():
            module = getattr(place(), attribute, None)
            hook = self._hooks.get(name)
            if hook is None or hook.module is not module:
                if hook is not None:
                    hook.detach()
                if module is None:
                    continue  # gone: said after the call, by what was not read
                hook = self._hooks[name] = CallHook(module, partial(self._read, name), self._owner, pre=True, strict=True)
            hook.attach()

    def _probe(self) -> None:
        """Does each projection read what its hook gives? Those whose weights are elsewhere (offloaded) are seen at the first call."""
        dead = []
        self._thread.probing = True
        try:
            for name, hook in self._hooks.items():
                module = hook.module
                weight = getattr(module, "weight", None)
                if module is None or not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.is_floating_point():
                    continue
                read, other = torch.zeros(2, 1, 2, self.mount.store.width, device=weight.device, dtype=weight.dtype).unbind(0)
                self._keep(read, {name: other})
                got: list[Any] = []
                handle = module.register_forward_hook(lambda module, args, output, got=got: got.append(args[0]))
                try:
                    with torch.no_grad():
                        module(read)
                finally:
                    handle.remove()
                if len(got) != 1 or got[0] is not other:
                    dead.append(name)
        finally:
            self._thread.probing = False
        if dead:
            raise MountError(f"{type(self._denoiser()).__name__} does not follow the concepts at {', '.join(dead)}; detach what wraps it")

    # -- around the denoiser -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a call of the denoiser."""
        if self._hooks:
            self._follow()
            self._thread.seen = set()

    def finish(self) -> None:
        """After it. Raises MountError if a mount with rows was passed by; looked at once after each change of the concepts."""
        store = self.mount.store
        if self._verified == store.version or not store.active_contexts:
            return
        passed = sorted(store.active_contexts - self._thread.seen)
        if passed:
            raise self._unread(passed)
        self._verified = store.version

    def _unread(self, names: list[str]) -> MountError:
        return MountError(
            f"{type(self._denoiser()).__name__} ran without reading through {', '.join(names)} of {self.mount.role}, so no concept "
            "reached it there; undo fused projections (pipe.unfuse_qkv_projections()), or use attention that calls to_k and to_v"
        )

    # -- contexts ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def giving(self, states: torch.Tensor, contexts: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """For training: inside, the denoiser is called with `states`, and each named mount reads its own context instead.

        Contexts are like `states` `[batch, time, width]`. They stay bound to that very tensor until the next ones are given, so that
        gradient checkpoints, which run parts of the denoiser again in the backward pass, read the same.

        Raises:
            MountError: the denoiser read other states, or did not read at one of the mounts.
        """
        if not contexts:
            yield
            return
        if self._last_given is not None:
            self._entries.pop(self._last_given, None)
        self._follow()
        self._last_given = id(states)
        self._keep(states, contexts)
        self._thread.given, self._thread.seen = True, set()
        try:
            yield
        finally:
            self._thread.given = False
        passed = sorted(set(contexts) - self._thread.seen)
        if passed:
            raise self._unread(passed)

    def _read(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """One projection's pre-hook."""
        begin = time.perf_counter()
        self._thread.seen.add(name)
        tensor = args[0] if args else None
        changed = self._contexts_of(tensor).get(name) if isinstance(tensor, torch.Tensor) else None
        self.seconds += time.perf_counter() - begin
        return None if changed is None else ((changed, *args[1:]), kwargs)

    def _contexts_of(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.tensor() is tensor and entry.state in (_state_of(tensor), (*_state_of(tensor), self._version())):
            return entry.contexts
        if self._thread.probing:
            return NOTHING
        if self._thread.given:
            raise MountError(
                f"{type(self._denoiser()).__name__} reads other text states than training gave it; take out what changes them on the way"
            )
        if not self.mount.store.active_contexts:
            return NOTHING
        version = self._version()
        contexts = self._make(tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()):  # a kept graph could be walked back once only
            self._keep(tensor, contexts, version)
        return contexts

    def _version(self) -> int:
        return self.mount.store.version

    def _keep(self, tensor: torch.Tensor, contexts: Mapping[str, torch.Tensor], *version: int) -> None:
        key, entries = id(tensor), self._entries
        entries[key] = _Entry(weakref.ref(tensor, lambda _: entries.pop(key, None)), (*_state_of(tensor), *version), contexts)

    def _make(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Match rows to prompts, and add what fires there: name -> `[batch, time, width]` like `tensor`; nothing where none fires."""
        store = self.mount.store
        prompts = self.mount.encoded.find(tensor) if tensor.dim() == 3 else [None]
        ids = [row for row in prompts if row is not None]
        if len(ids) < len(prompts):
            raise MountError(
                f"row {next(k for k, row in enumerate(prompts) if row is None)} of the {list(tensor.shape)} text states that the denoiser "
                f"reads is no prompt that {self.mount.role} has encoded since a concept with context mounts was loaded, so where its "
                "trigger stands is unknown; make prompt embeds with adapter.encode(prompt, negative_prompt), or disable_concepts()"
            )
        plan = store.plan_at(store.mounts[1:], torch.from_numpy(np.stack(ids)))
        if not plan.fired:
            return NOTHING
        stacked = tensor.expand(len(plan.mounts), *tensor.shape).reshape(-1, *tensor.shape[1:])
        for fired in plan.fired:
            stacked = fired.apply(stacked)
        return dict(zip(plan.mounts, stacked.split(len(tensor)), strict=True))


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a tensor is written to; inference tensors do not count that, and cannot be used outside inference mode."""
    return (-1 if tensor.is_inference() else tensor._version), torch.is_inference_mode_enabled()
