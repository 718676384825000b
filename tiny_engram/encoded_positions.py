"""Which prompt a row of text states belongs to, and which of its tokens stands where, told by the states at each position. Imports numpy
and torch, and encoded.

Between encoder and denoiser some pipelines crop a template, cut rows at their end, fill them up with zeros, or keep a list of rows. So a
position in the token ids is another position in what the denoiser is given; every state there still has the bits of one that was encoded.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from tiny_engram.encoded import ROUNDINGS

__all__ = ["EncodedPositions", "FoundRow", "position_digests"]

LIMIT = 64 * 2**20  # bytes of ids and digests: about 4,000 prompts of 512 tokens
MIXER = 0x2545F4914F6CDD1D  # odd; spreads the bits of a value over all 64


@dataclass(frozen=True, slots=True)
class FoundRow:
    """The prompt of one row of states: its token ids, int64 `[time]`; state j of the row is that of token j + shift, for j in
    [first, end). Whatever else stands in the row is no token that a trigger could lie in. `ids` is empty for a row of zeros: no prompt.
    """

    ids: np.ndarray
    shift: int = 0
    first: int = 0
    end: int = 0


@lru_cache(maxsize=8)
def _keys(width: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each value of a state, int64 `[2, width]`."""
    drawn = np.random.default_rng(width).integers(-(2**62), 2**62, size=(2, width), dtype=np.int64)
    return torch.from_numpy(drawn * 2 + 1).to(device)


def position_digests(states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A number for each state of `[batch, time, width]` or `[time, width]`, int64 `[batch, time]` or `[time]`, equal for any float type
    that holds the values exactly; and which of them are not zero, bool. Computed where the states are: only the numbers are copied.
    """
    rows = states.detach() if states.dim() == 3 else states.detach()[None]
    each = [_row_digests(row) for row in rows]  # one by one: whole batches of 64-bit integers would take much memory
    digests, there = (torch.stack(parts).cpu().numpy() for parts in zip(*each, strict=True))
    return (digests, there) if states.dim() == 3 else (digests[0], there[0])


def _row_digests(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = states.float() + 0.0  # -0.0 becomes 0.0: masks make both
    words = values.view(torch.int32).long()
    keys = _keys(states.shape[-1], states.device)
    mixed = (words + keys[0]) * MIXER
    return ((mixed ^ (mixed >> 32)) * keys[1]).sum(-1), (values != 0).any(-1)


class EncodedPositions:
    """Rows of text states that one encoder gave, by position, and their token ids; the oldest are forgotten first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._rows: OrderedDict[bytes, tuple[np.ndarray, np.ndarray, int]] = OrderedDict()  # ids, digests [kinds, time], width
        self._limit, self._bytes = limit, 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Remember rows as they are and as half types round them: ids int64 `[batch, time]`, states `[batch, time, width]`."""
        states = states.detach()
        kinds = [states, *(states.to(kind) for kind in ROUNDINGS if kind != states.dtype)]
        kept = ids.detach().cpu().numpy().copy()
        digests = np.stack([position_digests(kind)[0] for kind in kinds], axis=1)
        with self._lock:
            for row, each in zip(kept, digests, strict=True):
                key = each.tobytes()
                if key not in self._rows:
                    self._bytes += 2 * each.nbytes + row.nbytes
                self._rows[key] = row, each.copy(), states.shape[-1]
                self._rows.move_to_end(key)
            while self._bytes > self._limit and len(self._rows) > 1:
                _, (row, each, _) = self._rows.popitem(last=False)
                self._bytes -= 2 * each.nbytes + row.nbytes

    def find(self, states: torch.Tensor | Sequence[torch.Tensor]) -> list[FoundRow | None]:
        """The prompt of each row of `[batch, time, width]`, or of a list of `[time, width]`; None for a row that was not noted.

        A row is that of a prompt if every state in it that is not zero is one of the prompt's. Where states are wider than those that were
        noted, several entries stand side by side, and the first is looked at.
        """
        with self._lock:
            rows = list(reversed(self._rows.values()))
        digests: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        found: list[FoundRow | None] = []
        for k, row in enumerate(states):
            one = None
            for width in dict.fromkeys(width for *_, width in rows):
                if width > row.shape[-1]:
                    continue
                if width not in digests:
                    digests[width] = _of_all(states, width)
                mine, there = digests[width][k]
                if not there.any():
                    one = FoundRow(np.zeros(0, dtype=np.int64))
                    break
                known = ((ids, kinds) for ids, kinds, of in rows if of == width)
                one = next((hit for ids, kinds in known for each in kinds if (hit := _match(mine, there, ids, each))), None)
                if one is not None:
                    break
            if not rows and not bool((row != 0).any()):
                one = FoundRow(np.zeros(0, dtype=np.int64))
            found.append(one)
        return found


def _of_all(states: torch.Tensor | Sequence[torch.Tensor], width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    if isinstance(states, torch.Tensor):
        return list(zip(*position_digests(states[..., :width]), strict=True))
    return [position_digests(row[..., :width]) for row in states]


def _match(mine: np.ndarray, there: np.ndarray, ids: np.ndarray, known: np.ndarray) -> FoundRow | None:
    """A row with these digests, not zero where `there`, as part of a prompt with `known` ones; None if it is not."""
    # The last state: in an encoder that reads from left to right all prompts that begin alike have the first ones. Padding states may be
    # equal, so that it stands at several places: the right one is that at which most of the others stand right too.
    last = int(np.flatnonzero(there)[-1])
    best: tuple[int, int, np.ndarray] | None = None
    for at in np.flatnonzero(known == mine[last]).tolist():
        shift = at - last
        first = max(0, -shift)
        same = np.zeros(len(mine), dtype=bool)
        same[first : last + 1] = mine[first : last + 1] == known[first + shift : at + 1]
        count = int((same & there).sum())
        if best is None or count > best[0]:
            best = count, shift, same
            if count == int(there.sum()):
                break
    if best is None:
        return None
    _, shift, same = best
    # What a crop left standing in front (the start token, say) is one of the prompt's too, elsewhere.
    strange = there & ~same
    if strange.any() and not np.isin(mine[strange], known).all():
        return None
    breaks = np.flatnonzero(~(same & there)[:last])
    return FoundRow(ids, shift, int(breaks[-1]) + 1 if len(breaks) else 0, last + 1)
