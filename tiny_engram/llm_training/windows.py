"""Texts -> token ids, once -> windows of equal length. Imports torch, safetensors and, of this package, texts."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tiny_engram.errors import TinyEngramError, TokenizerError
from tiny_engram.files import write_atomically

from .texts import counted, read_texts

__all__ = ["Windows", "end_token", "places_of", "tokenize"]

logger = logging.getLogger(__name__)

_VERSION = b"1"  # of how texts become ids: another one makes older caches stale
_TOGETHER = 256  # texts that the tokenizer is given at a time


def end_token(tokenizer: Any) -> int:
    """Raw id of the token behind each text. Raises TokenizerError where the tokenizer has none."""
    end = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(end, int):
        raise TokenizerError("the tokenizer has no end token, which stands between texts; set tokenizer.eos_token to one of its tokens")
    return end


def text_digest(paths: Sequence[str | Path], tokenizer: Any) -> str:
    """sha256 (hex) of the texts in their order and of all that makes ids of them."""
    digest = hashlib.sha256(_VERSION)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    # What the last call was padded and cut to, which is no part of the tokenizer: these texts never are.
    digest.update(json.dumps(described | {"padding": None, "truncation": None}).encode())
    digest.update(f"{end_token(tokenizer)}".encode())
    for text in read_texts(paths):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def tokenize(paths: Sequence[str | Path], tokenizer: Any, cache: Path) -> "tuple[torch.Tensor, str]":
    """Ids int32 ``[tokens]`` of all texts, each with the end token behind it, and their digest; from the cache where they are in it.

    A text's ids begin as the tokenizer begins every text, with its beginning token for one.

    Raises:
        TinyEngramError: as `read_texts`, or the cache cannot be written.
    """
    digest = text_digest(paths, tokenizer)
    path = cache / f"tokens-{digest[:32]}.safetensors"
    try:
        return load_file(path)["tokens"], digest
    except (OSError, SafetensorError, KeyError):
        pass  # not there yet, or not whole
    end = end_token(tokenizer)
    ids: list[torch.Tensor] = []
    for texts in _some(read_texts(paths, tell=True)):
        for found in tokenizer(texts, verbose=False)["input_ids"]:
            ids.append(torch.tensor(found if found and found[-1] == end else [*found, end], dtype=torch.int32))
    tokens = torch.cat(ids)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({"tokens": tokens}))
    except OSError as error:
        raise TinyEngramError(f"{path}: cannot be written ({error.strerror or error}); free space or choose another folder") from error
    logger.info("%s, %s", counted(len(ids), "text"), counted(len(tokens), "token"))
    return tokens, digest


def _some(texts: Iterator[str]) -> Iterator[list[str]]:
    while some := list(islice(texts, _TOGETHER)):
        yield some


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one stream of ids.

    Attributes:
        tokens: int32 ``[tokens]``.
        size: tokens of a window.
        chosen: int64 ``[windows]``, the windows' numbers in the stream; the stream's last one may be shorter.
        pad_id: raw id that fills it up.
    """

    tokens: torch.Tensor
    size: int
    chosen: torch.Tensor
    pad_id: int

    @classmethod
    def of(cls, tokens: torch.Tensor, size: int, pad_id: int) -> "Windows":
        """All windows of a stream; a last one of a single token, which nothing predicts, is left out."""
        count = len(tokens) // size + (len(tokens) % size > 1)
        return cls(tokens, size, torch.arange(count), pad_id)

    def __len__(self) -> int:
        return len(self.chosen)

    def split(self, percentage: float) -> "tuple[Windows, Windows]":
        """Without, and only, so many of each hundred windows, spread evenly; at least one where any are asked for.

        Raises:
            TinyEngramError: nothing would be left to learn from.
        """
        held = 0 if not percentage else max(1, round(len(self) * percentage / 100))
        if held >= len(self):
            raise TinyEngramError(
                f"the text has {counted(len(self), 'window')} of {self.size} tokens: expected one to learn from and one to hold out; pass "
                "a smaller --block_size, more text, or --validation_split_percentage 0"
            )
        out = torch.zeros(len(self), dtype=torch.bool)
        out[_spread(len(self), held)] = True
        return self._only(~out), self._only(out)

    def some(self, most: int) -> "Windows":
        """At most so many of these, spread evenly."""
        return self if len(self) <= most else Windows(self.tokens, self.size, self.chosen[_spread(len(self), most)], self.pad_id)

    def _only(self, mask: torch.Tensor) -> "Windows":
        return Windows(self.tokens, self.size, self.chosen[mask], self.pad_id)

    def targets(self, places: torch.Tensor) -> int:
        """Tokens that are predicted in the windows at these places."""
        starts = self.chosen[places] * self.size
        return int(((len(self.tokens) - starts).clamp(max=self.size) - 1).sum())

    def batch(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids int64 ``[B, size]`` and the attention mask int64 ``[B, size]``, None where no window is short; places int64 ``[B]``."""
        at = (self.chosen[places] * self.size).unsqueeze(1) + torch.arange(self.size)
        inside = at < len(self.tokens)
        ids = self.tokens[at.clamp(max=len(self.tokens) - 1)].to(torch.int64)
        return torch.where(inside, ids, self.pad_id), None if bool(inside.all()) else inside.to(torch.int64)


def _spread(count: int, wanted: int) -> torch.Tensor:
    """int64 ``[wanted]`` of 0..count - 1, the middles of equal parts."""
    return (2 * torch.arange(wanted) + 1) * count // (2 * wanted) if wanted else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, windows: int) -> torch.Tensor:
    return torch.randperm(windows, generator=torch.Generator().manual_seed((seed << 24) ^ epoch))


def places_of(seed: int, first: int, count: int, windows: int) -> torch.Tensor:
    """Which windows the samples `first` to ``first + count - 1`` of a run are, int64 ``[count]``.

    Every epoch goes through all windows once, in an order of its own. A run's position in its data is one number.
    """
    found = []
    while count:
        epoch, at = divmod(first, windows)
        part = _order(seed, epoch, windows)[at : at + count]
        found.append(part)
        first, count = first + len(part), count - len(part)
    return torch.cat(found)
