"""What each place of a denoiser reads in the place of one tensor of text states. May import maps, mount_names and store.

A *place* is a projection, `context.{i}.key` or `context.{i}.value`. It reads the rows of its own mounts and of its block's, of those in
bands the ones of the timestep at hand. Spans of different concepts never overlap, and one concept has one of these layouts at a place, so
what is added never overlaps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from tiny_engram.maps import GivenMaps
from tiny_engram.mount_names import band_at, context_name, map_name
from tiny_engram.store import FiredMaps, Plan

__all__ = ["ContextLayout", "Contexts", "PlannedContexts", "given_maps"]

# Timesteps of the denoiser's call: one for all rows of the batch, or one for each.
Timesteps = Callable[[], Sequence[float]]


class ContextLayout:
    """Which mounts each place reads.

    Args:
        mounts: all that the role can have; those at the encoder are left out.
        blocks: the block of each cross-attention, in running order.
        training_timesteps: gives the number of timesteps that the present scheduler was trained with, which bands are shares of.

    Attributes:
        names: each context mount's name, taken apart.
    """

    def __init__(self, mounts: Sequence[str], blocks: Sequence[str], *, training_timesteps: Callable[[], int]) -> None:
        self.training_timesteps = training_timesteps
        self.names = {mount: name for mount in mounts if (name := context_name(mount)) is not None}
        self._places: dict[str, tuple[str, ...]] = {}
        self._mounts: dict[str, list[str]] = {}
        for mount, name in self.names.items():
            numbers = [i for i, block in enumerate(blocks) if block == name.where] if name.shared else [int(name.where)]
            self._places[mount] = tuple(f"context.{i}.{name.kind}" for i in numbers)
            for place in self._places[mount]:
                self._mounts.setdefault(place, []).append(mount)

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
        self.maps = tuple(maps)

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        """What a place reads instead of `tensor`; None for the tensor itself."""
        return self._places.get(place)


class PlannedContexts(Contexts):
    """What fires in one tensor `[batch, time, width]`, at all mounts that have rows for it: made once, and picked by place and timestep."""

    def __init__(self, tensor: torch.Tensor, plan: Plan, layout: ContextLayout) -> None:
        super().__init__(maps=given_maps(plan.maps, tensor))
        self._layout = layout
        self._fired = plan.fired
        stacked = tensor.expand(len(plan.mounts), *tensor.shape).reshape(-1, *tensor.shape[1:])
        for fired in plan.fired:
            stacked = fired.apply(stacked)
        self._mounts = dict(zip(plan.mounts, stacked.split(len(tensor)), strict=True)) if plan.fired else {}
        self._numbers = {mount: k for k, mount in enumerate(plan.mounts)}
        self._read: dict[tuple[tuple[str, tuple[bool, ...]], ...], torch.Tensor] = {}

    def at(self, place: str, tensor: torch.Tensor, timesteps: Timesteps) -> torch.Tensor | None:
        chosen: list[tuple[str, tuple[bool, ...]]] = []  # which mounts, for which rows of the batch; () for all
        for mount in self._layout.mounts_at(place):
            if mount in self._mounts:
                rows = self._rows(mount, timesteps)
                if all(rows) or any(rows):
                    chosen.append((mount, () if all(rows) else rows))
        if not chosen:
            return None
        if len(chosen) == 1 and not chosen[0][1]:
            return self._mounts[chosen[0][0]]
        key = tuple(chosen)
        if key not in self._read:
            self._read[key] = self._joined(tensor, chosen)
        return self._read[key]

    def _rows(self, mount: str, timesteps: Timesteps) -> tuple[bool, ...]:
        """Which rows of the batch read a mount now: one answer for each, or a single one for all; () for those without bands."""
        name = self._layout.names[mount]
        if name.bands == 1:
            return ()
        total = self._layout.training_timesteps()
        return tuple(band_at(t, name.bands, total) == name.band for t in timesteps())

    def _joined(self, tensor: torch.Tensor, chosen: Sequence[tuple[str, tuple[bool, ...]]]) -> torch.Tensor:
        """The tensor with what several mounts put at their spans, each in the rows that it is chosen for."""
        for mount, rows in chosen:
            batch, time = self._positions(mount, len(tensor))
            if rows:
                kept = torch.tensor(rows)[batch]
                batch, time = batch[kept], time[kept]
            at = batch.to(tensor.device), time.to(tensor.device)
            tensor = tensor.index_put(at, self._mounts[mount][at])
        return tensor

    def _positions(self, mount: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch row and time of all positions at which a mount has rows, int64 CPU `[N]` each."""
        found = [fired.spans.flat()[:2] for fired in self._fired]
        rows, time = (torch.cat(parts) for parts in zip(*found, strict=True))
        own = rows // batch == self._numbers[mount]
        return rows[own] % batch, time[own]


def given_maps(fired: Sequence[FiredMaps], tensor: torch.Tensor) -> tuple[GivenMaps, ...]:
    """The maps that fire in text states `[batch, time, width]`, on their device."""
    made: list[GivenMaps] = []
    for one in fired:
        at = torch.zeros(tensor.shape[:2])
        for row, start, length in one.spans:
            at[row, start : start + length] = 1.0
        factors = {name: (into.to(tensor.device), out.to(tensor.device)) for name in one.maps for into, out in (one.factors(name),)}
        made.append(GivenMaps(at.to(tensor.device), factors))
    return tuple(made)
