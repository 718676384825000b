"""The lines of each section that are measure, figure, target and whether it was met. Imports findings and wording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, Retention, mean_of
from benchmarks.llm.wording import KINDS, METHODS, WORDS, percent, ranged, seeds
from benchmarks.personalization.formats import change
from benchmarks.tables import row

PUBLISHED_TOP1, PUBLISHED_BYTES = 0.68, 160  # of LoRA at 100 facts: top-1, and its bytes over the table's


def everywhere_rows(found: Everywhere) -> list[dict[str, Any]]:
    """That a table helps is asked of the best share alone."""
    rows = []
    for share in found.shares:
        mean = found.against_plain("table", share)
        best = share == found.best()
        name = f"from scratch, {percent(share)} of the budget a table{', the best share' if best else ''}: loss against none"
        figure = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
        rows.append(row(name, figure, "interval below 0" if best else "", mean.high < 0 if best else None))
    for kind, share in found.others():
        mean = found.against_plain(kind, share)
        figure = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
        rows.append(row(f"from scratch, {percent(share)}, {KINDS[kind]}: loss against none", figure))
        if kind == "hot":
            mean = found.hot_tier(share)
            figure = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
            rows.append(row(f"from scratch, {percent(share)}, hot tier on against off: loss", figure))
    return rows


def retention_rows(found: Retention) -> list[dict[str, Any]]:
    rows = []
    for level in found.levels():
        ours, theirs = (mean_of(list(found.at(method, level)[1].values())) for method in METHODS)
        text = f"{ranged(ours, digits=2)} against LoRA r8's {ranged(theirs, digits=2)}"
        target = "lower than LoRA's"
        rows.append(row(f"retention, ordinary loss where the narrow one is {level:g}", text, target, ours.value < theirs.value))
    return rows


def facts_rows(found: FactRuns) -> list[dict[str, Any]]:
    rows = []
    for count in found.counts:
        if not found.has(count, "facts"):
            continue
        ours, name = found.get(count, "facts"), f"{count:,} facts"
        lora = found.get(count, "lora") if found.has(count, "lora") else None
        for way in WAYS:
            text = percent(ours["recall"][way]["top1"])
            met = None
            if lora is not None:
                text += f" against LoRA r8's {percent(lora['recall'][way]['top1'])}"
                met = ours["recall"][way]["top1"] >= lora["recall"][way]["top1"]
            rows.append(row(f"{name}, {WORDS[way]}: top-1", text, "" if lora is None else "at least LoRA's", met))
        moved = ours["off_trigger_change"]
        rows.append(row(f"{name}: largest change of logits without a trigger", change(moved), "exactly 0", moved == 0))
        rows.append(row(f"{name}: bytes a fact", f"{ours['bytes_per_fact']:,.0f}"))
        rows.append(row(f"{name}: seconds a fact", f"{ours['seconds_per_fact']:.2f}"))
        if lora is not None:
            times = lora["bytes"] / ours["bytes"]
            published = count == 100
            target = f"{PUBLISHED_BYTES} times (published)" if published else ""
            met = times >= PUBLISHED_BYTES if published else None
            rows.append(row(f"{name}: LoRA r8's bytes over the table's", f"{times:,.1f} times", target, met))
            if published:
                told = lora["recall"]["as taught"]["top1"]
                rows.append(row(f"{name}: LoRA r8's top-1 as taught", percent(told), f"{percent(PUBLISHED_TOP1)} (published)"))
    return rows


ROWS: dict[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]] = {
    "everywhere": lambda figures: everywhere_rows(Everywhere(figures)),
    "retention": lambda figures: retention_rows(Retention(figures)),
    "facts": lambda figures: facts_rows(FactRuns(figures)),
}
