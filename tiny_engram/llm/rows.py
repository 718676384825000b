"""Rows that learn: float32 masters read through the quantiser that stores them. And what a config says of its layers' rows.

Imports torch, the core (hashing, quantization, table) and, of this package, config and memory.
"""

from collections.abc import Mapping, Sized

import torch
from torch import nn

from tiny_engram.errors import TinyEngramError
from tiny_engram.hashing import NgramHasher
from tiny_engram.quantization import fake_quantize, quantize
from tiny_engram.table import EngramTable
from tiny_engram.table.prefetch import Rows

from .config import EngramConfig
from .memory import memory_for

__all__ = ["LearnedRows", "check_tables", "learned_rows", "rows_total"]


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


def learned_rows(config: EngramConfig, generator: torch.Generator) -> dict[int, LearnedRows]:
    """Of every layer. Raises TinyEngramError where there is no memory for them."""
    std, made = 0.0 if config.start == "rows" else 0.02, {}
    for layer in config.layers:
        rows = rows_total(config, layer)
        size = rows * config.head_dim * 4
        way_out = "lower EngramConfig.vocab, heads or max_ngram"
        what = f"the rows of layer {layer}: {rows:,} of {config.head_dim} float32 values, {size:,} bytes"
        if size > 1 << 62:
            raise TinyEngramError(f"out of memory for {what}; {way_out}")
        with memory_for(what, way_out):
            made[layer] = LearnedRows(rows, config.head_dim, std=std, generator=generator)
    return made


def check_tables(config: EngramConfig, tables: Mapping[int, Rows]) -> None:
    """Are these the rows that a config's layers read? Raises TinyEngramError if not."""
    if set(tables) != set(config.layers):
        wanted = f"one for each of {sorted(config.layers)}, as EngramConfig.layers says"
        raise TinyEngramError(f"tables are for layers {sorted(tables)}: expected {wanted}")
    for layer, table in tables.items():
        if table.head_dim != config.head_dim:
            wanted = f"{config.head_dim}, as EngramConfig.head_dim says"
            raise TinyEngramError(f"layer {layer}: rows have {table.head_dim} values, expected {wanted}")
        rows, needed = len(table) if isinstance(table, Sized) else None, rows_total(config, layer)
        if rows is not None and rows < needed:
            wanted = "expected a table that was made for this config"
            raise TinyEngramError(f"layer {layer}: the table has {rows} rows, its hash reaches {needed}; {wanted}")


def rows_total(config: EngramConfig, layer: int) -> int:
    """Rows of a layer's table."""
    return NgramHasher(config.hash_config, layer).rows_total
