"""Draws the plots of docs/performance.md from the figures in benchmarks/results.

    python benchmarks/plots.py                           # docs/images/kernels.png and docs/images/host_lookup.png

Imports matplotlib and benchmarks/tables.py.
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib
from tables import ROOT, load

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLOURS = {"forward": "#1b6ca8", "backward": "#c8553d", "zero_copy": "#1b6ca8", "cpu_gather": "#c8553d", "planner": "#222222"}


def figures_of(name: str, section: str, key: str) -> list[dict[str, Any]]:
    """Figures of one section of a result, by their name; ends the program with one line where they are not there."""
    try:
        report = load(name)
        return report["sections"][section]["figures"][key]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    except (KeyError, TypeError):
        sys.exit(f"benchmarks/results/{name}.json: no figures {key!r} in section {section!r}; run the benchmark that writes them")


def moved_mib(figure: dict[str, Any]) -> float:
    """MiB that a gate must move in bfloat16: x, key and out, with the gradient x, key, grad and the gradients of x and key; value too."""
    rows, values = figure["tokens"] * figure["copies"] * figure["D"], figure["tokens"] * figure["D"]
    tensors, shared = (3, 1) if figure["direction"] == "forward" else (5, 2)
    return 2 * (tensors * rows + shared * values) / 2**20


def draw_kernels() -> None:
    """The gate's share of the copy rate against the bytes that it moves."""
    gate = figures_of("kernels", "gate", "gate")
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for direction, target in (("forward", 80), ("backward", 70)):
        for copies, marker in ((4, "o"), (1, "x")):
            points = sorted((moved_mib(f), 100 * f["share"]) for f in gate if f["direction"] == direction and f["copies"] == copies)
            label = f"{direction}, {'[T, 4, 5120]' if copies == 4 else '[T, 1, 768..4096]'}"
            axes.plot(*zip(*points, strict=True), marker, color=COLOURS[direction], label=label, alpha=0.8)
        axes.hlines(target, 256, axes.get_xlim()[1], color=COLOURS[direction], linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="MiB read and written", ylabel="share of the device's copy rate, %", ylim=(0, 110))
    axes.set_title("Fused gate; dashed: the target, from 256 MiB on")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "kernels.png", dpi=130)


def draw_host_lookup() -> None:
    """Time of a lookup in host memory against its rows, by path."""
    lines = figures_of("table", "host_lookup_sweep", "record_16_gib")
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    names = {"zero_copy": "read in place by the GPU", "cpu_gather": "gathered by the CPU, then copied", "planner": "the planner's choice"}
    rows = [line["rows"] for line in lines]
    for path, label in names.items():
        style = "--" if path == "planner" else "o-"
        axes.plot(rows, [line["us"][path] for line in lines], style, color=COLOURS[path], label=label)
    axes.set(xscale="log", yscale="log", xlabel="rows of 264 B from a 16 GiB table", ylabel="microseconds until the device has them")
    axes.set_title("Lookups in host memory, ids on the GPU, fresh ids each time")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(IMAGES / "host_lookup.png", dpi=130)


if __name__ == "__main__":
    draw_kernels()
    draw_host_lookup()
