"""The levers of our method, by name, checked. Imports the description of a run and of maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.personalization.methods.maps import ranks_of
from benchmarks.personalization.runs import Run, Shares

__all__ = ["Options"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "bands": (1, 2, 3, 4),
    "share": ("none", "block", "stage", "width", "all"),
    "init": ("zero", "anchor", "class", "class-last"),
    "key_lock": (False, True),
    "deep_local": (False, True),
    "gate": ("learned", "start", "fixed", "removed"),
    "gate_shared": (False, True),
    "norm": ("bounded", "plain"),
    "quantise": (False, True),
    "schedule": ("constant", "cosine"),
}
_RHOS = ("rho", "rho_deep", "rho_span", "rho_key", "rho_value")
_MOUNT = re.compile(r"span|key|value|input|layer-\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a run of ours may set through `Run.options`. The runs of one stack agree in all but the rhos.

    Attributes:
        mounts: joined by "+": "input" (the token embeddings) and "layer-k" (what encoder layer k reads) lie inside the
            encoder, so that later positions move; "span" is its last hidden state; "key" and "value" are what those
            projections of every cross-attention read.
        rho: bound of a residual as a share of the span's mean norm; rho_deep (input, layer-k), rho_span, rho_key and
            rho_value replace it at their mounts.
        bands: equal shares of the timesteps that have context rows of their own.
        share: groups of cross-attentions with one set of rows: "none" each its own, "block" (down_blocks.0 and so on), "stage" (down,
            middle, up), "width" (channels of the block), "all".
        columns: rows of each position and mount; None takes as many as the width needs, fewer leave the rest zero.
        init: "zero"; "class", rows that move the trigger's states to the class word's; "class-last", so at the trigger's last
            token only; "anchor", so on the text side only (input, layer-k, span), and key and value rows start at zero.
        key_lock: key rows stay with the class word's states, and are not trained.
        deep_local: of an encoder with rows inside it, the states at the trigger alone are taken, all others stay the base's: the
            trigger is read in its sentence, and the sentence does not read the trigger.
        maps: "none", or ranks of `maps.Maps`, such as "attention:1+feedforward:2"; map_rate: factor of their learning rate.
        gate: "learned"; "start" keeps the values it starts with (gain 1, bias 0), "fixed" is one half everywhere, "removed" one.
        gate_shared: one gate for all mounts of a position.
        gate_rate, deep_rate: factors of the learning rate, for gates and for rows inside the encoder.
        norm: "bounded" by max(1, |v|), or "plain".
        quantise: rows pass through the e4m3 and e8m0 form that a file holds.
        ema, schedule, warmup, beta2: of the training.
        prior, collage: samples of 8 that are not the taught pictures, see `runs.Shares`.
    """

    mounts: str = "input+value"
    rho: float = 2.5
    rho_deep: float | None = None
    rho_span: float | None = None
    rho_key: float | None = None
    rho_value: float | None = None
    bands: int = 2
    share: str = "block"
    columns: int | None = None
    init: str = "anchor"
    key_lock: bool = False
    deep_local: bool = True
    maps: str = "attention:1+feedforward:1"
    map_rate: float = 0.4
    gate: str = "learned"
    gate_shared: bool = False
    gate_rate: float = 1.0
    deep_rate: float = 1.0
    norm: str = "bounded"
    quantise: bool = True
    ema: float = 0.98
    schedule: str = "constant"
    warmup: int = 0
    beta2: float = 0.95
    prior: int = 0
    collage: int = 2

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(str, allowed))}")
        kinds = self.kinds
        if not all(_MOUNT.fullmatch(kind) for kind in kinds) or len(set(kinds)) < len(kinds):
            raise ValueError(f"mounts {self.mounts!r}: expected span, key, value, input, layer-k, each once, joined by +")
        if self.key_lock and "key" not in kinds:
            raise ValueError(f"key_lock with mounts {self.mounts!r}: expected key among them")
        if self.bands > 1 and not {"key", "value"} & set(kinds):
            raise ValueError(f"bands is {self.bands} with mounts {self.mounts!r}: only key and value rows know the timestep; expected 1")
        named = (*_RHOS, "columns", "gate_rate", "deep_rate", "map_rate")
        positive = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        for name, value in positive.items():
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name} is {value!r}; expected a number above 0")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup!r}; expected steps, 0 or more")
        for name in ("ema", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a share from 0 to below 1")
        ranks_of(self.maps)
        Shares(prior=self.prior, collage=self.collage)

    @classmethod
    def of(cls, run: Run, preset: Mapping[str, Any]) -> Options:
        """The options of a run over a method's own. Raises ValueError for a name or a value that makes no sense."""
        known = [field.name for field in fields(cls)]
        given = {**preset, **dict(run.options)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"{run.method} has no option {', '.join(unknown)}; expected {', '.join(known)}")
        return cls(**given)

    @classmethod
    def of_stack(cls, runs: Sequence[Run], preset: Mapping[str, Any]) -> list[Options]:
        """The options of runs that are trained together. Raises ValueError where they differ in more than rhos."""
        each = [cls.of(run, preset) for run in runs]
        if not each:
            raise ValueError("no runs; expected one or more")
        for options in each[1:]:
            if options.without_rhos() != each[0].without_rhos():
                raise ValueError(f"runs of one stack may differ in {', '.join(_RHOS)} alone, got {each[0]} and {options}")
        return each

    def without_rhos(self) -> Options:
        return replace(self, rho=1.0, rho_deep=None, rho_span=None, rho_key=None, rho_value=None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The mounts in the order in which a prompt meets them."""
        named = self.mounts.split("+")
        order = {"input": -1, "span": 1000, "key": 1001, "value": 1002}
        return tuple(sorted(named, key=lambda kind: order.get(kind, int(kind[6:]) if kind[:6] == "layer-" and kind[6:].isdigit() else 0)))

    @property
    def deep(self) -> tuple[str, ...]:
        """Mounts inside the encoder."""
        return tuple(kind for kind in self.kinds if kind == "input" or kind.startswith("layer-"))

    @property
    def context(self) -> tuple[str, ...]:
        """Mounts at the cross-attentions."""
        return tuple(kind for kind in self.kinds if kind in ("key", "value"))

    def rho_of(self, kind: str) -> float:
        own = self.rho_deep if kind in self.deep else getattr(self, f"rho_{kind}")
        return self.rho if own is None else own
