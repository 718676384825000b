"""Where in a run the denoiser is, and what that means for concepts with schedules. May import hooks, loaded, mounts, scheduled_rows.

Encoders run before the first step, so prompts are encoded at every strength that a run will need (`EngramSchedule`), and the denoisers'
hooks put the states of the present one in the place of those that the pipeline passes on. What is added inside the denoiser follows the
stores' strengths, which the step callback sets. An encoder is always called at the strengths of the first step.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tiny_engram.config import at_encoder
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import CallHook, HookSet, MountError
from tiny_engram.loaded import LoadedConcepts
from tiny_engram.mounts import EncoderMounts
from tiny_engram.scheduled_rows import Key, ScheduledRows

__all__ = ["EngramSchedule", "ScheduleRun"]


class EngramSchedule:
    """The step callback of a run with schedules, for one list of prompts: `pipe(prompt, **schedule.options)`, as often as wanted.

    Made by `adapter.step_callback`. After each step it tells the adapter how far the run is, and calls the user's own callback.

    Attributes:
        options: what `pipe(...)` takes, by name, so that it calls this one.
        names: concepts with a schedule that fire in the prompts and have rows at an encoder.
    """

    def __init__(self, run: "ScheduleRun", rows: ScheduledRows, names: tuple[str, ...], keys: set[Key], callback: Any) -> None:
        self.options: dict[str, Any] = {}
        self.names, self.rows, self.keys = names, rows, keys
        self.version = run.version
        self._run, self._callback = run, callback

    def __call__(self, *arguments: Any) -> Any:
        """As pipelines call theirs: (pipe, step, timestep, tensors) -> tensors; some have (step, timestep, latents) and no answer."""
        answer = arguments[-1]
        if self._callback is not None:
            answer = self._callback(*arguments)
        step, pipe = (arguments[1], arguments[0]) if len(arguments) == 4 else (arguments[0], None)
        self._run.advance(self, step, pipe)
        return answer


class ScheduleRun(HookSet):
    """Hooks on all denoisers and the ControlNet of a pipeline, in place while a concept has a schedule with more than one factor.

    Args:
        pipe: gives the pipeline, or None once it is gone.
        modules: gives those that read text states, as they are now.
    """

    def __init__(
        self,
        loaded: LoadedConcepts,
        mounts: Mapping[str, EncoderMounts],
        *,
        pipe: Callable[[], Any],
        modules: Callable[[], Iterable[nn.Module]],
        owner: Any,
    ) -> None:
        self.hooks: list[CallHook] = []
        self.version = 0
        self._loaded, self._mounts, self._owner = loaded, mounts, owner
        self._pipe, self._modules = pipe, modules
        self._share = self._encoding = 0.0  # of the steps done; and what encoders are called for
        self._current: EngramSchedule | None = None
        self._timesteps: Any = None
        self._since: set[float] = set()  # timesteps of calls since the last callback
        self._warned = False
        self._heard: dict[str, list[torch.Tensor]] | None = None
        for role, mount in mounts.items():
            mount.on_ids = partial(self._encoder_called, role)

    # -- what changes --------------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Concepts or their strengths were changed: prompts that were encoded before do not hold them as they are now."""
        self.version += 1

    def settle(self) -> None:
        """Bring the hooks in line with the schedules."""
        self._rewind()
        self._apply(0.0)
        wanted = any(self._loaded[name].changes for name in self._loaded)
        modules = [module for module in self._modules() if isinstance(module, nn.Module)] if wanted else []
        if [hook.module for hook in self.hooks] != modules:
            self.detach()
            self.hooks = [CallHook(m, self._before, self._owner, pre=True, strict=False, first=True) for m in modules]
        self._warned = False
        self.attach()

    def _apply(self, share: float) -> None:
        """Strengths in the stores as they are at a share of the steps."""
        if share == self._loaded.share:
            return
        before = {name: self._loaded.strength_now(name) for name in self._loaded if self._loaded[name].changes}
        self._loaded.share = share
        for name, old in before.items():
            new = self._loaded.strength_now(name)
            if new != old:
                for role in self._loaded[name].concept.roles:
                    self._mounts[role].store.set_strength(name, new)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, concepts whose factor is 0 just now are found in prompts."""
        asleep = [name for name in self._loaded.active() if not self._loaded.strength_now(name)]
        places = [(self._mounts[role].store, name) for name in asleep for role in self._loaded[name].concept.roles]
        for store, name in places:
            store.set_strength(name, self._loaded[name].strength)
        try:
            yield
        finally:
            for store, name in places:
                store.set_strength(name, 0.0)

    # -- encoding ------------------------------------------------------------------------------------------------------------

    def _encoder_called(self, role: str, ids: torch.Tensor) -> None:
        self._apply(self._encoding)
        if self._heard is not None:
            self._heard[role].append(ids.detach().reshape(-1, ids.shape[-1]).cpu())

    def prepare(self, encode: Callable[[], Mapping[str, Any]], steps: int | None, callback: Any) -> EngramSchedule:
        """Encode prompts at every strength that their run will need, once each.

        Args:
            encode: gives the embeds of the prompts.
            steps: how many steps are run; needed where a linear schedule matters.
            callback: the user's own, or None.

        Raises:
            TinyEngramError: steps are needed.
        """
        self._heard = {role: [] for role in self._mounts}
        try:
            embeds = encode()
        finally:
            heard, self._heard = self._heard, None
        rows, names = ScheduledRows(embeds), self._firing(heard)
        schedules = {name: schedule for name in names if (schedule := self._loaded[name].schedule) is not None}
        shares = {0.0, *(share for schedule in schedules.values() for share, _ in schedule.points if share < 1.0)}
        linear = [name for name, schedule in schedules.items() if schedule.moves]
        if linear:
            if steps is None:
                raise TinyEngramError(
                    f"the schedule of concept {linear[0]!r} is linear, so its prompts are encoded once for each step: say how many with "
                    "num_inference_steps=..., or with steps=... where fewer of them are run, as in image to image"
                )
            shares = {step / steps for step in range(steps)}
        keys = {self._key(names, 0.0)}
        try:
            for share in sorted(shares):
                key = self._key(names, share)
                if key not in keys:
                    keys.add(key)
                    self._encoding = share
                    rows.add(key, encode())
        finally:
            self._encoding = 0.0
            self._apply(0.0)
        return EngramSchedule(self, rows, names, keys, callback)

    def _firing(self, heard: Mapping[str, list[torch.Tensor]]) -> tuple[str, ...]:
        """Active concepts with a schedule that changes, and with rows at an encoder that was called with their trigger."""
        found: set[str] = set()
        with self.awake():
            for role, calls in heard.items():
                index = self._mounts[role].store.index
                with index.lock:
                    found |= {index.entries[e].name for ids in calls for e in index.match(ids.numpy()).entry.tolist()}
        return tuple(name for name in self._loaded.active() if name in found and self._loaded[name].changes and self._encoded(name))

    def _encoded(self, name: str) -> bool:
        """Has it rows at an encoder?"""
        return any(at_encoder(mount) for place in self._loaded[name].concept.roles.values() for mount in place.mounts)

    def _key(self, names: tuple[str, ...], share: float) -> Key:
        return tuple(self._loaded.strength_at(name, share) for name in names)

    # -- running -------------------------------------------------------------------------------------------------------------

    def _rewind(self) -> None:
        self._current, self._share = None, 0.0
        self._since.clear()

    def advance(self, schedule: EngramSchedule, step: int, pipe: Any) -> None:
        """A step is done.

        Raises:
            TinyEngramError: the prompts were encoded for other concepts, strengths or numbers of steps.
            MountError: the denoiser was not given the states that were encoded.
        """
        followed = self._current is schedule
        unread = schedule.rows.unread() if followed else bool(schedule.names) and pipe is not None and step > 0
        if pipe is not None:
            count = int(pipe.num_timesteps)
        else:  # whole steps of a scheduler, which may call the denoiser twice in each
            scheduler = self._pipe().scheduler
            step, count = (step + 1) * getattr(scheduler, "order", 1) - 1, len(scheduler.timesteps)
        share = min((step + 1) / count, 1.0)
        self._rewind()
        if schedule.version != self.version:
            raise TinyEngramError(
                "concepts, strengths or schedules were changed after this step callback was made; make another with adapter.step_callback"
            )
        if unread:
            raise MountError(
                "the denoiser reads no text states that adapter.step_callback encoded, so no schedule reached it; give that the prompts "
                "and the options of this call (max_sequence_length, ...), and make it again if the denoiser was replaced or compiled since"
            )
        if share < 1.0:
            if self._key(schedule.names, share) not in schedule.keys:
                raise TinyEngramError(f"this run has {count} steps, but its prompts were encoded for another number; give steps={count}")
            self._current, self._share = schedule, share
            schedule.rows.begin_step()
            self.attach()
        self._apply(self._share)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A denoiser or a ControlNet is called."""
        pipe = self._pipe()
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        if pipe is not None and timesteps is not self._timesteps:  # each run makes new ones: an earlier one may have been broken off
            self._rewind()
            self._timesteps = timesteps
        self._apply(self._share)
        if not self._warned and self._current is None:  # reading a timestep waits for the device
            self._warn(pipe, kwargs["timestep"] if "timestep" in kwargs else args[1] if len(args) > 1 else None)
        if self._current is None:
            return None
        given = self._current.rows.swapped((args, kwargs), self._key(self._current.names, self._share))
        return None if given[0] is args and given[1] is kwargs else given

    def _warn(self, pipe: Any, timestep: Any) -> None:
        """Say so if steps go by without the callback."""
        names = [name for name in self._loaded.active() if self._loaded[name].changes]
        if timestep is None or not names:
            return
        self._since.add(float(torch.as_tensor(timestep).max()))
        if len(self._since) > getattr(getattr(pipe, "scheduler", None), "order", 1):
            self._warned = True
            warnings.warn(
                f"concepts {names[:8]} have schedules, but this run does not call their step callback, so they keep the first step's "
                "factor: call pipe(**adapter.scheduled(prompt, negative_prompt), ...)",
                stacklevel=2,
            )
