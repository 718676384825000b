"""report.html: what a run was, on one page without any network: loss, pictures over the steps, what the trigger is worth, costs, config.

Imports the standard library, Pillow and errors.
"""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

__all__ = ["REPORT", "STYLE", "Report", "picture_uri"]

REPORT = "report.html"
T = TypeVar("T")
# So that a long run's page stays one that a browser opens at once.
MOST_SHEETS, MOST_POINTS, WIDEST = 12, 1000, 1024
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 260, 56, 30, 12
SMOOTHED = 25

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1d2430; --soft: #5d6878; --line: #d8dde4; --a: #1f6fd0; --b: #c2571a; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181e; --ink: #e6eaf0; --soft: #9aa6b5; --line: #333b46; --a: #6aaeff; --b: #f0995c; }
}
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 46rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .2rem 0; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .82rem; line-height: 1.45; }
figure { margin: 0 0 1rem; } img { max-width: 100%; height: auto; border-radius: 4px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .raw, .smooth, .measured { fill: none; stroke: var(--a); }
.raw { stroke-width: 1; opacity: .35; } .smooth { stroke-width: 2; } .measured { stroke: var(--b); stroke-width: 2; }
.dot { fill: var(--b); } .best { fill: var(--ground); stroke: var(--b); stroke-width: 2; }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page says.

    Attributes:
        trigger: of the concept. losses: of each step. measured: (step, validation loss) of each measurement.
        prompts: what the columns of the validation sheets show. sheets: folder of step-N.png.
        registered: what registering the trigger told. costs: name -> value, in words. config: as YAML.
    """

    trigger: str
    losses: Sequence[float]
    measured: Sequence[tuple[int, float]]
    prompts: Sequence[str]
    sheets: Path
    registered: str
    costs: Mapping[str, str]
    config: str

    def render(self) -> str:
        """The HTML, with its pictures in it."""
        title = html.escape(f"“{self.trigger}”, taught in {len(self.losses)} steps")
        costs = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in self.costs.items())
        parts = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<h2>Loss</h2>{self._curve()}",
            self._pictures(),
            f"<h2>Costs</h2><table>{costs}</table>",
            f"<h2>Trigger</h2><pre>{html.escape(self.registered)}</pre>",
            f"<h2>Config</h2><pre>{html.escape(self.config)}</pre>",
            "</body></html>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    # -- the curve ---------------------------------------------------------------------------------------------------------------

    def _curve(self) -> str:
        raw = [(step, loss) for step, loss in enumerate(self.losses, 1) if math.isfinite(loss)]
        measured = [(step, loss) for step, loss in self.measured if math.isfinite(loss)]
        if not raw:
            return "<p>No step was done.</p>"
        # far outliers would press everything else flat
        values = sorted(loss for _, loss in raw)
        top = max([values[min(len(values) - 1, int(0.99 * len(values)))], *(loss for _, loss in measured)]) * 1.05 or 1.0
        steps = max(2, len(self.losses))

        def at(step: float, loss: float) -> tuple[float, float]:
            x = LEFT + (step - 1) / (steps - 1) * (WIDTH - LEFT - 12)
            return round(x, 1), round(TOP + (1 - min(loss, top) / top) * (HEIGHT - BOTTOM - TOP), 1)

        def line(points: Sequence[tuple[float, float]], kind: str) -> str:
            return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in (at(*point) for point in points))}"/>'

        marks = []
        for k in range(5):
            x, y = at(1, top * k / 4)
            marks.append(f'<line class="grid" x1="{x}" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>')
            marks.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{top * k / 4:.3g}</text>')
        for step in sorted({1, *(max(1, round(steps * k / 4)) for k in range(1, 5))} & set(range(1, len(self.losses) + 1))):
            marks.append(f'<text x="{at(step, 0)[0]}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>')
        smooth = [(raw[k][0], sum(v for _, v in raw[max(0, k - SMOOTHED + 1) : k + 1]) / min(k + 1, SMOOTHED)) for k in range(len(raw))]
        drawn = [line(_thinned(raw), "raw"), line(_thinned(smooth), "smooth")]
        said = f"thin: each step; thick: mean of the last {SMOOTHED}"
        if measured:
            best = min(measured, key=lambda each: each[1])
            drawn.append(line(measured, "measured"))
            for point in measured:
                x, y = at(*point)
                drawn.append(f'<circle class="{"best" if point == best else "dot"}" cx="{x}" cy="{y}" r="{5 if point == best else 3}"/>')
            said += f"; with dots: validation loss, lowest at step {best[0]} ({best[1]:.4f})"
        picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss over steps">{"".join(marks + drawn)}</svg>'
        return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"

    # -- pictures ----------------------------------------------------------------------------------------------------------------

    def _pictures(self) -> str:
        sheets = sorted(
            (int(step), path) for path in self.sheets.glob("step-*.png") if (step := path.stem.removeprefix("step-")).isdecimal()
        )
        sheets = [each for each in sheets if each[0] <= len(self.losses)]
        figures = [
            f'<figure><img alt="pictures at step {step}" src="{uri}"><figcaption>step {step}</figcaption></figure>'
            for step, path in _thinned(sheets, MOST_SHEETS)
            if (uri := picture_uri(path)) is not None
        ]
        if not figures:
            return ""
        columns = html.escape(" | ".join(self.prompts))
        return f'<h2>Pictures over the steps</h2><p class="soft">columns: {columns}</p>' + "".join(figures)


def _thinned(items: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def picture_uri(path: Path) -> str | None:
    """A sheet as a data URI, no wider than the page needs; None for one that is no picture any more."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return None
    picture.thumbnail((WIDEST, WIDEST * 4))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=85)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
