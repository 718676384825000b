"""What fires in a batch of prompts, with the rows that were read for it, and how it is added to states.

May import residual and concept; knows no store, no module and no pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tiny_engram.concept import MapFactors
from tiny_engram.residual import Spans, add_to_spans, spread

__all__ = ["NOTHING", "Fired", "FiredMaps", "Plan", "RowsRead"]


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows float32 `[N, columns, head_dim]` that were read for some spans; the keys and values that they stand for are made once."""

    rows: torch.Tensor
    basis_seed: int
    _spread: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    def spread(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in states of this width, float32 `[N, width]` each, on a device."""
        found = self._spread.get((width, device))
        if found is None:
            # Tensors made in inference mode could never be saved for a backward pass, and these are kept.
            with torch.inference_mode(False):
                found = spread(self.rows.to(device), width=width, basis_seed=self.basis_seed)
            if not self.rows.requires_grad:  # else a recomputed forward would find what belongs to the first one's graph
                self._spread[width, device] = found
        return found


@dataclass(frozen=True, slots=True)
class Fired:
    """The spans that fire in a batch, of all concepts of one shape, with the rows read for their N positions.

    `names` holds the concept of each span; gain, bias and scale (strength * rho) float32 `[N]`.
    """

    names: tuple[str, ...]
    spans: Spans
    read: RowsRead
    gain: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """float32 `[N, columns, head_dim]`."""
        return self.read.rows

    @property
    def basis_seed(self) -> int:
        """Of the bases that the rows are spread by."""
        return self.read.basis_seed

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[batch, time, width]` with the residual at the spans; see `residual.apply_spans`."""
        return self.apply_each([hidden])[0]

    def apply_each(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`apply` to several states of one batch, in one pass: each as by itself."""
        key, value = self.read.spread(states[0].shape[-1], states[0].device)
        return add_to_spans(states, self.spans, key, value, self.gain, self.bias, self.scale)


@dataclass(frozen=True, slots=True)
class FiredMaps:
    """One concept's maps in a batch: (batch row, start, length) of each of its spans, its strength, and the maps by name.

    The spans of one concept in one row of the batch share its maps: their masses are added.
    """

    name: str
    spans: tuple[tuple[int, int, int], ...]
    strength: float
    maps: Mapping[str, MapFactors]

    def factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(into, strength * out) of one of the maps, float32 `[rank, channels]` each, on the CPU."""
        into, out = self.maps[name].factors()
        return into, self.strength * out


@dataclass(frozen=True, slots=True)
class Plan:
    """What fires where: (name, batch row, start, length) of each span, the mounts that have rows for any of them, and the rows.

    For several mounts the batch is stacked: row b of mount k is row k * batch + b of what `fired` is applied to. `maps` holds those of
    all concepts that fire, and `held` the mounts at which any of them has rows, whichever mounts were asked for.
    """

    places: tuple[tuple[str, int, int, int], ...]
    mounts: tuple[str, ...]
    fired: tuple[Fired, ...]
    maps: tuple[FiredMaps, ...] = ()
    held: frozenset[str] = frozenset()


NOTHING = Plan((), (), ())
