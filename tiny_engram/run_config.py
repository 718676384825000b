"""What the configs of training runs have in common: checks, the schedule, JSON. Imports the standard library, config and errors."""

import math
from typing import Any

from tiny_engram.config import JsonConfig
from tiny_engram.errors import ConfigError

__all__ = ["PRECISIONS", "SCHEDULES", "TRACKERS", "RunConfig", "is_number"]

SCHEDULES = ("constant", "constant_with_warmup", "cosine", "cosine_warmup_with_min_lr", "cosine_with_min_lr", "cosine_with_restarts")
SCHEDULES += ("inverse_sqrt", "linear", "polynomial", "warmup_stable_decay")
TRACKERS = ("none", "tensorboard", "wandb")
PRECISIONS = ("no", "fp16", "bf16")
# Of schedules that transformers knows and that cannot be had here: why, and what comes nearest.
_REFUSED_SCHEDULES = {
    "reduce_lr_on_plateau": "; that one follows the loss, and a rate here is a function of the step alone, so that a resumed run goes on "
    "exactly. The nearest is warmup_stable_decay, which holds the rate and lowers it in the last fifth",
}


def is_number(value: Any) -> bool:
    """Finite, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


class RunConfig(JsonConfig):
    """For frozen dataclasses that have these fields, among others, which `_check_run` looks at.

    Every refusal is a ConfigError of one line, "{field} is {value}, expected ...": fields are options of a command, by the same names.
    """

    __slots__ = ()

    train_batch_size: int
    max_train_steps: int
    gradient_accumulation_steps: int
    learning_rate: float
    adam_beta2: float
    lr_scheduler: str
    lr_warmup_steps: int
    max_grad_norm: float
    mixed_precision: str
    seed: int
    validation_steps: int
    checkpointing_steps: int
    checkpoints_total_limit: int | None
    report_to: str
    # of schedules that have them; a config may make them fields
    lr_num_cycles = 1
    lr_power = 1.0
    lr_min_ratio = 0.1

    def rate(self, step: int) -> float:
        """Factor of the learning rates at a step, counted from 0. A function of the step alone, so that a resume goes on exactly.

        Names are those of transformers and diffusers. Everything that falls does so from the first step on, also under the warm-up;
        "cosine_warmup_with_min_lr" alone begins to fall behind it, and reaches its least rate at the last step.
        """
        warm = min(1.0, (step + 1) / max(1, self.lr_warmup_steps))
        left = max(0.0, 1 - step / self.max_train_steps)
        match self.lr_scheduler:
            case "cosine":
                return warm * 0.5 * (1 - math.cos(math.pi * left))
            case "linear":
                return warm * left
            case "cosine_with_restarts":
                return warm * 0.5 * (1 + math.cos(math.pi * ((1 - left) * self.lr_num_cycles % 1.0)))
            case "cosine_with_min_lr":
                return warm * self._above_least(0.5 * (1 - math.cos(math.pi * left)))
            case "cosine_warmup_with_min_lr":
                done = (step + 1 - self.lr_warmup_steps) / max(1, self.max_train_steps - self.lr_warmup_steps)
                return warm * self._above_least(0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done)))))
            case "polynomial":
                return warm * left**self.lr_power
            case "inverse_sqrt":
                whole = max(1, self.lr_warmup_steps)
                return warm * min(1.0, math.sqrt(whole / (step + 1)))
            case "warmup_stable_decay":
                return warm * min(1.0, left / 0.2)  # the last fifth
        return warm

    def _above_least(self, share: float) -> float:
        return self.lr_min_ratio + (1 - self.lr_min_ratio) * share

    @property
    def trackers(self) -> tuple[str, ...]:
        """Of `report_to`; none for "none"."""
        return tuple(name for name in _split(self.report_to) if name != "none")

    def _check(self, ok: bool, field: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{field} is {getattr(self, field)!r}, expected {expected}")

    def _check_whole(self, low: int, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            self._check(isinstance(value, int) and not isinstance(value, bool) and value >= low, field, f"a whole number from {low}")

    def _check_above_0(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            self._check(is_number(value) and value > 0, field, "a number above 0")

    def _check_below_1(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            self._check(is_number(value) and 0 <= value < 1, field, "a share from 0 to below 1")

    def _check_tuples(self, kind: type, *fields: str) -> None:
        """Of values of one type; lists, which JSON makes of tuples, become tuples again."""
        for field in fields:
            value = getattr(self, field)
            value = tuple(value) if isinstance(value, list) else value
            fits = isinstance(value, tuple) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)
            self._check(fits, field, f"a tuple of {kind.__name__}")
            object.__setattr__(self, field, value)

    def _check_run(self) -> None:
        """The fields above."""
        self._check_whole(1, "train_batch_size", "max_train_steps", "gradient_accumulation_steps")
        self._check_whole(0, "validation_steps", "checkpointing_steps", "lr_warmup_steps", "seed")
        if self.checkpoints_total_limit is not None:
            self._check_whole(1, "checkpoints_total_limit")
        self._check_above_0("learning_rate", "max_grad_norm")
        self._check_below_1("adam_beta2", "lr_min_ratio")
        known, why = self.lr_scheduler in SCHEDULES, _REFUSED_SCHEDULES.get(str(self.lr_scheduler), "")
        self._check(known, "lr_scheduler", f"one of {', '.join(SCHEDULES)}{why}")
        self._check(self.mixed_precision in PRECISIONS, "mixed_precision", "no, fp16 or bf16")
        told = self.report_to
        if isinstance(told, list | tuple) and all(isinstance(name, str) for name in told):
            object.__setattr__(self, "report_to", ",".join(told))
        named = _split(self.report_to) if isinstance(self.report_to, str) else []
        known = bool(named) and set(named) <= set(TRACKERS) and len(set(named)) == len(named)
        self._check(known and ("none" not in named or len(named) == 1), "report_to", "'none', or one or more of tensorboard, wandb")
