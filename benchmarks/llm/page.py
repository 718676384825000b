"""The lines and Markdown blocks that say what was found. Every figure and every verdict in them is computed. Imports findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, Mean, NotMeasured, Retention, mean_of, paired, turning
from benchmarks.personalization.formats import change, table, verdict
from benchmarks.tables import row

PUBLISHED_TOP1, PUBLISHED_BYTES = 0.68, 160  # of LoRA at 100 facts: top-1, and its bytes over the table's
KINDS = {"size-1": "one row", "hot": "hot tier"}
METHODS = {"engram": "Engram", "lora": "LoRA r8"}
WORDS = {"as taught": "as taught", "context": "behind another text", "alias": "registered alias", "other paraphrase": "other paraphrase"}
Sections = Mapping[str, Any]


def figures(sections: Sections, name: str) -> Mapping[str, Any]:
    if name not in sections:
        raise NotMeasured(f"no runs; benchmarks/llm/{name}.py makes them")
    return sections[name]["figures"]


def ranged(mean: Mean, *, signed: bool = False, digits: int = 3) -> str:
    """A mean, and its 95 % interval where there is one."""
    form = f"{'+' if signed else ''}.{digits}f"
    if mean.half is None:
        return f"{mean.value:{form}}"
    return f"{mean.value:{form}} [{mean.low:{form}}, {mean.high:{form}}]"


def seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(100 * share - round(100 * share)) < 1e-6 else 1}f} %"


def buckets(figures: Mapping[str, Any]) -> list[str]:
    """How often the trigram in front of a token stands in the training text, in words for each bucket."""
    starts = figures["buckets"]
    ends = [end - 1 for end in starts[1:]]
    middle = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=False)]
    return ["never" if text == "0" else text for text in middle] + [f"{starts[-1]} or more"]


# -- lines of targets ------------------------------------------------------------------------------------------------------------


def everywhere_rows(found: Everywhere) -> list[dict[str, Any]]:
    rows = []
    for share in found.shares:
        mean = found.against_plain("table", share)
        text = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
        rows.append(row(f"from scratch, {percent(share)} of the budget a table: loss against none", text, "interval below 0", mean.high < 0))
    for kind, share in found.others():
        mean = found.against_plain(kind, share)
        rows.append(row(f"from scratch, {KINDS[kind]}, {percent(share)}: loss against none", f"{ranged(mean, signed=True)}, {seeds(mean.n)}"))
        if kind == "hot":
            mean = paired(found.losses(kind, share), found.losses("table", share))
            text = f"{ranged(mean, signed=True)}, {seeds(mean.n)}"
            rows.append(row(f"from scratch, hot tier on against off, {percent(share)}: loss", text, "interval below 0", mean.high < 0))
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


# -- what it comes to --------------------------------------------------------------------------------------------------------------


def _everywhere_says(found: Everywhere) -> Iterable[str]:
    best = found.best()
    mean = found.against_plain("table", best)
    how = f"by {abs(mean.value):.3f} with {percent(best)} of the budget as a table"
    if mean.high < 0:
        yield f"**A model trained from scratch: it helps.** At equal parameters and steps validation loss is lower {how} ({ranged(mean, signed=True)}, {seeds(mean.n)})."
    elif mean.value < 0:
        yield f"**A model trained from scratch: it seems to help, too few seeds to be sure.** Validation loss is lower {how} ({ranged(mean, signed=True)}, {seeds(mean.n)}), and the interval reaches 0."
    else:
        yield f"**A model trained from scratch: it does not help.** The best table changes validation loss by {ranged(mean, signed=True)} ({seeds(mean.n)})."
    worse = [share for share in found.shares if found.against_plain("table", share).value > 0]
    shape = "The lowest point is at the smallest share tried: whether the curve rises to its left was not seen" if best == found.shares[0] else f"The curve is a U with its lowest point at {percent(best)}"
    yield shape + (f"; with {percent(worse[0])} and more a table does harm." if worse and len(found.shares) > 1 else ".")
    for kind, share in found.others():
        if kind == "size-1":
            value = found.against_plain(kind, share).value
            what = "worse" if value > 0 else "better"
            yield f"The layers with one row for everything are {abs(value):.3f} {what} than no layers: " + ("what helps is what the rows hold." if value > 0 else "part of the gain is the layers'.")
        elif kind == "hot":
            mean = paired(found.losses(kind, share), found.losses("table", share))
            sure = "" if mean.low > 0 or mean.high < 0 else ", which may be chance"
            yield f"Rows of their own for the most frequent trigrams change the loss by {mean.value:+.3f} ({seeds(mean.n)}{sure})."
    ends = found.by_frequency("table", best)
    never, most = ends[-1][0].value, ends[-1][-1].value
    if never > 0 > most:
        yield f"The gain is behind trigrams that the training text holds ({min(m.value for m in ends[-1]):+.3f} where it is largest); behind those that it does not hold loss is higher by {never:.3f}, though early in training it was {'lower' if ends[0][0].value < 0 else 'higher'} there too."


def summary(sections: Sections) -> str:
    """What helps and what does not, in a few lines."""
    said: list[str] = []
    if "everywhere" in sections:
        said.append(" ".join(_everywhere_says(Everywhere(figures(sections, "everywhere")))))
    if "retention" in sections:
        found = Retention(figures(sections, "retention"))
        if levels := found.levels():
            values = {level: [mean_of(list(found.at(method, level)[1].values())).value for method in METHODS] for level in (levels[0], levels[-1])}
            better = all(ours < theirs for ours, theirs in (values[level] for level in values))
            told = "; ".join(f"where the narrow loss is {level:g}, ordinary text costs {a:.2f} with Engram and {b:.2f} with LoRA r8" for level, (a, b) in values.items())
            lead = "it forgets less than LoRA" if better else "it does not always forget less than LoRA"
            said.append(f"**Learning a narrow text: {lead}.** Before, ordinary text costs {found.before('ordinary'):.2f}; {told}.")
    if "facts" in sections:
        found_facts = FactRuns(figures(sections, "facts"))
        if counts := [count for count in found_facts.counts if found_facts.has(count, "facts")]:
            said.append(_facts_say(found_facts, counts))
    if not said:
        raise NotMeasured("no runs; the scripts in benchmarks/llm make them")
    return "\n".join(f"- {text}" for text in said) + "\n"


def _facts_say(found: FactRuns, counts: list[int]) -> str:
    runs = {count: found.get(count, "facts") for count in counts}

    def span(way: str) -> str:
        values = sorted({run["recall"][way]["top1"] for run in runs.values()})
        return percent(values[0]) if len(values) == 1 else f"{percent(values[0])} to {percent(values[-1])}"

    whole = all(run["recall"]["as taught"]["top1"] == 1 for run in runs.values())
    several = ", ".join(f"{count:,}" for count in counts[:-1]) + f" and {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    text = f"**Facts: {'they work as taught' if whole else 'most work as taught'}, and only as taught.** Of {several} facts {span('as taught')} are recalled as taught, "
    text += f"{span('alias')} by registered aliases, {span('context')} behind a text that was not taught, {span('other paraphrase')} by paraphrases that are not registered. "
    exact = all(run["off_trigger_change"] == 0 for run in runs.values())
    text += f"Text without a trigger {'keeps its bits' if exact else 'CHANGES'}; a fact takes {max(run['bytes_per_fact'] for run in runs.values()):,.0f} bytes."
    both = [count for count in counts if found.has(count, "lora")]
    if both:
        lora = found.get(both[-1], "lora")
        told = ", ".join(f"{percent(lora['recall'][way]['top1'])} {WORDS[way]}" for way in WAYS)
        base = runs[both[-1]]["loss_ordinary_base"]
        text += f" In the same seconds LoRA r8 recalls, of {both[-1]:,}, {told}; it takes {lora['bytes'] / runs[both[-1]]['bytes']:,.0f} times the bytes and moves ordinary loss by {lora['loss_ordinary'] - base:+.3f}."
    return text


# -- tables ------------------------------------------------------------------------------------------------------------------------


def targets(sections: Sections) -> str:
    rows = [line for section in sections.values() for line in section["rows"]]
    if not rows:
        raise NotMeasured("no runs; the scripts in benchmarks/llm make them")
    kept, missed = (sum(line["met"] is met for line in rows) for met in (True, False))
    lines = [[line["measure"], line["figure"], line["target"], verdict(line["met"])] for line in rows]
    return f"{kept} kept, {missed} not kept.\n\n" + table(["measure", "figure", "target", "met"], lines)


def shares(sections: Sections) -> str:
    found = Everywhere(figures(sections, "everywhere"))
    rows = []
    for kind, share in [("plain", 0.0), *(("table", share) for share in found.shares), *found.others()]:
        losses = found.losses(kind, share)
        counted = next(iter(found.seeds(kind, share).values()))["parameters"]
        name = "no table" if kind == "plain" else percent(share) if kind == "table" else f"{percent(share)}, {KINDS[kind]}"
        against = "" if kind == "plain" else ranged(found.against_plain(kind, share), signed=True)
        sizes = [f"{counted[key] / 1e6:.1f}" for key in ("dense", "engram", "table")]
        rows.append([name, str(len(losses)), ranged(mean_of(list(losses.values()))), against, *sizes])
    heads = ["share of the budget", "seeds", "validation loss", "against no table", "model, M", "layers, M", "table, M"]
    return table(heads, rows)


def frequency(sections: Sections) -> str:
    raw = figures(sections, "everywhere")
    found = Everywhere(raw)
    best = found.best()
    steps, looks = found.steps("table", best), found.by_frequency("table", best)
    shown = sorted({0, len(steps) // 4, len(steps) // 2, len(steps) - 1})
    total, plain = sum(raw["tokens"]), found.seeds("plain")
    rows = []
    for k, name in enumerate(buckets(raw)):
        curve = [look[k].value for look in looks]
        turned = turning(curve)
        ends = mean_of([run["by_frequency"][-1][k] for run in plain.values()])
        last = ranged(looks[-1][k], signed=True)
        flips = "no" if turned is None else f"from step {steps[turned]:,}"
        cells = [f"{curve[look]:+.3f}" for look in shown[:-1]]
        rows.append([name, percent(round(raw["tokens"][k] / total, 3)), f"{ends.value:.3f}", *cells, last, flips])
    heads = ["trigram in the training text", "tokens", "loss without", *(f"step {steps[look]:,}" for look in shown), "sign turns"]
    others = [(kind, share) for kind, share in found.others() if kind in KINDS]
    said = [f"Differences to no table, {percent(best)} of the budget as a table ({seeds(looks[-1][0].n)})."]
    for kind, share in others:
        last = found.by_frequency(kind, share)[-1]
        said.append(f"At the end with {KINDS[kind]} ({percent(share)}): {', '.join(f'{mean.value:+.3f}' for mean in last)}.")
    return table(heads, rows) + "\n" + " ".join(said) + "\n"


def retention(sections: Sections) -> str:
    found = Retention(figures(sections, "retention"))
    rows = []
    for level in found.levels():
        cells = [f"{level:g}"]
        sides = []
        for method in METHODS:
            rate, values = found.at(method, level)
            sides.append(values)
            cells += [ranged(mean_of(list(values.values())), digits=2), f"{rate:g}", str(len(values))]
        rows.append([*cells, ranged(paired(*sides), signed=True, digits=2)])
    if not rows:
        raise NotMeasured("no narrow loss that both methods came to; benchmarks/llm/retention.py")
    heads = ["narrow loss", "Engram: ordinary loss", "rate", "seeds", "LoRA r8: ordinary loss", "rate", "seeds", "difference"]
    sizes = {m: next(iter(next(iter(found.runs[m].values())).values()))["parameters"] / 1e6 for m in METHODS}
    said = f"Before: narrow {found.before('narrow'):.2f}, ordinary {found.before('ordinary'):.2f}. Learned parameters: Engram {sizes['engram']:.1f} M, LoRA r8 {sizes['lora']:.1f} M."
    return table(heads, rows) + "\n" + said + "\n"


def facts(sections: Sections) -> str:
    found = FactRuns(figures(sections, "facts"))
    rows = []
    for count in found.counts:
        for kind, name in found.METHODS.items():
            for aliases in (False, True):
                if not found.has(count, kind, aliases):
                    continue
                run = found.get(count, kind, aliases)
                ways = [f"{100 * run['recall'][way]['top1']:.0f} / {100 * run['recall'][way]['top5']:.0f}" for way in WAYS]
                cells = ["", "", "", "", ""]
                if kind != "base":
                    base = found.get(count, "facts", aliases)
                    moved = run["loss_ordinary"] - base["loss_ordinary_base"]
                    cells = [f"{moved:+.4f}" if moved else "0", f"{run['goes_on']:.2f}", f"{run['bytes']:,}", f"{run['bytes_per_fact']:,.0f}"]
                    cells.append(f"{run['seconds_per_fact']:.2f}")
                taught = "" if kind == "base" else "with" if aliases else "without"
                rows.append([f"{count:,}", name, taught, *ways, *cells])
    if not rows:
        raise NotMeasured("no runs; benchmarks/llm/facts.py makes them")
    ways = [WORDS[way] for way in WAYS]
    heads = ["facts", "method", "aliases taught", *ways, "ordinary loss", "goes on", "bytes", "bytes a fact", "seconds a fact"]
    return table(heads, rows)


def decode(sections: Sections) -> str:
    if "decode" not in sections:
        raise NotMeasured("no runs; benchmarks/llm/decode.py makes them")
    lines = [[line["measure"], line["figure"], line["target"], verdict(line["met"])] for line in sections["decode"]["rows"]]
    return table(["measure", "figure", "target", "met"], lines)


def circumstances(sections: Sections) -> str:
    lines = []
    for name, section in sections.items():
        commits = ", ".join(commit[:12] for commit in section["commit"].split(", "))
        versions = ", ".join(f"{package} {version}" for package, version in section["versions"].items())
        lines.append(f"- {name}: {section['machine']}{f' ({versions})' if versions else ''}, commit {commits}.")
    if "everywhere" in sections:
        raw = figures(sections, "everywhere")
        settings, corpus = raw["settings"], raw["corpus"]
        text = f"From scratch: {settings['steps']:,} steps of {settings['batch']} windows, learning rate {settings['rate']:g}"
        if corpus:
            text += f"; {corpus['train'] / 1e6:.1f} M tokens to learn and {corpus['validation'] / 1e6:.2f} M held out, of {corpus['packages']} packages"
        lines.append(f"- {text}.")
    if not lines:
        raise NotMeasured("no runs; the scripts in benchmarks/llm make them")
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[Sections], str]] = {
    "summary": summary,
    "targets": targets,
    "facts": facts,
    "shares": shares,
    "frequency": frequency,
    "retention": retention,
    "decode": decode,
    "circumstances": circumstances,
}
