"""What the runs of a language model say: means over seeds, differences at the same seed, and losses at the same narrow loss.

An interval is Student's t over seeds, 95 %: with two seeds it is 13 times as wide as the standard error, and with one there is none. It
speaks of other seeds, not of other texts or sizes. Imports the standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# 97.5 % quantiles of Student's t for 1 to 20 degrees of freedom; for more than that the last is kept, which is a little too wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
LEVELS = (2.5, 2.0, 1.5, 1.0, 0.5, 0.3)  # narrow losses at which retention is compared


class NotMeasured(ValueError):
    """There are no runs to say this from; the message says which are lacking."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `half` is half the width of its interval, None of one seed."""

    value: float
    half: float | None
    n: int

    @property
    def low(self) -> float:
        return self.value - (math.inf if self.half is None else self.half)

    @property
    def high(self) -> float:
        return self.value + (math.inf if self.half is None else self.half)


def mean_of(values: Sequence[float]) -> Mean:
    if not values:
        raise NotMeasured("no seed has this figure")
    n = len(values)
    half = T[min(n - 1, len(T)) - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(statistics.fmean(values), half, n)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Mean:
    """The difference at the same seeds."""
    both = sorted(set(ours) & set(theirs))
    if not both:
        raise NotMeasured("no seed that both sides have")
    return mean_of([ours[seed] - theirs[seed] for seed in both])


def turning(differences: Sequence[float]) -> int | None:
    """The place from which a curve keeps the sign that it ends with, where that is not the one it began with."""
    if (differences[0] < 0) == (differences[-1] < 0):
        return None
    last = len(differences) - 1
    while (differences[last - 1] < 0) == (differences[-1] < 0):
        last -= 1
    return last


class Everywhere:
    """The comparison from scratch, by kind and share."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.figures = figures
        self.runs: dict[tuple[str, float], dict[int, Any]] = {}
        for run in figures["runs"]:
            self.runs.setdefault((run["kind"], run["share"]), {})[run["seed"]] = run

    def seeds(self, kind: str, share: float = 0.0) -> dict[int, Any]:
        if (kind, share) not in self.runs:
            raise NotMeasured(f"no run of {kind}, share {share:g}; benchmarks/llm/everywhere.py makes them")
        return self.runs[kind, share]

    @property
    def shares(self) -> list[float]:
        return sorted(share for kind, share in self.runs if kind == "table")

    def losses(self, kind: str, share: float = 0.0) -> dict[int, float]:
        """At the end of training, by seed."""
        return {seed: run["loss"][-1] for seed, run in self.seeds(kind, share).items()}

    def against_plain(self, kind: str, share: float) -> Mean:
        return paired(self.losses(kind, share), self.losses("plain"))

    def hot_tier(self, share: float) -> Mean:
        """Loss with the tier against the same share without it."""
        return paired(self.losses("hot", share), self.losses("table", share))

    def best(self) -> float:
        """The share whose difference to no table is lowest, of those with the most seeds: a single run is no answer beside three."""
        if not self.shares:
            raise NotMeasured("no run with a table; benchmarks/llm/everywhere.py makes them")
        means = {share: self.against_plain("table", share) for share in self.shares}
        most = max(mean.n for mean in means.values())
        return min((share for share in means if means[share].n == most), key=lambda share: means[share].value)

    def lowest(self) -> float:
        """The lowest point of the curve, however many seeds it has."""
        return min(self.shares, key=lambda share: self.against_plain("table", share).value)

    def others(self) -> list[tuple[str, float]]:
        return sorted(key for key in self.runs if key[0] not in ("plain", "table"))

    def steps(self, kind: str, share: float = 0.0) -> list[int]:
        return next(iter(self.seeds(kind, share).values()))["step"]

    def by_frequency(self, kind: str, share: float) -> list[list[Mean]]:
        """Differences to no table at each look, for each bucket of trigrams."""
        ours, plain = self.seeds(kind, share), self.seeds("plain")
        looks, buckets = range(len(self.steps(kind, share))), range(len(self.figures["buckets"]))

        def losses(runs: Mapping[int, Any], look: int, bucket: int) -> dict[int, float]:
            return {seed: run["by_frequency"][look][bucket] for seed, run in runs.items()}

        return [[paired(losses(ours, look, bucket), losses(plain, look, bucket)) for bucket in buckets] for look in looks]

    def gates(self, kind: str, share: float) -> dict[str, list[Mean]]:
        """Mean gate at the end for each bucket, by layer."""
        runs = list(self.seeds(kind, share).values())
        buckets = range(len(self.figures["buckets"]))
        return {layer: [mean_of([run["gates"][layer][-1][k] for run in runs]) for k in buckets] for layer in runs[0]["gates"]}


class Retention:
    """What ordinary text costs while a narrow one is learned."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.runs: dict[str, dict[float, dict[int, Any]]] = {}
        for run in figures["runs"]:
            self.runs.setdefault(run["method"], {}).setdefault(run["rate"], {})[run["seed"]] = run

    def before(self, what: str) -> float:
        return statistics.fmean(run[what][0] for rates in self.runs.values() for seeds in rates.values() for run in seeds.values())

    def parameters(self, method: str) -> int:
        return next(iter(next(iter(self.runs[method].values())).values()))["parameters"]

    def at(self, method: str, narrow: float) -> tuple[float, dict[int, float]]:
        """(learning rate, loss on ordinary text by seed) where the narrow loss came to `narrow`, at the rate that keeps most.

        Only rates that came there with every seed that they were tried with are chosen from, and the same one is taken for all seeds.
        """
        found = {}
        for rate, seeds in self.runs.get(method, {}).items():
            reached = {seed: ordinary_at(run["narrow"], run["ordinary"], narrow) for seed, run in seeds.items()}
            known = {seed: value for seed, value in reached.items() if value is not None}
            if len(known) == len(seeds):
                found[rate] = known
        if not found:
            raise NotMeasured(f"no rate of {method} brought the narrow loss to {narrow:g}")
        best = min(found, key=lambda rate: statistics.fmean(found[rate].values()))
        return best, found[best]

    def levels(self) -> list[float]:
        """Those of LEVELS that both methods reach."""

        def reached(method: str, level: float) -> bool:
            try:
                self.at(method, level)
            except NotMeasured:
                return False
            return True

        return [level for level in LEVELS if reached("engram", level) and reached("lora", level)]


def ordinary_at(narrow: Sequence[float], ordinary: Sequence[float], level: float) -> float | None:
    """Loss on ordinary text where the narrow text's first came to `level`, between two points; None where it never did."""
    for k in range(len(narrow) - 1):
        if narrow[k + 1] <= level <= narrow[k]:
            share = (narrow[k] - level) / max(narrow[k] - narrow[k + 1], 1e-9)
            return ordinary[k] + share * (ordinary[k + 1] - ordinary[k])
    return None


WAYS = ("as taught", "context", "alias", "other paraphrase")


class FactRuns:
    """Facts beside LoRA, by count, method and whether aliases were taught."""

    METHODS = {"facts": "Facts", "lora": "LoRA r8, equal time", "same-bytes": "LoRA of equal bytes and time", "base": "No facts"}

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.runs: dict[tuple[int, str, bool], dict[str, Any]] = {}
        for run in figures["runs"]:
            name = run["method"]
            kind = "base" if name == "base" else "facts" if name.startswith("facts") else "same-bytes" if " layers" in name else "lora"
            key = run["facts"], kind, name.endswith(" with aliases")
            if key not in self.runs or _recalled(run, key[2]) > _recalled(self.runs[key], key[2]):
                self.runs[key] = run

    @property
    def counts(self) -> list[int]:
        return sorted({count for count, _, _ in self.runs})

    def get(self, count: int, kind: str, aliases: bool = True) -> dict[str, Any]:
        if (count, kind, aliases) not in self.runs:
            raise NotMeasured(f"{self.METHODS[kind]} was not run with {count:,} facts; benchmarks/llm/facts.py does it")
        return self.runs[count, kind, aliases]

    def has(self, count: int, kind: str, aliases: bool = True) -> bool:
        return (count, kind, aliases) in self.runs


def _recalled(run: Mapping[str, Any], aliases: bool) -> float:
    """What a learning rate is chosen by: what was taught is recalled."""
    return run["recall"]["as taught"]["top1"] + run["recall"]["alias"]["top1"] * aliases
