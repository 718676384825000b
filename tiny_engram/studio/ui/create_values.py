"""What the Create tab shows of the studio, and what it reads from what a page sends. Nothing of gradio.

May import the studio and create_html. Strengths are the page's own and go along with each request; the shelf is the engine's.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tiny_engram.studio.cards import Card
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.gallery import Entry
from tiny_engram.studio.highlighting import highlight
from tiny_engram.studio.html_parts import notice, wrap
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui import create_html as shown

__all__ = ["highlighted", "history_value", "reused", "shelf_value", "size_of", "strengths_in"]

THUMBNAIL = 192  # pixels


def shelf_value(studio: Studio, strengths: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The shelf for the page. strengths None: sliders stay where the user had them."""
    shelf = studio.engine.loaded()
    there = {each.id for each in shelf}
    others = [c for c in studio.library.cards() if usable(c, studio) and c.id not in there]
    offered = others[: shown.MOST_OFFERED]
    given = {each.id: (strengths or {}).get(each.id, 1.0) for each in shelf}
    return {
        "html": shown.shelf_html(shelf, offered, len(others) - len(offered), given),
        "keep": strengths is None,
        "strengths": given,
    }


def usable(card: Card, studio: Studio) -> bool:
    return not card.draft and card.error is None and card.base in ("", studio.engine.base)


def strengths_in(shelf: Any) -> dict[str, Any]:
    """Strengths by concept that came from the page; what a request may hold is checked when it is made."""
    given = shelf.get("strengths") if isinstance(shelf, Mapping) else None
    return dict(given) if isinstance(given, Mapping) else {}


def highlighted(studio: Studio, prompt: str, shelf: Any) -> str:
    """The panel under the prompt box."""
    loaded = studio.engine.loaded()
    there = {each.id for each in loaded}
    strengths = {id: value for id, value in strengths_in(shelf).items() if id in there and isinstance(value, int | float)}
    # a concept that the page has not seen yet does not act in its pictures
    try:
        pieces = highlight(prompt or "", studio.engine, strengths)
    except StudioError as error:  # while typing, a message in the corner at each letter would be no help
        return wrap(notice("error", str(error)))
    names = {each.id: each.name for each in studio.engine.book.known().values()} if any(id for _, id, *_ in pieces) else {}
    return shown.highlight_html(pieces, names, {each.id: place for place, each in enumerate(loaded)}, bool(strengths))


@functools.lru_cache(maxsize=1024)
def _thumbnail(file: Path, _stamp: int) -> str:
    with Image.open(file, formats=("PNG",)) as picture:
        return shown.picture_uri(picture, THUMBNAIL)


def history_value(studio: Studio, chosen: str | None, count: int) -> str:
    """The newest `count` pictures; one that is damaged or goes meanwhile is left out."""
    entries = studio.gallery.entries(count + 1)
    thumbs: list[tuple[Entry, str]] = []
    for entry in entries[:count]:
        try:
            thumbs.append((entry, _thumbnail(entry.file, entry.file.stat().st_mtime_ns)))
        except (OSError, SyntaxError, ValueError):
            continue
    return shown.history_html(thumbs, chosen, len(entries) > count)


def reused(studio: Studio, settings: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """(strengths by id of the library, names of concepts that it does not have) of a picture's settings.

    A concept is found by its id, or where the picture comes from elsewhere by its trigger.
    """
    cards = [card for card in studio.library.cards() if usable(card, studio)]
    by_id, by_trigger = {card.id: card for card in cards}, {card.trigger.casefold(): card for card in reversed(cards)}
    concepts = settings.get("concepts")
    strengths, missing = {}, []
    for each in concepts[:64] if isinstance(concepts, Sequence) and not isinstance(concepts, str) else ():
        if not isinstance(each, Mapping):
            continue
        trigger = str(each.get("trigger") or each.get("name") or "?")
        strength = each.get("strength", 1.0)
        card = by_id.get(str(each.get("id"))) or by_trigger.get(trigger.casefold())
        if card is None or isinstance(strength, bool) or not isinstance(strength, int | float):
            missing.append(trigger[:80])
        else:
            strengths[card.id] = float(strength)
    return strengths, missing


def size_of(width: float | None, height: float | None, native: tuple[int, int] | None) -> tuple[Any, Any]:
    """Sides as a request takes them; one alone is a square's, and what the base was made for needs no saying."""
    return (None, None) if (width, height) == native else (width or None, height or None)
