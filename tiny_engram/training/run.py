"""What changes with the steps of a training run: masters, their average, the optimiser, the losses; and how a checkpoint brings it back.

May import torch, checkpoints, concept and the parts of training below the loop.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import load_checkpoint, refuse_another_run, tell_other_settings
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.mount_names import GROUPS
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.rows import ConceptRows

__all__ = ["Run", "resume"]

logger = logging.getLogger(__name__)

# Of fields that checkpoints of earlier versions lack: what they were made with.
OLD_DEFAULTS = {"share": "none", "bands": 1, "attention_rank": 0, "feedforward_rank": 0}
# Those that may change on the way; that they did is said.
_TOLD = ("max_train_steps", "learning_rate", "gate_learning_rate", "map_learning_rate", "lr_scheduler", "lr_warmup_steps", "adam_beta2")
_TOLD += ("max_grad_norm", "train_batch_size", "gradient_accumulation_steps", "mixed_precision", "seed", "resolution", "caption_dropout")
_TOLD += ("collages", "snr_gamma", "ema_decay")
_TOLD += ("subject_type", "caption_tag_dropout", "shuffle_tags", "random_flip", "alpha_mask", "unmasked_weight", "recursive")
_TOLD += ("folder_repeats", "buckets", "bucket_steps", "bucket_no_upscale")


class Run:
    """State of one run that changes with its steps.

    Attributes:
        average: moving average (EMA) of each parameter, by its name; what is validated and saved.
        step: optimiser steps done. losses: one float for each of them.
        whole: (tensors, state) as `keep` found them after the last whole step; what a checkpoint holds.
    """

    def __init__(self, module: ConceptRows, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self.module, self.optimizer, self.scaler = module, optimizer, scaler
        self.average = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.step = 0
        self.losses: tuple[float, ...] = ()
        self.keep()

    def follow(self, decay: float) -> None:
        """Move the running average; early steps count more, so that it forgets where it began."""
        decay = min(decay, (1 + self.step) / (10 + self.step))
        for name, p in self.module.named_parameters():
            self.average[name].lerp_(p.detach(), 1 - decay)

    def keep(self) -> None:
        """Remember the present state as that of the last whole step."""
        tensors = {k: v.detach().clone() for k, v in self.tensors().items()}
        self.whole = (tensors, {"step": self.step, "losses": self.losses, "scaler": self.scaler.state_dict() if self.scaler else {}})

    def back(self) -> None:
        """Return to the last whole step: an interrupt may fall between two lines that belong together."""
        self.restore(*self.whole)

    def concept(self, start: Concept, role: str, recipe: dict[str, Any]) -> Concept:
        """The averaged values, quantised: what is validated and what is saved."""
        return self.module.concept(start, role, self.average).with_details(recipe=recipe)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of each parameter "master.{name}", "average.{name}" and "optimizer.{name}.{moment}"; not copies."""
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
        self.step, self.losses = state["step"], tuple(state["losses"])
        self.keep()


def resume(run: Run, folder: Path, config: TrainConfig) -> None:
    """Take up the run of a checkpoint. Raises TinyEngramError if it taught another trigger, other mounts or other maps, began at
    another class word, has done more steps than are asked for, or has none left for settings that are others now."""
    tensors, state = load_checkpoint(folder)
    now, before = config.to_dict(), {**OLD_DEFAULTS, **state["config"]}
    for told in (now, before):
        if not GROUPS.keys() & set(told.get("mounts") or ()):
            told |= {"share": "none", "bands": 1}  # which say nothing of other mounts
    fields = ("trigger", "aliases", "mounts", "class_word", *OLD_DEFAULTS)
    refuse_another_run(folder, state["step"], config.max_train_steps, [(field, before.get(field), now[field]) for field in fields])
    tell_other_settings(folder, state["step"], before, now, _TOLD)
    run.restore(tensors, state)
    logger.info("resumed from %s", folder)
