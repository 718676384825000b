"""The optimisers of a concept's run, and what they remember besides tensors. Packages that not everybody has are imported where they
are used.

May import torch, config and role_rows.
"""

import contextlib
import importlib.util
import io
from typing import Any

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.role_rows import each_role

__all__ = ["make_optimizer", "restore_numbers", "told_numbers"]

_PACKAGES = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}


def make_optimizer(module: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser that the config names, over rows, gates and maps, in this order, each with its rate and its weight decay; `module` is
    a ConceptRows or a RoleRows.

    Raises:
        TinyEngramError: its package is not installed.
    """
    single = config.optimizer == "prodigy"  # which has one rate, that it finds
    gate_rate, roles = config.learning_rate if single else config.gate_learning_rate, each_role(module)
    groups: list[dict[str, Any]] = [
        {"params": [one.rows for one in roles], "lr": config.learning_rate, "weight_decay": config.row_weight_decay},
        {"params": [p for one in roles for p in (one.gain, one.bias)], "lr": gate_rate, "weight_decay": 0.0},
    ]
    if maps := [one.maps for one in roles if one.maps is not None]:
        rate = config.learning_rate if single else config.map_learning_rate
        groups.append({"params": maps, "lr": rate, "weight_decay": config.adam_weight_decay})
    betas = (config.adam_beta1, config.adam_beta2)
    package = _PACKAGES.get(config.optimizer)
    if package is not None and importlib.util.find_spec(package) is None:
        raise TinyEngramError(f"optimizer {config.optimizer!r} needs the package {package}, which is not installed; pip install {package}")
    if config.optimizer == "adamw8bit":
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        return bitsandbytes.optim.AdamW8bit(groups, betas=betas, eps=config.adam_epsilon)
    if config.optimizer == "prodigy":
        import prodigyopt  # pyright: ignore[reportMissingImports]

        with contextlib.redirect_stdout(io.StringIO()):  # it says how it decays
            return prodigyopt.Prodigy(groups, betas=betas, eps=config.adam_epsilon, safeguard_warmup=config.lr_warmup_steps > 0)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, betas=betas, eps=config.adam_epsilon)


def told_numbers(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimiser keeps as plain numbers: of each parameter, by name, and of each group, whose settings are among them."""
    return {
        "parameters": {name: _numbers(optimizer.state.get(p, {})) for name, p in module.named_parameters()},
        "groups": [_numbers(group) for group in optimizer.param_groups],
    }


def restore_numbers(module: torch.nn.Module, optimizer: torch.optim.Optimizer, told: dict[str, Any], settings: set[str]) -> None:
    """Take up what `told_numbers` told; `settings` are those of groups that the config decides and a run may change on its way."""
    for name, p in module.named_parameters():
        if numbers := told["parameters"].get(name):
            optimizer.state.setdefault(p, {}).update(numbers)
    for group, numbers in zip(optimizer.param_groups, told["groups"], strict=True):
        group.update({key: value for key, value in numbers.items() if key not in settings})


def _numbers(told: Any) -> dict[str, int | float]:
    return {key: value for key, value in told.items() if isinstance(value, int | float) and not isinstance(value, bool)}
