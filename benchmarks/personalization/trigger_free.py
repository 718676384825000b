"""What a loaded method does to prompts that do not name its subject: to states, to the denoiser's predictions and to pictures.

Everything is compared with the base on the same batch, so that what changes nothing gives exact zeros. Imports torch,
captions and parts of the bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from captions import ALONE, COLOURS, PAIR, STYLES, fill

import tiny_engram
from benchmarks.personalization.base import Base
from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import Adapters, Rows
from benchmarks.personalization.plan import Settings

__all__ = ["TriggerFree", "difference", "near_misses", "prompts"]

# A near miss of the trigger is written for every so many-th thing.
NEAR = 7
# Share of the schedule: in its middle the prompt still decides.
MIDDLE = 0.5


def near_misses(trigger: str) -> list[str]:
    """Words that look like a trigger of two hyphenated parts and are not: a careless matcher takes them for it."""
    first, last = trigger.split("-")
    return [f"{trigger}s", first, f"{last}-{first}", f"{first}-{first}", f"{trigger}{last}"]


def prompts(names: Sequence[str], trigger: str, count: int) -> list[str]:
    """`count` different prompts over `names`, styles, colours and both kinds of template; every seventh has a near miss first."""
    colours, missed = list(COLOURS), near_misses(trigger)
    found: dict[str, None] = {}
    for number in range(count * 20):
        if len(found) == count:
            break
        style, colour = STYLES[number % len(STYLES)], colours[number // len(STYLES) % len(colours)]
        one = names[number * 7 % len(names)] if number % NEAR else missed[number // NEAR % len(missed)]
        other = names[(number * 7 + 1 + number // len(names)) % len(names)]
        pair = number % 2 and one != other
        templates = PAIR if pair else ALONE
        found[fill(templates[number // 2 % len(templates)], style, colour, [one, other] if pair else [one])] = None
    if len(found) < count:
        raise ValueError(f"{count} different prompts asked for, {len(found)} found over {len(names)} names; give more names")
    return list(found)


def difference(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """{"max", "mean"} of the absolute difference over all pairs of tensors."""
    most = total = 0.0
    count = 0
    for one, other in pairs:
        apart = (one.double() - other.double()).abs()
        if apart.numel():
            most, total, count = max(most, apart.max().item()), total + apart.sum().item(), count + apart.numel()
    return {"max": most, "mean": total / max(count, 1)}


class TriggerFree:
    """The base's own states, predictions and pictures of prompts that hold no trigger.

    Args:
        texts: the prompts. near: whether each holds a near miss.
        pictures: how many of the first are drawn.
    """

    @torch.no_grad()
    def __init__(self, base: Base, texts: Sequence[str], near: Sequence[bool], settings: Settings, *, pictures: int) -> None:
        self.base, self.texts, self.near, self.settings, self.drawn = base, list(texts), list(near), settings, pictures
        self.chunk = 250 if base.device.type == "cuda" else 16
        noise = torch.randn(self.chunk, *base.latent_shape, generator=torch.Generator().manual_seed(1))
        self.latents = noise.to(base.device)
        self.timestep = torch.tensor(int(base.scheduler.config.num_train_timesteps * MIDDLE), device=base.device)
        self.rows = self._encoded()
        self.predictions = [self._denoised(part.states, part.ids) for part in self._parts(self.rows)]
        self.pictures = self._draw(self.rows, None)

    def _encoded(self) -> Rows:
        # as a loaded method has it: run 0 in every row, though no trigger stands there
        return self.base.rows(self.texts, [()] * len(self.texts), torch.zeros(len(self.texts), 1, dtype=torch.long))

    def _parts(self, rows: Rows) -> list[Rows]:
        return [rows.part(first, min(first + self.chunk, len(self.texts))) for first in range(0, len(self.texts), self.chunk)]

    def _denoised(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        size = len(states)
        return self.base.predict(self.latents[:size], self.timestep.expand(size), states, self.base.mask(ids))

    def _draw(self, rows: Rows, adapters: Adapters | None) -> np.ndarray:
        how: dict[str, Any] = {"steps": self.settings.drawing_steps, "guidance": self.settings.guidance}
        return draw(self.base, adapters, rows.part(0, self.drawn), range(self.drawn), **how)

    def _compared(
        self,
        rows: Rows,
        states_of: Callable[[Rows], torch.Tensor],
        attached: Callable[[Rows, torch.Tensor], AbstractContextManager],
        pictures: np.ndarray,
    ) -> dict[str, Any]:
        near = torch.tensor(self.near, device=self.base.device)
        apart: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"conditioning": [], "near": [], "denoiser": []}
        plain = self._parts(self.rows)
        for number, part in enumerate(self._parts(rows)):
            states, own = states_of(part), plain[number].states
            marked = near[number * self.chunk :][: len(states)]
            with attached(part, states):
                predicted = self._denoised(states, part.ids)
            apart["conditioning"].append((states, own))
            apart["near"].append((states[marked], own[marked]))
            apart["denoiser"].append((predicted, self.predictions[number]))
        found: dict[str, Any] = {name: difference(pairs) for name, pairs in apart.items()}
        found["pictures"] = difference([(torch.from_numpy(pictures), torch.from_numpy(self.pictures))])
        return found | {"prompts": len(self.texts), "drawn": self.drawn}

    @torch.no_grad()
    def changed_by(self, adapters: Adapters) -> dict[str, Any]:
        """{"conditioning", "near" (the same of near misses), "denoiser", "pictures"}, each `difference` from the base's: states and
        predictions in their own units, pictures in 1/255."""
        pictures = self._draw(self.rows, adapters)
        base = self.base
        return self._compared(
            self.rows,
            lambda part: adapters.states(base, part),
            lambda part, states: adapters.attached(base, part, states),
            pictures,
        )

    @torch.no_grad()
    def changed_by_product(self, concept: Any) -> dict[str, Any]:
        """The same with a concept loaded into the pipeline, which looks for the trigger by itself in the encoder and the denoiser."""
        adapter = tiny_engram.attach(self.base.pipe)
        try:
            adapter.load_concept(concept)
            # encoded anew, through the product's hooks, in batches of the same shape
            rows = self._encoded()
            pictures = self._draw(rows, None)
            return self._compared(rows, lambda part: part.states, lambda part, states: nullcontext(), pictures)
        finally:
            adapter.detach()
