"""Maps: what a trigger adds to the denoiser where the picture looks at it, read from the picture's own features. One arithmetic,
which serving and training both call. Imports torch.

At a place x of the picture a map adds mass(x) * sum_j <into_j, h(x)> out_j: h is what a layer reads there, mass the attention that x
pays to the trigger's tokens. Text states are equal at every place; a map is not. Where nothing fires nothing is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["GivenMaps", "attention_mass", "map_attention", "map_feedforward"]


@dataclass(frozen=True, eq=False)
class GivenMaps:
    """The maps of one concept in one batch, or of one concept for each of its rows.

    Attributes:
        fired: float32 `[batch, time]`, 1 where the trigger stands and 0 elsewhere.
        factors: (into, out), float32 `[rank, channels]` each, by the map's name: "attention.{i}", "feedforward.{i}". A strength is
            already in `out`. Or `[batch, rank, channels]`, where each row has a concept of its own.
    """

    fired: torch.Tensor
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Rows of the batch in which the trigger stands, int64 `[rows]` on the CPU, in order; found once, which waits for the device."""
        return self.fired.any(1).nonzero().flatten().cpu()

    def at_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Those rows of x `[batch, ...]`; a view where they are neighbours, as they are in a guided batch of one prompt."""
        return x[self._index.to(x.device) if isinstance(self._index, torch.Tensor) else self._index]

    def factors_at_rows(self, name: str) -> tuple[torch.Tensor, ...]:
        """(into, out) of a map for those rows."""
        return tuple(self.at_rows(factor) if factor.dim() == 3 else factor for factor in self.factors[name])

    def add_at_rows(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """A copy of x `[batch, ...]` with `added` `[rows, ...]` at those rows; all others keep their bits, -0.0 included."""
        new = self.at_rows(x) + added.to(x.dtype)
        if isinstance(self._index, slice):
            return x.slice_scatter(new, 0, self._index.start, self._index.stop)
        return x.index_put((self._index.to(x.device),), new)

    @cached_property
    def _index(self) -> torch.Tensor | slice:
        rows = self.rows.tolist()
        together = bool(rows) and rows == list(range(rows[0], rows[-1] + 1))
        return slice(rows[0], rows[-1] + 1) if together else self.rows.to(self.fired.device)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[..., n, heads * d]` -> `[..., heads, n, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, fired: torch.Tensor, *, heads: int, scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The attention that each place pays to the trigger's tokens, by head.

    Args:
        query: `[rows, places, heads * d]`, as the cross-attention's `to_q` gives it; key `[rows, time, heads * d]`, as `to_k` does.
        fired: float32 `[rows, time]`, 1 where the trigger stands.
        scale: of the products before the softmax.
        bias: `[rows, time]`, added to them there: a mask over the text.

    Returns:
        float32 `[rows, heads, places]`, from 0 to 1.
    """
    with torch.autocast(query.device.type, enabled=False):
        scores = _heads(query.float(), heads) @ _heads(key.float(), heads).transpose(-1, -2) * scale
        share = (scores if bias is None else scores + bias.float()[:, None, None]).softmax(-1)
        return (share @ fired[:, None, :, None])[..., 0]


def map_attention(states: torch.Tensor, mass: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What a map adds to the heads' outputs of a cross-attention, before `to_out`: each head by its own mass.

    Args:
        states: `[rows, places, channels in]`, what `to_q` reads.
        mass: float32 `[rows, heads, places]`.
        into: float32 `[rank, channels in]`; out float32 `[rank, heads * d]`; or `[rows, ...]` of these.

    Returns:
        float32 `[rows, places, heads * d]`.
    """
    with torch.autocast(states.device.type, enabled=False):
        read = states.float() @ into.mT
        weighted = mass[..., None] * read[:, None]  # [rows, heads, places, rank]
        return (weighted @ _heads(out, mass.shape[1])).transpose(1, 2).flatten(2)


def map_feedforward(states: torch.Tensor, mass: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What a map adds to the output of a feed-forward layer, by the mean mass of the heads.

    states `[rows, places, channels]` is what the layer reads, mass float32 `[rows, heads, places]` is of the cross-attention before it,
    into and out float32 `[rank, channels]`, or `[rows, ...]` of these; returns float32 `[rows, places, channels]`.
    """
    with torch.autocast(states.device.type, enabled=False):
        weighted = mass.mean(1)[..., None] * (states.float() @ into.mT)
        return weighted @ out
