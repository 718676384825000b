"""What a pipeline of any family encodes of captions, for all of its roles, computed once: by its own calls of its encoders, which are
listened to. At a step the states of each role take their places in it again. May import torch, data, reading and the adapter's parts.

A role's states are found in what the denoiser is given by what they hold (`encoded_positions`), so that templates that are cut off and
texts one behind the other need no description here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tiny_engram.concept import Concept
from tiny_engram.config import INPUT
from tiny_engram.deep_mounts import layer_of, reading_inside
from tiny_engram.encoded_positions import EncodedPositions
from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.input_mount import encode_with_input
from tiny_engram.residual import Spans
from tiny_engram.second_pass import row_options
from tiny_engram.training.data import DataError
from tiny_engram.training.reading import ReadEncoder, encoder_of

__all__ = ["ConditionBatch", "Conditions", "RoleBatch", "cache_conditions", "joined_conditions"]

# (start, length, offset of its rows) of a trigger.
Place = tuple[int, int, int]
# Embeddings or states and the spans in them, to what takes their place.
Move = Callable[[torch.Tensor, Spans], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """A role's part in one caption: its ids int64 `[1, time]` and what else the encoder is given, where the trigger stands in the ids, how
    many of the ids lie before the first of its states, and which of its states, from the first to the end, are the encoder's own."""

    ids: torch.Tensor
    options: Mapping[str, Any]
    places: tuple[Place, ...]
    shift: int = 0
    reach: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class RoleBatch:
    """One role's part in the captions of a step; what ConceptRows reads of a `CaptionBatch`.

    Attributes:
        states: as the denoiser is given them, `[batch, time, width]`, short ones filled up with zeros; a pooled role's vectors `[batch,
            width]`.
        spans: where the trigger stands in these; of a pooled role in its prompt.
        calls: of each distinct caption; `row` says which of them each caption of the batch is.
        recomputed: the encoder's passes are computed again in the backward pass rather than keep what that needs.
    """

    states: torch.Tensor
    spans: Spans
    encoder: ReadEncoder
    calls: tuple[_Call, ...]
    row: tuple[int, ...]
    recomputed: bool = False

    @property
    def fired(self) -> torch.Tensor:
        """1 where the trigger stands and 0 elsewhere, float32 `[batch, time]` on the CPU."""
        return self.spans.marks(self.states.shape[:2])

    def read_inside(self, inside: Mapping[int, Move]) -> "RoleBatch":
        """The same part with all states from an encoder whose layers, by number, read what is made of their states; differentiable."""
        outputs, device = self._encoded(None, inside), self.states.device
        if self.encoder.pooled:
            return replace(self, states=self._vectors(outputs))
        states = self.states.clone()
        for sample, row in enumerate(self.row):
            (first, end), shift = self.calls[row].reach, self.calls[row].shift
            states[sample, first:end] = outputs[row][0, first + shift : end + shift].to(device, states.dtype)
        return replace(self, states=states)

    def read_again(self, move: Move, inside: Mapping[int, Move] | None = None) -> torch.Tensor:
        """States with those at the spans from an encoder whose token embeddings go through `move(embeddings, spans)`; differentiable. A
        pooled vector is the one of that pass. `inside` as `read_inside` takes it."""
        outputs = self._encoded(move, inside or {})
        device = self.states.device
        if self.encoder.pooled:
            return self._vectors(outputs)
        batch, time, _ = self.spans.flat()
        found = [
            outputs[self.row[sample]][0, at + self.calls[self.row[sample]].shift]
            for sample, at in zip(batch.tolist(), time.tolist(), strict=True)
        ]
        new = torch.stack(found).to(device, self.states.dtype)
        return self.states.index_put((batch.to(device), time.to(device)), new)

    def _vectors(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([outputs[row][0] for row in self.row]).to(self.states.device, self.states.dtype)

    def _encoded(self, move: Move | None, inside: Mapping[int, Move]) -> list[torch.Tensor]:
        """What is read of each distinct caption, `[1, ...]`; captions whose calls are alike in one call."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for k, call in enumerate(self.calls):
            alike.setdefault((call.ids.shape[1], *((name, _shape(value)) for name, value in call.options.items())), []).append(k)
        found: dict[int, torch.Tensor] = {}
        for numbers in alike.values():
            calls = [self.calls[k] for k in numbers]
            spans = Spans.of((row, *place) for row, call in enumerate(calls) for place in call.places)
            ids = torch.cat([call.ids for call in calls])
            options = {name: _joined([call.options[name] for call in calls]) for name in calls[0].options}
            run = partial(self._run, ids, options, spans, move, inside)
            # hooks belong to one pass: it is computed again as a whole, with those of its own
            said = checkpoint(run, use_reentrant=False) if self.recomputed else run()
            found |= zip(numbers, said.split(1), strict=True)
        return [found[k] for k in range(len(self.calls))]

    def _run(
        self, ids: torch.Tensor, options: Mapping[str, Any], spans: Spans, move: Move | None, inside: Mapping[int, Move]
    ) -> torch.Tensor:
        encoder = self.encoder.module
        with reading_inside(encoder, {layer: partial(_at, one, spans) for layer, one in inside.items()}):
            output = encoder(ids, **options) if move is None else encode_with_input(encoder, ids, partial(_at, move, spans), **options)
        return self.encoder.read(output)


def _at(move: Move, spans: Spans, x: torch.Tensor) -> torch.Tensor:
    return move(x, spans)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)


def _joined(values: Sequence[Any]) -> Any:
    """One argument for several captions: tensors with a row for each caption are put together."""
    first = values[0]
    return torch.cat(list(values)) if isinstance(first, torch.Tensor) and first.dim() > 1 and len(first) == 1 else first


@dataclass(frozen=True, slots=True)
class ConditionBatch:
    """The captions of one step: what the base's encoders say of them, and each role's part.

    Attributes:
        said: by the names that `pipe(...)` takes; not changed by anything.
        parts: by role, of those that the concept has something at.
    """

    said: Mapping[str, Any]
    parts: Mapping[str, RoleBatch]
    place: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def embeds(self, states: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What `pipe(...)` takes, with other states of some roles, shaped as in `parts`; differentiable."""
        made = {name: [row.clone() for row in value] if isinstance(value, list) else value.clone() for name, value in self.said.items()}
        for role, changed in states.items():
            held = self.place(made)[role]
            for k, new in enumerate(changed):
                held[k].copy_(new[: len(held[k])])  # held is part of what was made: a slice, or a list's own rows
        return made


@dataclass(frozen=True, slots=True)
class Conditions:
    """Distinct captions, each as the pipeline encodes it alone: `said` by name, a tensor `[1, ...]` or a list of one `[time, width]`, in
    the host's memory, since those of T5 take megabytes each; and what each role's encoder was given. `device` is the denoiser's;
    `recomputed` as a `RoleBatch` has it."""

    texts: tuple[str, ...]
    said: tuple[Mapping[str, Any], ...]
    calls: Mapping[str, tuple[_Call, ...]]
    encoders: Mapping[str, ReadEncoder]
    place: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    device: torch.device
    recomputed: bool = False

    def batch(self, picks: Sequence[int]) -> ConditionBatch:
        """These captions, the shorter ones' embeds and masks filled up with zeros, as pipelines do it."""
        each = [self.said[pick] for pick in picks]
        said = {name: _on(_together([one[name] for one in each]), self.device) for name in each[0]}
        held, distinct = self.place(said), list(dict.fromkeys(picks))
        parts = {}
        for role, calls in self.calls.items():
            own = held[role]
            places = [(row, calls[k].shift, one) for row, k in enumerate(picks) for one in calls[k].places]
            parts[role] = RoleBatch(
                pad_sequence(own, batch_first=True) if isinstance(own, list) else own,
                Spans.of((row, start - shift, length, offset) for row, shift, (start, length, offset) in places),
                self.encoders[role],
                tuple(calls[k] for k in distinct),
                tuple(distinct.index(pick) for pick in picks),
                self.recomputed,
            )
        return ConditionBatch(said, parts, self.place)


def _on(value: Any, device: torch.device) -> Any:
    return [row.to(device) for row in value] if isinstance(value, list) else value.to(device)


def _together(values: Sequence[Any]) -> Any:
    """One name's values of several captions."""
    if isinstance(values[0], list):
        return [row for value in values for row in value]
    longest = max(value.shape[1] for value in values)
    if all(value.shape[1] == longest for value in values):
        return torch.cat(list(values))
    return pad_sequence([value[0] for value in values], batch_first=True)


def joined_conditions(parts: Sequence[Conditions], positions: Sequence[int | Mapping[str, int]]) -> Conditions:
    """The captions of several concepts as one, one concept behind the other; offsets count through the positions of all.

    positions: of each concept's rows, by role where there are several.
    """
    first, *_ = parts
    calls: dict[str, list[_Call]] = {role: [] for role in first.calls}
    for role, joined in calls.items():
        ahead = 0
        for part, own in zip(parts, positions, strict=True):
            shifted = [tuple((start, size, offset + ahead) for start, size, offset in call.places) for call in part.calls[role]]
            joined += [replace(call, places=places) for call, places in zip(part.calls[role], shifted, strict=True)]
            ahead += own[role] if isinstance(own, Mapping) else own
    texts, said = (tuple(one for part in parts for one in getattr(part, name)) for name in ("texts", "said"))
    joint = {role: tuple(each) for role, each in calls.items()}
    return replace(first, texts=texts, said=said, calls=joint, recomputed=any(part.recomputed for part in parts))


@contextmanager
def _listening(encoders: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """Inside, the last call of each role's encoder: its arguments, by place and by name, and its output."""
    heard: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    handles = []
    for role, module in encoders.items():

        def hear(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, role: str = role) -> None:
            heard[role] = args, kwargs, output

        handles.append(module.register_forward_hook(hear, with_kwargs=True))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def cache_conditions(adapter: EngramAdapter, concept: Concept, texts: Sequence[str], *, recomputed: bool = False) -> Conditions:
    """Encode each distinct caption once, by the pipeline, with no concept firing; `recomputed` as a `RoleBatch` has it.

    Raises:
        DataError: a caption in which the trigger does not fire at each role, or whose trigger is cut off.
        TinyEngramError: states of an encoder are not found in what the denoiser is given.
    """
    distinct, encoders = tuple(dict.fromkeys(texts)), {role: encoder_of(adapter, role) for role in concept.roles}
    said: list[Mapping[str, Any]] = []
    calls: dict[str, list[_Call]] = {role: [] for role in concept.roles}
    device = torch.device("cpu")

    def place(embeds: Mapping[str, Any]) -> Mapping[str, Any]:
        return adapter.family.states(adapter.pipe, embeds)

    with _listening({role: encoder.module for role, encoder in encoders.items()}) as heard:
        for text in distinct:
            heard.clear()
            embeds = _with_masks(adapter.family, adapter.embeds([text]))
            device = adapter.family.text_of(embeds).device
            said.append({name: _on(value, torch.device("cpu")) for name, value in embeds.items()})
            for role, encoder in encoders.items():
                if role not in heard:
                    raise TinyEngramError(f"{type(adapter.pipe).__name__} encodes {text!r} without its encoder of {role}; load it whole")
                kept = any(mount == INPUT or layer_of(mount) is not None for mount in concept.roles[role].mounts)
                calls[role].append(_call_of(adapter, concept, role, text, encoder, heard[role], embeds, kept))
    told = {role: tuple(each) for role, each in calls.items()}
    return Conditions(distinct, tuple(said), told, encoders, place, device, recomputed)


def _with_masks(family: Any, embeds: Mapping[str, Any]) -> dict[str, Any]:
    """Where a pipeline leaves out a mask that hides nothing: that mask. Captions of other lengths may stand beside this one."""
    found = dict(embeds)
    for name in family.returns:
        if name.startswith("prompt") and name.endswith("_mask") and name not in found:
            found[name] = torch.ones(found["prompt_embeds"].shape[:2], dtype=torch.int64, device=found["prompt_embeds"].device)
    return found


def _vector_goes_on(output: Any, said: Mapping[str, Any]) -> bool:
    """Is a pooled vector of an encoder's output, for one text, all or a part of one that the denoiser is given?"""
    own = [getattr(output, name, None) for name in ("text_embeds", "pooler_output")]
    vectors = [value[0] for value in said.values() if isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()]
    pairs = [(one[0], vector) for one in own if one is not None for vector in vectors if one.shape[-1] <= len(vector)]
    return any((vector.unfold(0, len(one), 1) == one.to(vector)).all(1).any() for one, vector in pairs)


def _call_of(
    adapter: EngramAdapter, concept: Concept, role: str, text: str, encoder: ReadEncoder, heard: Any, said: Mapping[str, Any], kept: bool
) -> _Call:
    args, kwargs, output = heard
    ids = kwargs.get("input_ids", args[0] if args else None)
    mount = adapter.mounts[role]
    shown = mount.templates.masked(ids)
    found = adapter.spans(concept, shown, role)
    places: list[Place] = list(zip(found.start.tolist(), found.length.tolist(), found.offset.tolist(), strict=True))
    if not places:
        raise DataError(
            f"caption {text!r}: the trigger {concept.trigger!r} does not fire in it at {role} (cut off, or a letter or digit touches it); "
            "shorten the caption or write the trigger as a word of its own"
        )
    inside = [mount for mount in concept.roles[role].mounts if layer_of(mount) is not None]
    if inside and not encoder.pooled and _vector_goes_on(output, said):
        raise TinyEngramError(
            f"mount {inside[0]!r} of {role} moves the encoder's pooled vector too, which {type(adapter.pipe).__name__} gives its denoiser "
            "beside the states, and which is not taught; use other mounts, such as 'input' or 'span'"
        )
    options = row_options(encoder.module, args, kwargs, 0, 1) if kept else {}
    if encoder.pooled:
        return _Call(ids, options, tuple(places))
    noted = EncodedPositions()
    noted.note(ids, encoder.read(output))
    (row,) = noted.find(adapter.family.states(adapter.pipe, said)[role])
    if row is None or not len(row.ids):
        raise TinyEngramError(
            f"the states of {role} are not found in what {type(adapter.pipe).__name__} gives its denoiser for {text!r}, so where the "
            "trigger stands is unknown; take out what changes prompt embeds"
        )
    left = tuple(p for p in places if row.first <= p[0] - row.shift and p[0] + p[1] - row.shift <= row.end)
    if len(left) < len(places):
        raise DataError(f"caption {text!r}: the trigger {concept.trigger!r} is cut off in what the denoiser reads of {role}; shorten it")
    return _Call(ids, options, left, row.shift, (row.first, row.end))
