"""Several concepts in one batch: their pictures, their captions and their rows. May import torch and the parts of
training that these are.

Rows of different concepts stand one behind the other, and each sample's spans read those of its own. Gradients are disjoint, so that every
concept is taught what it would be taught alone, to rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tiny_engram.training import objective
from tiny_engram.training.cache import CaptionBatch, joined_captions
from tiny_engram.training.conditions import ConditionBatch, Conditions, joined_conditions
from tiny_engram.training.prepared import Latents, TrainingData
from tiny_engram.training.role_rows import RoleRows
from tiny_engram.training.rows import ConceptRows

__all__ = ["JointData", "JointRows"]


class JointData:
    """The data of several concepts, whose latents have one shape. It stands where a `TrainingData` does; samples are those of the first
    concept, then those of the second, as many of each.

    Args:
        parts: of each concept. positions: of each concept's rows, by role where there are several.
    """

    def __init__(self, parts: Sequence[TrainingData], positions: Sequence[Any]) -> None:
        self.parts, self.concepts, self.family = tuple(parts), len(parts), parts[0].family
        captions: list[Any] = [part.captions for part in parts]
        self._captions = (joined_conditions if isinstance(captions[0], Conditions) else joined_captions)(captions, positions)
        self._ahead = [sum(len(part.captions.texts) for part in parts[:k]) for k in range(len(parts))]

    def batch(self, draws: Sequence[objective.Draw], dropout: float) -> tuple[Latents, CaptionBatch | ConditionBatch]:
        """As `TrainingData.batch`."""
        share, picks, shown = len(draws) // len(self.parts), [], []
        for k, (part, ahead) in enumerate(zip(self.parts, self._ahead, strict=True)):
            own = draws[k * share : (k + 1) * share]
            pictures = [part.picture(drawn) for drawn in own]
            picks += [ahead + pick for pick in part.picks(own, pictures, dropout)]
            shown.append(part.latents(own, pictures))
        return _joined(shown), self._captions.batch(picks)


def _joined(shown: Sequence[Latents]) -> Latents:
    if len(shown) == 1:
        return shown[0]
    weighted = any(one.weights is not None for one in shown)
    weights = [torch.ones_like(one.means[:, :1]) if one.weights is None else one.weights for one in shown]
    means, stds = (torch.cat([getattr(one, name) for one in shown]) for name in ("means", "stds"))
    return Latents(means, stds, torch.cat(weights) if weighted else None, torch.cat([one.frames for one in shown]))


class JointRows:
    """The rows of several concepts of one shape. It stands where a `ConceptRows` or a `RoleRows` is called."""

    def __init__(self, modules: Sequence[ConceptRows | RoleRows]) -> None:
        self._first, *self._others = modules

    def __call__(self, captions: Any, timesteps: Sequence[int], dtype: torch.dtype):
        return self._first(captions, timesteps, dtype, self._others)
