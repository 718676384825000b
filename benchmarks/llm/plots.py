"""Draws the plots of the language side from the sections of llm.json. Imports matplotlib, findings and wording."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

from benchmarks.llm.findings import WAYS, Everywhere, FactRuns, NotMeasured, Retention
from benchmarks.llm.wording import METHODS, WORDS, buckets, figures, percent, seeds
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
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(192, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomically(path, small.getvalue())


def draw_shares(sections: Mapping[str, Any], path: Path) -> Path:
    """The curve over shares, with every seed as a point, since an interval over two seeds says little by itself."""
    found = Everywhere(figures(sections, "everywhere"))
    if not found.shares:
        raise NotMeasured("no run with a table")
    figure, (axes,) = _panels()
    plain, drawn = found.losses("plain"), []
    # beside the table's own point of that share, which would cover them
    looks = {"size-1": ("s", THEIRS, "the same layers, one row", 1.2), "hot": ("D", THIRD, "with a hot tier", 1.2)}
    axes.axhline(0, color=GREY, linewidth=1)
    axes.plot([100 * s for s in found.shares], [found.against_plain("table", s).value for s in found.shares], color=OURS, zorder=3)
    for kind, share in [*(("table", share) for share in found.shares), *found.others()]:
        marker, colour, label, aside = looks.get(kind, ("o", OURS, "table, mean over seeds", 0.0))
        mean, at = found.against_plain(kind, share), 100 * share + aside
        seen = axes.get_legend_handles_labels()[1]
        axes.plot(at, mean.value, marker, color=colour, markersize=7, zorder=4, label=None if label in seen else label)
        if mean.half is not None:
            text = None if "95 % interval over seeds" in seen else "95 % interval over seeds"
            axes.errorbar(at, mean.value, yerr=mean.half, color=colour, capsize=4, elinewidth=1.2, linestyle="none", label=text)
        points = [value - plain[seed] for seed, value in found.losses(kind, share).items() if seed in plain]
        axes.plot([at] * len(points), points, "x", color="black", markersize=5, zorder=5, label=None if "a seed" in seen else "a seed")
        drawn += points
    # An interval of two seeds would flatten the curve itself, so that it may leave the picture.
    reach = max(max(drawn) - min(drawn), 0.01)
    axes.set(ylim=(min(drawn) - 0.4 * reach, max(drawn) + 0.25 * reach), xlim=(0, 100 * max(found.shares) + 5))
    axes.set(xlabel="share of the parameter budget that is the table, %", ylabel="loss against no table, nats a token")
    figure.suptitle("Validation loss at equal parameters and steps; below 0 a table helps", fontsize=11)
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
    for k, (name, marker) in enumerate(zip(names, "oPs^vD", strict=True)):
        line = [look[k].value for look in looks]
        colour = OURS if k == 0 else colours(1.0 - k / (len(names) - 1) * 0.98)
        axes.plot(steps, line, marker=marker, color=colour, markersize=5, linewidth=2.2 if k == 0 else 1.5, label=name)
    axes.set(xlabel="steps of training", ylabel="loss against no table, nats a token", xlim=(0, None))
    text = f"Validation loss, {percent(best)} of the budget as a table ({seeds(looks[-1][0].n)}),"
    figure.suptitle(f"{text}\nby how often the trigram in front of a token stands in the training text", fontsize=11)
    return _save(figure, axes, path, columns=6)


def draw_gates(sections: Mapping[str, Any], path: Path) -> Path:
    """At the end of training; the control's gate cannot know how frequent a trigram is but by the state that it meets."""
    raw = figures(sections, "everywhere")
    found = Everywhere(raw)
    best, names = found.best(), buckets(raw)
    figure, (axes,) = _panels()
    shown = [("table", best, "-o", f"table of {percent(best)}")]
    shown += [(kind, share, "--s", "one row") for kind, share in found.others() if kind == "size-1"]
    for kind, share, style, label in shown:
        for (layer, means), colour in zip(found.gates(kind, share).items(), (OURS, THEIRS), strict=False):
            axes.plot(range(len(names)), [mean.value for mean in means], style, color=colour, markersize=5, label=f"{label}, layer {layer}")
            for run in found.seeds(kind, share).values():
                axes.plot(range(len(names)), run["gates"][layer][-1], style[:-1], color=colour, linewidth=0.8, alpha=0.5)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, 1), xlabel="times that the trigram stands in the training text", ylabel="mean gate, 0 to 1")
    figure.suptitle("How far the gate opens, at the end of training; thin lines are seeds", fontsize=11)
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
    ticks = [WORDS[way].replace(" ", "\n", 1) for way in WAYS]
    for axes, count in zip(panels, counts, strict=True):
        width = 0.8 / len(present)
        for k, (kind, colour) in enumerate(present.items()):
            if not found.has(count, kind):
                continue
            values = [100 * found.get(count, kind)["recall"][way]["top1"] for way in WAYS]
            at = [place + (k - (len(present) - 1) / 2) * width for place in range(len(WAYS))]
            bars = axes.bar(at, values, width * 0.92, color=colour, label=found.METHODS[kind])
            axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        axes.set_xticks(range(len(WAYS)), ticks, fontsize=7.5)
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
