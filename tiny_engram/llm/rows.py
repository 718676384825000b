"""Rows that learn: float32 masters read through the quantiser that stores them.

Imports torch, tiny_engram.quantization and tiny_engram.table.
"""

import torch
from torch import nn

from tiny_engram.quantization import fake_quantize, quantize
from tiny_engram.table import EngramTable

__all__ = ["LearnedRows"]


class LearnedRows(nn.Module):
    """The rows of one layer while they are taught.

    Attributes:
        weight: float32 ``[rows, head_dim]``; its gradient is sparse, of the rows that a batch read.
    """

    def __init__(self, rows: int, head_dim: int, *, std: float = 0.0, generator: torch.Generator | None = None) -> None:
        """std: of the rows at first; 0 begins with zeros."""
        super().__init__()
        start = torch.zeros(rows, head_dim) if not std else torch.randn(rows, head_dim, generator=generator) * std
        self.weight = nn.Parameter(start)

    @property
    def head_dim(self) -> int:
        return self.weight.shape[1]

    def lookup(self, row_ids: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[..., head_dim]`` of int64 ``[...]``, as the stored rows will read, with a gradient straight through to the masters."""
        rows = nn.functional.embedding(row_ids, self.weight, sparse=True)
        return fake_quantize(rows).to(dtype)

    @torch.no_grad()
    def table(self) -> EngramTable:
        """The stored form, on the CPU. Raises TableError where a row is not finite."""
        payload, scale = quantize(self.weight.detach().cpu())
        return EngramTable.dense(payload, scale)
