"""What changes with the steps of a training run: masters, their average, the optimiser, the losses; and how a checkpoint brings it back.

May import torch, checkpoints, concept and the parts of training below the loop.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import load_checkpoint, refuse_another_run, tell_other_settings
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.mount_names import GROUPS
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.optimizers import restore_numbers, told_numbers
from tiny_engram.training.role_rows import RoleRows
from tiny_engram.training.rows import ConceptRows

__all__ = ["Run", "changed_settings", "refuse_resume", "resume"]

logger = logging.getLogger(__name__)

# Of fields that checkpoints of earlier versions lack: what they were made with.
OLD_DEFAULTS = {"share": "none", "bands": 1, "attention_rank": 0, "feedforward_rank": 0, "optimizer": "adam"}
# Those that may change on the way; that they did is said.
_TOLD = ("max_train_steps", "learning_rate", "gate_learning_rate", "map_learning_rate", "lr_scheduler", "lr_warmup_steps", "adam_beta2")
_TOLD += ("max_grad_norm", "train_batch_size", "gradient_accumulation_steps", "mixed_precision", "seed", "resolution", "caption_dropout")
_TOLD += ("subject_type", "caption_tag_dropout", "shuffle_tags", "random_flip", "alpha_mask", "unmasked_weight", "recursive")
_TOLD += ("folder_repeats", "buckets", "bucket_steps", "bucket_no_upscale")
_TOLD += ("collages", "snr_gamma", "ema_decay", "adam_beta1", "adam_epsilon", "adam_weight_decay", "row_weight_decay", "lr_num_cycles")
_TOLD += ("lr_power", "lr_min_ratio", "noise_offset", "timestep_sampling", "logit_mean", "logit_std", "mode_scale", "timestep_shift")
_TOLD += ("validation_loss_steps", "validation_loss_samples", "validation_data_dir")
# Of the optimiser's groups what the config says, and not what was learnt on the way.
_SETTINGS = {"lr", "initial_lr", "weight_decay", "eps"}


class Run:
    """State of one run that changes with its steps.

    Attributes:
        average: moving average (EMA) of each parameter, by its name; what is validated and saved.
        step: optimiser steps done. losses: one float for each of them; norms: of their gradients before they were cut, None where unknown.
        measured: (step, validation loss) of each measurement so far.
        best: the averages at the lowest of these, as `average`; empty before the first.
        whole: (tensors, state) as `keep` found them after the last whole step; what a checkpoint holds.
    """

    def __init__(self, module: ConceptRows | RoleRows, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self.module, self.optimizer, self.scaler = module, optimizer, scaler
        self.average = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.step = 0
        self.losses: tuple[float, ...] = ()
        self.norms: tuple[float | None, ...] = ()
        self.measured: tuple[tuple[int, float], ...] = ()
        self.best: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self.keep()

    def follow(self, decay: float) -> None:
        """Move the running average; early steps count more, so that it forgets where it began."""
        decay = min(decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.module.parameters()], 1 - decay)

    def measure(self, loss: float) -> bool:
        """Note a validation loss of this step; is it the lowest so far?"""
        lowest = self.lowest
        self.measured = (*self.measured, (self.step, loss))
        if math.isfinite(loss) and (lowest is None or loss < lowest[1]):
            self.best = {name: value.clone() for name, value in self.average.items()}
            return True
        return False

    @property
    def lowest(self) -> tuple[int, float] | None:
        """(step, validation loss) of the best measurement, the first of equal ones; None before there is one that is a number."""
        return min((each for each in self.measured if math.isfinite(each[1])), key=lambda each: each[1], default=None)

    def settled(self, patience: int | None) -> bool:
        """Were the last `patience` measurements no new best?"""
        if patience is None or not self.measured:
            return False
        lowest = self.lowest
        return sum(1 for step, _ in self.measured if lowest is None or step > lowest[0]) >= patience

    def keep(self) -> None:
        """Remember the present state as that of the last whole step."""
        tensors = {name: value.detach() for name, value in self._moving().items()}
        place, steps = self._spare, [name for name in tensors if name.endswith(".step")]
        if not tensors.keys() <= place.keys():
            place = {name: torch.empty_like(value) for name, value in tensors.items()}
        # Adam keeps its step count on the CPU: apart, each is one call
        for names in ([name for name in tensors if name not in steps], steps):
            if names:
                torch._foreach_copy_([place[name] for name in names], [tensors[name] for name in names])
        state = {"step": self.step, "losses": self.losses, "norms": self.norms, "measured": self.measured}
        state |= {"optimizer": told_numbers(self.module, self.optimizer), "scaler": self.scaler.state_dict() if self.scaler else {}}
        # into what was kept before the last time: an interrupt in between spoils neither
        self._spare, self._kept = self._kept, place
        self.whole: tuple[dict[str, torch.Tensor], dict[str, Any]] = (place | self._bests(), state)

    def back(self) -> None:
        """Return to the last whole step: an interrupt may fall between two lines that belong together."""
        self.restore(*self.whole)

    def concept(self, start: Concept, role: str, recipe: dict[str, Any], values: dict[str, torch.Tensor] | None = None) -> Concept:
        """The averaged values, quantised: what is validated and what is saved; or others, such as `best`."""
        return self.module.concept(start, role, self.average if values is None else values).with_details(recipe=recipe)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of each parameter "master.{name}", "average.{name}", "optimizer.{name}.{moment}", and "best.{name}" where there is a best;
        not copies."""
        return self._moving() | self._bests()

    def _bests(self) -> dict[str, torch.Tensor]:
        """Which are never written to: a better one takes their place."""
        return {f"best.{k}": v for k, v in self.best.items()}

    def _moving(self) -> dict[str, torch.Tensor]:
        tensors = {f"master.{k}": p for k, p in self.module.named_parameters()} | {f"average.{k}": v for k, v in self.average.items()}
        for name, p in self.module.named_parameters():
            tensors |= {f"optimizer.{name}.{k}": v for k, v in self.optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}
        return tensors

    def restore(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Go on from what `whole` held. Raises TinyEngramError for a parameter that is not there, or has another shape."""
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                saved = tensors.get(f"master.{name}")
                average = tensors.get(f"average.{name}")
                if saved is None or average is None or saved.shape != p.shape or average.shape != p.shape:
                    have = "none" if saved is None else list(saved.shape)
                    raise TinyEngramError(f"checkpoint {name}: {have}, expected {list(p.shape)}; resume with what it was made for")
                p.copy_(saved)
                self.average[name].copy_(average)
                prefix = f"optimizer.{name}."
                moments = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
                # Adam keeps its step count on the CPU
                self.optimizer.state[p] = {k: v.clone() if k == "step" else v.to(p.device) for k, v in moments.items()}
        if self.scaler and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        if "optimizer" in state:
            restore_numbers(self.module, self.optimizer, state["optimizer"], _SETTINGS)
        self.step, self.losses = state["step"], tuple(state["losses"])
        # earlier versions kept neither
        self.norms = tuple(state.get("norms", [None] * self.step))
        self.measured = tuple((step, loss) for step, loss in state.get("measured", ()))
        self.best = {name: tensors[f"best.{name}"].to(p.device).clone() for name, p in self.average.items() if f"best.{name}" in tensors}
        self.keep()


def refuse_resume(folder: Path, step: int, before: Mapping[str, Any], config: TrainConfig) -> None:
    """Raises TinyEngramError if a checkpoint of this step, whose config was `before`, taught another trigger, other mounts or other maps,
    began at another class word, or has done more steps than are asked for."""
    now, before = config.to_dict(), {**OLD_DEFAULTS, **before}
    for told in (now, before):
        if not GROUPS.keys() & set(told.get("mounts") or ()):
            told |= {"share": "none", "bands": 1}  # which say nothing of other mounts
    fields = ("trigger", "aliases", "mounts", "class_word", *OLD_DEFAULTS)
    refuse_another_run(folder, step, config.max_train_steps, [(field, before.get(field), now[field]) for field in fields])


def changed_settings(before: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Names of what a run would be taught with that is another now than in `before`, a config as JSON; what that lacks is not compared."""
    now = config.to_dict()
    names = ("trigger", "aliases", "mounts", "class_word", "rho", "context_rho", *OLD_DEFAULTS, *_TOLD, "companions", "collage_pictures")
    changed = [name for name in dict.fromkeys(names) if name in before and before[name] != now[name]]
    folder = before.get("train_data_dir")
    same = not isinstance(folder, str) or Path(folder).resolve() == Path(config.train_data_dir).resolve()
    return changed if same else ["train_data_dir", *changed]


def resume(run: Run, folder: Path, config: TrainConfig) -> None:
    """Take up the run of a checkpoint. Raises TinyEngramError as `refuse_resume` does, or if none is left of its steps for settings that
    are others now."""
    tensors, state = load_checkpoint(folder)
    refuse_resume(folder, state["step"], state["config"], config)
    tell_other_settings(folder, state["step"], {**OLD_DEFAULTS, **state["config"]}, config.to_dict(), _TOLD)
    run.restore(tensors, state)
    logger.info("resumed from %s", folder)
