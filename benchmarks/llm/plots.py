"""Draws the plots of the language side from the sections of llm.json. Imports matplotlib, findings and page."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, Mean, NotMeasured, Retention
from benchmarks.llm.page import METHODS, WORDS, buckets, figures, percent, seeds
from tiny_engram.files import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

WIDTH, DPI = 8.0, 110
OURS, THEIRS, THIRD, GREY = "#c8553d", "#1b6ca8", "#8a6d3b", "#555555"


def _panels(columns: int = 1, height: float = 4.2, **more: Any) -> tuple[Any, Sequence[Any]]:
    figure, axes = plt.subplots(1, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False, **more)
    figure.set_facecolor("white")
    for each in axes[0]:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _save(figure: Any, axes: Any, path: Path, columns: int = 3) -> Path:
    """With one legend below all panels, so that it never covers a point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    blob = io.BytesIO()
    # the software's version would make a new file of the same plot
    figure.savefig(blob, dpi=DPI, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomically(path, blob.getvalue())


def _errors(means: Sequence[Mean]) -> list[float]:
    return [mean.half or 0.0 for mean in means]


def draw_shares(sections: Mapping[str, Any], path: Path) -> Path:
    """The curve over shares, with every seed as a point, since an interval over two seeds says little by itself."""
    found = Everywhere(figures(sections, "everywhere"))
    shares = found.shares
    if not shares:
        raise NotMeasured("no run with a table")
    figure, (axes,) = _panels()
    means = [found.against_plain("table", share) for share in shares]
    x = [100 * share for share in shares]
    axes.axhline(0, color=GREY, linewidth=1)
    axes.plot(x, [mean.value for mean in means], "-o", color=OURS, markersize=7, label="table, mean over seeds", zorder=4)
    sure = [(at, mean) for at, mean in zip(x, means, strict=True) if mean.half is not None]
    if sure:
        at, known = zip(*sure, strict=True)
        bars = {"elinewidth": 1.2, "capsize": 4, "linestyle": "none", "zorder": 3}
        axes.errorbar(at, [mean.value for mean in known], yerr=_errors(known), color=OURS, label="95 % interval over seeds", **bars)
    plain = found.losses("plain")
    looks = {"size-1": ("s", THEIRS, "the same layers, one row"), "hot": ("D", THIRD, "with a hot tier")}
    for (kind, share), runs in found.runs.items():
        points = [(100 * share, run["loss"][-1] - plain[seed]) for seed, run in runs.items() if seed in plain]
        if kind == "table" and points:
            axes.plot(*zip(*points, strict=True), "x", color="black", markersize=5, zorder=5, label="a seed" if share == shares[0] else None)
    for kind, share in found.others():
        marker, colour, label = looks[kind]
        mean = found.against_plain(kind, share)
        axes.errorbar(100 * share, mean.value, yerr=_errors([mean]), fmt=marker, color=colour, capsize=4, elinewidth=1.2, label=label, zorder=4)
    # Intervals of few seeds would flatten the curve itself: they may leave the picture.
    values = [run["loss"][-1] - plain[seed] for runs in found.runs.values() for seed, run in runs.items() if seed in plain]
    reach = max(values) - min(values)
    axes.set(ylim=(min(values) - 0.4 * reach, max(values) + 0.25 * reach), xlim=(0, max(x) + 5))
    axes.set(xlabel="share of the parameter budget that is the table, %", ylabel="validation loss against no table, nats a token")
    figure.suptitle("Equal parameters, equal steps; below 0 a table helps", fontsize=11)
    return _save(figure, axes, path)


def draw_frequency(sections: Mapping[str, Any], path: Path) -> Path:
    """Differences over training, a line a bucket."""
    raw = figures(sections, "everywhere")
    found = Everywhere(raw)
    best = found.best()
    steps, looks = found.steps("table", best), found.by_frequency("table", best)
    figure, (axes,) = _panels()
    names = buckets(raw)
    colours = plt.get_cmap("viridis")
    axes.axhline(0, color=GREY, linewidth=1)
    for k, name in enumerate(names):
        line = [look[k].value for look in looks]
        colour = OURS if k == 0 else colours(0.85 - 0.8 * k / len(names))
        axes.plot(steps, line, "o-", color=colour, markersize=4, linewidth=2.2 if k == 0 else 1.5, label=name)
    axes.set(xlabel="steps of training", ylabel="validation loss against no table, nats a token", xlim=(0, None))
    text = f"{percent(best)} of the budget as a table, {seeds(looks[-1][0].n)}; lines: times the trigram stands in the training text"
    figure.suptitle(text, fontsize=10.5)
    return _save(figure, axes, path, columns=6)


def draw_gates(sections: Mapping[str, Any], path: Path) -> Path:
    """At the end of training; the control's gate cannot know how frequent a trigram is but by the state that it meets."""
    raw = figures(sections, "everywhere")
    found = Everywhere(raw)
    best, names = found.best(), buckets(raw)
    figure, (axes,) = _panels()
    shown = [("table", best, "-o", f"table of {percent(best)}"), *(("size-1", share, "--s", "one row") for k, share in found.others() if k == "size-1")]
    for kind, share, style, label in shown:
        for (layer, means), colour in zip(found.gates(kind, share).items(), (OURS, THEIRS), strict=False):
            axes.plot(range(len(names)), [mean.value for mean in means], style, color=colour, markersize=5, label=f"{label}, layer {layer}")
            if means[0].half is not None and kind == "table":
                low, high = [mean.low for mean in means], [mean.high for mean in means]
                axes.fill_between(range(len(names)), low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, 1), xlabel="times that the trigram stands in the training text", ylabel="mean gate, 0 to 1")
    figure.suptitle("How far the gate opens, at the end of training", fontsize=11)
    return _save(figure, axes, path, columns=2)


def draw_retention(sections: Mapping[str, Any], path: Path) -> Path:
    """Every run as a curve from right to left: the narrow loss falls as it is learned."""
    found = Retention(figures(sections, "retention"))
    figure, (axes,) = _panels()
    lines = ("-", "--", ":", "-.")
    for method, colour in zip(METHODS, (OURS, THEIRS), strict=True):
        for style, (rate, runs) in zip(lines, sorted(found.runs.get(method, {}).items()), strict=False):
            for k, run in enumerate(runs.values()):
                label = f"{METHODS[method]}, rate {rate:g}" if k == 0 else None
                axes.plot(run["narrow"], run["ordinary"], style, color=colour, marker=".", markersize=4, linewidth=1.4, label=label)
    axes.axhline(found.before("ordinary"), color=GREY, linewidth=1, label="before")
    axes.invert_xaxis()
    axes.set(xlabel="loss on the narrow text, nats a token (learning goes to the right)", ylabel="loss on ordinary text, nats a token")
    figure.suptitle("What ordinary text costs while a narrow text is learned; lower is better", fontsize=11)
    return _save(figure, axes, path, columns=4)


def draw_facts(sections: Mapping[str, Any], path: Path) -> Path:
    """Taught with their aliases; a panel a count."""
    found = FactRuns(figures(sections, "facts"))
    counts = [count for count in found.counts if found.has(count, "facts")]
    if not counts:
        raise NotMeasured("no runs of facts")
    figure, panels = _panels(len(counts), height=4.0, sharey=True)
    shown = {"facts": OURS, "lora": THEIRS, "same-bytes": "#8fb8d8"}
    present = {kind: colour for kind, colour in shown.items() if any(found.has(count, kind) for count in counts)}
    short = {"as taught": "as\ntaught", "context": "behind\nother text", "alias": "registered\nalias", "other paraphrase": "other\nparaphrase"}
    assert set(short) == set(WORDS)
    for axes, count in zip(panels, counts, strict=True):
        width = 0.8 / len(present)
        for k, (kind, colour) in enumerate(present.items()):
            if not found.has(count, kind):
                continue
            values = [100 * found.get(count, kind)["recall"][way]["top1"] for way in WAYS]
            at = [place + (k - (len(present) - 1) / 2) * width for place in range(len(WAYS))]
            bars = axes.bar(at, values, width * 0.92, color=colour, label=found.METHODS[kind])
            axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        axes.set_xticks(range(len(WAYS)), [short[way] for way in WAYS], fontsize=7.5)
        axes.set(title=f"{count:,} facts", ylim=(0, 109))
        axes.title.set_fontsize(10)
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("answers recalled whole (top-1), %")
    fullest = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    return _save(figure, fullest, path)


DRAWN: dict[str, Callable[[Mapping[str, Any], Path], Path]] = {
    "shares": draw_shares,
    "frequency": draw_frequency,
    "gates": draw_gates,
    "retention": draw_retention,
    "facts": draw_facts,
}


def draw_all(sections: Mapping[str, Any], folder: Path) -> list[Path]:
    """`NAME.png` in `folder` of each plot whose figures are there."""
    drawn = []
    for name, draw in DRAWN.items():
        try:
            drawn.append(draw(sections, folder / f"{name}.png"))
        except NotMeasured as missing:
            plt.close("all")
            print(f"{name}.png: not drawn, {missing}")
    return drawn
