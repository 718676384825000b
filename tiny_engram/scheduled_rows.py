"""The text states of a run's prompts at other strengths, and how they are put in the place of those that a denoiser is given.

Rows are known by their content, never by their place: between encoder and denoiser a pipeline stacks, repeats and casts them, each in its
own way. Imports torch.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ScheduledRows"]

# The strengths of the concepts that matter, in their order.
Key = tuple[float, ...]
ROUNDINGS = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Row:
    """One prompt's states `[time, width]`, or its pooled vector `[width]`.

    `changed` holds, by key, the positions that differ from what the prompt was encoded to, and what stands there; positions None for a
    pooled vector. `needed` says that a step which does not read it draws without the concepts, `seen` that this step has read it.
    """

    plain: torch.Tensor
    needed: bool
    changed: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)
    seen: bool = False

    def add(self, key: Key, other: torch.Tensor) -> None:
        differs = other != self.plain
        if bool(differs.any()):
            positions = differs.any(-1).nonzero().flatten() if other.dim() > 1 else None
            self.changed[key] = positions, other.clone() if positions is None else other[positions]

    def write(self, key: Key, target: torch.Tensor) -> None:
        """Into a copy of the row, of whatever type and device."""
        positions, values = self.changed[key]
        values = values.to(target)
        if positions is None:
            target.copy_(values)
        else:
            target[positions.to(target.device)] = values


@dataclass(slots=True)
class _Found:
    """A tensor that a denoiser was given, as long as it stays as it was: which of its rows are known, and its copies by key."""

    tensor: Callable[[], torch.Tensor | None]
    version: int
    rows: list[tuple[int, _Row]]
    copies: dict[Key, torch.Tensor] = field(default_factory=dict)


class ScheduledRows:
    """What a family's `embeds` gives for some prompts, at the strengths of each stretch of a run.

    Args:
        embeds: as the pipeline encodes the prompts itself: tensors `[batch, time, width]` or `[batch, width]`, or lists of `[time, width]`,
            by name.
    """

    def __init__(self, embeds: Mapping[str, Any]) -> None:
        self._rows = {name: [_Row(row, not name.startswith("negative_")) for row in rows] for name, rows in _rows_of(embeds)}
        self._known: dict[bytes, _Row] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._found: dict[int, _Found] = {}

    def add(self, key: Key, embeds: Mapping[str, Any]) -> None:
        """The same prompts encoded at other strengths."""
        for name, others in _rows_of(embeds):
            for row, other in zip(self._rows[name], others, strict=True):
                row.add(key, other)
                if key in row.changed:
                    self._shapes.add(tuple(row.plain.shape))
                    for kind in (row.plain, *(row.plain.to(kind) for kind in ROUNDINGS)):
                        self._known.setdefault(_digest(kind), row)

    def swapped(self, value: Any, key: Key) -> Any:
        """What a denoiser is given in the place of `value`, an argument or all of them: itself where nothing in it changes.

        A changed tensor is a copy, the same one for each call; rows that are not known keep their bits.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, key)
        if isinstance(value, dict):
            values = {name: self.swapped(one, key) for name, one in value.items()}
            return values if any(values[name] is not one for name, one in value.items()) else value
        if type(value) in (list, tuple):
            items = [self.swapped(one, key) for one in value]
            return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def begin_step(self) -> None:
        """From here on `unread` counts."""
        for row in self._known.values():
            row.seen = False

    def unread(self) -> bool:
        """Is there a row with a concept that no call of this step was given? Those of negative prompts need not be: guidance may be off."""
        return any(row.needed and not row.seen for row in self._known.values())

    def _tensor(self, tensor: torch.Tensor, key: Key) -> torch.Tensor:
        shape = tuple(tensor.shape)
        alone = shape in self._shapes  # one of a list of prompts
        if not tensor.is_floating_point() or not (alone or shape[1:] in self._shapes):
            return tensor
        found = self._found.get(id(tensor))
        if found is None or found.tensor() is not tensor or found.version != _version(tensor):
            rows = [tensor] if alone else list(tensor)
            known = [(k, row) for k, one in enumerate(rows) if (row := self._known.get(_digest(one))) is not None]
            number, kept = id(tensor), self._found
            found = kept[number] = _Found(weakref.ref(tensor, lambda _: kept.pop(number, None)), _version(tensor), known)
        for _, row in found.rows:
            row.seen = True
        changed = [(k, row) for k, row in found.rows if key in row.changed]
        if not changed:
            return tensor
        if key not in found.copies:
            copy = found.copies[key] = tensor.detach().clone()
            for k, row in changed:
                row.write(key, copy if alone else copy[k])
        return found.copies[key]


def _rows_of(embeds: Mapping[str, Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Name and rows of what may hold states; masks and ids are of other types or do not differ."""
    for name, value in embeds.items():
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1):
            yield name, [row.detach() for row in value]


def _digest(row: torch.Tensor) -> bytes:
    """Of its shape and values: equal for any float type that holds them exactly."""
    values = row.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return hashlib.blake2b(str(values.shape).encode() + values.tobytes(), digest_size=16).digest()


def _version(tensor: torch.Tensor) -> int:
    """Rises when a tensor is written to; inference tensors do not count that."""
    return -1 if tensor.is_inference() else tensor._version
