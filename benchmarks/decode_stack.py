"""A decoder of random weights in the shape of a 4B-class model, one token a step for a batch of requests, with Engram layers or none.

What benchmarks/overlap.py times: the whole step can be captured as one CUDA graph, sampling included, so that ids never visit the
host. Left out are positions (no rotary embedding) and the growth of the context, which cost the same with and without Engram.
Imports torch, tiny_engram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from tiny_engram.config import V41_EPS, HashConfig
from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.engram_gate import engram_gate

# The published hash of DeepSeek V4.1-Flash: 24 rows of 256 values for each token and layer.
HASH = HashConfig(max_ngram=4, heads=8, vocab=16_000_000, pad_id=2, compressed_vocab=99_092, layer_ids=(1, 14))
HEAD_DIM = 256

Waiting = Literal["in time", "at the end"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the stack; ``engram_at`` are the blocks that an Engram layer stands before, in the order of ``HASH.layer_ids``."""

    blocks: int = 36
    hidden: int = 2560
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    ffn: int = 9728
    vocab: int = 151_936
    context: int = 1024
    engram_at: tuple[int, int] = (1, 14)


TINY = Shape(blocks=4, hidden=64, heads=4, kv_heads=2, head=16, ffn=96, vocab=500, context=16, engram_at=(1, 3))


class Rows(Protocol):
    """Rows of one Engram layer, fetched while earlier blocks run: a Prefetcher."""

    @property
    def staging(self) -> torch.Tensor: ...
    def start(self, row_ids: torch.Tensor) -> None: ...
    def wait(self) -> torch.Tensor: ...


@dataclass
class Block:
    """Weights of one block."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Engram:
    """Weights of one Engram layer, one copy of the hidden state."""

    wkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor


class Weights:
    """bfloat16 weights drawn once, shared by every variant."""

    def __init__(self, shape: Shape, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            fan_in = size[-1]
            weight = torch.empty(size, dtype=torch.bfloat16, device=device)
            return weight.normal_(0.0, fan_in**-0.5, generator=generator)

        def ones(*size: int) -> torch.Tensor:
            return torch.ones(size, dtype=torch.bfloat16, device=device)

        width = shape.heads * shape.head
        self.shape = shape
        self.embedding = drawn(shape.vocab, shape.hidden) * shape.hidden**0.5
        self.blocks = [
            Block(
                ones(shape.hidden),
                drawn(width + 2 * shape.kv_heads * shape.head, shape.hidden),
                drawn(shape.hidden, width),
                ones(shape.hidden),
                drawn(2 * shape.ffn, shape.hidden),
                drawn(shape.hidden, shape.ffn),
            )
            for _ in range(shape.blocks)
        ]
        self.norm = ones(shape.hidden)
        self.head = drawn(shape.vocab, shape.hidden)
        self.engram = [
            Engram(drawn(2 * shape.hidden, HASH.columns * HEAD_DIM), ones(1, shape.hidden), ones(1, shape.hidden)) for _ in shape.engram_at
        ]
        self.canonical = torch.randint(0, HASH.compressed_vocab, (shape.vocab,), device=device, generator=generator)
        self.hashers = [NgramHasher(HASH, layer_id) for layer_id in HASH.layer_ids]


class Decoder:
    """One variant: the stack, where its rows come from, and the state of a batch of requests.

    Args:
        weights: shared.
        cache: keys and values, bfloat16 ``[blocks, 2, batch, kv_heads, context, head]``, shared between variants.
        rows: one source for each Engram layer, or None for no Engram at all.
        table_rows: rows of the table; ids beyond are taken modulo.
        waiting: "at the end" uses the rows that stand there from the step before, and waits last: wrong results, for telling
            what waiting costs from what running beside a fetch costs.
    """

    def __init__(
        self,
        weights: Weights,
        cache: torch.Tensor,
        rows: Sequence[Rows] | None,
        table_rows: int = 0,
        waiting: Waiting = "in time",
    ):
        self.weights, self.shape, self.cache = weights, weights.shape, cache
        self.rows, self.table_rows, self.waiting = rows, table_rows, waiting
        self.batch = cache.shape[2]
        self.device = cache.device
        self.ids = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self.history = torch.zeros((self.batch, HASH.max_ngram - 1), dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits = torch.zeros((self.batch, self.shape.vocab), dtype=torch.bfloat16, device=self.device)
        self.row_ids: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Back to the first step: other ids for each request, the same in every variant."""
        generator = torch.Generator().manual_seed(1)
        self.ids.copy_(torch.randint(0, self.shape.vocab, (self.batch,), generator=generator))
        self.history.copy_(torch.randint(0, HASH.compressed_vocab, self.history.shape, generator=generator))
        self.position.zero_()

    def hashed(self) -> list[torch.Tensor]:
        """Row ids int64 ``[batch, 24]`` of each Engram layer for the ids of this step."""
        canonical = self.weights.canonical[self.ids].unsqueeze(1)
        out = []
        for hasher in self.weights.hashers:
            row_ids = hasher.rows(canonical, history=self.history).squeeze(1)
            out.append(row_ids % self.table_rows if self.table_rows < hasher.rows_total else row_ids)
        self.history.copy_(torch.cat((self.history[:, 1:], canonical), dim=1))
        return out

    def blocks(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Blocks ``first`` up to, but without, ``last``, Engram layers before them included: ``[batch, hidden]`` -> the same."""
        for number in range(first, last):
            if self.rows is not None and number in self.shape.engram_at:
                x = self._engram(x, self.shape.engram_at.index(number))
            x = self._block(x, number)
        return x

    def step(self) -> None:
        """One token for every request."""
        if self.rows is not None:
            self.row_ids = self.hashed()
            for source, row_ids in zip(self.rows, self.row_ids, strict=True):
                source.start(row_ids)
        x = self.blocks(F.embedding(self.ids, self.weights.embedding), 0, self.shape.blocks)
        x = F.rms_norm(x, (self.shape.hidden,), self.weights.norm)
        torch.mm(x, self.weights.head.t(), out=self.logits)
        self.ids.copy_(self._sampled())
        self.position.add_(1).remainder_(self.shape.context)
        if self.rows is not None and self.waiting == "at the end":
            for source in self.rows:
                source.wait()

    def _engram(self, x: torch.Tensor, place: int) -> torch.Tensor:
        assert self.rows is not None
        weights = self.weights.engram[place]
        rows = self.rows[place].wait() if self.waiting == "in time" else self.rows[place].staging
        keyed = F.linear(rows.reshape(self.batch, -1), weights.wkv)
        key, value = keyed.split(self.shape.hidden, dim=-1)
        gated = engram_gate(x.unsqueeze(1), key.unsqueeze(1), value, weights.q_weight, weights.k_weight, eps=V41_EPS, form="v41")
        return gated.squeeze(1)

    def _block(self, x: torch.Tensor, number: int) -> torch.Tensor:
        shape, weights = self.shape, self.weights.blocks[number]
        normed = F.rms_norm(x, (shape.hidden,), weights.attention_norm)
        fused = F.linear(normed, weights.qkv).view(self.batch, shape.heads + 2 * shape.kv_heads, shape.head)
        query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        keys, values = self.cache[number]
        keys.index_copy_(2, self.position, key.unsqueeze(2))
        values.index_copy_(2, self.position, value.unsqueeze(2))
        # The query heads of one key head stand as if they were positions: nothing is masked, and keys are read once for all of them.
        grouped = query.reshape(self.batch, shape.kv_heads, shape.heads // shape.kv_heads, shape.head)
        attended = F.scaled_dot_product_attention(grouped, keys, values).reshape(self.batch, -1)
        x = x + F.linear(attended, weights.out)
        normed = F.rms_norm(x, (shape.hidden,), weights.ffn_norm)
        gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, weights.down)

    def _sampled(self) -> torch.Tensor:
        """One draw from each row's softmax, on the device: the largest of probability over exponential noise."""
        probability = torch.softmax(self.logits, dim=-1, dtype=torch.float32)
        return (probability / torch.empty_like(probability).exponential_()).argmax(dim=-1)


def random_cache(shape: Shape, batch: int, device: torch.device) -> torch.Tensor:
    """Keys and values of a full context, as if it had been read."""
    cache = torch.empty((shape.blocks, 2, batch, shape.kv_heads, shape.context, shape.head), dtype=torch.bfloat16, device=device)
    for block in cache:
        block.normal_(generator=torch.Generator(device).manual_seed(2))
    return cache
