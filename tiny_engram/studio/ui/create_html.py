"""The pieces of the Create tab as HTML: pure functions, everything escaped. May import the studio's view models; nothing of gradio."""

import base64
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from PIL import Image

from tiny_engram.studio.cards import Card
from tiny_engram.studio.engine import Loaded
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.gallery import Entry
from tiny_engram.studio.highlighting import Piece
from tiny_engram.studio.html import settings
from tiny_engram.studio.html_parts import date_in_words, encoder, escape
from tiny_engram.studio.ui.create_drawing import Drawing, Fired, Shown

__all__ = ["data_uri", "highlight_html", "history_html", "picture_uri", "progress_html", "shelf_html", "stage_html"]

COLOURS = 6
MOST_OFFERED = 6
MOST_REASONS = 6


def data_uri(blob: bytes, kind: str) -> str:
    """Bytes of a picture that this server wrote, as the address of an <img>; kind: "png" or "webp"."""
    return f"data:image/{kind};base64,{base64.b64encode(blob).decode()}"


def picture_uri(picture: Image.Image, side: int | None = None) -> str:
    """A picture as data URI: PNG as it is, or with `side` a WebP of at most so many pixels a side."""
    buffer = io.BytesIO()
    if side is None:
        picture.save(buffer, "PNG")
        return data_uri(buffer.getvalue(), "png")
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    small.save(buffer, "WEBP", quality=82)
    return data_uri(buffer.getvalue(), "webp")


def _colour(id: str, order: Mapping[str, int]) -> str:
    return f"tc-c{order.get(id, 0) % COLOURS}"


def _strength(value: Any) -> str:
    return f"{float(value):.2f}"


def highlight_html(pieces: Sequence[Piece], names: Mapping[str, str], order: Mapping[str, int], shelf: bool) -> str:
    """The prompt with its triggers marked, and a line that says it in words.

    names: concept id -> shown name; order: concept id -> place on the shelf (its colour); shelf: whether any concept is there.
    """
    marked, lines = [], []
    fired: dict[tuple[str, str], None] = {}
    silent: dict[tuple[str, str, str], None] = {}
    for text, id, fires, reason in pieces:
        if id is None:
            marked.append(escape(text))
            continue
        name = names.get(id, "another concept")
        if fires:
            fired[name, reason] = None
        else:
            silent[name, reason, text] = None
        kind = f"tc-fires {_colour(id, order)}" if fires else "tc-silent"
        marked.append(f'<mark class="{kind}" title="{escape(f"{name}: {reason}")}">{escape(text)}</mark>')
    prompt = f'<div class="tc-prompt">{"".join(marked)}</div>' if "".join(text for text, *_ in pieces).strip() else ""
    if fired:
        told = ", ".join(f"<b>{escape(name)}</b> ({escape(reason.removeprefix('fires, '))})" for name, reason in fired)
        lines.append(f'<p class="tc-line tc-good"><span aria-hidden="true">●</span> Will fire: {told}</p>')
    elif prompt and shelf:
        lines.append('<p class="tc-line">No trigger fires here: this draws the base’s own picture.</p>')
    for name, reason, text in list(silent)[:MOST_REASONS]:
        told = f"“{escape(text)}” will not fire: {escape(reason)} (<b>{escape(name)}</b>)"
        lines.append(f'<p class="tc-line"><span aria-hidden="true">○</span> {told}</p>')
    if not prompt:
        lines.append('<p class="tc-line">As you type, this shows which triggers of your prompt will fire.</p>')
    return f'<div class="tc-highlight" aria-live="polite">{prompt}{"".join(lines)}</div>'


def shelf_html(shelf: Sequence[Loaded], offered: Sequence[Card], more: int, strengths: Mapping[str, float]) -> str:
    """A chip and a slider for each concept on the shelf, then concepts of the library that could be put there (`more`: not shown)."""
    rows = []
    for place, each in enumerate(shelf):
        strength = strengths.get(each.id, 1.0)
        low, high = min(0.0, strength), max(2.0, strength)
        name, trigger, id = escape(each.name), escape(each.trigger), escape(each.id)
        rows.append(
            f'<li class="tc-concept tc-c{place % COLOURS}">'
            f'<button type="button" class="tc-chip" data-act="insert" data-text="{trigger}" '
            f'aria-label="Put {trigger} into the prompt" title="Put {trigger} into the prompt">'
            f'<span class="tc-chip-text">{trigger}</span></button>'
            f'<input type="range" data-id="{id}" data-strength="{strength:g}" value="{strength:g}" min="{low:g}" '
            f'max="{high:g}" step="0.05" aria-label="Strength of {name}">'
            f'<output class="tc-number">{_strength(strength)}</output>'
            f'<button type="button" class="tc-away" data-act="away" data-id="{id}" '
            f'aria-label="Put {name} away" title="Put {name} away">✕</button></li>'
        )
    if rows:
        head = '<p class="tc-hint">Click a name to put it into the prompt; the slider is its strength.</p>'
        told = f'{head}<ul class="tc-concepts">{"".join(rows)}</ul>'
    elif offered:
        told = '<p class="tc-hint">No concept is in use. Choose one:</p>'
    else:
        told = (
            '<p class="tc-hint">There is no concept yet, so pictures are the base’s own. Teach one in <b>Teach</b>, '
            "or import one in <b>Library</b>.</p>"
        )
    if offered:
        buttons = "".join(
            f'<button type="button" class="tc-offer" data-act="use" data-id="{escape(card.id)}" '
            f'title="Use {escape(card.name)}">+ {escape(card.trigger)}</button>'
            for card in offered
        )
        rest = f'<span class="tc-hint">and {more} more in the Library</span>' if more else ""
        told += f'<div class="tc-offers">{buttons}{rest}</div>'
    return f'<div class="tc-shelf"><h3 class="tc-label">Concepts</h3>{told}</div>'


def progress_html(drawing: Drawing | None, before: int = 0) -> str:
    """How far a picture is; `before` counts requests that are served first. Nothing without one."""
    if drawing is None:
        return ""
    if drawing.cancel.is_set():
        text = "Stopping at the next step …"
    elif drawing.step == 0 and before > 0:
        text = f"Waiting for {before} other {'request' if before == 1 else 'requests'} …"
    elif drawing.step == 0:
        text = "Starting …"
    else:
        left = drawing.seconds_left
        rest = "" if left is None else f" · about {max(1, round(left))} s left"
        text = f"Step {drawing.step} of {drawing.total}{rest}"
    return (
        f'<div class="tc-progress" role="status"><progress max="{drawing.total}" value="{drawing.step}" aria-label="Steps done"></progress>'
        f"<span>{escape(text)}</span></div>"
    )


def _time_of(id: str) -> str:
    """When a picture of the gallery was drawn, which its id says; the page's script puts it into the time of whoever looks."""
    drawn = datetime.fromtimestamp(int(id[:16], 16) / 1e9, UTC)
    return f'<time datetime="{drawn:%Y-%m-%dT%H:%M:%SZ}">{date_in_words(drawn.isoformat())}, {drawn:%H:%M} UTC</time>'


def _figure(uri: str, caption: str, alt: str, note: str = "") -> str:
    more = f' <span class="tc-note">{escape(note)}</span>' if note else ""
    return (
        f'<figure><button type="button" data-zoom aria-expanded="false" title="Larger, or back">'
        f'<img src="{uri}" alt="{escape(alt)}"></button><figcaption>{escape(caption)}{more}</figcaption></figure>'
    )


def _fired_html(fired: Sequence[Fired]) -> str:
    lines = []
    for each in list(fired)[:MOST_REASONS]:
        where = f" at the {', '.join(map(encoder, each.roles))}" if each.roles else ""
        if each.fired:
            lines.append(
                f'<p class="tc-line tc-good"><span aria-hidden="true">●</span> <b>{escape(each.name)}</b> fired{escape(where)}</p>'
            )
        else:
            told = f"<b>{escape(each.name)}</b> did not fire: {escape(each.reason)}"
            lines.append(f'<p class="tc-line"><span aria-hidden="true">○</span> {told}</p>')
    return "".join(lines) or '<p class="tc-line">No trigger fired: this is the base’s own picture.</p>'


def stage_html(entry: Entry | None, shown: Shown | None = None) -> str:
    """The large picture with its settings; beside it, where they are known, the base's picture and the difference."""
    if entry is None:
        return (
            '<div class="tc-stage tc-empty"><div class="tc-frame" aria-hidden="true"></div><p>Your picture appears here.</p>'
            '<p class="tc-hint">Write a prompt and press Generate, or choose a picture of the history below.</p></div>'
        )
    prompt = str(entry.settings.get("prompt") or "")
    try:
        uri = data_uri(entry.file.read_bytes(), "png")
    except OSError as error:
        raise StudioError("the picture is gone or cannot be read; choose another one") from error
    concepts = bool(entry.settings.get("concepts"))
    figures = [_figure(uri, "With concepts" if concepts else "The base", f"Picture of the prompt: {prompt[:200]}")]
    if shown is not None and shown.plain is not None and shown.difference is not None:
        share = f"{100 * (shown.changed or 0):.1f} % of the pixels differ"
        figures.append(_figure(picture_uri(shown.plain), "Base, same seed", "The base’s picture from the same seed"))
        figures.append(_figure(picture_uri(shown.difference), "Difference", f"Where the two differ: {share}", share))
    told = _fired_html(shown.fired) if shown is not None else ""
    took = f" · {shown.seconds:.1f} s" if shown is not None else ""
    about = f'<div class="tc-told">{told}<p class="tc-hint">{_time_of(entry.id)}{took}</p>{settings(entry.settings)}</div>'
    return f'<div class="tc-stage"><div class="tc-figures tc-of-{len(figures)}">{"".join(figures)}{about}</div></div>'


def history_html(thumbs: Sequence[tuple[Entry, str]], chosen: str | None, more: bool) -> str:
    """The pictures drawn so far, newest first, with their thumbnails' data URIs."""
    if not thumbs:
        return '<p class="tc-hint">Every picture you draw is kept here, its settings inside the PNG.</p>'
    cells = []
    for entry, uri in thumbs:
        prompt = escape(str(entry.settings.get("prompt") or "(no prompt)")[:200])
        pressed = "true" if entry.id == chosen else "false"
        cells.append(
            f'<li><button type="button" class="tc-thumb" data-act="choose" data-id="{escape(entry.id)}" aria-pressed="{pressed}" '
            f'title="{prompt}"><img src="{uri}" alt="{prompt}" loading="lazy"></button></li>'
        )
    rest = '<button type="button" class="tc-offer" data-act="more">Show more</button>' if more else ""
    return f'<ul class="tc-history">{"".join(cells)}</ul>{rest}'
