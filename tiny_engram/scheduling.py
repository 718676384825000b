"""The adapter's verbs about schedules: strength that changes over the steps of a run. May import what the adapter may."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.loaded import LoadedConcepts
from tiny_engram.schedule_run import EngramSchedule, ScheduleRun
from tiny_engram.schedules import CONSTANT, Schedule
from tiny_engram.store import checked_strength

__all__ = ["Scheduling"]

END, INPUTS, LEGACY = "callback_on_step_end", "callback_on_step_end_tensor_inputs", "callback"
# What the pipeline itself makes, or repeats, of encoded prompts.
NOT_ENCODED = ("num_images_per_prompt", "num_videos_per_prompt")


class Scheduling(ABC):
    """Part of EngramAdapter."""

    _loaded: LoadedConcepts
    _schedules: ScheduleRun
    family: Any

    @property
    @abstractmethod
    def pipe(self) -> Any:
        """The pipeline."""

    def set_schedule(
        self,
        name: str,
        points: Sequence[tuple[float, float]] | Schedule | None = None,
        *,
        start: float | None = None,
        end: float | None = None,
        interpolation: str = CONSTANT,
    ) -> None:
        """Have a concept's strength change over the steps of a run, which then needs `scheduled` or `step_callback`.

        Args:
            points: (share of the steps that are done, factor of the concept's strength), the first at 0; None, with no start or end,
                removes the schedule.
            start, end: in the place of points: on from this share of the steps, and off from that one.
            interpolation: "constant" up to the next point, or "linear" between points; for points alone.

        Raises:
            TinyEngramError: no such concept, or a schedule that makes no sense; nothing is changed then.
        """
        entry = self._loaded[name]
        if points is not None and (start is not None or end is not None):
            raise TinyEngramError("a schedule was given as points and as start or end, expected one of the two")
        if points is None and interpolation != CONSTANT:
            raise TinyEngramError(
                f"interpolation is {str(interpolation)[:40]!r} without points, expected with some such as [(0.0, 1.0), (1.0, 0.0)]"
            )
        schedule = None
        if points is not None:
            schedule = Schedule.of(points, interpolation)
        elif start is not None or end is not None:
            schedule = Schedule.between(0.0 if start is None else start, 1.0 if end is None else end)
        for factor in schedule.factors if schedule is not None else ():
            checked_strength(entry.strength * factor)
        self._schedules.settle()  # at the first step's strengths, before they change
        entry.schedule = schedule
        self._refresh(name)
        self._schedules.settle()

    def get_schedule(self, name: str) -> Schedule | None:
        """A concept's schedule, or None."""
        return self._loaded[name].schedule

    def step_callback(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        steps: int | None = None,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = None,
        **options: Any,
    ) -> EngramSchedule:
        """The step callback for runs of these prompts: `pipe(prompt, **adapter.step_callback(prompt).options)`.

        Encodes the prompts once for each set of strengths that concepts in them will have.

        Args:
            prompt, negative_prompt: those of the run.
            steps: how many steps will be run, where a schedule is linear; None takes num_inference_steps of the options.
            callback_on_step_end, callback_on_step_end_tensor_inputs: your own, called first. On a pipeline that has only `callback`, one
                for that.
            options: further arguments of the run; what `pipe.encode_prompt` knows of them is given to it.

        Raises:
            TinyEngramError: the pipeline calls no callback, takes no negative prompt, or is to be given other prompts for each encoder;
                steps are needed or make no sense.
        """
        self._check_attached()
        pipe, known = self.pipe, inspect.signature(type(self.pipe).__call__).parameters
        if END not in known and "callback_steps" not in known:
            raise TinyEngramError(
                f"{type(pipe).__name__} calls nothing after its steps, so schedules cannot follow them; set_strength holds for all of them"
            )
        if negative_prompt is not None and "negative_prompt" not in known:
            raise TinyEngramError(f"{type(pipe).__name__} takes no negative_prompt; leave it out")
        self.family.check_options(pipe, options)
        for other in options:
            if other.removeprefix("negative_").startswith("prompt_") and other != "prompt_template" and options[other] is not None:
                raise TinyEngramError(f"{other} is given, but schedules encode one prompt, the same for all encoders; leave it out")
        steps = options.get("num_inference_steps") if steps is None else steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise TinyEngramError(f"steps is {str(steps)[:40]}, expected a whole number of at least 1")
        encoded = {name: value for name, value in options.items() if name not in NOT_ENCODED}
        made = self._schedules.prepare(lambda: self.embeds(prompt, negative_prompt, **encoded), steps, callback_on_step_end)
        if END in known:
            inputs = getattr(callback_on_step_end, "tensor_inputs", callback_on_step_end_tensor_inputs)
            made.options = {END: made, INPUTS: list(inputs or ["latents"])}
        else:
            made.options = {LEGACY: made, "callback_steps": 1}
        return made

    def scheduled(
        self, prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None = None, *, steps: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """All arguments of a run with schedules: `pipe(**adapter.scheduled(prompt, negative_prompt, num_inference_steps=30))`.

        They are the prompts, the options and the step callback; see `step_callback`, which says what may be given and what is raised.
        """
        made = self.step_callback(prompt, negative_prompt, steps=steps, **options)
        own = {name: value for name, value in options.items() if name not in (END, INPUTS)}
        return {**_prompts(prompt, negative_prompt), **own, **made.options}

    @abstractmethod
    def embeds(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        **options: Any,
    ) -> Mapping[str, Any]:
        """Encoded prompts."""

    @abstractmethod
    def _check_attached(self) -> None:
        """Raises TinyEngramError if the adapter was detached."""

    @abstractmethod
    def _refresh(self, *names: str) -> None:
        """Bring the mounts in line with what these concepts' switches say."""


def _prompts(prompt: str | Sequence[str], negative: str | Sequence[str] | None) -> dict[str, Any]:
    """As pipelines take them: a negative prompt of a list is a list as long."""
    if isinstance(prompt, str):
        return {"prompt": prompt} if negative is None else {"prompt": prompt, "negative_prompt": negative}
    texts = list(prompt)
    if negative is None:
        return {"prompt": texts}
    others = [negative] if isinstance(negative, str) else list(negative)
    return {"prompt": texts, "negative_prompt": others * len(texts) if len(others) == 1 else others}
