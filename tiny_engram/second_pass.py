"""What the `input` mount needs beside hooks: one row of an encoder's call, and its states in the place of the plain ones. Imports torch.

An encoder's output is whatever transformers gives: an object with fields, a tuple, or the last hidden state alone.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MovedRow", "last_hidden_state", "row_options", "states_read", "take_over", "with_hidden_states", "with_last_hidden_state"]

FIELDS = ("last_hidden_state", "hidden_states")


@dataclass(frozen=True, slots=True)
class MovedRow:
    """What a second pass gave for one row of a batch: its `output` has that row alone, `times` int64 `[N]` are the positions to take."""

    row: int
    times: torch.Tensor
    output: Any


def row_options(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], row: int, batch: int) -> dict[str, Any]:
    """The arguments of an encoder's call but its ids, for one row of the batch: tensors with a row for each prompt lose the others."""
    names = list(inspect.signature(encoder.forward).parameters)
    options = dict(zip(names[1:], args[1:], strict=False)) | kwargs
    options.pop("input_ids", None)

    def own(value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == batch
        return value[row : row + 1] if rows else value

    return {name: own(value) for name, value in options.items()}


def _is_named(output: Any) -> bool:
    return not isinstance(output, torch.Tensor | tuple)


def last_hidden_state(output: Any) -> torch.Tensor:
    """The last hidden state in an encoder's output, `[batch, time, width]`."""
    return output["last_hidden_state"] if _is_named(output) else output[0] if isinstance(output, tuple) else output


def with_last_hidden_state(output: Any, hidden: torch.Tensor) -> Any:
    """The same output, in a copy, with another last hidden state."""
    if _is_named(output):
        return type(output)(**{**output, "last_hidden_state": hidden})
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _entries(read: int | tuple[int, ...], count: int, *, earlier: bool = True) -> tuple[int, ...]:
    """Which of so many `hidden_states` pipelines read: one number, counted as in a list, means all from the first layer's to that one
    (clip_skip reads an earlier one) or that one alone; several mean these."""
    if isinstance(read, int):
        return tuple(range(1 if earlier else read % count, read % count + 1))
    return tuple(k % count for k in read)


def states_read(output: Any, read: int | tuple[int, ...], *, earlier: bool) -> list[torch.Tensor]:
    """Those of an output's `hidden_states` that pipelines read, and with `earlier` those that clip_skip would read; see
    `with_hidden_states`."""
    if _is_named(output):
        found = [output.get("hidden_states")]
    else:
        found = [x for x in output if isinstance(x, tuple) and x[0].dim() == 3] if isinstance(output, tuple) else []
    return [states[k] for states in found if states is not None for k in _entries(read, len(states), earlier=earlier)]


def with_hidden_states(output: Any, read: int | tuple[int, ...], change: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> Any:
    """The same output, in a copy, with some of its `hidden_states` changed, all of them in one call.

    read: a number, counted as in a list, means all from the first layer's to that one (clip_skip reads an earlier one); several mean these.
    The token embeddings, all other entries and an output without `hidden_states` are passed on as they are.
    """

    def changed(states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        chosen = _entries(read, len(states))
        new = dict(zip(chosen, change([states[k] for k in chosen]), strict=True))
        return tuple(new.get(k, x) for k, x in enumerate(states))

    if _is_named(output):
        states = output.get("hidden_states")
        return output if states is None else type(output)(**{**output, "hidden_states": changed(states)})
    if not isinstance(output, tuple):
        return output
    return tuple(changed(x) if isinstance(x, tuple) and x[0].dim() == 3 else x for x in output)


def take_over(output: Any, moved: Sequence[MovedRow]) -> Any:
    """An encoder's output, in a copy, whose states at these rows' positions are those of their second pass.

    That is the last hidden state, where there is one, and every one of `hidden_states`; all else, and every other position, is passed on
    as it is.
    """
    rows = torch.cat([torch.full_like(one.times, one.row) for one in moved])
    times = torch.cat([one.times for one in moved])

    def merge(plain: Any, own: Sequence[Any]) -> Any:
        if isinstance(plain, tuple):
            return tuple(merge(x, [one[k] for one in own]) for k, x in enumerate(plain))
        at = [index.to(plain.device) for index in (rows, times)]
        here = torch.cat([x[0, one.times.to(x.device)] for x, one in zip(own, moved, strict=True)])
        return plain.index_put(tuple(at), here.to(plain.dtype))

    own = [one.output for one in moved]
    if _is_named(output):
        kept = {name: output[name] for name in FIELDS if output.get(name) is not None}
        return type(output)(**{**output, **{name: merge(plain, [one[name] for one in own]) for name, plain in kept.items()}})
    if not isinstance(output, tuple):
        return merge(output, own)
    shape = output[0].shape
    states = [k == 0 or (isinstance(x, tuple) and all(y.shape == shape for y in x)) for k, x in enumerate(output)]
    return tuple(merge(x, [one[k] for one in own]) if taken else x for k, (x, taken) in enumerate(zip(output, states, strict=True)))
