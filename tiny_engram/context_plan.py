"""What each place of a denoiser reads instead of text states: the rows of the mounts that are meant for it, at the trigger's positions.
May import maps, mount_names, residual and store.

A *place* is a projection, `context.{i}.key` or `context.{i}.value`. It reads the rows of its own mounts and of its block's, of those in
bands the ones of the timestep at hand. Spans of different concepts never overlap, and one concept has one of these layouts at a place, so
what is added never overlaps.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tiny_engram.fired import Fired, FiredMaps, Plan, RowsRead
from tiny_engram.maps import GivenMaps
from tiny_engram.mount_names import band_at, context_name, map_name
from tiny_engram.residual import SpanRuns, Spans, moved, spread

__all__ = [
    "Chosen",
    "ContextLayout",
    "Contexts",
    "FiredGroup",
    "PlannedContexts",
    "Reading",
    "Timesteps",
    "chosen_at",
    "given_maps",
    "picked",
    "rows_by_mount",
]

# Timesteps of the denoiser's call: one for all rows of the batch, or one for each.
Timesteps = Callable[[], Sequence[float]]
# A mount, and the rows of the batch that read it: one answer for each, () for all.
Chosen = tuple[str, tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class Reading:
    """How text stands in what a place reads.

    Attributes:
        width: of what it reads.
        offset: positions in front of the text.
        tail: where the text stands at the end instead: lengths of the rows' texts -> positions from its first one to the end.
    """

    width: int
    offset: int = 0
    tail: Callable[[Sequence[int]], int] | None = None

    def start(self, time: int, lengths: Sequence[int]) -> int:
        """Where the text begins in a sequence of `time` positions."""
        return self.offset if self.tail is None else time - self.tail(lengths)


class ContextLayout:
    """Which mounts each place reads.

    Args:
        mounts: all that the role can have; those at the encoder are left out.
        blocks: the block of each cross-attention, in running order.
        training_timesteps: gives the number of timesteps that the present scheduler was trained with, which bands are shares of.
        readings: how text stands at each place, where places read other tensors than the one that the denoiser is given.
        offset: where the role's first state stands in the text, behind another encoder's.
        columns: (first, end) of the role's own in the width of what a place reads, where several encoders' states lie side by side.

    Attributes:
        names: each context mount's name, taken apart.
    """

    def __init__(
        self,
        mounts: Sequence[str],
        blocks: Sequence[str],
        *,
        training_timesteps: Callable[[], int],
        readings: Mapping[str, Reading] | None = None,
        offset: int = 0,
        columns: tuple[int, int] | None = None,
    ) -> None:
        self.training_timesteps = training_timesteps
        self.readings = dict(readings or {})
        self.offset, self.columns = offset, columns
        self.names = {mount: name for mount in mounts if (name := context_name(mount)) is not None}
        self._places: dict[str, tuple[str, ...]] = {}
        self._mounts: dict[str, list[str]] = {}
        for mount, name in self.names.items():
            numbers = [i for i, block in enumerate(blocks) if block == name.where] if name.shared else [int(name.where)]
            self._places[mount] = tuple(f"context.{i}.{name.kind}" for i in numbers)
            for place in self._places[mount]:
                self._mounts.setdefault(place, []).append(mount)

    @property
    def adds_on_the_way(self) -> bool:
        """Does a concept add to whatever a place reads, as it is read? Otherwise all places read one tensor, and it is known before."""
        return bool(self.readings) or self.columns is not None

    def width_at(self, place: str, states: torch.Tensor) -> int:
        """Width of what a role adds to at a place, where its states are `[..., width]`."""
        return self.readings[place].width if place in self.readings else states.shape[-1]

    def places_of(self, name: str) -> tuple[str, ...]:
        """What a denoiser has to go through for a mount to be read, or for a map to add something: places, or the map itself."""
        return (name,) if map_name(name) is not None else self._places[name]

    def clash(self, mounts: Iterable[str]) -> tuple[str, str, str] | None:
        """(place, mount, mount) where one concept's mounts would both add to what a place reads; None if there is no such place.

        Bands of one layout never do: of those a place reads one at a time.
        """
        owners: dict[str, str] = {}
        for mount in mounts:
            for place in self._places.get(mount, ()):
                other = owners.setdefault(place, mount)
                if replace(self.names[other], band=0) != replace(self.names[mount], band=0):
                    return place, other, mount
        return None

    def mounts_at(self, place: str) -> Sequence[str]:
        """The mounts that a place reads, of all bands."""
        return self._mounts.get(place, ())


class Contexts:
    """What was given for one tensor: by place, like that tensor; and the maps that fire in it."""

    def __init__(self, places: Mapping[str, torch.Tensor] | None = None, maps: Sequence[GivenMaps] = ()) -> None:
        self._places = places or {}
        self._maps = tuple(maps)

    def maps_in(self, place: str, tensor: torch.Tensor) -> Sequence[GivenMaps]:
        """The maps that fire in what a key projection reads."""
        return self._maps

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        """What a place reads instead of `tensor`; None for the tensor itself."""
        return self._places.get(place)


def chosen_at(layout: ContextLayout, place: str, fired: Mapping[str, object], timesteps: Timesteps) -> tuple[Chosen, ...]:
    """The mounts among `fired` that a place reads now, and for which rows of the batch."""
    chosen: list[Chosen] = []
    for mount in layout.mounts_at(place):
        if mount in fired:
            name = layout.names[mount]
            if name.bands == 1:
                chosen.append((mount, ()))
                continue
            total = layout.training_timesteps()
            rows = tuple(band_at(t, name.bands, total) == name.band for t in timesteps())
            if any(rows):
                chosen.append((mount, () if all(rows) else rows))
    return tuple(chosen)


def picked(fired: Fired, spans: torch.Tensor, batch: torch.Tensor) -> Fired:
    """Some spans of `fired`, bool `[spans]`, with other batch rows, int64 `[spans picked]`."""
    # By numpy, as all small work on a prompt's path: torch's repeat_interleave wakes the thread pool.
    at = torch.from_numpy(np.repeat(spans.numpy(), fired.spans.length.numpy()))
    old = fired.spans
    return replace(
        fired,
        names=tuple(name for name, keep in zip(fired.names, spans.tolist(), strict=True) if keep),
        spans=Spans(batch, old.start[spans], old.length[spans], old.offset[spans]),
        read=RowsRead(fired.rows[at], fired.basis_seed),
        gain=fired.gain[at],
        bias=fired.bias[at],
        scale=fired.scale[at],
    )


def rows_by_mount(plan: Plan, batch: int) -> dict[str, list[Fired]]:
    """What fires at each mount of a plan, whose batch has so many rows: the mounts are no longer stacked along it."""
    found: dict[str, list[Fired]] = {}
    for fired in plan.fired:
        spans = fired.spans
        # A mount's spans stand one behind the other.
        numbers, counts = torch.unique_consecutive(spans.batch // batch, return_counts=True)
        sizes = counts.tolist()
        places = zip(
            *((x % batch if x is spans.batch else x).split(sizes) for x in (spans.batch, spans.start, spans.length, spans.offset)),
            strict=True,
        )
        lengths = [int(part.sum()) for part in spans.length.split(sizes)]
        values = zip(*(getattr(fired, name).split(lengths) for name in ("rows", "gain", "bias", "scale")), strict=True)
        first = 0
        for k, size, place, (rows, gain, bias, scale) in zip(numbers.tolist(), sizes, places, values, strict=True):
            own = Fired(fired.names[first : first + size], Spans(*place), RowsRead(rows, fired.basis_seed), gain, bias, scale)
            found.setdefault(plan.mounts[k], []).append(own)
            first += size
    return found


class FiredGroup:
    """What fires at several mounts in one tensor `[batch, time, width]`, ready to be added: all that depends on the rows alone is made
    once, on the tensor's device.

    Args:
        fired: by mount.
        start: added to the spans' positions.
        columns: (first, end) in the tensor's width that belong to the role; None for all.
    """

    def __init__(
        self,
        fired: Mapping[str, Sequence[Fired]],
        *,
        width: int,
        device: torch.device,
        start: int = 0,
        columns: tuple[int, int] | None = None,
    ) -> None:
        each = [one for parts in fired.values() for one in parts]
        flat = [one.spans.flat() for one in each]
        self._batch, self._time = (torch.cat([x[k] for x in flat]) for k in (0, 1))
        self._time = self._time + start
        self._runs = SpanRuns.of(torch.cat([one.spans.length for one in each]), device)
        self._at = self._batch.to(device), self._time.to(device)
        sides = _sides(each, width=width, device=device)
        gates = [torch.cat([getattr(one, name) for one in each]).to(device) for name in ("gain", "bias", "scale")]
        self._added = (*(torch.cat([pair[k] for pair in sides]) for k in (0, 1)), *gates)
        self._columns, self._device = columns, device
        sizes = [sum(len(one.gain) for one in parts) for parts in fired.values()]
        self._parts = dict(zip(fired, torch.arange(len(self._batch)).split(sizes), strict=True))
        self._indices: dict[tuple[Chosen, ...], tuple[torch.Tensor, ...]] = {}

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The states at all spans with what is added, `[N, width]` in the type of `tensor`."""
        own = tensor if self._columns is None else tensor[..., slice(*self._columns)]
        return moved(own[self._at], self._runs, *self._added)

    def put(self, tensor: torch.Tensor, chosen: tuple[Chosen, ...], values: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` with those of `values` that belong to the chosen mounts and rows; differentiable."""
        if chosen not in self._indices:
            each = [at[torch.tensor(rows)[self._batch[at]]] if rows else at for mount, rows in chosen for at in (self._parts[mount],)]
            which = torch.cat(each)
            self._indices[chosen] = tuple(x.to(self._device) for x in (which, self._batch[which], self._time[which]))
        which, batch, time = self._indices[chosen]
        if self._columns is None:
            return tensor.index_put((batch, time), values[which])
        columns = torch.arange(*self._columns, device=self._device)
        return tensor.index_put((batch[:, None], time[:, None], columns), values[which])


def _sides(fired: Sequence[Fired], *, width: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each; all rows of one shape in one pass."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for k, one in enumerate(fired):
        alike.setdefault((one.basis_seed, *one.rows.shape[1:]), []).append(k)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for (seed, *_), numbers in alike.items():
        rows = torch.cat([fired[k].rows for k in numbers]).to(device)
        sizes = [len(fired[k].rows) for k in numbers]
        parts = (side.split(sizes) for side in spread(rows, width=width, basis_seed=seed))
        found |= dict(zip(numbers, zip(*parts, strict=True), strict=True))
    return [found[k] for k in range(len(fired))]


class PlannedContexts(Contexts):
    """What fires in one tensor `[batch, time, width]` that all places read, at all mounts that have rows for it: made once, and picked by
    place and timestep.
    """

    def __init__(self, tensor: torch.Tensor, plan: Plan, layout: ContextLayout) -> None:
        super().__init__(maps=given_maps(plan.maps, (len(tensor), tensor.shape[1]), tensor.device))
        self._layout = layout
        self._fired = rows_by_mount(plan, len(tensor))
        self._read: dict[tuple[Chosen, ...], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        if self._fired:
            first, end = layout.columns or (0, tensor.shape[-1])
            self._group = FiredGroup(self._fired, width=end - first, device=tensor.device, columns=layout.columns)
            self._values = self._group.values(tensor)

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        """`tensor` is the one that all places read, or that with what another role adds in its own columns."""
        chosen = chosen_at(self._layout, place, self._fired, timesteps)
        if not chosen:
            return None
        kept = self._read.get(chosen)
        if kept is None or kept[0]() is not tensor:
            # At the next step the other role's mounts give the same tensor again.
            kept = self._read[chosen] = weakref.ref(tensor), self._group.put(tensor, chosen, self._values)
        return kept[1]


def given_maps(fired: Sequence[FiredMaps], shape: Sequence[int], device: torch.device, start: int = 0) -> tuple[GivenMaps, ...]:
    """The maps that fire in text states of a shape (batch, time), `start` positions behind where their spans say."""
    made: list[GivenMaps] = []
    for one in fired:
        at = torch.zeros(*shape)
        for row, first, length in one.spans:
            at[row, start + first : start + first + length] = 1.0
        factors = {name: (into.to(device), out.to(device)) for name in one.maps for into, out in (one.factors(name),)}
        made.append(GivenMaps(at.to(device), factors))
    return tuple(made)
