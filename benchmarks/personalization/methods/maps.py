"""Maps: what a trigger adds to the denoiser where the picture looks at it, read from the picture's own features.

At a place x of the picture a map adds mass(x) * sum_j <into_j, h(x)> out_j: h is what the layer reads there, mass the attention that
x pays to the trigger's tokens. Text states are equal at every place; a map is not. Where nothing fires nothing is added.
"attention" is before `to_out` of a cross-attention, each head by its own mass; "feedforward" beside the feed-forward layer behind it,
by the mean mass of the heads. Imports torch and the spans of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.personalization.methods.method import Rows
from benchmarks.personalization.methods.spans import CONFIG, gathered
from tiny_engram.concept_rows import map_start
from tiny_engram.config import BLOCK
from tiny_engram.mount_names import SITES
from tiny_engram.quantization import fake_quantize, quantize

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Maps", "ranks_of"]

_PART = re.compile(rf"({'|'.join(SITES)}):([1-9]\d*)")


def ranks_of(text: str) -> dict[str, int]:
    """Ranks by site of "attention:1+feedforward:2"; none of "none". Raises ValueError for anything else."""
    if text == "none":
        return {}
    parts = [_PART.fullmatch(part) for part in text.split("+")]
    found = {part[1]: int(part[2]) for part in parts if part}
    if len(found) < len(parts):
        raise ValueError(f"maps {text!r}: expected none, or {' and '.join(f'{site}:RANK' for site in SITES)}, each once, joined by +")
    return found


class Maps(nn.Module):
    """The maps of many runs, as one parameter float32 `[runs, values]`: a step waits for kernels to be launched, not for numbers.

    It holds, one behind the other, "{site}-{i}-in" (`into`) and "{site}-{i}-out" (`out`) for the i-th cross-attention, see `factors`. The
    first start as rows of a fixed basis, equal for all runs, the second at zero.
    """

    def __init__(self, base: Base, runs: int, ranks: dict[str, int], *, quantised: bool) -> None:
        super().__init__()
        self.ranks, self.quantised = ranks, quantised
        self.shapes: dict[str, tuple[int, int]] = {}
        starts: list[torch.Tensor] = []
        for i, (_, module) in enumerate(base.cross_attentions):
            attention: Any = module
            channels = attention.to_q.in_features
            for number, (site, rank) in enumerate(ranks.items()):
                if rank * len(ranks) > channels:
                    raise ValueError(f"maps of rank {rank} at {channels} channels; expected {channels // len(ranks)} at most")
                starts.append(map_start(rank, channels, number=number, seed=CONFIG.basis_seed).to(base.device))
                starts.append(torch.zeros_like(starts[-1]))
                self.shapes |= {f"{site}-{i}-{end}": (rank, channels) for end in ("in", "out")}
        if starts:
            start = torch.cat([x.flatten() for x in starts])
            self.values_of = nn.Parameter(start.expand(runs, -1).clone())

    def parts(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views `[..., rank, channels]` of values laid out as the parameter is, `[..., values]`, by name."""
        split = values.split([rank * channels for rank, channels in self.shapes.values()], -1)
        return {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.shapes.items(), split, strict=True)}

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """Views of the parameter, `[runs, rank, channels]` each."""
        return self.parts(self.values_of) if self.shapes else {}

    def _read(self, run: torch.Tensor, strength: float) -> dict[str, torch.Tensor]:
        """`[batch, slots * rank, channels]` of each row's runs, as they would be read from a file; zeros for a run of -1."""
        values = self.values_of
        if self.quantised:
            values = fake_quantize(values.unflatten(-1, (-1, BLOCK))).flatten(-2)
        own = gathered(values, run.clamp(min=0).flatten()).unflatten(0, run.shape)
        if run.shape[1] > 1:
            # zeros rather than a product with 0: a run that diverged must not reach rows that it has no part in
            own = own.masked_fill((run < 0)[:, :, None], 0.0)
        parts = {name: part.flatten(1, 2) for name, part in self.parts(own).items()}
        return parts if strength == 1.0 else {n: strength * part if n.endswith("-out") else part for n, part in parts.items()}

    def hooks(self, base: Base, rows: Rows, strength: float) -> list[tuple[nn.Module, Callable[..., Any], bool]]:
        """For `spans.hooked`: the denoiser runs with the maps of `rows` in it."""
        fired, read = _fired(rows), self._read(rows.run, strength)
        modules = dict(base.unet.named_modules())
        names = {module: name for name, module in modules.items()}
        hooks: list[tuple[nn.Module, Callable[..., Any], bool]] = []
        for i, (_, module) in enumerate(base.cross_attentions):
            factors = {site: (read[f"{site}-{i}-in"], read[f"{site}-{i}-out"]) for site in self.ranks}
            layer = modules[names[module].removesuffix("attn2") + "ff"]
            hooks += _Layer(module, fired, factors, rows.run.shape[1]).hooks(layer)
        return hooks

    def values(self, run: int) -> dict[str, torch.Tensor]:
        """As a file holds them: payload e4m3 and scale uint8 of each factor, or float16."""
        found: dict[str, torch.Tensor] = {}
        for name, factors in self.factors.items():
            own = factors[run].detach().cpu()
            if self.quantised:
                found[f"map.{name}.payload"], found[f"map.{name}.scale"] = quantize(own.unflatten(-1, (-1, BLOCK)))
            else:
                found[f"map.{name}"] = own.half()
        return found


def _fired(rows: Rows) -> torch.Tensor:
    """1 where a slot's trigger stands, `[batch, time, slots]`."""
    at = rows.positions()
    fired = torch.zeros(*rows.ids.shape, rows.run.shape[1], device=rows.ids.device)
    one = torch.ones((), device=fired.device)
    return fired.index_put((at.row, at.place, at.slot), one)


class _Layer:
    """One cross-attention and the feed-forward layer behind it, during one batch: what their hooks tell each other."""

    def __init__(self, attention: Any, fired: torch.Tensor, factors: dict[str, tuple[torch.Tensor, torch.Tensor]], slots: int) -> None:
        self.attention, self.fired, self.factors, self.slots = attention, fired, factors, slots
        self.states = self.query = self.key = self.mass = torch.empty(0)

    def hooks(self, feedforward: nn.Module) -> list[tuple[nn.Module, Callable[..., Any], bool]]:
        a = self.attention
        hooks = [(a.to_q, self._queried, False), (a.to_k, self._keyed, False), (a.to_out[0], self._attended, True)]
        return hooks + ([(feedforward, self._fed, False)] if "feedforward" in self.factors else [])

    def _queried(self, _module: nn.Module, args: tuple, _kwargs: Any, out: torch.Tensor) -> None:
        self.states, self.query = args[0], out

    def _keyed(self, _module: nn.Module, _args: tuple, _kwargs: Any, out: torch.Tensor) -> None:
        self.key = out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.attention.heads, -1)).transpose(1, 2)

    def _attended(self, _module: nn.Module, args: tuple, kwargs: Any) -> tuple[tuple, Any] | None:
        """Heads' outputs `[batch, places, channels]` with what the map adds."""
        query, key = self._heads(self.query), self._heads(self.key)
        share = (query @ key.transpose(2, 3) * self.attention.scale).float().softmax(-1)
        self.mass = share @ self.fired[:, None]  # [batch, heads, places, slots]
        if "attention" not in self.factors:
            return None
        into, out = self.factors["attention"]
        read = self.states @ into.transpose(1, 2)  # [batch, places, slots * rank]
        weighted = self.mass.repeat_interleave(read.shape[-1] // self.slots, -1) * read[:, None]
        added = (weighted @ self._heads(out)).transpose(1, 2).flatten(2)
        return (args[0] + added.to(args[0].dtype), *args[1:]), kwargs

    def _fed(self, _module: nn.Module, args: tuple, _kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        into, back = self.factors["feedforward"]
        read = args[0] @ into.transpose(1, 2)
        weighted = self.mass.mean(1).repeat_interleave(read.shape[-1] // self.slots, -1) * read
        return out + (weighted @ back).to(out.dtype)
