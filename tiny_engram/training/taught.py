"""What a pipeline encodes and its denoiser reads, with rows that are being taught in the place of a loaded concept's: differentiable at
every mount, `span`, `input`, `deep.{i}`, `pooled` and `context.{i}`. May import the core of concepts and the adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.fired import Fired, Plan, RowsRead
from tiny_engram.quantization import fake_quantize
from tiny_engram.store import ConceptStore

__all__ = ["TaughtRows", "taught"]


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Masters of one concept at one mount: rows float32 `[positions, columns, head_dim]`, gain and bias float32 `[positions]`."""

    rows: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor


class _TaughtStore(ConceptStore):
    """What a store holds, read as it does, but for one concept's rows."""

    def __init__(self, store: ConceptStore, name: str, masters: Mapping[str, TaughtRows]) -> None:
        self.__dict__.update(vars(store))
        self._name, self._masters = name, masters

    def plan_at(self, mounts: Sequence[str], input_ids: torch.Tensor) -> Plan:
        plan = super().plan_at(mounts, input_ids)
        return replace(plan, fired=tuple(self._in_place(one, plan.mounts, len(input_ids)) for one in plan.fired))

    def _in_place(self, fired: Fired, mounts: Sequence[str], batch: int) -> Fired:
        """With the masters' rows and gates; the mounts are stacked along the batch."""
        places = [(owner, mounts[row // batch]) for owner, row in zip(fired.names, fired.spans.batch.tolist(), strict=True)]
        of_position = [place for place, length in zip(places, fired.spans.length.tolist(), strict=True) for _ in range(length)]
        rows, gain, bias = fired.rows, fired.gain, fired.bias
        for mount, masters in self._masters.items():
            mine = torch.tensor([k for k, place in enumerate(of_position) if place == (self._name, mount)], dtype=torch.int64)
            if not len(mine):
                continue
            at = fired.spans.flat()[2][mine]
            rows = _put(rows, mine, fake_quantize(masters.rows), at)
            gain, bias = _put(gain, mine, masters.gain, at), _put(bias, mine, masters.bias, at)
        return replace(fired, read=RowsRead(rows, fired.basis_seed), gain=gain, bias=bias)


def _put(read: torch.Tensor, places: torch.Tensor, own: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """What was read, with the masters' positions `at` in these places of it."""
    return read.to(own.device).index_put((places.to(own.device),), own[at.to(own.device)])


@contextmanager
def taught(adapter: EngramAdapter, name: str, masters: Mapping[str, Mapping[str, TaughtRows]]) -> Iterator[None]:
    """Inside, what the pipeline encodes holds a loaded concept with these masters, through the quantiser as it would be served.

    Args:
        name: of a loaded concept.
        masters: by role and mount, such as `{"t5": {"span": ..., "deep.1": ..., "context.0.key": ...}}`; where there are none, the
            concept's own rows are read.

    Encode with gradients on, by `adapter.family.embeds(pipe, prompts)`; `adapter.embeds` switches them off. Rows at context mounts are read
    where the denoiser is called: inside as well, and without gradient checkpoints there. Nothing may be loaded or unloaded inside.

    Raises:
        TinyEngramError: the concept has no rows at such a role or mount, or masters of another shape are given.
    """
    places = adapter.concept(name).roles
    for role, at in masters.items():
        held = places[role].mounts if role in places else {}
        for mount, one in at.items():
            expected = None if mount not in held else tuple(held[mount].payload.shape)
            if tuple(one.rows.shape) != expected:
                raise TinyEngramError(
                    f"masters of shape {list(one.rows.shape)} at mount {mount!r} of {role}, expected "
                    f"{list(expected) if expected else 'none: concept ' + repr(name) + ' has no rows there'}; make them from the concept"
                )
    before = {role: adapter.mounts[role].store for role in masters}
    try:
        for role, store in before.items():
            adapter.mounts[role].store = _TaughtStore(store, name, masters[role])
        yield
    finally:
        for role, store in before.items():
            adapter.mounts[role].store = store
