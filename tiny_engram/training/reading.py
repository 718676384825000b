"""Texts as a pipeline gives them to a text encoder. May import torch and the adapter's parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiny_engram.adapter_reports import reading_of

__all__ = ["Tokens", "read_texts"]


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
