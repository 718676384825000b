"""The two published table methods, written from their rules: "after Tiny-Engram" and "after V-Engram".

Both store a row for every run of 2 or more neighbouring tokens of the trigger, and add the rows of all runs that stand in the prompt
at every position they cover. Sub-runs match by ids alone, wherever they stand: a prompt that holds a part of the trigger is
moved as well, another subject's prompt only where tokens agree. What the publications leave open is in `ASSUMPTIONS`.
Imports torch and the shapes of the bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.methods.spans import context_inputs, encoder_with, hooked
from benchmarks.personalization.runs import Run

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["ASSUMPTIONS", "AfterTinyEngram", "AfterVEngram", "SubRuns", "sub_runs"]

ASSUMPTIONS: dict[str, tuple[str, ...]] = {
    "after-tiny-engram": (
        "The form published for SD1.5 is used (e * tanh(s)), since the base is an SD1.5-like pipeline with one CLIP encoder.",
        "Rows and gates ship as float16.",
        "The optimiser is AdamW without weight decay; the rates of rows (1e-3) and gate (1e-4) keep their ratio in the sweep.",
        "A part of the trigger that occurs twice in it has one row, and two matches over one position add it twice.",
    ),
    "after-v-engram": (
        "Every mount has rows and gates of its own; rows start as N(0, 0.02^2) and gates at 0.05, as in Tiny-Engram.",
        "rho(H) is the mean norm of all of the prompt's states at the mount, without gradient; eps is 1e-6.",
        "Where several entries cover a position, their residuals are summed.",
        "The cross-attentions of the UNet stand in for MMDiT's context blocks: the residual is added to what each one's key and value "
        "projections read, and does not carry over to the next.",
        "Of the encoders, the base has CLIP alone: its mount is before the second-last layer, and there is none of T5's.",
        "Weight decay is AdamW's usual 0.01, on rows and gates. Rows and gates ship as float16.",
    ),
}


def sub_runs(ids: Sequence[int], longest: int) -> list[tuple[int, ...]]:
    """All runs of 2 to `longest` neighbouring tokens, by length and place, and the whole trigger last where it is longer than that."""
    lengths = range(2, min(len(ids), longest) + 1)
    found = [tuple(ids[at : at + n]) for n in lengths for at in range(len(ids) - n + 1)]
    return [*found, tuple(ids)] if len(ids) > longest else found


@dataclass(frozen=True, slots=True)
class SubRuns:
    """The sub-runs of several triggers of one length, for matching on the device.

    Attributes:
        ids: int64 `[runs, entries, longest]`, -1 after an entry's end; all of them -1 where an earlier entry has the same ids.
        length: int64 `[runs, entries]`; 0 where a shorter trigger has no entry.
        distinct: entries of each run that are its own.
        entries: of each run, those that it has once more included.
    """

    ids: torch.Tensor
    length: torch.Tensor
    distinct: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, triggers: Sequence[Sequence[int]], longest: int, device: torch.device) -> SubRuns:
        """Raises ValueError for a trigger of one token."""
        if (shortest := min(map(len, triggers))) < 2:
            raise ValueError(f"a trigger of {shortest} token; expected 2 or more, whose sub-runs have rows")
        tables, lengths, distinct = [], [], []
        each = [sub_runs(ids, longest) for ids in triggers]
        most, width = max(map(len, each)), max(len(entry) for entries in each for entry in entries)
        for entries in each:
            own = [entry not in entries[:i] for i, entry in enumerate(entries)]
            kept = [entry if new else () for entry, new in zip(entries, own, strict=True)]
            kept += [()] * (most - len(entries))
            tables.append([[*entry, *[-1] * (width - len(entry))] for entry in kept])
            lengths.append([len(entry) for entry in kept])
            distinct.append(sum(own))
        return cls(torch.tensor(tables, device=device), torch.tensor(lengths, device=device), tuple(distinct), tuple(map(len, each)))

    def counts(self, rows: Rows) -> torch.Tensor:
        """How many matches of each entry cover each position: float32 `[batch, slots, entries, time]`; nothing leaves the device."""
        wanted = self.ids[rows.run.clamp(min=0)]  # [batch, slots, entries, longest]
        longest = wanted.shape[-1]
        padded = nn.functional.pad(rows.ids, (0, longest - 1), value=-2)
        agree = padded.unfold(1, longest, 1)[:, None, None] == wanted[..., None, :]  # [batch, slots, entries, time, longest]
        length = self.length[rows.run.clamp(min=0)]  # [batch, slots, entries]
        past = torch.arange(longest, device=rows.ids.device) >= length[..., None]
        own = (wanted[..., 0] >= 0) & (rows.run >= 0)[..., None]
        starts = ((agree | past[:, :, :, None]).all(-1) & own[..., None]).float()
        covered = torch.zeros_like(starts)
        for step in range(longest):
            shifted = nn.functional.pad(starts, (step, 0))[..., : starts.shape[-1]]
            covered = covered + shifted * (step < length)[..., None]
        return covered


def _triggers(base: Base, runs: Sequence[Run]) -> list[list[int]]:
    return [base.word_ids(base.subject(run.subject).trigger) for run in runs]


def _drawn(runs: Sequence[Run], entries: Sequence[int], before: tuple[int, ...], width: int, device: torch.device) -> torch.Tensor:
    """N(0, 0.02^2) `[runs, *before, most entries, width]`, each run's by its own seed and for its own entries; the others are zero."""
    made = torch.zeros(len(runs), *before, max(entries), width)
    for run, count, into in zip(runs, entries, made, strict=True):
        into[..., :count, :] = torch.randn(*before, count, width, generator=torch.Generator("cpu").manual_seed(run.seed))
    return made.mul(0.02).to(device)


class AfterTinyEngram(Adapters):
    """Sub-runs of 2 to 7 tokens and the whole if it is longer; one gate vector; added after the encoder. Rate 1e-3, gate a tenth of it."""

    rate_factors = {"gate": 0.1}

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        self.table = SubRuns.of(_triggers(base, runs), 7, base.device)
        self.rows = nn.Parameter(_drawn(runs, self.table.entries, (), base.width, base.device))
        self.gate = nn.Parameter(torch.full((len(runs), base.width), 0.05, device=base.device))

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        counts = self.table.counts(rows)
        entries = (self.rows * self.gate.tanh()[:, None])[rows.run.clamp(min=0)]
        delta = _summed("bset,bsew->btw", counts, entries)
        return _added(rows.states, delta, counts)


class AfterVEngram(Adapters):
    """Sub-runs of 2 to 4 tokens and the whole; a gate per entry and mount; before CLIP's second-last layer, which moves later positions
    too, and at every cross-attention. AdamW, 5e-4."""

    weight_decay = 0.01
    eps = 1e-6

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        self.table = SubRuns.of(_triggers(base, runs), 4, base.device)
        mounts, entries = 1 + len(base.cross_attentions), self.table.ids.shape[1]
        # one table of rows where encoder and cross-attentions are as wide, two where they are not
        apart = base.context_width != base.width
        self.rows = nn.Parameter(_drawn(runs, self.table.entries, (1 if apart else mounts,), base.width, base.device))
        drawn = _drawn(runs, self.table.entries, (mounts - 1,), base.context_width, base.device) if apart else None
        self.context_rows = None if drawn is None else nn.Parameter(drawn)
        self.gate = nn.Parameter(torch.full((len(runs), mounts, entries), 0.05, device=base.device))
        self.layer = f"layer-{base.text_encoder.config.num_hidden_layers - 2}"

    def _residuals(self, contexts: bool, rows: Rows, counts: torch.Tensor) -> torch.Tensor:
        """What the entries add at each mount, that of the encoder or those of the cross-attentions, as a share of rho(H):
        `[mounts, batch, time, width]`."""
        mounts = slice(1, None) if contexts else slice(0, 1)
        e = self.rows[:, mounts] if self.context_rows is None or not contexts else self.context_rows
        shares = e / (e.norm(dim=-1, keepdim=True) + self.eps) * self.gate[:, mounts].tanh()[..., None]
        return _summed("bset,bsmew->mbtw", counts, shares[rows.run.clamp(min=0)])

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        counts = self.table.counts(rows)
        share, mask = self._residuals(False, rows, counts)[0], base.mask(rows.ids)
        new = encoder_with(base, rows.ids, {self.layer: lambda h: _added(h, _mean_norm(h, mask) * share, counts)})
        return torch.where(_covered(counts).any(1)[:, None, None], new, rows.states)

    @contextmanager
    def attached(self, base: Base, rows: Rows, states: torch.Tensor) -> Iterator[None]:
        counts = self.table.counts(rows)
        read = base.read(states)
        norm = _mean_norm(read, base.mask(rows.ids))
        moved = [_added(read, delta, counts) for delta in norm * self._residuals(True, rows, counts)]

        def put(new: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda x: new.to(x.dtype)

        projections: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = [
            (module.get_submodule(name), put(new))
            for (_, module), new in zip(base.cross_attentions, moved, strict=True)
            for name in ("to_k", "to_v")
        ]
        with hooked(context_inputs(projections)):
            yield


def _summed(indices: str, counts: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """What all matches add, in float32 even where the encoder and the denoiser run in less."""
    with torch.autocast(counts.device.type, enabled=False):
        return torch.einsum(indices, counts, entries)


def _covered(counts: torch.Tensor) -> torch.Tensor:
    """bool `[batch, time]`: positions that some match covers."""
    return (counts > 0).any(2).any(1)


def _mean_norm(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """rho(H): `[batch, 1, 1]`, without gradient; over the text alone where a mask says where that is."""
    norm = states.detach().norm(dim=-1)
    mean = norm.mean(1) if mask is None else (norm * mask).sum(1) / mask.sum(1)
    return mean[:, None, None]


def _added(states: torch.Tensor, delta: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """states + delta where something matches; the rest keeps its bits."""
    return torch.where(_covered(counts)[..., None], states + delta.to(states.dtype), states)
