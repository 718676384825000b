"""Texts as a pipeline gives them to a text encoder, and what it reads of its output. May import torch and the adapter's parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiny_engram.adapter_reports import reading_of
from tiny_engram.pooled import pooled_vector
from tiny_engram.second_pass import last_hidden_state, states_read

__all__ = ["ReadEncoder", "Tokens", "encoder_of", "read_texts"]


@dataclass(frozen=True, slots=True)
class ReadEncoder:
    """A role's encoder, and what the pipeline reads of its output, as the family's `EncoderSpec` says it."""

    module: nn.Module
    reads: int | tuple[int, ...] | None
    pooled: bool

    @property
    def options(self) -> dict[str, Any]:
        """What it has to be asked for beside the ids."""
        return {} if self.reads is None else {"output_hidden_states": True}

    def read(self, output: Any) -> torch.Tensor:
        """States `[batch, time, width]`, or pooled vectors `[batch, width]`."""
        if self.pooled:
            return pooled_vector(output)
        if self.reads is None:
            return last_hidden_state(output)
        return torch.cat(states_read(output, self.reads, earlier=False), -1)


def encoder_of(adapter: Any, role: str) -> ReadEncoder:
    """The encoder of a role."""
    spec, _, _ = reading_of(adapter.pipe, adapter.family, role)
    return ReadEncoder(adapter.mounts[role].module, spec.reads, spec.pooled)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts as tokens.

    Attributes:
        ids: int64 `[texts, time]`. mask: int64 like it, 1 where a text stands, where the encoder is given one; what it hides behind all
            texts is cut off.
        characters: of each text, (first, end) of what each token covers.
        window: tokens that the pipeline reads of a text.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    characters: list[list[tuple[int, int]]]
    window: int

    @property
    def options(self) -> dict[str, Any]:
        """What an encoder is given beside the ids."""
        return {} if self.mask is None else {"attention_mask": self.mask}

    def at(self, rows: Sequence[int], device: torch.device) -> "Tokens":
        """These texts, on a device."""
        mask = None if self.mask is None else self.mask[list(rows)].to(device)
        return Tokens(self.ids[list(rows)].to(device), mask, [self.characters[row] for row in rows], self.window)


def read_texts(adapter: Any, role: str, texts: Sequence[str]) -> Tokens:
    """Texts as the pipeline of an adapter would have the role's encoder read them, on the CPU."""
    spec, given, most = reading_of(adapter.pipe, adapter.family, role)
    tokenizer = adapter.mounts[role].tokenizer
    window = tokenizer.model_max_length if most is None else most
    told = [given(text) for text in texts]
    out = tokenizer(told, padding="max_length", max_length=window, truncation=True, return_offsets_mapping=True, return_tensors="pt")
    characters = [[(first, end) for first, end in row] for row in out.offset_mapping.tolist()]
    if not spec.masked:
        return Tokens(out.input_ids, None, characters, window)
    time = int(out.attention_mask.sum(1).max())
    return Tokens(out.input_ids[:, :time], out.attention_mask[:, :time], [row[:time] for row in characters], window)
