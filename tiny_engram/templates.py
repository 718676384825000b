"""Words that a pipeline itself puts around a prompt, such as a chat template: a trigger in them is nobody's. Imports torch.

They are learnt from the token ids of two prompts that have nothing in common.
"""

from collections.abc import Iterable, Sequence

import torch

__all__ = ["PromptTemplates"]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class PromptTemplates:
    """What stands before and behind prompts at one encoder, as token ids.

    Args:
        special: ids of begin, end and padding; a template is more than these.
        filler: one of them, which takes the place of a template's tokens where triggers are looked for.

    Attributes:
        longest: most tokens in front of a prompt, special ones among them; 0 without a template.
    """

    def __init__(self, special: Iterable[int], filler: int) -> None:
        self._special, self._filler = frozenset(special), filler
        self.known: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.longest = 0

    def learn(self, one: Sequence[int], other: Sequence[int]) -> None:
        """From two prompts' ids, padding and all: prompts that neither begin nor end alike."""
        (start, end), (begin, stop) = self._inner(one), self._inner(other)
        first, second = list(one[start:end]), list(other[begin:stop])
        head = _common(first, second)
        tail = _common(first[head:][::-1], second[head:][::-1])
        before, behind = tuple(first[:head]), tuple(first[len(first) - tail :])
        if not self._special.issuperset((*before, *behind)):
            self.known.add((before, behind))
            self.longest = max(self.longest, start + head)

    def _inner(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where the ids without the special ones at both edges begin and end."""
        start, end = 0, len(ids)
        while start < end and ids[start] in self._special:
            start += 1
        while end > start and ids[end - 1] in self._special:
            end -= 1
        return start, end

    def masked(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids int64 `[batch, time]` with the filler in the place of a known template's; the tensor itself where there is none."""
        if not self.known:
            return ids
        rows = ids.detach().cpu()
        changed = rows.clone()
        for k, row in enumerate(rows.tolist()):
            start, end = self._inner(row)
            for before, behind in self.known:
                text = tuple(row[start:end])
                if text[: len(before)] == before:
                    changed[k, start : start + len(before)] = self._filler
                    if behind and text[-len(behind) :] == behind:
                        changed[k, end - len(behind) : end] = self._filler
        return changed.to(ids.device)
