"""Engram in a frozen causal LM, over the same hasher, table, kernels and layer as concepts in pictures."""

from collections.abc import Mapping
from typing import Any, overload

from tiny_engram.errors import ConfigError
from tiny_engram.table.prefetch import Rows

from .config import EngramConfig
from .decoders import ARCHITECTURES, UnsupportedModelError
from .engram_layers import EngramLayers
from .fact_config import FactsConfig, TeachConfig
from .fact_spelling import Fact
from .facts import FactReport, Facts, FiredFact, HeldFact

__all__ = [
    "ARCHITECTURES",
    "EngramConfig",
    "EngramLayers",
    "Fact",
    "FactReport",
    "Facts",
    "FactsConfig",
    "FiredFact",
    "HeldFact",
    "TeachConfig",
    "UnsupportedModelError",
    "attach",
]


@overload
def attach(model: Any, config: EngramConfig, tokenizer: Any, *, tables: Mapping[int, Rows] | None = None) -> EngramLayers: ...
@overload
def attach(model: Any, config: FactsConfig, tokenizer: Any) -> Facts: ...
def attach(model: Any, config: Any, tokenizer: Any, **options: Any) -> Any:
    """Put Engram into a causal LM, whose bits stay as they are until it has learned something.

    No weight of the model changes, and no flag: whether its own parameters learn is its owner's to say (`model.requires_grad_(False)`).

    Args:
        model: a transformers causal LM, or a PEFT model around one.
        config: an EngramConfig reads all n-grams of a text; a FactsConfig reads rows where a registered trigger ends.
        tokenizer: the model's, with a fast backend.
        tables: of an EngramConfig: rows that are there already, see `EngramLayers.attach`.

    Raises:
        UnsupportedModelError: the model has no place for it.
        TinyEngramError: a tokenizer without a fast backend, or a config made for another model or tokenizer.
    """
    kinds = {EngramConfig: EngramLayers, FactsConfig: Facts}
    if type(config) not in kinds:
        raise ConfigError(f"config is {type(config).__name__}: expected an EngramConfig or a FactsConfig")
    return kinds[type(config)].attach(model, config, tokenizer, **options)
