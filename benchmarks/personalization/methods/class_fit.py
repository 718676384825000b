"""Rows that start at the class word, in closed form: where a mount stands, they move the trigger's states to those that its class word
has in the same sentences, as far as bound and gate let them.

The basis has orthonormal rows, so the rows of a value are its product with the transpose. The gate depends on the rows' direction
and on the state; a few rounds settle it. Averaged over carrier sentences by least squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benchmarks.personalization.methods.spans import CONFIG, Places, basis_matrices, encoder_with
from tiny_engram.kernels.span_residual import span_residual
from tiny_engram.residual import span_mean_norm
from tiny_engram.training.class_word import CARRIERS, REACH, ROUNDS, WIDEST

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base
    from benchmarks.personalization.methods.ours import Ours

__all__ = ["fit_class"]


@torch.no_grad()
def fit_class(ours: Ours, base: Base) -> None:
    """Set the rows of every mount in turn, each given those before it; with `init` "zero" the locked keys alone."""
    options = ours.options
    subjects = [base.subject(run.subject) for run in ours.runs]
    texts = list(CARRIERS) * len(subjects)
    run = torch.arange(len(subjects)).repeat_interleave(len(CARRIERS))[:, None]
    triggers, classes = (
        base.rows(texts, [(word,) for word in words for _ in CARRIERS], run)
        for words in ([s.trigger for s in subjects], [s.class_word for s in subjects])
    )
    places = ours.places(triggers)
    # The last token of a word is the one that has read it whole: last goes to last, and what is left over to the first.
    target_time = [
        start + max(0, step - trigger_length + length)
        for (_, _, start, length), (_, _, _, trigger_length) in zip(classes.spans, triggers.spans, strict=True)
        for step in range(trigger_length)
    ]
    last = torch.tensor([step == n - 1 for n in places.length for step in range(n)], device=base.device)
    chosen = last if options.init == "class-last" else torch.ones_like(last)

    for kind in options.kinds:
        if options.init == "zero" and not (kind == "key" and options.key_lock):
            continue
        if options.init == "anchor" and kind in options.context and not (kind == "key" and options.key_lock):
            continue
        if kind in options.deep:
            before = ours.deep_changes(places, options.deep[: options.deep.index(kind)])
            here, there = (_inside(base, rows.ids, kind, changes) for rows, changes in ((triggers, before), (classes, {})))
        else:
            # The span's own rows are still zero when it is fitted, and add nothing.
            here, there = ours.states(base, triggers), classes.states
            if kind in options.context:
                here, there = base.read(here), base.read(there)
        h = here[places.batch, places.time].float()
        target = there[places.batch, torch.tensor(target_time, device=base.device)].float()
        _solve(ours, kind, places, h, target - h, chosen)


def _inside(base: Base, ids: torch.Tensor, kind: str, changes: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """What the mount `kind` inside the encoder reads, with the changes of those before it."""
    seen: list[torch.Tensor] = []

    def record(states: torch.Tensor) -> torch.Tensor:
        seen.append(states)
        return states

    encoder_with(base, ids, {**changes, kind: record})
    return seen[0]


def _solve(ours: Ours, kind: str, places: Places, h: torch.Tensor, delta: torch.Tensor, chosen: torch.Tensor) -> None:
    """Rows whose residual is nearest to `delta` `[N, width]` over the carriers of each run and position, for all sets of a mount kind.

    A learned gate that is too narrow for the way gets a bias that opens it.
    """
    rows = ours.held("rows", kind)
    runs, _, positions, kept, head_dim = rows.shape
    width = h.shape[-1]
    key_basis, value_basis = basis_matrices(CONFIG.columns_at(width) * head_dim, width, h.device)[:, : kept * head_dim]
    scale, norm = ours.get_buffer(f"rho_{kind}")[places.run], span_mean_norm(h, torch.tensor(places.length))
    one, own = torch.ones_like(scale), places.run * positions + places.position

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(runs * positions, *x.shape[1:], device=h.device).index_add_(0, own, x)

    count = summed(one).clamp(min=1)
    gain, bias = (ours.held(name, kind)[:, 0].flatten() for name in ("gain", "bias"))
    gate, best = torch.full_like(scale, 0.5), torch.zeros(runs * positions, kept * head_dim, device=h.device)
    for _ in range(ROUNDS):
        step = scale * norm * gate
        value = summed(step[:, None] * delta) / summed(step * step).clamp(min=1e-12)[:, None]
        best = value @ value_basis.T
        reached = best @ value_basis
        length = reached.norm(dim=1)
        if ours.options.norm == "bounded":  # beyond the bound, length says nothing and its gradient is gone
            best = best / length.clamp(min=1.0)[:, None]
            if ours.options.gate == "learned" and not ours.options.gate_shared:
                mean = summed(gate) / count
                wanted = (mean * length / REACH).clamp(1e-3, WIDEST)
                bias = torch.where(length > REACH, (bias + wanted.logit() - mean.logit(1e-6)).clamp(min=bias), bias)
        # The residual of a unit value with scale and norm one is the gate itself.
        unit = functional.normalize(reached)[own]
        gates = {"gain": gain[own], "bias": bias[own], "scale": one, "mean_norm": one}
        gate = span_residual(h, (best @ key_basis)[own], unit, **gates).norm(dim=1)
    fitted = summed(chosen.float()) > 0
    rows.copy_((best * fitted[:, None]).view(runs, 1, positions, kept, head_dim).expand_as(rows))
    if not ours.options.gate_shared:
        held = ours.held("bias", kind)
        held.copy_(torch.where(fitted.view(runs, 1, positions), bias.view(runs, 1, positions), held))
