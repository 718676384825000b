"""Texts that lie behind one another in the rows of a batch, told apart by their positions alone. Imports torch.

That is how training packs short texts: transformers lets none of them attend to another, where there is neither a mask nor a cache.
"""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Packed", "packed_texts"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the texts of a batch ``[B, T]`` lie.

    Attributes:
        places: int64 ``[texts, longest]``, each token's place in the flat batch; B * T behind a text's end.
        back_places: int64 ``[B, T]``, each token's place in the flat texts.
    """

    places: torch.Tensor
    back_places: torch.Tensor

    def lay(self, values: torch.Tensor, empty: float) -> torch.Tensor:
        """``[B, T, ...]`` -> ``[texts, longest, ...]``, a row for each text, `empty` behind its end."""
        flat = values.flatten(0, 1)
        return torch.cat((flat, flat.new_full((1, *flat.shape[1:]), empty)))[self.places.to(values.device)]

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """``[texts, longest, ...]`` -> ``[B, T, ...]``."""
        return values.flatten(0, 1)[self.back_places.to(values.device)]

    def rows(self) -> torch.Tensor:
        """The batch row of each text, int64 ``[texts]``."""
        return self.places[:, 0] // self.back_places.shape[1]

    def tokens(self, text: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch row and time, int64 ``[N]`` each, of tokens at these times of these texts."""
        flat = self.places.to(text.device)[text, time]
        return flat // self.back_places.shape[1], flat % self.back_places.shape[1]


@torch.compiler.disable
def packed_texts(positions: Any, ids: torch.Tensor) -> Packed | None:
    """The texts of ids int64 ``[B, T]`` by their positions ``[B or 1, T]``: one begins wherever a position is not the next one.

    None where each row is one text.
    """
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != ids.shape[1] or not ids.numel():
        return None
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = (positions.diff(dim=1) != 1).to(ids.device)
    first = begins.flatten().nonzero()[:, 0]
    if len(first) == len(ids):
        return None
    text = begins.flatten().cumsum(0) - 1
    every = torch.arange(ids.numel(), device=ids.device)
    time = every - first[text]
    places = torch.full((len(first), int(time.max()) + 1), ids.numel(), device=ids.device)
    places[text, time] = every
    return Packed(places, (text * places.shape[1] + time).view(ids.shape))
