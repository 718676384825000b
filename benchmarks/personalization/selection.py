"""The one rule that picks a learning rate, and the LoRA that the final table compares with. Imports plan and the registry of methods."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.plan import RATE_FACTORS

__all__ = ["FIDELITY", "RULE", "best_lora", "choose", "selection_score"]

FIDELITY = ("effnet_best", "lpips_best", "identity", "identity_lpips")
RULE = (
    "the learning rate with the highest mean, over the development subjects, of half concept fidelity (mean of best-reference "
    "similarity and identity, each by EfficientNet and by SqueezeNet, over the nine contexts) and half prompt fidelity (mean over those "
    "that ask for something)"
)


def selection_score(records: Sequence[Mapping[str, Any]]) -> float:
    """The figure by which one method's settings are compared: see `RULE`. `records` are those of one setting at one step."""
    by_subject: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_subject.setdefault(record["subject"], []).append(record)
    scores = []
    for own in by_subject.values():
        # similarities alone would say little: a thing of the right kind, untaught, has half of what a perfect picture has
        fidelity = fmean(fmean(record[name] for name in FIDELITY) for record in own)
        scores.append(0.5 * fidelity + 0.5 * fmean(record["prompt"] for record in own if "prompt" in record))
    return fmean(scores)


def choose(records: Sequence[Mapping[str, Any]], development: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each method that was swept whole: {"rate", "score", "at_edge", "scores": {rate: score}}. `records` are the sweep's."""
    by_method: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for record in records:
        by_method.setdefault(record["method"], {}).setdefault(record["learning_rate"], []).append(record)
    chosen = {}
    for method, by_rate in by_method.items():
        whole = {rate: own for rate, own in by_rate.items() if {record["subject"] for record in own} == set(development)}
        if len(whole) < len(RATE_FACTORS):
            continue
        scores = {rate: selection_score(own) for rate, own in sorted(whole.items())}
        rate = max(scores, key=lambda r: scores[r])
        chosen[method] = {
            "rate": rate,
            "score": scores[rate],
            # the best may lie outside what was tried
            "at_edge": rate in (min(scores), max(scores)),
            "scores": {f"{r:g}": score for r, score in scores.items()},
        }
    return chosen


def best_lora(chosen: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The LoRA with the highest score in the sweep; None before all of them were swept."""
    loras = [method for method in METHODS if method.startswith("lora-")]
    if not loras or any(method not in chosen for method in loras):
        return None
    return max(loras, key=lambda method: chosen[method]["score"])
