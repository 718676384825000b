"""EngramLayer: lookup -> key and value -> gate -> (short convolution) -> residual, for a causal LM.

Imports torch, kernels and tiny_engram.{config,hashing}. Source: Engram (arXiv 2601.07372), both published forms.
"""

from typing import Protocol

import torch
from torch import nn

from tiny_engram.config import LayerConfig
from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.engram_gate import engram_gate
from tiny_engram.kernels.short_conv import short_conv


class RowLookup(Protocol):
    """Where rows come from: an EngramTable, or whatever else answers the same call."""

    def lookup(self, row_ids: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[..., head_dim]`` in ``dtype``, rounded once, of int64 ``[...]``, on their device."""
        ...


class _Projections(nn.Module):
    """Rows of a position -> one key per copy and one value."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.copies, self.hidden = config.copies, config.hidden
        if config.form == "v41":
            self.wkv = nn.Linear(config.row_width, (config.copies + 1) * config.hidden, bias=False)
        else:
            self.key_projs = nn.ModuleList(nn.Linear(config.row_width, config.hidden) for _ in range(config.copies))
            self.value_proj = nn.Linear(config.row_width, config.hidden)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, T, row_width]`` -> key ``[B, T, copies, hidden]``, value ``[B, T, hidden]``."""
        if hasattr(self, "wkv"):
            fused = self.wkv(rows).unflatten(-1, (self.copies + 1, self.hidden))
            return fused[..., : self.copies, :], fused[..., self.copies, :]
        key = torch.stack([project(rows) for project in self.key_projs], dim=-2)
        return key, self.value_proj(rows)


class EngramLayer(nn.Module):
    """Adds what the table says about the last n tokens to the hidden state, before attention.

    Form "v41": n = 4 in the published model, fused key/value weight without bias, no convolution. Form "paper": n = 3,
    biases, then a short causal convolution over the gated values, which starts at zero and so changes nothing at first.

    Rows are not parameters: they come from ``table``, which may be far larger than the module and is not in its state.
    """

    def __init__(self, config: LayerConfig, table: RowLookup):
        super().__init__()
        self.config = config
        self.table = table
        self.hasher = NgramHasher(config.hash, config.layer_id)
        self.projections = _Projections(config)
        self.q_weight = nn.Parameter(torch.ones(config.copies, config.hidden))
        self.k_weight = nn.Parameter(torch.ones(config.copies, config.hidden))
        if config.form == "paper":
            self.conv_weight = nn.Parameter(torch.zeros(config.copies, config.hidden, config.conv_kernel))
            self.conv_norm_weight = nn.Parameter(torch.ones(config.copies, config.hidden))

    def row_ids(
        self,
        canonical: torch.Tensor,
        *,
        blocked: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        history_blocked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Row ids int64 ``[B, T, columns]``; arguments as in :meth:`forward`. They are known before the model runs: prefetch by them."""
        return self.hasher.rows(canonical, blocked, history, history_blocked)

    def forward(
        self,
        x: torch.Tensor,
        canonical: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        blocked: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        history_blocked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the Engram residual.

        Args:
            x: ``[B, T, copies, hidden]`` hidden states.
            canonical: int64 ``[B, T]`` canonical token ids.
            rows: ``[B, T, row_width]``, the rows of :meth:`row_ids` where they were read ahead; the table is not asked then, and
                canonical and history are not looked at.
            blocked: bool ``[B, T]``, image or padding tokens; their rows of x come back bit for bit.
            history: int64 ``[B, n - 1]`` canonical ids before the block, oldest first.
            history_blocked: bool ``[B, n - 1]``.

        Returns:
            ``[B, T, copies, hidden]`` in x's dtype. The paper's convolution sees this block only: who decodes keeps the
            :meth:`gated_values` of the last :attr:`conv_reach` tokens, and gives them to :meth:`mixed`.

        Raises:
            ValueError: shapes that do not belong together.
        """
        config = self.config
        if rows is None:
            rows = self.rows(self.row_ids(canonical, blocked=blocked, history=history, history_blocked=history_blocked))
        if config.form == "v41":
            assert config.eps is not None  # filled in by LayerConfig
            key, value = self._projected(x, rows)
            return engram_gate(x, key, value, self.q_weight, self.k_weight, eps=config.eps, form="v41", mask=blocked)
        out = x + self.mixed(self.gated_values(x, rows, blocked=blocked))
        # The convolution reaches blocked positions from earlier ones; they must not move at all.
        return out if blocked is None else torch.where(blocked[..., None, None], x, out)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        """The table's rows ``[B, T, row_width]`` of int64 ``[B, T, columns]``, as the projections take them."""
        return self.table.lookup(row_ids, dtype=self.row_dtype).flatten(-2)

    @property
    def row_dtype(self) -> torch.dtype:
        """What the table is asked for."""
        dtype = self.q_weight.dtype
        # A table rounds to these types itself; other types, float64 say, are exact from float32.
        return dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32

    def gated_values(self, x: torch.Tensor, rows: torch.Tensor, *, blocked: torch.Tensor | None = None) -> torch.Tensor:
        """``gate * value`` ``[B, T, copies, hidden]`` in x's dtype, zeros where blocked; arguments as in :meth:`forward`."""
        config = self.config
        assert config.eps is not None
        key, value = self._projected(x, rows)
        return engram_gate(x, key, value, self.q_weight, self.k_weight, eps=config.eps, form=config.form, mask=blocked, residual=False)

    def mixed(self, gated: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """The paper's convolution over gated values ``[B, T, copies, hidden]``; V4.1 has none and gives them back.

        before: the gated values of the :attr:`conv_reach` positions in front of the block ``[B, conv_reach, copies, hidden]``, zeros where
        there was none or a blocked one; without it the block is the text's beginning.
        """
        config = self.config
        if config.form == "v41":
            return gated
        assert config.eps is not None
        whole = gated if before is None else torch.cat((before.to(gated.dtype), gated), dim=1)
        mixed = short_conv(whole, self.conv_weight, self.conv_norm_weight, dilation=config.hash.max_ngram, eps=config.eps)
        return mixed[:, whole.shape[1] - gated.shape[1] :]

    @property
    def conv_reach(self) -> int:
        """Positions that the convolution looks back."""
        return 0 if self.config.form == "v41" else (self.config.conv_kernel - 1) * self.config.hash.max_ngram

    def _projected(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of rows. Raises ValueError: shapes that do not belong together."""
        config = self.config
        if rows.shape != (*x.shape[:2], config.row_width):
            raise ValueError(
                f"rows {list(rows.shape)}: expected [B, T, row_width] = {[*x.shape[:2], config.row_width]}, of x {list(x.shape)} and "
                f"a table with head_dim {config.head_dim}"
            )
        return self.projections(rows.to(self.q_weight))
