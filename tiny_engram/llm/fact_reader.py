"""FactReader: adds the rows of facts to hidden states at the last tokens of their triggers.

Imports torch, kernels, residual, table and neighbours.
"""

from dataclasses import dataclass

import torch

from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.span_residual import span_residual
from tiny_engram.residual import Spans, apply_spans, token_norms
from tiny_engram.table import EngramTable

from .fact_config import FactsConfig
from .fact_index import NOWHERE, FactIndex
from .fact_rows import FactRows
from .history import BLOCKED
from .host import Call

__all__ = ["FactReader"]


@dataclass(frozen=True, slots=True)
class _Found:
    """What fires in a call: its places, and rows float32 `[layers, N, columns, head_dim]`, on the CPU."""

    spans: Spans
    rows: torch.Tensor


class FactReader:
    """The `Reader` of facts (host.py). Positions that do not fire are never written, not even with zero.

    Attributes:
        on: False leaves the model as it is, bit for bit.
    """

    blocked_ids: tuple[int, ...] = ()

    def __init__(self, config: FactsConfig, index: FactIndex, rows: FactRows) -> None:
        """config: completed."""
        assert config.layers is not None
        self.config, self.index, self.rows = config, index, rows
        self.layers = config.layers
        self.on = True

    @property
    def reach(self) -> int:
        return self.index.reach

    @property
    def enabled(self) -> bool:
        return self.on and self.index.longest > 0

    def prepare(self, call: Call) -> "_Found | torch.Tensor | None":
        """What fires, with its rows; in a compiled graph the slots of all positions, since no shape there may depend on them."""
        ids, before, owners, packed = torch.where(call.blocked, BLOCKED, call.ids), call.before, call.owners, call.packed
        if packed is not None:
            ids, owners = packed.lay(ids, BLOCKED), None if owners is None else owners[packed.rows()]
            before = before.new_full((len(ids), before.shape[1]), BLOCKED)
        if torch.compiler.is_compiling():
            slots = self.index.everywhere(ids, before, owners)
            return slots if packed is None else packed.back(slots)
        if call.history is not None and call.history.capacity is not None:
            self.rows.pack(ids.device)  # the steps behind this one may be a compiled graph, which cannot make it
        places = self.index.places(ids, before, owners)
        if places is None:
            return None
        batch, time, slot = places
        if packed is not None:
            batch, time = packed.tokens(batch, time)
        return _Found(Spans(batch, time, torch.ones_like(time), torch.zeros_like(time)), self.rows.lookup(slot))

    def at(self, layer: int, hidden: torch.Tensor, call: Call, prepared: "_Found | torch.Tensor | None") -> torch.Tensor:
        """Hidden states `[B, T, D]` with the rows of what fired added, at their places."""
        if prepared is None:
            return hidden
        number = self.layers.index(layer)
        if isinstance(prepared, torch.Tensor):
            return self._everywhere(number, hidden, prepared.to(hidden.device))
        rows = prepared.rows[number]
        gain = torch.ones(len(rows))
        scale = torch.full((len(rows),), self.config.rho)
        return apply_spans(hidden, prepared.spans, rows, gain, torch.zeros_like(gain), scale, basis_seed=self.config.basis_seed)

    def _everywhere(self, number: int, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The arithmetic of `apply_spans` at every position, taken where one fires: slots int64 `[B, T]`."""
        table = self.rows.packed(slots.device)
        if table is None:
            table = _made(self.rows, slots.device)  # pyright: ignore[reportCallIssue]
        columns, values = self.config.columns, self.config.columns * self.config.head_dim
        flat = slots.reshape(-1, 1)
        at = (flat * len(self.layers) + number) * columns + torch.arange(columns, device=slots.device)
        e = table.lookup(torch.where(flat == NOWHERE, -1, at), bounds="ignore").reshape(-1, values)
        h = hidden.reshape(-1, hidden.shape[-1]).float()
        ones = torch.ones_like(h[:, 0])
        seed = 2 * self.config.basis_seed
        residual = span_residual(
            h,
            fixed_basis(e, width=h.shape[1], seed=seed),
            fixed_basis(e, width=h.shape[1], seed=seed + 1),
            gain=ones,
            bias=torch.zeros_like(ones),
            scale=ones * self.config.rho,
            mean_norm=token_norms(h),
        )
        moved = (h + residual).to(hidden.dtype).view(hidden.shape)
        return torch.where((slots == NOWHERE).unsqueeze(-1), hidden, moved)


@torch.compiler.disable
def _made(rows: FactRows, device: torch.device) -> EngramTable:
    """A graph that nobody went before is broken here, once after each change of the facts."""
    return rows.pack(device)
