"""How facts are addressed and added, and how they are taught. Imports the standard library and tiny_engram.config and errors."""

from dataclasses import dataclass, replace
from typing import Self

from tiny_engram.config import ConceptConfig, HashConfig, JsonConfig, need_blocks, need_int, need_positive
from tiny_engram.errors import ConfigError

__all__ = ["FactsConfig", "TeachConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactsConfig(JsonConfig):
    """Registered triggers alone read rows, each at its last token.

    Args:
        layers: decoder layers in front of which a fact's rows are added; they count from 0. None takes one at four fifteenths of the depth.
        max_ngram: n of the suffix n-grams whose hashes are the rows' addresses.
        head_dim: values per row, a multiple of 32.
        vocab: addresses per (n-gram size, head); virtual, so a large space costs nothing.
        rho: bound of what is added, as a share of the state's own length; the gate halves it at the start.
        basis_seed: of the fixed key and value bases.
        hidden, depth, compressed_vocab, pad_id, fingerprint, base_model_name_or_path: of the model and the tokenizer; filled in when
            attached, and compared when loaded.
    """

    layers: tuple[int, ...] | None = None
    max_ngram: int = 3
    head_dim: int = 32
    vocab: int = 2**31
    rho: float = 2.5
    basis_seed: int = 0
    hidden: int | None = None
    depth: int | None = None
    compressed_vocab: int | None = None
    pad_id: int | None = None
    fingerprint: str | None = None
    base_model_name_or_path: str | None = None

    def __post_init__(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, list) else self.layers
        if layers is not None:
            whole = isinstance(layers, tuple) and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in layers)
            if not whole or not layers or sorted(set(layers)) != list(layers):
                raise ConfigError(f"FactsConfig.layers is {layers!r}: expected one or more layers, 0 or more, ascending")
        object.__setattr__(self, "layers", layers)
        need_int(self, 2, "max_ngram", "vocab")
        need_blocks(self)
        need_positive(self, "rho")
        need_int(self, 0, "basis_seed")

    def completed(self, *, depth: int, **found: int | str | None) -> Self:
        """With what the model and its tokenizer say, where the config does not say it already.

        Raises:
            ConfigError: it says something else.
        """
        for name, value in {"depth": depth, **found}.items():
            said = getattr(self, name)
            if said is not None and said != value and name != "base_model_name_or_path":
                what = "tokenizer" if name in ("compressed_vocab", "pad_id", "fingerprint") else "model"
                raise ConfigError(
                    f"the facts were made for {name} {said!r}, this {what} has {value!r}: expected the {what} that they were taught to"
                )
        layers = (depth * 4 // 15,) if self.layers is None else self.layers
        if layers[-1] >= depth:
            raise ConfigError(f"FactsConfig.layers is {layers!r}: expected 0 to {depth - 1}, of this model")
        lacking = {name: value for name, value in {"depth": depth, **found}.items() if getattr(self, name) is None}
        return replace(self, layers=layers, **lacking)

    @property
    def columns(self) -> int:
        """Rows that a fact has at one layer. Raises ConfigError before `completed`."""
        return self.hash_config.columns

    @property
    def hash_config(self) -> HashConfig:
        """Of all layers, by the rule of concepts. Raises ConfigError before `completed`."""
        if self.hidden is None or self.compressed_vocab is None or self.pad_id is None or self.layers is None:
            raise ConfigError("FactsConfig.hidden is None: expected the model's width; attach the config to a model first")
        shape = ConceptConfig(max_ngram=self.max_ngram, head_dim=self.head_dim, vocab=self.vocab)
        return shape.hash_config(width=self.hidden, compressed_vocab=self.compressed_vocab, pad_id=self.pad_id, mounts=len(self.layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class TeachConfig(JsonConfig):
    """How rows are found; the defaults were chosen on SmolLM2-135M.

    Args:
        steps: most that a fact gets.
        learning_rate: of the float32 masters (AdamW, no weight decay).
        margin: a fact is done once every token of its answer leads all others by this, in nats of its logit, in every one of its texts.
        calm: weight of the divergence from the base model behind the answer, so that the text goes on as it would have.
        calm_tokens: how many tokens behind the answer that looks at.
        end: what is taught behind an answer that does not end in punctuation.
        contexts: texts in front of the prompt that each fact is taught in, too.
        forms: also teach it in capitals, as a question, and as a question in the tokenizer's chat template, where it has one.
        batch: texts taught at a time; None takes 48 on a CPU and 512 on a device.
    """

    steps: int = 120
    learning_rate: float = 0.01
    margin: float = 1.0
    calm: float = 0.25
    calm_tokens: int = 4
    end: str = "."
    contexts: tuple[str, ...] = ("", "Yesterday I read a whole page about this. ")
    forms: bool = True
    batch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.contexts, list):
            object.__setattr__(self, "contexts", tuple(self.contexts))
        if not isinstance(self.contexts, tuple) or not self.contexts or not all(isinstance(text, str) for text in self.contexts):
            raise ConfigError(f"TeachConfig.contexts is {self.contexts!r}: expected one or more texts, such as ''")
        need_int(self, 1, "steps")
        need_int(self, 0, "calm_tokens")
        if self.batch is not None:
            need_int(self, 1, "batch")
        need_positive(self, "learning_rate")
        for name in ("margin", "calm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"TeachConfig.{name} is {value!r}: expected 0 or more")
        if not isinstance(self.forms, bool):
            raise ConfigError(f"TeachConfig.forms is {self.forms!r}: expected True or False")
        if not isinstance(self.end, str):
            raise ConfigError(f"TeachConfig.end is {self.end!r}: expected text, such as '.', or '' for none")
