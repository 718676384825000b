"""What a method is to the bench: the trainable state of many runs at once, and how it enters the frozen pipeline.

Runs of one method are stacked: every parameter has the shape `[runs, ...]`, and each row of a batch says whose values it
takes. A run's values depend on its own rows alone, so that a run alone and the same run among forty others give the same
numbers (up to the rounding of batched products).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from benchmarks.personalization.runs import Run, Shares

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of prompts as one method sees them.

    Attributes:
        ids: int64 `[batch, time]`, on the device.
        states: the untouched encoder's last hidden states of those ids, `[batch, time, width]`.
        run: int64 `[batch, slots]`, on the device: which run fills each slot of the prompt (a prompt of two subjects has
            two slots), -1 for none. Methods without an address (LoRA) apply all runs of a row to the whole row.
        spans: where the triggers stand: (row, slot, start, length); no position twice.
    """

    ids: torch.Tensor
    states: torch.Tensor
    run: torch.Tensor
    spans: tuple[tuple[int, int, int, int], ...]

    def part(self, first: int, last: int) -> Rows:
        """Rows `first` up to but not including `last`."""
        spans = tuple((row - first, slot, start, length) for row, slot, start, length in self.spans if first <= row < last)
        return Rows(self.ids[first:last], self.states[first:last], self.run[first:last], spans)

    def joined(self, other: Rows) -> Rows:
        """These rows, then the other's, which have as many slots."""
        moved = tuple((row + len(self.ids), slot, start, length) for row, slot, start, length in other.spans)
        ids, states, run = (torch.cat(pair) for pair in ((self.ids, other.ids), (self.states, other.states), (self.run, other.run)))
        return Rows(ids, states, run, self.spans + moved)

    def positions(self) -> Positions:
        """Every position that a span covers, in the order of the spans."""
        spans = np.asarray(self.spans, np.int64).reshape(-1, 4)
        row, slot, start, length = (np.repeat(column, spans[:, 3]) for column in spans.T)
        offset = np.arange(len(row)) - np.repeat(spans[:, 3].cumsum() - spans[:, 3], spans[:, 3])
        laid = to_device(torch.from_numpy(np.stack([row, start + offset, offset, slot])), self.ids.device)
        return Positions(laid[0], laid[1], laid[2], laid[3], self.run[laid[0], laid[3]])


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions in a batch, int64 `[positions]` each on its device: row, place in the prompt, offset in the span, slot, and the run."""

    row: torch.Tensor
    place: torch.Tensor
    offset: torch.Tensor
    slot: torch.Tensor
    run: torch.Tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on `device`, without waiting for what the device is doing."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Adapters(nn.Module):
    """The trainable state of `runs` of one method; parameters are float32 `[runs, ...]`.

    Attributes:
        vectors: positions that a trigger takes in the prompt; None for the trigger's own number of tokens.
        stackable: False for a method that trains the base's own weights: it holds one run at a time.
        rate_factors: parameter name -> factor of the run's learning rate (1 where it is not named).
        weight_decay: AdamW's. ema_decay: of the values that are drawn and saved; 0 takes the last ones.
        schedule: "constant" or "cosine", over the whole training. warmup: steps in which the rate rises to its full height.
        betas: AdamW's.
        shares: samples of a batch that are not the taught pictures.
    """

    vectors: int | None = None
    stackable: bool = True
    rate_factors: Mapping[str, float] = {}
    weight_decay: float = 0.0
    ema_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__()
        self.runs = tuple(runs)
        self.shares = Shares.of_stack(runs)

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        """What the denoiser is given, `[batch, time, width]`; the encoder's untouched states unless a method says otherwise."""
        return rows.states

    @contextmanager
    def attached(self, base: Base, rows: Rows, states: torch.Tensor) -> Iterator[None]:
        """Inside, `base.denoiser` runs with these runs in it, on a batch laid out as `rows`, given `states`."""
        yield

    def values(self, run: int) -> dict[str, torch.Tensor]:
        """What a file of one run holds, on the CPU, in the dtypes it ships in."""
        return {name: p[run].detach().half().cpu() for name, p in self.named_parameters()}

    def payload(self, run: int) -> int:
        """Bytes of one run as shipped, without headers."""
        return sum(t.numel() * t.element_size() for t in self.values(run).values())

    def trainable(self) -> int:
        """Trainable values of one run."""
        return sum(p[0].numel() for p in self.parameters())
