"""What a DeepSeek-V4.1 checkpoint's config.json says about Engram. Imports the core (config, hashing, tokenizer)."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from tiny_engram.config import BLOCK, V41_EPS, HashConfig, JsonConfig, LayerConfig, need_blocks, need_int, need_positive
from tiny_engram.errors import ConfigError, TokenizerError
from tiny_engram.hashing import NgramHasher
from tiny_engram.tokenizer import CompressedTokenizer

__all__ = ["DeepSeekConfig"]

_MOST = 400  # characters of what a file says, in a message
# The names in config.json's `text_config`; all are needed, since a guess would read other rows without a word.
_KEYS = {
    "layers": "engram_layer_ids",
    "rows": "engram_num_embeddings",
    "max_ngram": "engram_max_ngram_size",
    "heads": "engram_n_heads",
    "vocab": "engram_vocab_size",
    "head_dim": "engram_head_dim",
    "pad_id": "engram_pad_token_id",
    "compressed_vocab": "engram_compressed_vocab_size",
    "hidden": "hidden_size",
    "copies": "hc_mult",
    "eps": "rms_norm_eps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekConfig(JsonConfig):
    """What config.json says about Engram; the defaults are DeepSeek-V4.1-Flash's.

    Args:
        layers: decoder layers with Engram; they hand out primes in this order.
        rows: of each layer's table, the sum of its primes; None takes what the hash asks for.
        max_ngram: n; suffix n-grams of 2..n tokens are hashed.
        heads: independent hashes of each n-gram.
        vocab: rows asked for per (n-gram size, head).
        head_dim: values of a row.
        pad_id: RAW id of the pad token; its canonical id stands where an n-gram may not look.
        compressed_vocab: number of canonical ids, which enters every multiplier.
        hidden: width D. copies: hyper-connection copies of the hidden state. eps: of the norms.
        image_id: raw id of an image's placeholder, which no n-gram may read; None where there is none.
    """

    layers: tuple[int, ...] = (1, 14)
    rows: tuple[int, ...] | None = None
    max_ngram: int = 4
    heads: int = 8
    vocab: int = 16_000_000
    head_dim: int = 256
    pad_id: int = 2
    compressed_vocab: int = 99_092
    hidden: int = 5120
    copies: int = 4
    eps: float = V41_EPS
    image_id: int | None = 129_264

    def __post_init__(self) -> None:
        for name in ("layers", "rows"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        need_int(self, 0, "pad_id", *(["image_id"] if self.image_id is not None else []))
        need_int(self, 1, "hidden", "copies")
        need_blocks(self)
        need_positive(self, "eps")
        hashing = self.hash_config(0)  # refuses what is wrong with the others
        found = tuple(NgramHasher(hashing, layer).rows_total for layer in self.layers)
        if self.rows is not None and self.rows != found:
            raise ConfigError(
                f"DeepSeekConfig.rows is {self.rows!r}: expected {found}, the sums of the primes of layers {list(self.layers)}"
            )

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Self:
        """Of a checkpoint's config.json.

        Raises:
            ConfigError: it cannot be read, says nothing about Engram, or something that cannot be.
        """
        try:
            said = json.loads(Path(path).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); expected the config.json of a DeepSeek-V4.1 checkpoint") from error
        text = said.get("text_config", said) if isinstance(said, dict) else None
        if not isinstance(text, dict) or "engram_layer_ids" not in text:
            raise ConfigError(f"{path}: has no engram_layer_ids; expected the config.json of a DeepSeek-V4.1 checkpoint")
        lacking = [key for key in _KEYS.values() if key not in text]
        if lacking:
            raise ConfigError(f"{path}: lacks {', '.join(lacking)}; expected the config.json of a DeepSeek-V4.1 checkpoint")
        quantized = said.get("quantization_config")
        block = quantized.get("weight_block_size", [BLOCK, BLOCK]) if isinstance(quantized, dict) else [BLOCK, BLOCK]
        if block != [BLOCK, BLOCK]:
            raise ConfigError(f"{path}: weight_block_size is {block!r}, expected [{BLOCK}, {BLOCK}], as V4.1's weights have")
        try:
            return cls(**{name: text[key] for name, key in _KEYS.items()}, image_id=said.get("image_token_id", text.get("image_token_id")))
        except ConfigError as error:
            raise ConfigError(f"{path}: {str(error)[:_MOST]}") from error

    def hash_config(self, pad_id: int) -> HashConfig:
        """Of all layers; pad_id is the CANONICAL id of the pad token, see `CompressedTokenizer.pad_id`."""
        return HashConfig(
            max_ngram=self.max_ngram,
            heads=self.heads,
            vocab=self.vocab,
            pad_id=pad_id,
            compressed_vocab=self.compressed_vocab,
            layer_ids=self.layers,
        )

    def layer_config(self, layer: int, pad_id: int) -> LayerConfig:
        """Of one layer, with the canonical pad id."""
        return LayerConfig(
            hash=self.hash_config(pad_id), layer_id=layer, hidden=self.hidden, copies=self.copies, head_dim=self.head_dim, eps=self.eps
        )

    def tokenizer(self, tokenizer: Any) -> CompressedTokenizer:
        """The canonical ids of a tokenizer (fast, a tokenizers.Tokenizer, or compressed already), which must be this checkpoint's.

        Raises:
            TokenizerError: no Rust backend, or another number of canonical ids: every row would be another one.
        """
        if not isinstance(tokenizer, CompressedTokenizer):
            return CompressedTokenizer(tokenizer, expected_size=self.compressed_vocab, pad_id=self.pad_id)
        pads = self.pad_id < len(tokenizer.canonical) and tokenizer.pad_id == int(tokenizer.canonical[self.pad_id])
        if tokenizer.size != self.compressed_vocab or not pads:
            raise TokenizerError(
                f"the tokenizer has {tokenizer.size} canonical ids and pads with canonical id {tokenizer.pad_id}: expected "
                f"{self.compressed_vocab} ids, and that of raw id {self.pad_id}; use the checkpoint's own tokenizer"
            )
        return tokenizer
