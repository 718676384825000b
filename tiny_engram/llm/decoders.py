"""Where the parts of a transformers causal LM are: decoder, layers, width. Imports torch and tiny_engram.errors."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tiny_engram.errors import TinyEngramError

__all__ = ["ARCHITECTURES", "Decoder", "UnsupportedModelError", "decoder_of"]

# model_type of the configurations whose decoders take keyword arguments through to their layers; each is tested.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


class UnsupportedModelError(TinyEngramError):
    """A model that Engram layers cannot be put into."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The part of a causal LM between its token embeddings and its head.

    Attributes:
        model: the causal LM, without a PEFT wrapper.
        module: the decoder, which is called once with the ids of a step.
        layers: in running order.
        hidden: width D.
        cache_argument: what the decoder calls its cache, "cache" or in older releases "past_key_values".
    """

    model: nn.Module
    module: nn.Module
    layers: nn.ModuleList
    hidden: int
    cache_argument: str

    @property
    def config(self) -> Any:
        return self.module.config


def decoder_of(model: Any) -> Decoder:
    """The decoder of a causal LM, or of a PEFT model around one.

    Raises:
        UnsupportedModelError: another kind of model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{type(base).__name__} has model type {kind!r}: expected a causal LM of {', '.join(ARCHITECTURES)}; load one with "
            "AutoModelForCausalLM"
        )
    module = getattr(base, getattr(base, "base_model_prefix", "") or "model", None)
    layers = getattr(module, "layers", None)
    if not isinstance(module, nn.Module) or not isinstance(layers, nn.ModuleList) or base.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(base).__name__} has no head: expected a causal LM; load it with AutoModelForCausalLM")
    names = inspect.signature(module.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    return Decoder(base, module, layers, int(config.hidden_size), argument)  # pyright: ignore[reportOptionalMemberAccess]
