"""Teaching Engram layers of a frozen causal LM from text.

`train_lm(model, tokenizer, config)` teaches a folder of texts and needs the `train` extra (accelerate); `EngramOptimizer(layers)` is for a
loop of one's own, or transformers' Trainer. The rest is what they are made of. May import the core, what training runs share (run_config,
run_setup, checkpoints, interrupts) and tiny_engram.llm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_engram.llm_training.config import LMTrainConfig
    from tiny_engram.llm_training.loop import LMTrainResult, train_lm
    from tiny_engram.llm_training.optimizer import EngramOptimizer
    from tiny_engram.llm_training.row_adam import RowAdam

__all__ = ["EngramOptimizer", "LMTrainConfig", "LMTrainResult", "RowAdam", "train_lm"]

_HOMES = {"EngramOptimizer": "optimizer", "LMTrainConfig": "config", "LMTrainResult": "loop", "RowAdam": "row_adam", "train_lm": "loop"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
