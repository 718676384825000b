"""What helps and what does not, in a few lines, each verdict computed from the runs. Imports findings and wording."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, NotMeasured, Retention, mean_of, turning
from benchmarks.llm.wording import METHODS, WORDS, Sections, figures, percent, ranged, seeds


def _everywhere_says(found: Everywhere) -> list[str]:
    best = found.best()
    mean = found.against_plain("table", best)
    figure = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
    lower = f"At equal parameters and steps, validation loss is lower by {-mean.value:.3f} nats a token with {percent(best)} of the "
    lower += f"parameters in a table ({figure})"
    if mean.high < 0:
        lines = [f"**A model trained from scratch: a table helps.** {lower}."]
    elif mean.value < 0:
        lines = [f"**A model trained from scratch: a table seems to help.** {lower}; too few seeds to be sure."]
    else:
        lines = [f"**A model trained from scratch: a table does not help.** The best share changes validation loss by {figure}."]
    return [*lines, f"**Where that comes from.** {' '.join(_shape_says(found, best))}"]


def _shape_says(found: Everywhere, best: float) -> Iterable[str]:
    worse = [share for share in found.shares if found.against_plain("table", share).value > 0]
    lowest = found.lowest()
    if lowest == found.shares[0]:
        text = "The curve is lowest at the smallest share tried, so that its left arm was not seen"
    else:
        text = f"The curve over shares is lowest at {percent(lowest)}"
    yield f"{text}; from {percent(worse[0])} on a table does harm." if worse and worse[0] > lowest else f"{text}."
    for kind, share in found.others():
        if kind == "size-1":
            value = found.against_plain(kind, share).value
            lead = f"The same layers with one row for all n-grams are {abs(value):.3f} {'worse' if value > 0 else 'better'} than none"
            yield f"{lead}: what helps is what rows hold." if value > 0 else f"{lead}: part of the gain is the layers'."
        elif kind == "hot":
            mean = found.hot_tier(share)
            sure = "" if mean.low > 0 or mean.high < 0 else ", which may be chance"
            yield f"Rows of their own for the most frequent trigrams change loss by {mean.value:+.3f} ({seeds(mean.n)}{sure})."
    looks, steps = found.by_frequency("table", best), found.steps("table", best)
    never, held = looks[-1][0], min(looks[-1][1:], key=lambda mean: mean.value)
    yield f"Behind trigrams that the training text holds loss changes by {ranged(held, signed=True)} where it gains most."
    turned = turning([look[0].value for look in looks])
    text = f"Behind those that it does not hold it changes by {ranged(never, signed=True)}"
    yield f"{text}." if turned is None else f"{text}, a difference whose sign turns in training, at step {steps[turned]:,}."
    gates = found.gates("table", best).items()
    told = ", ".join(f"{means[0].value:.2f} to {means[-1].value:.2f} in layer {layer}" for layer, means in gates)
    yield f"From never seen to frequent trigrams the mean gate goes from {told}."


def _retention_says(found: Retention) -> list[str]:
    levels = found.levels()
    if not levels:
        return []
    values = {level: [mean_of(list(found.at(method, level)[1].values())).value for method in METHODS] for level in levels}
    less = all(ours < theirs for ours, theirs in values.values())
    lead = "Engram forgets less than LoRA" if less else "Engram does not always forget less than LoRA"
    told = " and ".join(
        f"{ours:.2f} with Engram, {theirs:.2f} with LoRA r8 where the narrow loss is {level:g}"
        for level, (ours, theirs) in ((level, values[level]) for level in dict.fromkeys((levels[0], levels[-1])))
    )
    before = f"Loss on ordinary text, {found.before('ordinary'):.2f} before, is {told}"
    engram, lora = (found.parameters(method) for method in METHODS)
    return [f"**Learning a narrow text: {lead}.** {before}. Engram has {engram / lora:.1f} times LoRA's parameters here."]


def _facts_say(found: FactRuns) -> list[str]:
    counts = [count for count in found.counts if found.has(count, "facts")]
    if not counts:
        return []
    runs = [found.get(count, "facts") for count in counts]

    def span(way: str) -> str:
        values = sorted({run["recall"][way]["top1"] for run in runs})
        return percent(values[0]) if len(values) == 1 else f"{percent(values[0])} to {percent(values[-1])}"

    several = " and ".join(f"{count:,}" for count in counts[-2:])
    several = ", ".join([*(f"{count:,}" for count in counts[:-2]), several])
    whole = all(run["recall"][way]["top1"] == 1 for run in runs for way in ("as taught", "alias"))
    other = any(run["recall"]["other paraphrase"]["top1"] > 0 for run in runs)
    kept = all(run["off_trigger_change"] == 0 for run in runs)
    text = (
        f"**Facts: {'' if whole else 'not '}all are recalled by trigger and alias, {'few' if other else 'none'} by other words.** "
        f"Of {several} facts {span('as taught')} as taught, {span('alias')} by aliases, {span('context')} behind a text that was not "
        f"taught, {span('other paraphrase')} by paraphrases that are not registered. Text without a trigger "
        f"{'keeps its bits' if kept else 'does not keep its bits'}; a fact takes {max(run['bytes_per_fact'] for run in runs):,.0f} bytes."
    )
    both = [run for count, run in zip(counts, runs, strict=True) if found.has(count, "lora")]
    if not both:
        return [text]
    ours, lora = both[-1], found.get(both[-1]["facts"], "lora")
    told = ", ".join(f"{percent(lora['recall'][way]['top1'])} {WORDS[way]}" for way in WAYS)
    moved = lora["loss_ordinary"] - ours["loss_ordinary_base"]
    return [
        text,
        f"**LoRA r8 in the same seconds**, {ours['facts']:,} facts: {told}. It takes {lora['bytes'] / ours['bytes']:,.1f} times the bytes, "
        f"and moves loss on ordinary text by {moved:+.3f}.",
    ]


def summary(sections: Sections) -> str:
    """What helps and what does not, in a few lines."""
    said: list[str] = []
    if "facts" in sections:
        said += _facts_say(FactRuns(figures(sections, "facts")))
    if "everywhere" in sections:
        said += _everywhere_says(Everywhere(figures(sections, "everywhere")))
    if "retention" in sections:
        said += _retention_says(Retention(figures(sections, "retention")))
    if asked := [line for line in sections.get("decode", {"rows": []})["rows"] if line["met"] is not None]:
        missed = [f"{line['measure']}, {line['figure']} (asked: {line['target']})" for line in asked if not line["met"]]
        told = f" Missed: {'; '.join(missed)}." if missed else ""
        said.append(f"**Decoding: {len(asked) - len(missed)} of {len(asked)} targets met.**{told}")
    if not said:
        raise NotMeasured("no runs; the scripts in benchmarks/llm make them")
    return "\n".join(f"- {text}" for text in said) + "\n"
