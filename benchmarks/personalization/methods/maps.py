"""Maps: what a trigger adds to the denoiser where the picture looks at it, read from the picture's own features.

At a place x of the picture a map adds mass(x) * sum_j <into_j, h(x)> out_j: h is what the layer reads there, mass the attention that
x pays to the trigger's tokens. Text states are equal at every place; a map is not. Where nothing fires nothing is added.
"attention" is before `to_out` of a cross-attention, each head by its own mass; "feedforward" beside the feed-forward layer behind it,
by the mean mass of the heads. Imports torch, the spans of a batch and the arithmetic in few launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.personalization.methods.map_gradients import add_attended, add_fed, wide_mass
from benchmarks.personalization.methods.method import Rows
from benchmarks.personalization.methods.spans import CONFIG, Places, gathered
from tiny_engram.concept_rows import map_start
from tiny_engram.config import BLOCK
from tiny_engram.mount_names import SITES
from tiny_engram.quantization import quantize

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

    def _of(self, values: torch.Tensor, run: torch.Tensor, strength: float) -> dict[str, torch.Tensor]:
        """`[batch, slots * rank, channels]` of each row's runs, out of values `[runs, values]`. Beside
        other slots, a run of -1 reads zeros; alone, anything: nothing fires there, and what is read is weighed by 0."""
        several = run.shape[1] > 1
        own = gathered(values, (run.clamp(min=0) if several else run).flatten()).unflatten(0, run.shape)
        if several:
            # zeros rather than a product with 0: a run that diverged must not reach rows that it has no part in
            own = own.masked_fill((run < 0)[:, :, None], 0.0)
        parts = {name: part.flatten(1, 2) for name, part in self.parts(own).items()}
        return parts if strength == 1.0 else {n: strength * part if n.endswith("-out") else part for n, part in parts.items()}

    def hooks(
        self, base: Base, rows: Rows, places: Places, values: torch.Tensor, strength: float
    ) -> list[tuple[nn.Module, Callable[..., Any], bool]]:
        """For `spans.hooked`: the denoiser runs with the maps of `rows` in it, whose spans are at `places`.

        values: float32 `[runs, values]`, the parameter as it would be read from a file.
        """
        attentions: list[Any] = [module for _, module in base.cross_attentions]
        widest = max(attention.to_q.out_features // attention.heads for attention in attentions)
        fired = torch.zeros(len(rows.ids), rows.run.shape[1], rows.ids.shape[1], widest, device=rows.ids.device)
        fired.index_put_((places.batch, places.slot, places.time), torch.ones((), device=fired.device))
        read = self._of(values, rows.run, strength)
        mask = base.mask(rows.ids)
        # as the denoiser makes it of the mask
        bias = None if mask is None else (1 - mask.float())[:, None, None] * -10_000.0
        modules = dict(base.denoiser.named_modules())
        names = {module: name for name, module in modules.items()}
        hooks: list[tuple[nn.Module, Callable[..., Any], bool]] = []
        for i, module in enumerate(attentions):
            factors = {site: (read[f"{site}-{i}-in"], read[f"{site}-{i}-out"]) for site in self.ranks}
            layer = modules[names[module].removesuffix("attn2") + "ff"]
            hooks += _Layer(module, fired, factors, rows.run.shape[1], bias).hooks(layer)
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


class _Layer:
    """One cross-attention and the feed-forward layer behind it, during one batch: what their hooks tell each other."""

    def __init__(
        self,
        attention: Any,
        fired: torch.Tensor,
        factors: dict[str, tuple[torch.Tensor, torch.Tensor]],
        slots: int,
        bias: torch.Tensor | None,
    ) -> None:
        """fired: float32 `[batch, slots, time, d or more]`, 1 where a slot's trigger stands, d the width of a head. bias: float32
        `[batch, 1, 1, time]`, what the denoiser's mask over the text adds to the products, or None."""
        self.attention, self.fired, self.factors, self.slots, self.bias = attention, fired, factors, slots, bias
        self.states = self.query = self.key = torch.empty(0)
        self.masses: list[torch.Tensor] = []

    def hooks(self, feedforward: nn.Module) -> list[tuple[nn.Module, Callable[..., Any], bool]]:
        a = self.attention
        hooks = [(a.to_q, self._queried, False), (a.to_k, self._keyed, False), (a.to_out[0], self._attended, True)]
        return hooks + ([(feedforward, self._fed, False)] if "feedforward" in self.factors else [])

    def _queried(self, _module: nn.Module, args: tuple, _kwargs: Any, out: torch.Tensor) -> None:
        self.states, self.query = args[0], out

    def _keyed(self, _module: nn.Module, _args: tuple, _kwargs: Any, out: torch.Tensor) -> None:
        self.key = out

    def _of_slots(self, site: str) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The factors of each slot, `[batch, rank, channels]`."""
        if self.slots == 1:  # a part of the whole would be copied on its way back
            return [self.factors[site]]
        return zip(*(factor.chunk(self.slots, 1) for factor in self.factors[site]), strict=True)

    def _attended(self, _module: nn.Module, args: tuple, kwargs: Any) -> tuple[tuple, Any] | None:
        """Heads' outputs `[batch, places, channels]` with what the map adds."""
        heads, scale = self.attention.heads, self.attention.scale
        wide = self.fired[..., : self.query.shape[-1] // heads].unbind(1)
        masses = [wide_mass(self.query, self.key, fired, heads=heads, scale=scale, bias=self.bias) for fired in wide]
        if "attention" not in self.factors:
            self.masses = [mass.mean((2, 3))[..., None] for mass in masses]  # a head's channels all hold its mass
            return None
        x, self.masses = args[0], []
        for mass, (into, out) in zip(masses, self._of_slots("attention"), strict=True):
            x, by_all = add_attended(x, mass, self.states, into, out)
            self.masses.append(by_all)
        return (x, *args[1:]), kwargs

    def _fed(self, _module: nn.Module, args: tuple, _kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        for mass, (into, back) in zip(self.masses, self._of_slots("feedforward"), strict=True):
            out = add_fed(out, mass, args[0], into, back)
        return out
