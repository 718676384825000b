"""Small pieces of HTML that the Studio's views are made of; each takes plain values and escapes them. Imports boundaries."""

import html
import math
import re
from collections.abc import Sequence
from datetime import datetime

from tiny_engram.boundaries import WORD_END, WORD_START, text_of_token

__all__ = [
    "badge",
    "button",
    "clock",
    "date_in_words",
    "empty",
    "encoder",
    "escape",
    "facts",
    "file_size",
    "last_loss",
    "loss_plot",
    "notice",
    "picture",
    "plural",
    "shown_token",
    "smoothed",
    "table",
    "wrap",
]

MOST_POINTS = 300
# Overrides that turn the text after them around, and other signs that show nothing: a file name may hold them to look like another.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SOURCE = re.compile(r"data:image/(?:png|webp|jpeg);base64,[A-Za-z0-9+/=]+|/(?!/)[^\s\"'<>\\]*")


def escape(value: object) -> str:
    """Text for an element or a quoted attribute: markup escaped, control and direction signs shown as U+FFFD."""
    return html.escape(_UNSEEN.sub("\ufffd", str(value)), quote=True)


def wrap(*parts: str) -> str:
    """The element that the style sheet speaks of."""
    return f'<div class="te">{"".join(parts)}</div>'


def encoder(role: str) -> str:
    """A role in plain words: every one that reads prompts is a text encoder."""
    return f"text encoder ({role})"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def file_size(count: int) -> str:
    """Bytes in words: 512 B, 15.1 kB, 2.3 MB."""
    if count < 1_000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def date_in_words(iso: str) -> str:
    """An ISO date as 30 Nov 2026; what is none, as it is."""
    try:
        date = datetime.fromisoformat(iso)
    except (TypeError, ValueError):
        return str(iso)
    month = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")[date.month - 1]
    return f"{date.day} {month} {date.year}"


def clock(seconds: float) -> str:
    """A duration in words, rounded up to what one plans by."""
    if not math.isfinite(seconds) or seconds > 99 * 3_600:
        return "days"
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{max(5, math.ceil(seconds / 5) * 5)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def badge(text: str, mood: str) -> str:
    """A word on a coloured ground; mood is good, bad, warning, busy or quiet."""
    return f'<span class="te-badge te-{mood}">{escape(text)}</span>'


def notice(kind: str, text: str) -> str:
    """One line with a mark; kind is error, warning, good or info. Errors are read out by screen readers."""
    sign = {"error": "\u2715", "warning": "!", "good": "\u2713"}.get(kind, "i")
    role = "alert" if kind == "error" else "status"
    return f'<p class="te-notice te-{kind}" role="{role}"><span aria-hidden="true">{sign}</span><span>{escape(text)}</span></p>'


def empty(title: str, text: str, *, small: bool = False) -> str:
    """What stands where there is nothing yet: what it is for, and the way out."""
    return f'<div class="te-empty{" te-small" if small else ""}"><strong>{escape(title)}</strong><p>{escape(text)}</p></div>'


def button(action: str, label: str, id: str, *, about: str = "") -> str:
    """A button for the page's listener; `about` names what it acts on, for those who do not see where it stands."""
    name = f"{label} {about}".strip()
    return (
        f'<button type="button" class="te-{escape(action)}" data-action="{escape(action)}" data-id="{escape(id)}" '
        f'aria-label="{escape(name)}">{escape(label)}</button>'
    )


def picture(source: str | None, alt: str) -> str:
    """An image from a data URI or a path of the app itself; nothing for any other source."""
    if source is None or not _SOURCE.fullmatch(source):
        return ""
    return f'<img src="{escape(source)}" alt="{escape(alt)}" loading="lazy">'


def facts(rows: Sequence[tuple[str, object]]) -> str:
    """Names and values."""
    return f'<dl class="te-facts">{"".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)}</dl>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str, *, stacks: bool = False) -> str:
    """A table; heads and label are text, cells HTML already. On narrow screens it scrolls, or its rows become blocks (`stacks`)."""
    names = [escape(head) for head in heads]
    top = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = ""
    for row in rows:
        cells = "".join(f'<td data-head="{name}">{cell}</td>' for name, cell in zip(names, row, strict=True))
        body += f"<tr>{cells}</tr>"
    kind = "te-table te-stacks" if stacks else "te-table"
    inner = f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="te-scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'


def shown_token(token: str) -> tuple[str, bool]:
    """A vocabulary's token as a person reads it, and whether it is one of those that begin, end or pad a text."""
    if re.fullmatch(r"<\|?/?\w+\|?>", token) and token != WORD_END:
        name = token.strip("<|/>")
        return {"startoftext": "start", "endoftext": "end", "s": "end"}.get(name, name), True
    if WORD_START in token:
        return token.replace(WORD_START, " ").strip() or "\u2423", False
    return text_of_token(token, byte_level=True).strip() or "\u2423", False


def smoothed(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Losses by step, each the mean of those around."""
    half = max(1, len(losses) // 16)
    near = [[loss for _, loss in losses[max(0, k - half) : k + half + 1]] for k in range(len(losses))]
    return [(step, sum(each) / len(each)) for (step, _), each in zip(losses, near, strict=True)]


def last_loss(losses: Sequence[tuple[int, float]]) -> float | None:
    """The loss that a job is at: the smoothed curve's end. None before the first step."""
    points = _points(losses)
    return smoothed(points)[-1][1] if points else None


def _points(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MOST_POINTS of them, means of what they stand for."""
    points = [(int(step), float(loss)) for step, loss in losses if math.isfinite(loss)]
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]


def loss_plot(losses: Sequence[tuple[int, float]], steps: int) -> str:
    """Losses by step, as they are and smoothed (the mean of those around), over `steps` in all; points that are no numbers are left out."""
    points = _points(losses)
    if not points:
        return empty("No loss yet", "The curve begins with the first steps.", small=True)
    smooth = smoothed(points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    flat = high - low <= 1e-6 * abs(high)
    room = (abs(high) * 0.1 or 1.0) if flat else (high - low) * 0.06
    low, high = max(0.0, low - room) if low >= 0 else low - room, high + room
    last = max(steps, points[-1][0], 1)

    def line(kind: str, of: Sequence[tuple[int, float]]) -> str:
        places = [(600 * step / last, 160 * (high - loss) / (high - low)) for step, loss in of]
        places = [*places, (places[0][0] + 0.01, places[0][1])] if len(places) == 1 else places
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return f'<polyline class="{kind}" points="{drawn}" vector-effect="non-scaling-stroke"/>'

    grid = "".join(f'<line x1="0" x2="600" y1="{y}" y2="{y}" vector-effect="non-scaling-stroke"/>' for y in (0, 40, 80, 120, 160))
    said = f"loss at step {points[-1][0]:,}, smoothed: {smooth[-1][1]:.4g}"
    return (
        f'<div class="te-plot"><span class="te-high">{high:.3g}</span><span class="te-low">{low:.3g}</span>'
        f'<svg viewBox="0 0 600 160" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">{grid}'
        f"{line('te-raw', points)}{line('te-smooth', smooth)}</svg>"
        f'<span class="te-first">0</span><span class="te-now">{escape(said)}</span><span class="te-last">{last:,}</span></div>'
    )
