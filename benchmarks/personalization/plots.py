"""Draws the plots of docs/results.md: fidelity against prompt fidelity, seconds and bytes. Imports matplotlib and results."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.personalization.results import OURS, NotMeasured, Results
from tiny_engram.files import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

STAGE = "final"
# Told apart without colour too: ours is the star, LoRA are squares and diamonds, text-side methods circles and triangles.
OURS_COLOUR = "#c8553d"
COLOURS = ("#1b6ca8", "#2a9d8f", "#7b5ea7", "#8a6d3b", "#555555", "#4f9ac7", "#a23b72", "#6a994e")
MARKERS = {"inversion": "oP", "lora": "sD", "after": "^v", "full": "X"}
NETWORKS = {"effnet_best": "concept fidelity, EfficientNet", "lpips_best": "concept fidelity, SqueezeNet"}
WIDTH, DPI = 8.0, 130  # 1,040 pixels, legible when shown at 800


def looks(results: Results) -> dict[str, dict[str, Any]]:
    """Colour, marker and size by label; ours stands out and is drawn on top."""
    found: dict[str, dict[str, Any]] = {}
    left = {family: list(markers) for family, markers in MARKERS.items()}
    for i, (label, method) in enumerate(results.methods(STAGE).items()):
        if method == OURS:
            found[label] = {"color": OURS_COLOUR, "marker": "*", "markersize": 13, "zorder": 5}
        else:
            free = left.get(method.split("-")[0])
            found[label] = {"color": COLOURS[i % len(COLOURS)], "marker": free.pop(0) if free else "h", "markersize": 7, "zorder": 3}
    return found


def _plain(axes: Any, unit: Callable[[float], str]) -> None:
    """A logarithmic axis with figures that people read, not powers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: unit(x)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _size(nbytes: float) -> str:
    return f"{nbytes / 1000:g} kB" if nbytes < 1e6 else f"{nbytes / 1e6:g} MB"


def _panels(columns: int, height: float = 4.4) -> tuple[Any, Sequence[Any]]:
    figure, axes = plt.subplots(1, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False)
    figure.set_facecolor("white")
    for each in axes[0]:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _save(figure: Any, axes: Any, path: Path) -> Path:
    """With one legend below all panels, so that it never covers a point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    blob = io.BytesIO()
    # the software's version would make a new file of the same plot
    figure.savefig(blob, dpi=DPI, format="png", metadata={"Software": None})
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomically(path, blob.getvalue())


def draw_fidelity(results: Results, path: Path) -> Path:
    """Concept fidelity by each network against prompt fidelity, with intervals; up and right is better."""
    figure, panels = _panels(2)
    for axes, (score, name) in zip(panels, NETWORKS.items(), strict=True):
        for label, look in looks(results).items():
            x, y = results.score(STAGE, label, "prompt"), results.score(STAGE, label, score)
            spread = [[[v.value - v.low], [v.high - v.value]] for v in (x, y)]
            axes.errorbar(x.value, y.value, xerr=spread[0], yerr=spread[1], linestyle="none", elinewidth=1, capsize=2, label=label, **look)
        axes.set(xlabel="prompt fidelity", ylabel=name)
    figure.suptitle("Up and right is better; bars are 95 % intervals over subjects", fontsize=11)
    return _save(figure, panels[0], path)


def draw_seconds(results: Results, path: Path) -> Path:
    """Concept fidelity at every checkpoint against seconds of training, alone on the machine."""
    figure, panels = _panels(2)
    for axes, (score, name) in zip(panels, NETWORKS.items(), strict=True):
        for label, look in looks(results).items():
            step = results.step_seconds(results.methods(STAGE)[label])
            points = [(at * step, value) for at, value in results.curve(STAGE, label, score)]
            seconds = [at for at, _ in points]
            smaller = look | {"markersize": look["markersize"] * 0.7}
            axes.plot(seconds, [value.value for _, value in points], linewidth=1.5, label=label, **smaller)
            low, high = ([getattr(value, end) for _, value in points] for end in ("low", "high"))
            axes.fill_between(seconds, low, high, color=look["color"], alpha=0.08, linewidth=0)
        _plain(axes, lambda x: f"{x:g}")
        axes.set(xlabel="seconds of training, one concept", ylabel=name)
    figure.suptitle("Means over subjects at each checkpoint; shades are 95 % intervals", fontsize=11)
    return _save(figure, panels[0], path)


def draw_bytes(results: Results, path: Path) -> Path:
    """Concept fidelity against the size of a concept's file."""
    figure, panels = _panels(2)
    for axes, (score, name) in zip(panels, NETWORKS.items(), strict=True):
        for label, look in looks(results).items():
            size, value = results.cost(results.methods(STAGE)[label], "bytes"), results.score(STAGE, label, score)
            spread = [[value.value - value.low], [value.high - value.value]]
            axes.errorbar(size, value.value, yerr=spread, linestyle="none", elinewidth=1, capsize=2, label=label, **look)
        _plain(axes, _size)
        axes.xaxis.set_major_locator(ticker.LogLocator())
        axes.set(xlabel="size of a concept", ylabel=name)
    figure.suptitle("Up and left is better; bars are 95 % intervals over subjects", fontsize=11)
    return _save(figure, panels[0], path)


def draw_all(results: Results, folder: Path) -> list[Path]:
    """`fidelity.png`, `seconds.png` and `bytes.png` in `folder`, those whose figures are there."""
    drawn = []
    for name, draw in (("fidelity", draw_fidelity), ("seconds", draw_seconds), ("bytes", draw_bytes)):
        try:
            drawn.append(draw(results, folder / f"{name}.png"))
        except NotMeasured as missing:
            plt.close("all")
            print(f"{name}.png: not drawn, {missing}")
    return drawn
