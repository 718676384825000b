"""The Markdown blocks of the pages. Every figure and every verdict in them is computed. Imports findings, summary, targets, wording."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, NotMeasured, Retention, mean_of, paired, turning
from benchmarks.llm.summary import summary
from benchmarks.llm.targets import PUBLISHED_BYTES, PUBLISHED_TOP1
from benchmarks.llm.wording import KINDS, METHODS, WORDS, Sections, buckets, figures, percent, ranged, seeds
from benchmarks.personalization.formats import table, verdict


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
    before = f"Before: narrow {found.before('narrow'):.2f}, ordinary {found.before('ordinary'):.2f}."
    engram, lora = (found.parameters(method) / 1e6 for method in METHODS)
    said = f"{before} Learned parameters: Engram {engram:.1f} M, LoRA r8 {lora:.1f} M."
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
                    cells = [f"{moved:+.4f}" if moved else "0", f"{run['goes_on']:.2f}", f"{run['bytes']:,}"]
                    cells += [f"{run['bytes_per_fact']:,.0f}", f"{run['seconds_per_fact']:.2f}"]
                taught = "" if kind == "base" else "with" if aliases else "without"
                rows.append([f"{count:,}", name, taught, *ways, *cells])
    if not rows:
        raise NotMeasured("no runs; benchmarks/llm/facts.py makes them")
    ways = [WORDS[way] for way in WAYS]
    heads = ["facts", "method", "aliases taught", *ways, "ordinary loss", "goes on", "bytes", "bytes a fact", "seconds a fact"]
    published = f"Published for 100 facts: LoRA recalls {percent(PUBLISHED_TOP1)} and takes {PUBLISHED_BYTES} times the table's bytes."
    return f"{table(heads, rows)}\n{published}\n"


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
            learn, held_out = (corpus[key] / 1e6 for key in ("train", "validation"))
            text += f"; {learn:.1f} M tokens to learn and {held_out:.2f} M held out, of {corpus['packages']} packages"
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
