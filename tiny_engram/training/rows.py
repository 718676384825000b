"""The trainable side of a concept: masters of its rows and gates at all of its mounts, and of its maps. May import torch and the core
of concepts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from tiny_engram.concept import Concept
from tiny_engram.config import BLOCK, INPUT, POOLED, SPAN
from tiny_engram.context_plan import ContextLayout
from tiny_engram.deep_mounts import layer_of
from tiny_engram.fired import Fired, RowsRead
from tiny_engram.mount_names import band_at, context_name
from tiny_engram.pooled import apply_pooled
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept, apply_spans, spread
from tiny_engram.stream_contexts import GivenRows, RowsAtPlace
from tiny_engram.training.cache import CaptionBatch
from tiny_engram.training.class_word import Start
from tiny_engram.training.conditions import RoleBatch

__all__ = ["ConceptRows"]

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Read:
    """What one pass reads: rows float32 `[mounts, positions, columns, head_dim]`, through the quantiser, gain and bias
    `[mounts, positions]`; of several concepts one behind the other along the positions."""

    rows: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Along the positions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


@dataclass(slots=True)
class _Shared:
    """Places that read the same rows: their names, how many bands there are, and the mount of each band that has rows, by number."""

    places: tuple[str, ...]
    bands: int
    mounts: dict[int, int] = field(default_factory=dict)


class ConceptRows(nn.Module):
    """Masters of one concept: rows float32 `[mounts, positions, columns, head_dim]`, gain and bias `[mounts, positions]`, and of its maps,
    one after the other, what lies under one scale, float32 `[blocks, 32]`. Mounts of less columns than others have zeros behind theirs.

    Args:
        concept: untrained, or what to go on from; one that the adapter loads, so that no place reads two sets of its rows.
        layout: of the role's context mounts, which says what each place reads.
        starts: other values to begin with, by mount.
    """

    def __init__(self, concept: Concept, role: str, layout: ContextLayout, *, starts: Mapping[str, Start] | None = None) -> None:
        super().__init__()
        held, maps = concept.roles[role].mounts, concept.roles[role].maps
        self.mounts = tuple(held)
        self.rho, self.basis_seed = [at.rho for at in held.values()], concept.config.basis_seed
        own = [(starts or {}).get(name) or Start(at.rows(), at.gain, at.bias) for name, at in held.items()]
        self._columns = [start.rows.shape[1] for start in own]
        widest = max(self._columns)
        self.rows = nn.Parameter(torch.stack([pad(start.rows, (0, 0, 0, widest - start.rows.shape[1])) for start in own]))
        self.gain = nn.Parameter(torch.stack([start.gain for start in own]))
        self.bias = nn.Parameter(torch.stack([start.bias for start in own]))
        self._layout = layout
        self._timesteps = layout.training_timesteps()
        self._shared = self._read_by(layout)
        self.shapes = {name: (at.rank, at.channels) for name, at in maps.items()}
        blocks = [factor.reshape(-1, BLOCK) for at in maps.values() for factor in at.factors()]
        self.maps = nn.Parameter(torch.cat(blocks)) if blocks else None

    def _read_by(self, layout: ContextLayout) -> list[_Shared]:
        found: dict[tuple[str, str, int], _Shared] = {}
        for k, mount in enumerate(self.mounts):
            name = context_name(mount)
            if name is None:
                continue
            key = (name.where, name.kind, name.bands)
            if key not in found:
                found[key] = _Shared(layout.places_of(mount), name.bands)
            found[key].mounts[name.band] = k
        return list(found.values())

    @property
    def positions(self) -> int:
        """Of all spellings."""
        return self.rows.shape[1]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What concepts must have in common to be read in one pass."""
        return self.mounts, tuple(self._columns), tuple(self.rho), self.basis_seed, tuple(self.shapes.items())

    def forward(
        self, captions: CaptionBatch | RoleBatch, timesteps: Sequence[int], dtype: torch.dtype, others: Sequence["ConceptRows"] = ()
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | GivenRows, Factors]:
        """Text states with the concept in, as it would be served: rows go through the quantiser, gradients straight past it.

        Args:
            timesteps: of each sample, on the CPU. dtype: what the denoiser reads.
            others: further concepts of this one's `shape`, each with as many samples, one concept behind the other; the offsets of the
                captions' spans count through the positions of all.

        Returns:
            What the denoiser is given; what each place "context.{i}.key" with rows reads instead, like it, or, where places read tensors of
            their own, the rows that are added there; and (into, out) of each map, of each sample where there are others.
        """
        every = (self, *others)
        rows = fake_quantize(_joined([one.rows for one in every]))
        read, states = _Read(rows, _joined([one.gain for one in every]), _joined([one.bias for one in every])), captions.states
        inside = {layer: partial(self._moved, read, mount) for mount in self.mounts if (layer := layer_of(mount)) is not None}
        if isinstance(captions, RoleBatch):
            captions = captions.read_inside(inside) if inside else captions
            states = captions.states
            if INPUT in self.mounts:
                states = captions.read_again(partial(self._moved, read, INPUT), inside)
        elif INPUT in self.mounts:
            states = captions.read_again(partial(self._moved, read, INPUT))
        if SPAN in self.mounts:
            states = self._moved(read, SPAN, states, captions.spans)
        if POOLED in self.mounts:
            states = self._moved_vectors(states, captions.spans, read)
        states = states.to(dtype)
        factors = self._factors([one.maps for one in every if one.maps is not None], len(states))
        if self._layout.adds_on_the_way:
            return states, self._given(states, captions.spans, read, timesteps), factors
        return states, self._contexts(states, captions.spans, read, timesteps), factors

    def _factors(self, maps: Sequence[torch.Tensor], samples: int) -> Factors:
        if not maps:
            return {}
        if len(maps) == 1:
            return self.factors(fake_quantize(maps[0]))
        blocks = fake_quantize(torch.stack(list(maps)))
        return self.factors(blocks[:, None].expand(-1, samples // len(maps), -1, -1).flatten(0, 1))

    def _moved(self, read: _Read, mount: str, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Embeddings or states `[batch, time, width]` with what a mount of the encoder adds."""
        k = self.mounts.index(mount)
        return apply_concept(
            x, spans, read.rows[k][:, : self._columns[k]], read.gain[k], read.bias[k], rho=self.rho[k], basis_seed=self.basis_seed
        )

    def _moved_vectors(self, vectors: torch.Tensor, spans: Spans, read: _Read) -> torch.Tensor:
        """Pooled vectors `[batch, width]` with what is added to them."""
        k, at = self.mounts.index(POOLED), spans.flat()[2].to(read.rows.device)
        scale = torch.full((len(at),), self.rho[k])
        rows = RowsRead(read.rows[k][at][:, : self._columns[k]], self.basis_seed)
        return apply_pooled(vectors, [Fired((), spans, rows, read.gain[k][at], read.bias[k][at], scale)])

    def _contexts(self, states: torch.Tensor, spans: Spans, read: _Read, timesteps: Sequence[int]) -> dict[str, torch.Tensor]:
        """What each place reads: all in one pass, each span with the rows of its sample's band."""
        if not self._shared:
            return {}
        size, positions = len(states), read.rows.shape[1]
        table: list[tuple[int, int, int, int]] = []
        rho: list[float] = []
        where = list(zip(*(x.tolist() for x in (spans.batch, spans.start, spans.length, spans.offset)), strict=True))
        for number, shared in enumerate(self._shared):
            for sample, start, length, offset in where:
                mount = shared.mounts.get(band_at(timesteps[sample], shared.bands, self._timesteps))
                if mount is not None:
                    table.append((number * size + sample, start, length, mount * positions + offset))
                    rho += [self.rho[mount]] * length
        everywhere = Spans.of(table)
        at = everywhere.flat()[2].to(states.device)
        stacked = apply_spans(
            states.expand(len(self._shared), *states.shape).flatten(0, 1),
            everywhere,
            read.rows.flatten(0, 1)[at],
            read.gain.flatten()[at],
            read.bias.flatten()[at],
            torch.tensor(rho, dtype=torch.float32),
            basis_seed=self.basis_seed,
        ).unflatten(0, (-1, size))
        return {place: stacked[k] for k, shared in enumerate(self._shared) for place in shared.places}

    def _given(self, states: torch.Tensor, spans: Spans, read: _Read, timesteps: Sequence[int]) -> GivenRows:
        """The rows that each place adds, of each sample those of its band; all of one width are spread in one pass."""
        where = list(zip(*(x.tolist() for x in (spans.batch, spans.start, spans.length, spans.offset)), strict=True))
        asked: dict[int, list[tuple[_Shared, Spans, torch.Tensor]]] = {}
        for shared in self._shared:
            bands = [shared.mounts.get(band_at(timesteps[sample], shared.bands, self._timesteps)) for sample, *_ in where]
            own = [(span, mount) for span, mount in zip(where, bands, strict=True) if mount is not None]
            if own:
                mounts = torch.tensor([mount for (_, _, length, _), mount in own for _ in range(length)])
                asked.setdefault(self._layout.width_at(shared.places[0], states), []).append(
                    (shared, Spans.of(at for at, _ in own), mounts)
                )
        found: dict[str, RowsAtPlace] = {}
        for width, parts in asked.items():
            mounts = torch.cat([mounts for _, _, mounts in parts])
            at = tuple(x.to(states.device) for x in (mounts, torch.cat([kept.flat()[2] for _, kept, _ in parts])))
            columns = self._columns[int(mounts[0])]
            sides = spread(read.rows[at][:, :columns], width=width, basis_seed=self.basis_seed)
            values = (*sides, read.gain[at], read.bias[at], torch.tensor(self.rho)[mounts])
            sizes = [len(mounts) for _, _, mounts in parts]
            for (shared, kept, _), split in zip(parts, zip(*(x.split(sizes) for x in values), strict=True), strict=True):
                found |= dict.fromkeys(shared.places, RowsAtPlace(kept, *split))
        return GivenRows(found, self._layout, [states.shape[1]] * len(states))

    def factors(self, blocks: torch.Tensor) -> Factors:
        """(into, out) of each map, float32 `[rank, channels]` each, from values laid out as `maps`; of several samples from
        `[samples, blocks, 32]`, with samples in front."""
        sizes = [rank * channels // BLOCK for rank, channels in self.shapes.values() for _ in range(2)]
        parts, first = iter(blocks.split(sizes, -2)), blocks.shape[:-2]
        return {name: (next(parts).reshape(*first, *shape), next(parts).reshape(*first, *shape)) for name, shape in self.shapes.items()}

    def concept(self, start: Concept, role: str, values: Mapping[str, torch.Tensor]) -> Concept:
        """`start` with these values, laid out as the parameters, quantised: what would be served."""
        made = start
        for k, mount in enumerate(self.mounts):
            made = made.with_rows(role, values["rows"][k][:, : self._columns[k]], values["gain"][k], values["bias"][k], mount=mount)
        if "maps" in values:
            for name, (into, out) in self.factors(values["maps"]).items():
                made = made.with_map(role, name, into, out)
        return made
