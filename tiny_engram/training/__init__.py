"""Teaching a concept from pictures: data, cached latents and text states, objective, loop, checkpoints.

Needs the `train` extra (accelerate). `train(pipe, config)` is the one entry; the rest is what it is made of.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_engram.training.config import TrainConfig
    from tiny_engram.training.loop import train
    from tiny_engram.training.trainer import TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]

_HOMES = {"TrainConfig": "config", "TrainResult": "trainer", "train": "loop"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
