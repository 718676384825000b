"""How a training run is set up: Accelerate, what trackers are told, and a base that stays as it is.

Imports torch, accelerate, run_config and errors.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from tiny_engram.errors import TinyEngramError
from tiny_engram.run_config import RunConfig

__all__ = ["accelerator_for", "close_trackers", "frozen", "log_sheet", "recomputed", "start_trackers", "tracked_values"]


def accelerator_for(config: RunConfig, output: Path, **options: Any) -> Accelerator:
    """An Accelerator with the config's precision and trackers, which write below `output`; `options` are Accelerator's own.

    Raises:
        TinyEngramError: this machine does not have the precision, or a tracker's package is not installed.
    """
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise TinyEngramError(f"report_to {name!r} needs the package {name}, which is not installed; pip install {name}, or pass none")
    try:
        return Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=list(config.trackers) or None,
            project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "logs")),
            **options,
        )
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise TinyEngramError(f"mixed_precision {config.mixed_precision!r} cannot be used here ({reason})") from error


def tracked_values(config: RunConfig) -> dict[str, Any]:
    """Trackers take numbers, strings and bools only."""
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in config.to_dict().items()}


def start_trackers(accelerator: Accelerator, config: RunConfig, output: Path) -> None:
    """Of the main process; all that they write lies below `output`. Raises TinyEngramError for one that does not start."""
    if not accelerator.is_main_process or not config.trackers:
        return
    beside = {"wandb": {"dir": str(output / "logs")}}  # which else writes where the command was called
    try:
        accelerator.init_trackers("tiny-engram", config=tracked_values(config), init_kwargs=beside)
    except Exception as error:  # of a service, of its settings, of the disk
        way = "log in to wandb or set WANDB_MODE=offline, or " if "wandb" in config.trackers else ""
        raise TinyEngramError(
            f"report_to {config.report_to!r}: a tracker cannot start ({' '.join(str(error).split())[:200]}); {way}pass --report_to none"
        ) from error


def log_sheet(accelerator: Accelerator, sheet: Any, step: int) -> None:
    """Give a picture, uint8 `[h, w, 3]`, to the trackers, each in the way that it takes one."""
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_images({"validation": [sheet]}, step=step)
        else:
            tracker.log_images({"validation": sheet[None]}, step=step, dataformats="NHWC")


def close_trackers(accelerator: Accelerator) -> None:
    """Accelerate's own end of a training would also end the group of its processes, which other runs still need."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Modules in eval mode and without gradients; every flag is put back afterwards."""
    flags = [(p, p.requires_grad) for m in modules for p in m.parameters()]
    modes = [(child, child.training) for m in modules for child in m.modules()]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        for m in modules:
            m.eval()
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)
        for child, mode in modes:
            child.training = mode


@contextmanager
def recomputed(denoiser: Any) -> Iterator[None]:
    """A denoiser of diffusers that computes its blocks again in the backward pass rather than keep what that needs; put back afterwards.

    Raises:
        TinyEngramError: its class cannot.
    """
    if not getattr(denoiser, "_supports_gradient_checkpointing", False):
        raise TinyEngramError(
            f"gradient_checkpointing is True, but {type(denoiser).__name__} cannot compute its blocks again; leave it out, or lower "
            "train_batch_size and raise gradient_accumulation_steps"
        )
    flags = [(module, module.gradient_checkpointing) for module in denoiser.modules() if hasattr(module, "gradient_checkpointing")]
    try:
        denoiser.enable_gradient_checkpointing()
        yield
    finally:
        for module, flag in flags:
            module.gradient_checkpointing = flag
