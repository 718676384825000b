"""Controls for ours: what is left of it with a part taken out.

Some are trained so, each a method of its own (`TRAINED`). Others change only what is drawn with: functions from trained runs to a
changed copy (`DRAWN`). Imports torch, ours and the kernels it stands on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.methods.spans import CONFIG, Places, basis_matrices
from benchmarks.personalization.runs import Run
from tiny_engram.kernels.span_residual import span_residual

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["DRAWN", "TRAINED"]


class GateFixed(Ours):
    """The gate is one half, whatever stands there."""

    preset: ClassVar[Mapping[str, Any]] = {"gate": "fixed"}


class GateRemoved(Ours):
    """The gate is one."""

    preset: ClassVar[Mapping[str, Any]] = {"gate": "removed"}


class Unquantised(Ours):
    """Rows as they are, shipped as float16."""

    preset: ClassVar[Mapping[str, Any]] = {"quantise": False}


class GatesOnly(Ours):
    """Rows stay as they start, at random where ours starts at zero; the gates alone are trained."""

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        for kind in list(self.rows):
            self.register_buffer(f"rows_{kind}", self.rows[kind].detach())
            del self.rows[kind]
        self.maps.requires_grad_(False)
        self.rate_factors = {name: self.options.gate_rate for name, _ in self.named_parameters()}

    def _start(self, base: Base) -> None:
        super()._start(base)
        if self.options.init == "zero":
            for rows in self.rows.values():
                draws = [torch.randn(rows.shape[1:], generator=torch.Generator("cpu").manual_seed(run.seed)) for run in self.runs]
                unit = functional.normalize(torch.stack(draws).flatten(3), dim=-1)
                rows.data.copy_(unit.view_as(rows))


class TrainableBasis(Ours):
    """The key and value projections are trained beside the rows; they start as the fixed basis, and one pair serves all mounts of a run."""

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        widths = set(self.widths.values())
        if len(widths) > 1:
            raise ValueError(f"mounts of widths {sorted(widths)}: one pair of projections serves mounts of one width; name fewer mounts")
        bases = basis_matrices(CONFIG.columns_at(*widths) * CONFIG.head_dim, *widths, base.device)
        self.key_basis, self.value_basis = (nn.Parameter(basis.expand(len(runs), -1, -1).clone()) for basis in bases)

    def arithmetic(
        self, here: torch.Tensor, places: Places, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        if not hasattr(self, "key_basis"):  # while the rows are given their start
            return super().arithmetic(here, places, rows, gain, bias, scale)
        mounts = len(rows)
        e = functional.pad(rows, (0, 0, 0, CONFIG.columns_at(here.shape[-1]) - rows.shape[2])).flatten(2)
        # each position with a copy of its run's matrix: by a product with zeros, a run that diverged would reach the others
        own = (basis[places.run] for basis in (self.key_basis, self.value_basis))
        key, value = (torch.einsum("mnd,ndw->mnw", e, basis).flatten(0, 1) for basis in own)
        h = here.float()
        norm = places.means(h.square().sum(-1).sqrt()).repeat(mounts)
        h = h.expand(mounts, -1, -1).flatten(0, 1)
        gates = {"gain": gain.flatten(), "bias": bias.flatten(), "scale": scale.flatten()}
        return (h + span_residual(h, key, value, mean_norm=norm, **gates)).view(mounts, *here.shape).to(here.dtype)

    def values(self, run: int) -> dict[str, torch.Tensor]:
        return super().values(run) | {name: getattr(self, name)[run].detach().half().cpu() for name in ("key_basis", "value_basis")}

    def mounts(self) -> dict[str, tuple[str, int]]:
        raise ValueError("projections of a run's own are nothing that a concept file holds; draw such a run by the bench")


TRAINED: dict[str, type[Ours]] = {
    "ours-gate-fixed": GateFixed,
    "ours-gate-removed": GateRemoved,
    "ours-no-fp8": Unquantised,
    "ours-trainable-basis": TrainableBasis,
    "ours-gates-only": GatesOnly,
}


# -- what only changes drawing: a trained stack in, a changed copy out, for `draw`; the trained one stays as it is --------------


@torch.no_grad()
def _with_rows(trained: Ours, change: Callable[[torch.Tensor], torch.Tensor]) -> Ours:
    """A copy whose rows of each mount kind, `[runs, sets, positions, kept, 32]`, were changed, and so were the factors of its maps."""
    copied = copy.deepcopy(trained)
    for kind in copied.options.kinds:
        rows = copied.held("rows", kind)
        rows.copy_(change(rows))
    for factors in copied.maps.factors.values():
        factors.copy_(change(factors[:, None].unflatten(-1, (-1, CONFIG.head_dim))).view_as(factors))
    return copied


def donor(trained: Ours, seed: int = 0) -> Ours:
    """Each run with the rows of the next run of another subject, and its own gates; `seed` says nothing here.

    Raises:
        ValueError: all runs teach one subject.
    """
    subjects = [run.subject for run in trained.runs]
    count = len(subjects)
    donors = [next((j % count for j in range(i + 1, i + count) if subjects[j % count] != subjects[i]), -1) for i in range(count)]
    if min(donors) < 0:
        raise ValueError(f"rows of another concept: all runs teach {subjects[0]!r}; expected runs of two subjects or more in the stack")
    return _with_rows(trained, lambda rows: rows[donors])


def shuffled(trained: Ours, seed: int = 0) -> Ours:
    """The rows of 32 values change places among sets, positions and columns of their mount kind; the same way in all runs."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def shuffle(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(1, 3)
        return flat[:, torch.randperm(flat.shape[1], generator=generator).to(flat.device)].view_as(rows)

    return _with_rows(trained, shuffle)


def random(trained: Ours, seed: int = 0) -> Ours:
    """Every row keeps its norm, and gets a direction drawn at random."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(rows: torch.Tensor) -> torch.Tensor:
        direction = functional.normalize(torch.randn(rows.shape, generator=generator), dim=-1).to(rows.device)
        return direction * rows.norm(dim=-1, keepdim=True)

    return _with_rows(trained, draw)


def off(trained: Ours, seed: int = 0) -> Ours:
    """Strength 0: the base."""
    copied = _with_rows(trained, lambda rows: rows)
    copied.strength = 0.0
    return copied


DRAWN: dict[str, Callable[[Ours], Ours]] = {"ours-donor": donor, "ours-shuffled": shuffled, "ours-random": random, "ours-off": off}
