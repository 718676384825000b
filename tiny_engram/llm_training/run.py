"""What changes with the steps of a run: masters, optimisers, losses, the position in the data; and how a checkpoint brings it back.

May import torch, the parts of tiny_engram.llm and, of this package, what is below the loop.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiny_engram.checkpoints import load_checkpoint, refuse_another_run, tell_other_settings
from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramLayers

from .config import LMTrainConfig
from .gradients import clip_gradients
from .optimizer import dense_groups
from .row_adam import RowAdam
from .validation import Measured

__all__ = ["Run", "resume"]

logger = logging.getLogger(__name__)

BETA1 = 0.9


class Run:
    """State of one run that changes with its steps. There is no random state: what a step reads follows from `samples` and the seed.

    Attributes:
        tables, dense: parameters by name; tables get sparse gradients.
        step: optimiser steps done. losses: one float for each of them.
        samples: windows read, of all processes: the position in the data.
        measured: what validation found so far.
        written: the step whose checkpoint lies in the run's own folder, the newest of them; None before there is one.
    """

    def __init__(self, engrams: EngramLayers, config: LMTrainConfig, scaler: torch.amp.GradScaler | None) -> None:
        self.config, self.scaler = config, scaler
        self.tables: dict[str, nn.Parameter] = {f"table.{layer}": rows.weight for layer, rows in engrams.learned.items()}
        taken = {id(p) for p in self.tables.values()}
        self.dense = {f"dense.{name}": p for name, p in engrams.engrams.named_parameters() if id(p) not in taken}
        betas = (BETA1, config.adam_beta2)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.AdamW(dense_groups(engrams, config.adam_weight_decay), lr=config.learning_rate, betas=betas),
            RowAdam(self.tables.values(), lr=config.table_rate, betas=betas),
        )
        self.step, self.samples = 0, 0
        self.losses: list[float] = []
        self.measured: list[Measured] = []
        self.written: int | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.dense | self.tables

    def set_rates(self) -> None:
        """The learning rates of the coming step."""
        factor = self.config.rate(self.step)
        for optimizer, rate in zip(self.optimizers, (self.config.learning_rate, self.config.table_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def update(self) -> bool:
        """One optimiser step from the gradients, which are forgotten; False where float16 overflowed, which lowers its scale instead.

        Raises:
            TinyEngramError: the gradients are not finite.
        """
        scaler = self.scaler
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        length = clip_gradients(list(self.parameters.values()), self.config.max_grad_norm)
        finite = bool(length.isfinite())
        if finite:
            for optimizer in self.optimizers:
                optimizer.step()
        elif scaler is None or scaler.get_scale() < 1:
            raise TinyEngramError(f"the gradients of step {self.step + 1} are not finite; {self.way_out()}")
        if scaler is not None:
            scaler.update()
        self.forget_gradients()
        return finite

    def forget_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def way_out(self) -> str:
        """What to do where numbers are no longer finite."""
        lower = "lower --learning_rate or --table_learning_rate, and"
        return f"{lower} start anew" if self.written is None else f"{lower} go on with --resume_from_checkpoint latest"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters by name and "optimizer.{name}.{what}"; not copies."""
        found: dict[str, torch.Tensor] = dict(self.parameters)
        for name, p in self.parameters.items():
            for optimizer in self.optimizers:
                state = optimizer.state.get(p, {})
                found |= {f"optimizer.{name}.{what}": value for what, value in state.items() if isinstance(value, torch.Tensor)}
        return found

    def state(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "step": self.step,
            "losses": self.losses,
            "samples": self.samples,
            "measured": [each.to_dict() for each in self.measured],
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "config": self.config.to_dict(),
        }

    def restore(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Go on from what `tensors` and `state` said. Raises TinyEngramError for a parameter that is not there, or has another shape."""
        table_of = set(map(id, self.tables.values()))
        for name, p in self.parameters.items():
            saved = tensors.get(name)
            if saved is None or saved.shape != p.shape:
                have = "none" if saved is None else list(saved.shape)
                raise TinyEngramError(f"{name}: {have}, expected {list(p.shape)}")
            with torch.no_grad():
                p.copy_(saved)
            prefix = f"optimizer.{name}."
            moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            optimizer = self.optimizers[id(p) in table_of]
            if moments:  # Adam keeps its step count on the CPU
                optimizer.state[p] = {what: value if what == "step" else value.to(p.device) for what, value in moments.items()}
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.losses, self.samples = state["step"], list(state["losses"]), state["samples"]
        self.measured = [Measured(**each) for each in state["measured"]]


# Of these a checkpoint's run and the one that takes it up must say the same: its masters and its place in the data mean nothing else.
_SAME = ("layers", "max_ngram", "heads", "rows", "head_dim", "form", "seed", "block_size")
# These may change on the way; that they did is said.
_TOLD = ("max_train_steps", "learning_rate", "table_learning_rate", "lr_scheduler", "lr_warmup_steps", "adam_beta2", "adam_weight_decay")
_TOLD += ("max_grad_norm", "train_batch_size", "gradient_accumulation_steps", "mixed_precision")
_IN_WORDS = {
    "text": "it was taught from another text, or with another tokenizer; resume with the files of --train_file and --validation_file as "
    "they were, or choose another --output_dir",
    "fingerprint": "it was taught with another tokenizer; resume with the model that it was made for",
}


def resume(run: Run, folder: Path, identity: dict[str, Any]) -> None:
    """Take up the run of a checkpoint.

    Args:
        identity: of the text, the tokenizer and the model; compared with what the checkpoint has.

    Raises:
        TinyEngramError: another model, text or shape of layers, more steps done than are asked for, or none left for other settings.
    """
    tensors, state = load_checkpoint(folder)
    config, before, made_for = run.config.to_dict(), state["config"], state.get("identity", {})
    compared = [(name, before.get(name), config[name]) for name in _SAME]
    if not config["validation_file"]:  # other windows would be held out, of which some were taught
        compared.append(("validation_split_percentage", before.get("validation_split_percentage"), run.config.validation_split_percentage))
    compared += [(name, made_for.get(name), value) for name, value in identity.items() if name not in _IN_WORDS]
    refuse_another_run(folder, state["step"], run.config.max_train_steps, compared)
    for name in ("fingerprint", "text"):
        if made_for.get(name) != identity[name]:
            raise TinyEngramError(f"{folder}: {_IN_WORDS[name]}")
    tell_other_settings(folder, state["step"], before, config, _TOLD)
    try:
        run.restore(tensors, state)
    except (KeyError, TypeError, TinyEngramError) as error:
        raise TinyEngramError(f"{folder}: cannot be taken up ({error}); resume from an older one, or start anew") from error
    logger.info("resumed from %s", folder)
