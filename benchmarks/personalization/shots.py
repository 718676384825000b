"""Pictures of taught subjects: which are drawn, from which noise, and what the verdicts come to. Imports torch and parts of the bench.

A *shot* is one picture: a prompt, whose subjects are in it, and a seed. Seeds depend on the run's seed, the context and
the sample alone, so that all methods and subjects are drawn from the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import Adapters
from benchmarks.personalization.plan import Settings
from benchmarks.personalization.prompts import Prompt, pair_prompts, prompts_for
from benchmarks.personalization.scores import Case
from benchmarks.personalization.subjects import Subject

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Shot", "averaged", "draw_shots", "pair_shots", "single_shots"]

# So many are in flight at once; rows of ids and states are built for them together.
CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One picture to draw.

    Attributes:
        subjects: in the prompt's slots. words: what is written for each.
        runs: whose values fill each slot, an index of the adapters; -1 for none.
        seed: of the picture's noise. sample: its number among those of its prompt.
    """

    prompt: Prompt
    subjects: tuple[Subject, ...]
    words: tuple[str, ...]
    runs: tuple[int, ...]
    seed: int
    sample: int


def single_shots(
    subjects: Mapping[int, Subject], seeds: Mapping[int, int], samples: int, *, by_class_word: bool = False
) -> list[Shot]:
    """All contexts of each run's subject; `subjects` and `seeds` are by run index, -1 - i for the i-th thing that no run is about."""
    shots = []
    for run, subject in subjects.items():
        for context, prompt in enumerate(prompts_for(subject)):
            shots += [
                Shot(
                    prompt=prompt, subjects=(subject,), words=(subject.class_word if by_class_word else subject.trigger,),
                    runs=(max(run, -1),), seed=1_000_000 * seeds[run] + 1_000 * context + sample, sample=sample,
                )
                for sample in range(samples)
            ]  # fmt: skip
    return shots


def pair_shots(subjects: Mapping[int, Subject], seed: int, samples: int) -> list[Shot]:
    """All pairs of the subjects of runs of one seed; keys as in `single_shots`."""
    runs, things = list(subjects), list(subjects.values())
    shots = []
    for number, (prompt, (a, b)) in enumerate(pair_prompts(things)):
        pair = (things[a], things[b])
        shots += [
            Shot(
                prompt=prompt, subjects=pair, words=tuple(thing.trigger for thing in pair), runs=(max(runs[a], -1), max(runs[b], -1)),
                seed=1_000_000 * seed + 500_000 + 10 * number + sample, sample=sample,
            )
            for sample in range(samples)
        ]  # fmt: skip
    return shots


def draw_shots(
    base: Base,
    adapters: Adapters | None,
    shots: Sequence[Shot],
    settings: Settings,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """uint8 `[shots, 128, 128, 3]`. Shots of one call have the same number of subjects. `progress` is told (drawn, of)."""
    pictures = []
    for first in range(0, len(shots), CHUNK):
        chunk = shots[first : first + CHUNK]
        run = torch.tensor([shot.runs for shot in chunk])
        words = [shot.words for shot in chunk]
        rows = base.rows([shot.prompt.text for shot in chunk], words, run, None if adapters is None else adapters.vectors)
        drawn = draw(
            base, adapters, rows, [shot.seed for shot in chunk], steps=settings.drawing_steps, guidance=settings.guidance
        )
        pictures.append(np.asarray(drawn))
        if progress is not None:
            progress(first + len(chunk), len(shots))
    return np.concatenate(pictures)


def cases(shots: Sequence[Shot]) -> list[Case]:
    """What the judges are asked about each picture."""
    return [Case(shot.prompt, shot.subjects) for shot in shots]


def averaged(shots: Sequence[Shot], scores: Sequence[Mapping[str, float]]) -> list[tuple[Shot, dict[str, Any]]]:
    """One (first shot, {"pictures": n, field: mean over its pictures}) for each prompt of each run, in the order of the shots."""
    groups: dict[tuple, tuple[Shot, list[Mapping[str, float]]]] = {}
    for shot, found in zip(shots, scores, strict=True):
        key = (shot.runs, tuple(subject.name for subject in shot.subjects), shot.prompt.context)
        groups.setdefault(key, (shot, []))[1].append(found)
    result = []
    for shot, found in groups.values():
        # which fields apply is the prompt's, but a judge may leave one out where a picture holds nothing
        fields = dict.fromkeys(name for one in found for name in one)
        means = {name: round(fmean(float(one[name]) for one in found if name in one), 4) for name in fields}
        result.append((shot, {"pictures": len(found)} | means))
    return result
