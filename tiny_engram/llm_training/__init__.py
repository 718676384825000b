"""Teaching Engram layers of a frozen causal LM from text.

Needs the `train` extra (accelerate). `train_lm(model, tokenizer, config)` is the one entry; the rest is what it is made of. May import
the core, what training runs share (run_config, run_setup, checkpoints) and tiny_engram.llm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_engram.llm_training.config import LMTrainConfig
    from tiny_engram.llm_training.loop import LMTrainResult, train_lm

__all__ = ["LMTrainConfig", "LMTrainResult", "train_lm"]

_HOMES = {"LMTrainConfig": "config", "LMTrainResult": "loop", "train_lm": "loop"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
