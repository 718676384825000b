"""Small language models that families share as text encoders, with seeded random weights."""

from typing import Any

import torch
from transformers import Gemma2Config, Gemma2Model


def decoder_sizes(width: int, layers: int) -> dict[str, Any]:
    """A decoder's sizes. Weights are drawn wider than the published 0.02, so that states hold what attention brings from other tokens."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    # The deeper the model, the less a layer adds: else attention would make all tokens alike.
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "initializer_range": 0.4 / layers**0.5,
        **heads,
    }


def telling(encoder: Any) -> Any:
    """The encoder, its token embeddings scaled to unit variance: states differ from token to token beside what the layers add."""
    with torch.no_grad():
        embeddings = encoder.get_input_embeddings().weight
        embeddings.div_(embeddings.std())
    return encoder


def gemma_2(vocabulary: int, width: int, layers: int = 4) -> Gemma2Model:
    """Gemma 2 with half of its layers on a window of 32 tokens; as many rows as tokens, as published. It scales embeddings by itself."""
    return Gemma2Model(Gemma2Config(vocab_size=vocabulary, sliding_window=32, query_pre_attn_scalar=8, **decoder_sizes(width, layers)))
