"""Teaching a concept from pictures: data, cached latents and text states, objective, loop, checkpoints.

Needs the `train` extra (accelerate). `train(pipe, config)` teaches one concept, `train_concepts(pipe, configs)` many; the
rest is what they are made of.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_engram.training.config import TrainConfig
    from tiny_engram.training.loop import train
    from tiny_engram.training.many import train_concepts
    from tiny_engram.training.trainer import TrainResult

__all__ = ["TrainConfig", "TrainResult", "train", "train_concepts"]

_HOMES = {"TrainConfig": "config", "TrainResult": "trainer", "train": "loop", "train_concepts": "many"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
