"""Engram in a frozen causal LM, over the same hasher, table, kernels and layer as concepts in pictures."""

from .config import EngramConfig
from .decoders import ARCHITECTURES, UnsupportedModelError
from .engram_layers import EngramLayers

__all__ = ["ARCHITECTURES", "EngramConfig", "EngramLayers", "UnsupportedModelError"]
