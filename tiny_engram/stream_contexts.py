"""Contexts of denoisers whose places read another tensor than the one that the denoiser is given: projected, normed, or mixed with time.
May import context_plan, encoded_positions, hooks, maps, residual and store.

Where the trigger stands is told at the denoiser's entry, by what its states hold; a place adds to whatever it reads at those positions,
with the norm that the span has there.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tiny_engram.context_plan import (
    Chosen,
    ContextLayout,
    Contexts,
    FiredGroup,
    Reading,
    Timesteps,
    chosen_at,
    given_maps,
    picked,
    rows_by_mount,
)
from tiny_engram.encoded_positions import FoundRow
from tiny_engram.fired import Fired, FiredMaps, Plan
from tiny_engram.hooks import MountError
from tiny_engram.maps import GivenMaps
from tiny_engram.residual import SpanRuns, Spans, moved

__all__ = ["GivenRows", "RowsAtPlace", "StreamContexts", "state_of", "where_consumed"]


def state_of(tensor: torch.Tensor) -> tuple[int, bool]:
    """What changes when a tensor is written to; inference tensors do not count that, and cannot be used outside inference mode."""
    return (-1 if tensor.is_inference() else tensor._version), torch.is_inference_mode_enabled()


def where_consumed(plan: Plan, rows: Sequence[FoundRow], offset: int) -> tuple[dict[str, list[Fired]], tuple[FiredMaps, ...]]:
    """What fires, by mount, and maps, with spans as they stand in the text that the denoiser reads: a span that a crop cut is gone."""

    def place(row: int, start: int, length: int) -> int | None:
        found = rows[row]
        begin = start - found.shift
        return begin + offset if found.first <= begin and begin + length <= found.end else None

    by_mount: dict[str, list[Fired]] = {}
    for mount, each in rows_by_mount(plan, len(rows)).items():
        for fired in each:
            spans = fired.spans
            triples = zip(spans.batch.tolist(), spans.start.tolist(), spans.length.tolist(), strict=True)
            starts = [place(*triple) for triple in triples]
            there = torch.tensor([start is not None for start in starts])
            if bool(there.any()):
                kept = picked(fired, there, spans.batch[there])
                start = torch.tensor([start for start in starts if start is not None])
                by_mount.setdefault(mount, []).append(replace(kept, spans=replace(kept.spans, start=start)))
    maps: list[FiredMaps] = []
    for one in plan.maps:
        triples = tuple((row, begin, length) for row, start, length in one.spans if (begin := place(row, start, length)) is not None)
        if triples:
            maps.append(replace(one, spans=triples))
    return by_mount, tuple(maps)


@dataclass(slots=True)
class _Stream:
    """What was made of one tensor that places read: by mount, the group and its values."""

    tensor: Callable[[], torch.Tensor | None]
    state: tuple[int, bool]
    values: dict[tuple[Chosen, ...], tuple[FiredGroup, torch.Tensor]]


class _Streaming(Contexts):
    """What adds to tensors as they are read.

    Args:
        lengths: of the rows' texts in what the denoiser is given.
        denoiser: what errors call it.
    """

    def __init__(self, layout: ContextLayout, lengths: Sequence[int], denoiser: Callable[[], str]) -> None:
        super().__init__()
        self._layout, self._lengths, self._denoiser = layout, tuple(lengths), denoiser

    def _reading(self, place: str, tensor: torch.Tensor) -> Reading:
        return self._layout.readings.get(place) or Reading(tensor.shape[-1])

    def _start(self, place: str, tensor: torch.Tensor, end: int) -> int:
        """Where the text begins in what a place reads, whose last span ends at `end`. Raises MountError where it cannot stand there."""
        reading = self._reading(place, tensor)
        good = tensor.dim() == 3 and len(tensor) == len(self._lengths) and tensor.shape[-1] == reading.width
        start = reading.start(tensor.shape[1], self._lengths) if good else -1
        if start < 0 or start + end > tensor.shape[1]:
            raise MountError(
                f"{self._denoiser()} reads {list(tensor.shape)} at {place}, expected {len(self._lengths)} rows of width {reading.width} "
                f"with the text's first {end} positions, so where the trigger stands is unknown; take out what changes them, or "
                "disable_concepts()"
            )
        return start


class StreamContexts(_Streaming):
    """What fires in the text of one call of the denoiser, or of all calls with the same text."""

    def __init__(
        self,
        fired: Mapping[str, Sequence[Fired]],
        maps: Sequence[FiredMaps],
        layout: ContextLayout,
        lengths: Sequence[int],
        denoiser: Callable[[], str],
    ) -> None:
        super().__init__(layout, lengths, denoiser)
        self._fired, self._fired_maps = dict(fired), tuple(maps)
        ends = [int((one.spans.start + one.spans.length).max()) for each in fired.values() for one in each]
        self._end = max([*ends, *(first + length for one in maps for _, first, length in one.spans)], default=0)
        self._groups: dict[tuple[tuple[str, ...], int, int, torch.device], FiredGroup] = {}
        self._streams: dict[int, _Stream] = {}
        self._given: dict[tuple[int, int, torch.device], tuple[GivenMaps, ...]] = {}

    def maps_in(self, place: str, tensor: torch.Tensor) -> Sequence[GivenMaps]:
        if not self._fired_maps:
            return ()
        start = self._start(place, tensor, self._end)
        key = len(tensor), tensor.shape[1], tensor.device
        if key not in self._given:
            self._given[key] = given_maps(self._fired_maps, key[:2], tensor.device, start)
        return self._given[key]

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        chosen = chosen_at(self._layout, place, self._fired, timesteps)
        if not chosen:
            return None
        start = self._start(place, tensor, self._end)
        group, values = self._values(place, tensor, chosen, start, timesteps)
        return group.put(tensor, chosen, values)

    def _values(
        self, place: str, tensor: torch.Tensor, chosen: tuple[Chosen, ...], start: int, timesteps: Timesteps
    ) -> tuple[FiredGroup, torch.Tensor]:
        """Values at the spans of a place's mounts. A tensor that another attention has read already is read by all (the text states do not
        change on their way), and what they add is made in one pass."""
        if tensor.requires_grad and torch.is_grad_enabled():
            # A block that is run again for its gradient makes what it made the first time.
            group = self._group([mount for mount, _ in chosen], tensor, start)
            return group, group.values(tensor)
        stream = self._streams.get(id(tensor))
        known = stream is not None and stream.tensor() is tensor and stream.state == state_of(tensor)
        if stream is None or not known:
            streams, key = self._streams, id(tensor)
            stream = streams[key] = _Stream(weakref.ref(tensor, lambda _: streams.pop(key, None)), state_of(tensor), {})
        if chosen not in stream.values:
            own = place.rpartition(".")[0] + "."
            beside = [other for other in self._layout.readings if known or other.startswith(own)]
            reading = self._reading(place, tensor)
            each = [chosen_at(self._layout, other, self._fired, timesteps) for other in beside if self._layout.readings[other] == reading]
            group = self._group(list(dict.fromkeys(mount for one in (chosen, *each) for mount, _ in one)), tensor, start)
            made = group, group.values(tensor)
            stream.values |= {one: made for one in (chosen, *each)}
        return stream.values[chosen]

    def _group(self, mounts: Sequence[str], tensor: torch.Tensor, start: int) -> FiredGroup:
        key = tuple(mounts), tensor.shape[-1], start, tensor.device
        if key not in self._groups:
            self._groups[key] = FiredGroup(
                {mount: self._fired[mount] for mount in mounts},
                width=tensor.shape[-1],
                device=tensor.device,
                start=start,
            )
        return self._groups[key]


@dataclass(frozen=True, slots=True)
class RowsAtPlace:
    """What training adds at one place: spans, N positions in all, of those samples that have rows there; what `residual.spread` makes of
    these, key and value float32 `[N, width]`; gain, bias and scale (strength * rho) float32 `[N]`."""

    spans: Spans
    key: torch.Tensor
    value: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor


class GivenRows(_Streaming):
    """For training: rows by place, differentiable, added to whatever the places read.

    Args:
        rows: by place; spans are those in the role's own states.
        length: of the text in what the denoiser is given, of each sample.
    """

    def __init__(self, rows: Mapping[str, RowsAtPlace], layout: ContextLayout, lengths: Sequence[int]) -> None:
        super().__init__(layout, lengths, lambda: "the denoiser")
        self.rows = dict(rows)
        self._found: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor, SpanRuns]] = {}

    def with_maps(self, maps: Sequence[GivenMaps]) -> "GivenRows":
        """The same with maps, whose batch and time are those of what the key projections read."""
        made = GivenRows(self.rows, self._layout, self._lengths)
        made._maps = tuple(maps)
        return made

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        added = self.rows.get(place)
        if added is None or not len(added.spans):
            return None
        spans, columns, ahead = added.spans, self._layout.columns, self._layout.offset
        start = ahead + self._start(place, tensor, ahead + int((spans.start + spans.length).max()))
        key = id(spans), start, tensor.device
        if key not in self._found:
            batch, time, _ = spans.flat()
            runs = SpanRuns.of(spans.length, tensor.device)
            self._found[key] = batch.to(tensor.device), (time + start).to(tensor.device), runs
        batch, time, runs = self._found[key]
        own = tensor if columns is None else tensor[..., slice(*columns)]
        gates = (x.to(tensor.device) for x in (added.gain, added.bias, added.scale))
        made = own.index_put((batch, time), moved(own[batch, time], runs, added.key, added.value, *gates))
        return made if columns is None else tensor.slice_scatter(made, -1, *columns)
