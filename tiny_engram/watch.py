"""Watches the denoisers: were the prompts of this run really encoded with the concepts? May import contexts, denoiser_call, encoded, hooks,
mounts and probe."""

import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tiny_engram.contexts import ContextMounts
from tiny_engram.denoiser_call import read_call
from tiny_engram.encoded import count_prompts
from tiny_engram.hooks import CallHook, HookSet, MountError
from tiny_engram.mounts import EncoderMounts
from tiny_engram.probe import prove

__all__ = ["DenoiserWatch"]


class DenoiserWatch(HookSet):
    """Hooks around each denoiser of a pipeline.

    Other features (textual inversion, PEFT, offload cycles) may drop hooks from an encoder, replace it, or bypass it with embeddings made
    elsewhere; each would silently draw without the concepts. So would attention that passes the context mounts by.

    `active` names the concepts that can fire at an encoder's own states; `encoders` maps each role to (attribute name, the pipeline's
    present encoder or None once the pipeline is gone).
    """

    def __init__(
        self,
        family: Any,
        denoisers: Mapping[str, nn.Module],
        mounts: Mapping[str, EncoderMounts],
        contexts: Mapping[str, ContextMounts],
        *,
        owner: Any,
        active: Callable[[], list[str]],
        encoders: Callable[[], Mapping[str, tuple[str, nn.Module | None]]],
    ) -> None:
        self.hooks = [
            hook
            for name, module in denoisers.items()
            for hook in (
                CallHook(module, partial(self._before, name, weakref.ref(module)), owner, pre=True, strict=False),
                CallHook(module, self._after, owner, pre=False, strict=False),
            )
        ]
        self._family = family
        self._contexts = contexts
        self._mounts, self._active, self._encoders = mounts, active, encoders
        self.seconds = 0.0
        self._names: list[str] | None = None
        self.changed()

    def changed(self) -> None:
        """The concepts were changed: embeddings made before do not hold them as they are now."""
        self._prompts = {role: mount.prompts for role, mount in self._mounts.items()}
        self._names = None
        self._counted = False

    def found(self) -> None:
        """A concept was loaded because a prompt that is being encoded calls it: no earlier prompt does."""
        self._names = None

    def _before(self, name: str, module: weakref.ref[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begin = time.perf_counter()
        call = read_call(self._family, name, module(), args, kwargs)
        for contexts in self._contexts.values():
            contexts.begin(call)
        if self._names is None:
            self._names = self._active()
        if self._names or any(mount.store.active_at_denoiser for mount in self._mounts.values()):
            self._check(next(iter(call.embeds.values()), None))
            for role, mount in self._mounts.items():
                if mount.proof:
                    prove(mount, self._contexts[role].consumed(call))
        self.seconds += time.perf_counter() - begin

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for contexts in self._contexts.values():
            contexts.finish()

    def _check(self, states: Any) -> None:
        encoders = self._encoders()
        for role, mount in self._mounts.items():
            attribute, encoder = encoders[role]
            if encoder is not None and encoder is not mount.module:
                raise MountError(
                    f"{attribute} of the pipeline was replaced after attach, so no concept reached it; "
                    "put the encoder back, or attach to the new pipeline and load the concepts there"
                )
            if not mount.attached:
                mount.attach()
                raise MountError(
                    f"another feature removed the hooks of role {role!r}, so this prompt was encoded without its concepts; "
                    "they are back now: run the call again"
                )
        if self._names and not self._counted:
            self._counted = True
            self._count(self._names[:8], states[0] if isinstance(states, tuple) else states)

    def _count(self, names: list[str], states: Any) -> None:
        """Warn if more prompts are drawn than were encoded since the change: a pipeline that is given embeddings encodes the rest alone."""
        rows = states if isinstance(states, list) else [states] if isinstance(states, torch.Tensor) and states.dim() == 3 else []
        drawn = count_prompts(rows) if rows else 1
        encoded = max(mount.prompts - self._prompts[role] for role, mount in self._mounts.items())
        if encoded < drawn:
            some = f"only {encoded} of {drawn} prompts {'was' if encoded == 1 else 'were'}" if encoded else "no prompt was"
            warnings.warn(
                f"concepts {names} are active, but {some} encoded since they were last changed: "
                "prompt_embeds made elsewhere do not hold them; make them with adapter.encode(prompt)",
                stacklevel=2,
            )
