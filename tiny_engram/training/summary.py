"""summary.html and the table of a run over many concepts. Imports concept, files, errors, and the parts of reports and of such runs."""

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically
from tiny_engram.training.many import Outcome
from tiny_engram.training.metrics import losses_of
from tiny_engram.training.report import REPORT, STYLE, picture_uri

__all__ = ["SUMMARY", "summary_table", "write_summary"]

SUMMARY = "summary.html"
RECENT = 25

_GALLERY = """
body { max-width: 68rem; } .gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem; }
.gallery figure { margin: 0; } .gallery img { width: 100%; aspect-ratio: 1; object-fit: cover; background: var(--line); }
.gallery a { color: inherit; overflow-wrap: anywhere; } .failed { color: var(--b); }
"""


def _told(outcome: Outcome) -> tuple[str, str, str, str, str]:
    """Concept, steps, mean of the last losses, seconds and path."""
    result = outcome.result
    if outcome.error is not None:
        return outcome.name, "failed", "", "", outcome.error
    losses = losses_of(Path(outcome.config.output_dir)) if result is None else result.losses
    recent = [loss for loss in losses[-RECENT:] if math.isfinite(loss)]
    loss = f"{sum(recent) / len(recent):.4f}" if recent else ""
    if result is None:
        return outcome.name, str(len(losses)), loss, "there", str(outcome.path)
    return outcome.name, str(result.steps), loss, f"{result.seconds:.0f}", str(result.path)


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each concept, in columns; seconds are those of its whole group, which is taught at once."""
    rows = [("concept", "steps", "loss", "seconds", "path"), *map(_told, outcomes)]
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    right = (False, True, True, True)
    lines = [
        "  ".join([*(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row[:4], widths, right, strict=True)), row[4]])
        for row in rows
    ]
    return "\n".join(lines)


def write_summary(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Write summary.html: each concept's last validation pictures, or else its thumbnail, with a link to its report.

    Raises:
        TinyEngramError: it cannot be written.
    """
    figures = "".join(_figure(folder, outcome) for outcome in outcomes)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _told(outcome)) + "</tr>" for outcome in outcomes)
    failed = sum(1 for outcome in outcomes if outcome.error is not None)
    head = "".join(f"<th>{name}</th>" for name in ("concept", "steps", "loss", "seconds", "path"))
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{len(outcomes)} concepts</title><style>{STYLE}{_GALLERY}</style><h1>{len(outcomes)} concepts</h1>"
        f'<p class="soft">{len(outcomes) - failed} finished, {failed} failed</p><div class="gallery">{figures}</div>'
        f'<h2>Runs</h2><p class="soft">seconds are those of a concept\'s whole group, which is taught at once</p>'
        f"<table><tr>{head}</tr>{rows}</table></html>"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_atomically(folder / SUMMARY, page.encode())
    except OSError as error:
        raise TinyEngramError(f"{folder / SUMMARY}: cannot write it ({error.strerror or error}); choose another output_dir") from error


def _figure(folder: Path, outcome: Outcome) -> str:
    name, output = html.escape(outcome.name), Path(outcome.config.output_dir)
    if outcome.error is not None:
        return f'<figure><figcaption>{name}<br><span class="failed">failed</span></figcaption></figure>'
    link = html.escape(Path(os.path.relpath((output / REPORT).resolve(), folder.resolve())).as_posix(), quote=True)
    return f'<figure><a href="{link}">{_picture(outcome, name)}</a><figcaption><a href="{link}">{name}</a></figcaption></figure>'


def _picture(outcome: Outcome, name: str) -> str:
    folder = Path(outcome.config.output_dir) / "validation"
    sheets = sorted((int(number), path) for path in folder.glob("step-*.png") if (number := path.stem[5:]).isdecimal())
    uri = picture_uri(sheets[-1][1]) if sheets else None
    if uri is None:
        concept = outcome.result.concept if outcome.result is not None else Concept.load(outcome.path)
        uri = concept.thumbnail
    return "" if not uri else f'<img alt="{name}" src="{html.escape(uri, quote=True)}">'
