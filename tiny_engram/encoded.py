"""Which prompt a row of text states belongs to, told by its content. Imports numpy and torch.

Between encoder and denoiser a pipeline stacks, repeats, casts and keeps states; a batch position says nothing about them. So the
encoder's mount notes a digest of each row with the ids it came from, and a context mount looks the row up that the denoiser reads.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["ROUNDINGS", "EncodedPrompts", "count_prompts"]

LIMIT = 16_384  # prompts of some 2 kB each
ROUNDINGS = (torch.float16, torch.bfloat16)


def _digests(states: torch.Tensor) -> list[bytes]:
    """16 bytes for each row of `[batch, time, width]`, equal for any float type that holds the values exactly."""
    rows = states.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return [hashlib.blake2b(memoryview(row).cast("B"), digest_size=16).digest() for row in rows]


def count_prompts(parts: Sequence[torch.Tensor]) -> int:
    """How many different prompts the rows of states hold, `[batch, time, width]` or one row `[time, width]` each; a row of zeros is
    none."""
    found: set[bytes] = set()
    for part in parts:
        rows = part if part.dim() == 3 else part[None]
        found |= {*_digests(rows)} - {*_digests(torch.zeros(1, *rows.shape[1:]))}
    return len(found)


class EncodedPrompts:
    """Rows of text states that one encoder gave, and their token ids; the oldest are forgotten first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._ids: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._limit = limit * (1 + len(ROUNDINGS))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Remember rows as they are and as half types round them: ids int64 `[batch, time]`, states `[batch, time, width]`."""
        states = states.detach()
        kinds = [states, *(states.to(kind) for kind in ROUNDINGS if kind != states.dtype)]
        kept = ids.detach().cpu().numpy().copy()
        found = [_digests(kind) for kind in kinds]
        with self._lock:
            for digests in found:
                for digest, row in zip(digests, kept, strict=True):
                    self._ids[digest] = row
                    self._ids.move_to_end(digest)
            while len(self._ids) > self._limit:
                self._ids.popitem(last=False)

    def find(self, states: torch.Tensor) -> list[np.ndarray | None]:
        """Token ids of each row, int64 `[time]`; None for a row that was not noted. A row of zeros stands for no prompt: ids -1."""
        nobody = np.full(states.shape[1], -1, dtype=np.int64)
        empty = _digests(torch.zeros(1, *states.shape[1:]))[0]
        with self._lock:
            return [nobody if digest == empty else self._ids.get(digest) for digest in _digests(states)]
