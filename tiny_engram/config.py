"""Frozen configurations with a JSON round trip. Imports the standard library and tiny_engram.errors only."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from tiny_engram.errors import ConfigError

FORMAT_VERSION = 3  # of the newest files; those that an older reader understands say 1 or 2
BLOCK = 32  # values under one e8m0 scale, as in kernels.block_quant
SPAN = "span"  # the mount on an encoder's last hidden state
INPUT = "input"  # the mount on an encoder's token embeddings
POOLED = "pooled"  # the mount on an encoder's pooled vector, where that is all that is used of it
DEEP = "deep"  # "deep.{i}" are the mounts on what an encoder's i-th layer reads
ENCODER_MOUNTS = (INPUT, SPAN)  # those that are local, in the order in which a prompt meets them
SHARES = ("none", "block")  # which cross-attentions have context rows in common
MOST_BANDS = 4
MOST_VALUES = 65_536  # of all rows of a position: any file may ask for more, which takes minutes to address or to spread
MOST_COLUMNS = 128
PAPER_EPS = 1.1920928955078125e-07  # torch's default eps of RMSNorm in float32
V41_EPS = 1e-20


def at_encoder(mount: str) -> bool:
    """Is a mount at an encoder? All others are context mounts."""
    return mount in (SPAN, INPUT, POOLED) or mount.partition(".")[0] == DEEP


def need_int(config: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: expected an integer of {low} or more")


def need_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: expected a finite number above 0")


def need_blocks(config: Any) -> None:
    need_int(config, 1, "head_dim")
    if config.head_dim % BLOCK:
        raise ConfigError(f"{type(config).__name__}.head_dim is {config.head_dim}: expected a multiple of {BLOCK}, the values of one scale")


class JsonConfig:
    """``to_dict`` and a strict ``from_dict``; subclasses are dataclasses whose values are JSON types, tuples or configs."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; tuples become lists, nested configs dicts."""
        out: dict[str, Any] = {}
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            out[field.name] = value.to_dict() if isinstance(value, JsonConfig) else list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The config that ``to_dict`` described.

        Raises:
            ConfigError: not a dict, an unknown or missing field, or a value that makes no sense.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"{cls.__name__} was given {type(data).__name__}: expected a dict of its fields")
        known = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
        unknown = sorted(str(name) for name in data if name not in known)
        if unknown:
            raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}: known are {', '.join(known)}")
        try:
            return cls(**data)
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class HashConfig(JsonConfig):
    """Everything that the hash of one model (or one encoder's mounts) depends on.

    Args:
        max_ngram: n, the largest suffix n-gram; sizes 2..n are hashed.
        heads: independent hashes of each n-gram.
        vocab: rows asked for per (n-gram size, head); the prime taken is at least this.
        seed: of the multipliers.
        pad_id: canonical id of the pad token.
        compressed_vocab: number of canonical ids; it enters every multiplier.
        layer_ids: in the order in which primes are handed out; a concept's mounts count 0, 1, ...
    """

    max_ngram: int
    heads: int
    vocab: int
    seed: int = 0
    pad_id: int
    compressed_vocab: int
    layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        need_int(self, 2, "max_ngram", "vocab")
        need_int(self, 1, "heads", "compressed_vocab")
        need_int(self, 0, "seed", "pad_id")
        if self.pad_id >= self.compressed_vocab:
            raise ConfigError(f"HashConfig.pad_id is {self.pad_id}: expected below compressed_vocab {self.compressed_vocab}")
        if isinstance(self.layer_ids, list):
            object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        layers = self.layer_ids
        good = isinstance(layers, tuple) and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in layers)
        if not good or not layers or len(set(layers)) != len(layers):
            raise ConfigError(f"HashConfig.layer_ids is {layers!r}: expected one or more different integers of 0 or more")
        if self.columns * len(layers) * self.vocab >= 1 << 62:
            raise ConfigError(f"HashConfig.vocab is {self.vocab}: row ids would not fit 63 bits; lower vocab or heads")

    @property
    def columns(self) -> int:
        """Rows read per position, ``(max_ngram - 1) * heads``."""
        return (self.max_ngram - 1) * self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig(JsonConfig):
    """One Engram layer of a causal LM.

    Args:
        hash: of the whole model.
        layer_id: one of ``hash.layer_ids``.
        hidden: model width D.
        copies: hyper-connection copies of the hidden state (1 without hyper-connections).
        head_dim: values per table row, a multiple of 32.
        form: "v41" (fused key/value weight, no bias, no convolution) or "paper" (biases, separate norms, convolution).
        eps: of the norms; None takes the form's own (1e-20, or torch's RMSNorm default).
        conv_kernel: taps of the paper's short convolution; its dilation is ``hash.max_ngram``.
    """

    hash: HashConfig
    layer_id: int
    hidden: int
    copies: int = 4
    head_dim: int = 256
    form: Literal["v41", "paper"] = "v41"
    eps: float | None = None
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.hash, dict):
            object.__setattr__(self, "hash", HashConfig.from_dict(self.hash))
        if not isinstance(self.hash, HashConfig):
            raise ConfigError(f"LayerConfig.hash is {type(self.hash).__name__}: expected a HashConfig")
        need_int(self, 1, "hidden", "copies", "conv_kernel")
        need_blocks(self)
        if self.layer_id not in self.hash.layer_ids:
            raise ConfigError(f"LayerConfig.layer_id is {self.layer_id!r}: expected one of {list(self.hash.layer_ids)}")
        if self.form not in ("v41", "paper"):
            raise ConfigError(f"LayerConfig.form is {self.form!r}: expected 'v41' or 'paper'")
        if self.eps is None:
            object.__setattr__(self, "eps", V41_EPS if self.form == "v41" else PAPER_EPS)
        need_positive(self, "eps")

    @property
    def row_width(self) -> int:
        """Values read per position, ``columns * head_dim``."""
        return self.hash.columns * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig(JsonConfig):
    """How concepts are addressed and added; every width-dependent number follows from the encoder.

    Args:
        max_ngram: n of the suffix n-grams inside a span.
        heads: hashes per n-gram; None takes just enough that the rows cover the encoder's width.
        head_dim: values per row, a multiple of 32.
        vocab: addresses per (n-gram size, head); virtual, so a large space costs nothing.
        rho: bound of the residual, as a share of the span's mean norm; the gate halves it at the start. Larger ones bind
            faster and wear down what stands beside the trigger (4 already spoils a companion's shape on the embedded base).
        basis_seed: of the fixed key and value bases.
        mounts: where rows are added: names of mounts, or the groups "context", "key" and "value" of `mount_names`.
        context_rho: rho of the context mounts; None takes `rho`.
        share: what the groups mean: "none", rows of its own for each cross-attention; "block", one set for all of a block.
        bands: shares of the scheduler's timesteps that have context rows of their own, 1 to 4; for the groups alone, as `share`.
        attention_rank: of the maps at the cross-attentions' outputs; 0 for none.
        feedforward_rank: of the maps at the feed-forward layers behind them; 0 for none.
    """

    max_ngram: int = 3
    heads: int | None = None
    head_dim: int = 32
    vocab: int = 2**31
    rho: float = 2.5
    basis_seed: int = 0
    mounts: tuple[str, ...] = (SPAN,)
    context_rho: float | None = None
    share: Literal["none", "block"] = "none"
    bands: int = 1
    attention_rank: int = 0
    feedforward_rank: int = 0

    def __post_init__(self) -> None:
        need_int(self, 2, "max_ngram", "vocab")
        if self.heads is not None:
            need_int(self, 1, "heads")
        need_blocks(self)
        need_positive(self, "rho")
        need_int(self, 0, "basis_seed")
        if isinstance(self.mounts, list):
            object.__setattr__(self, "mounts", tuple(self.mounts))
        if not isinstance(self.mounts, tuple) or not self.mounts or not all(isinstance(m, str) and m for m in self.mounts):
            raise ConfigError(f"ConceptConfig.mounts is {self.mounts!r}: expected one or more names such as 'span' or 'context'")
        if self.context_rho is not None:
            need_positive(self, "context_rho")
        if self.share not in SHARES:
            raise ConfigError(f"ConceptConfig.share is {self.share!r}: expected {' or '.join(map(repr, SHARES))}")
        need_int(self, 1, "bands")
        if self.bands > MOST_BANDS:
            raise ConfigError(f"ConceptConfig.bands is {self.bands}: expected 1 to {MOST_BANDS}")
        need_int(self, 0, "attention_rank", "feedforward_rank")

    def rho_at(self, mount: str) -> float:
        """Bound of the residual at one mount."""
        return self.rho if at_encoder(mount) or self.context_rho is None else self.context_rho

    def heads_at(self, width: int) -> int:
        """Heads for an encoder of this width: ``ceil(width / 64)`` with the defaults.

        Raises:
            ConfigError: fixed ``heads`` are too few for the width, or a position would read more rows than any width needs.
        """
        per_head = (self.max_ngram - 1) * self.head_dim
        needed = -(-width // per_head)
        if self.heads is not None and self.heads < needed:
            raise ConfigError(f"ConceptConfig.heads is {self.heads}: width {width} needs {needed} or more; or leave it None")
        heads = self.heads or needed
        columns, most = (self.max_ngram - 1) * heads, max(MOST_COLUMNS, width // 16)
        if columns > most or columns * self.head_dim > MOST_VALUES:
            raise ConfigError(
                f"ConceptConfig.max_ngram {self.max_ngram} with {heads} heads reads {columns} rows of {self.head_dim} values a position: "
                f"expected at most {most} rows and {MOST_VALUES} values at width {width}"
            )
        return heads

    def columns_at(self, width: int) -> int:
        """Rows that a position reads at this width. Raises ConfigError as `heads_at`."""
        return (self.max_ngram - 1) * self.heads_at(width)

    def hash_config(self, *, width: int, compressed_vocab: int, pad_id: int, mounts: int) -> HashConfig:
        """The hash of one encoder's mounts, which count 0..mounts-1 in place of layer ids."""
        return HashConfig(
            max_ngram=self.max_ngram,
            heads=self.heads_at(width),
            vocab=self.vocab,
            pad_id=pad_id,
            compressed_vocab=compressed_vocab,
            layer_ids=tuple(range(mounts)),
        )
