"""Means over subjects with bootstrap intervals, and when a curve reaches a level. Imports numpy only.

A subject counts once: its runs, contexts and pictures are averaged first, then subjects are drawn with replacement.
Estimates over the same subjects are drawn together, so that a difference of two of them is a paired one. An interval
therefore says how far the mean would move with other subjects of this kind; it does not speak of other bases or tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

RESAMPLES = 10_000


@lru_cache(maxsize=32)
def draw_counts(subjects: tuple[str, ...], seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each subject is drawn in each resample, float64 `[resamples, subjects]`; every row sums to their number.

    The draws follow from the names, so that two estimates over the same subjects see the same resamples, and two over
    different ones independent resamples.
    """
    digest = hashlib.sha256("\n".join(subjects).encode()).digest()
    generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    return generator.multinomial(len(subjects), np.full(len(subjects), 1 / len(subjects)), size=resamples).astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean over subjects and its value in every resample.

    Attributes:
        value: the mean over the subjects themselves.
        draws: float64 `[resamples]`; NaN where a resample holds no pair of two different subjects.
        subjects: whom it speaks of, in the order of their names.
    """

    value: float
    draws: np.ndarray = field(repr=False)
    subjects: tuple[str, ...]

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % percentile interval."""
        low, high = np.percentile(self.draws[~np.isnan(self.draws)], [2.5, 97.5])
        return float(low), float(high)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]

    def __sub__(self, other: Estimate) -> Estimate:
        """The paired difference.

        Raises:
            ValueError: the two speak of different subjects.
        """
        if self.subjects != other.subjects:
            odd = sorted(set(self.subjects) ^ set(other.subjects))
            raise ValueError(f"a paired difference needs the same subjects on both sides; {odd} are on one: finish that stage of the bench")
        return Estimate(self.value - other.value, self.draws - other.draws, self.subjects)

    def __truediv__(self, other: Estimate) -> Estimate:
        """The ratio of the two means; drawn together over the same subjects, independently over different ones."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(np.float64(self.value) / other.value)
            return Estimate(value, self.draws / other.draws, self.subjects)


def subject_means(records: Iterable[Mapping[str, Any]], score: str) -> dict[str, float]:
    """The mean of `score` of each subject over all its records (seeds and contexts) that have it."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record.get(score) is not None:
            values.setdefault(record["subject"], []).append(float(record[score]))
    return {subject: float(np.mean(numbers)) for subject, numbers in sorted(values.items())}


def estimate(means: Mapping[str, float], *, seed: int = 0) -> Estimate:
    """The mean of `means`, one value a subject.

    Raises:
        ValueError: there is none.
    """
    if not means:
        raise ValueError("no subject has this score: run that stage of the bench first")
    subjects = tuple(sorted(means))
    values = np.array([means[subject] for subject in subjects])
    return Estimate(float(values.mean()), draw_counts(subjects, seed) @ values / len(subjects), subjects)


def pair_estimate(means: Mapping[tuple[str, str], float], *, seed: int = 0) -> Estimate:
    """The mean over unordered pairs of two different subjects, drawn over subjects: a pair counts as often as the product
    of its two subjects' draws, as each takes part in many pairs, which are not independent.

    Raises:
        ValueError: there is no pair, or one of a subject with itself.
    """
    if not means:
        raise ValueError("no pair has this score: run that stage of the bench first")
    subjects = tuple(sorted({name for pair in means for name in pair}))
    place = {name: i for i, name in enumerate(subjects)}
    values, present = np.zeros((len(subjects),) * 2), np.zeros((len(subjects),) * 2)
    for (one, other), value in means.items():
        if one == other:
            raise ValueError(f"a pair of {one!r} with itself: expected two different subjects")
        i, j = sorted((place[one], place[other]))
        values[i, j] += value
        present[i, j] += 1
    counts = draw_counts(subjects, seed)
    with np.errstate(invalid="ignore"):
        draws = ((counts @ values) * counts).sum(1) / ((counts @ present) * counts).sum(1)
    return Estimate(float(values.sum() / present.sum()), draws, subjects)


def at_step(steps: Sequence[float], values: Sequence[float], step: float) -> float:
    """The value at `step`, linear between the checkpoints and constant beyond their ends."""
    return float(np.interp(step, steps, values))


def first_crossing(steps: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """The step at which `values` first reach `level`, linear between checkpoints; the first checkpoint where that is
    above it already, None where none is. `steps` rise.

    Raises:
        ValueError: lengths differ, there is no checkpoint, or steps do not rise.
    """
    if len(steps) != len(values) or not steps or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise ValueError(f"steps {list(steps)} with {len(values)} values: expected rising steps and one value each")
    if values[0] >= level:
        return float(steps[0])
    for left, right, below, above in zip(steps, steps[1:], values, values[1:], strict=False):
        if above >= level:
            return left + (right - left) * (level - below) / (above - below)
    return None
