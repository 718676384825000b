"""What Engram layers in a causal LM are made with; JSON beside their weights, as PEFT keeps it.

Imports the standard library and tiny_engram.{config,errors}.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from tiny_engram.config import HashConfig, JsonConfig, LayerConfig, need_blocks, need_int
from tiny_engram.errors import ConfigError

__all__ = ["EngramConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramConfig(JsonConfig):
    """Engram layers that read all suffix n-grams of a text (Engram, arXiv 2601.07372).

    Args:
        layers: decoder layers in front of whose attention a table is read; they count from 0, and hand out primes in this order.
        max_ngram: n; suffix n-grams of 2..n tokens are hashed.
        heads: independent hashes of each n-gram.
        vocab: rows asked for per (n-gram size, head); the prime taken is at least this.
        head_dim: values of a row, a multiple of 32.
        form: "paper" (biases, short convolution) or "v41" (fused key/value weight, no bias, no convolution).
        branches: gates with a key and norms each over the one value, whose mean is added.
        conv_kernel: taps of the paper's convolution.
        start: which of the two factors is zero at first, so that nothing changes: "rows", as a fresh table has it, or "values", the
            value projection, with random rows. Never both: neither would get a gradient.
        seed: of the hash's multipliers and of what is drawn.
        blocked_ids: raw ids that no n-gram may read, such as an image's placeholder; padding is blocked by the attention mask.
        compressed_vocab, pad_id, hidden, fingerprint, base_model_name_or_path: of the model and the tokenizer; filled in when attached, and
            compared when loaded.
    """

    layers: tuple[int, ...]
    max_ngram: int = 3
    heads: int = 8
    vocab: int = 8192
    head_dim: int = 32
    form: Literal["v41", "paper"] = "paper"
    branches: int = 1
    conv_kernel: int = 4
    start: Literal["rows", "values"] = "rows"
    seed: int = 0
    blocked_ids: tuple[int, ...] = ()
    compressed_vocab: int | None = None
    pad_id: int | None = None
    hidden: int | None = None
    fingerprint: str | None = None
    base_model_name_or_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "blocked_ids"):
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            if not isinstance(value, tuple) or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value):
                raise ConfigError(f"EngramConfig.{name} is {value!r}: expected integers of 0 or more")
            object.__setattr__(self, name, value)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"EngramConfig.layers is {self.layers!r}: expected one or more different layers")
        need_int(self, 2, "max_ngram", "vocab")
        need_int(self, 1, "heads", "branches", "conv_kernel")
        need_int(self, 0, "seed")
        need_blocks(self)
        if self.form not in ("v41", "paper"):
            raise ConfigError(f"EngramConfig.form is {self.form!r}: expected 'v41' or 'paper'")
        if self.start not in ("rows", "values"):
            raise ConfigError(f"EngramConfig.start is {self.start!r}: expected 'rows' or 'values'")

    def completed(self, **found: int | str | None) -> Self:
        """With what the model and its tokenizer say, where the config does not say it already.

        Raises:
            ConfigError: it says something else.
        """
        for name, value in found.items():
            said = getattr(self, name)
            if said is not None and said != value and name != "base_model_name_or_path":
                what = "tokenizer" if name in ("compressed_vocab", "pad_id", "fingerprint") else "model"
                raise ConfigError(
                    f"EngramConfig.{name} is {said!r}, this {what} has {value!r}: expected the {what} that the rows were made for"
                )
        return replace(self, **{name: value for name, value in found.items() if getattr(self, name) is None})

    @property
    def hash_config(self) -> HashConfig:
        """Of all layers. Raises ConfigError before `completed`."""
        if self.compressed_vocab is None or self.pad_id is None:
            raise ConfigError("EngramConfig.compressed_vocab is None: expected the tokenizer's; attach the config to a model first")
        return HashConfig(
            max_ngram=self.max_ngram,
            heads=self.heads,
            vocab=self.vocab,
            seed=self.seed,
            pad_id=self.pad_id,
            compressed_vocab=self.compressed_vocab,
            layer_ids=self.layers,
        )

    def layer_config(self, layer: int) -> LayerConfig:
        """Of one layer. Raises ConfigError before `completed`."""
        if self.hidden is None:
            raise ConfigError("EngramConfig.hidden is None: expected the model's width; attach the config to a model first")
        return LayerConfig(
            hash=self.hash_config,
            layer_id=layer,
            hidden=self.hidden,
            copies=self.branches,
            head_dim=self.head_dim,
            form=self.form,
            conv_kernel=self.conv_kernel,
        )
