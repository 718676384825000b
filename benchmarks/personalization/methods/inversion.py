"""Textual inversion (Gal et al. 2022, arXiv 2208.01618): the trigger's input embeddings are trained, nothing else.

Set up as diffusers' `textual_inversion.py`: new tokens start from an existing word's embedding and go through the whole frozen
encoder; AdamW with weight decay 1e-2 and a constant rate. A class word of several tokens starts them from the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.runs import Run

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Inversion", "InversionOne", "InversionTrigger", "encode_with"]


def encode_with(base: Base, ids: torch.Tensor, row: torch.Tensor, place: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The encoder's last hidden states `[batch, time, width]` of ids `[batch, time]`, with `vectors` `[n, width]` as the input
    embeddings (before positions are added) at (`row`, `place`) `[n]` each."""

    def replace(_module: nn.Module, _args: tuple, out: torch.Tensor) -> torch.Tensor:
        return out.index_put((row, place), vectors.to(out.dtype))

    hook = base.embedding.register_forward_hook(replace)
    try:
        return base.encoded(ids)
    finally:
        hook.remove()


class Inversion(Adapters):
    """`[runs, vectors, width]` input embeddings that stand where the trigger does; a run of a shorter trigger leaves the last ones alone.

    Attributes:
        counts: vectors of each run.
    """

    weight_decay = 1e-2

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        embeddings = base.embedding.weight.detach()
        starts = []
        for run in self.runs:
            subject = base.subject(run.subject)
            count = self.vectors or len(base.word_ids(subject.trigger))
            word = torch.tensor(base.word_ids(subject.class_word), device=base.device)
            starts.append(embeddings[word].mean(0).expand(count, -1))
        self.counts = tuple(len(start) for start in starts)
        most = max(self.counts)
        self.embeddings = nn.Parameter(torch.stack([start[:1].expand(most, -1) for start in starts]).float())

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        """Prompts with a trigger go through the encoder again; the others keep the bits of the untouched states."""
        touched = sorted({row for row, *_ in rows.spans})
        if not touched:
            return rows.states
        longest = max(length for *_, length in rows.spans)
        if longest > self.embeddings.shape[1]:
            raise ValueError(f"a span of {longest} tokens, expected at most {self.embeddings.shape[1]}: one for each vector")
        at = rows.positions()
        vectors = self.embeddings[at.run, at.offset]
        if len(touched) == len(rows.ids):
            return encode_with(base, rows.ids, at.row, at.place, vectors)
        index = torch.tensor(touched, device=rows.ids.device)
        states = encode_with(base, rows.ids[index], torch.searchsorted(index, at.row), at.place, vectors)
        return rows.states.index_copy(0, index, states.to(rows.states.dtype))

    def values(self, run: int) -> dict[str, torch.Tensor]:
        return {name: held[: self.counts[run]] for name, held in super().values(run).items()}


class InversionOne(Inversion):
    """One new token stands for the whole trigger."""

    vectors = 1


class InversionTrigger(Inversion):
    """A vector for each token of the trigger."""
