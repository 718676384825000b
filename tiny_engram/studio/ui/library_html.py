"""The pieces of the Library tab as HTML: pure functions, everything escaped. May import the library's cards; nothing of gradio."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiny_engram.studio.cards import Card
from tiny_engram.studio.html_parts import date_in_words, escape, file_size

__all__ = ["cards_html", "title_html", "undo_html"]

MOST_CARDS = 200


def _button(act: str, id: str, text: str, label: str, kind: str = "") -> str:
    return (
        f'<button type="button" class="tl-button {kind}" data-act="{act}" data-id="{escape(id)}" '
        f'aria-label="{escape(label)}">{escape(text)}</button>'
    )


def _card(card: Card, chosen: bool, used: bool, base: str) -> str:
    id, name = card.id, card.name
    facts = ["not taught yet" if card.draft and card.error is None else file_size(card.bytes), date_in_words(card.created)]
    if card.base:
        facts.insert(1, card.base)
    if card.steps:
        facts.append(f"{card.steps} steps")
    badges, buttons = [], []
    if card.error is not None:
        badges.append('<span class="tl-badge tl-bad">Damaged</span>')
        buttons.append(_button("delete", id, "Delete", f"Delete {name}"))
    elif card.draft:
        badges.append('<span class="tl-badge">Draft</span>')
        buttons.append(_button("teach", id, "Teach it", f"Teach {name}", "tl-first"))
        buttons.append(_button("delete", id, "Delete", f"Delete {name}"))
    elif used:
        badges.append('<span class="tl-badge tl-good">In use</span>')
        buttons.append(_button("away", id, "Put away", f"Put {name} away"))
    elif card.base and card.base != base:
        badges.append('<span class="tl-badge">Another base</span>')
    else:
        buttons.append(_button("use", id, "Use", f"Use {name} in pictures", "tl-first"))
    if card.thumbnail:
        picture = f'<img src="{escape(card.thumbnail)}" alt="">'
    else:
        picture = f'<span class="tl-letter" aria-hidden="true">{escape((card.trigger or "?")[:1].upper())}</span>'
    opens = card.error is None and not card.draft
    title = escape(name)
    heading = f'<button type="button" class="tl-open" data-act="inspect" data-id="{escape(id)}">{title}</button>' if opens else title
    told = [f'<h4 class="tl-name" title="{title}">{heading}</h4>']
    if card.error is not None:
        told.append(f'<p class="tl-error">{escape(card.error)}</p>')
    elif card.trigger != card.name:
        told.append(f'<p class="tl-trigger"><code>{escape(card.trigger)}</code></p>')
    if card.aliases and card.error is None:
        told.append(f'<p class="tl-aliases" title="{escape(", ".join(card.aliases))}">also {escape(", ".join(card.aliases))}</p>')
    told.append(f'<p class="tl-facts">{escape(" · ".join(facts))}</p>')
    top = f'<div class="tl-picture">{picture}<div class="tl-badges">{"".join(badges)}</div></div>'
    rest = f'<div class="tl-told">{"".join(told)}</div><div class="tl-buttons">{"".join(buttons)}</div>'
    return f'<li class="tl-card{" tl-chosen" if chosen else ""}">{top}{rest}</li>'


def cards_html(cards: Sequence[Card], *, search: str, chosen: str | None, used: Iterable[str], base: str) -> str:
    """The library as cards; `used`: ids on the shelf, `base`: the engine's, whose concepts can be used."""
    if not cards and search.strip():
        return f'<p class="tl-empty">Nothing here is called “{escape(search.strip()[:80])}”. Search by name, trigger, alias or base.</p>'
    if not cards:
        return (
            '<div class="tl-empty"><p><b>Your library is empty.</b></p><p>Teach a concept in <b>Teach</b>, or import the one file '
            "of somebody else’s (<code>.safetensors</code>).</p></div>"
        )
    on = set(used)
    made = "".join(_card(card, card.id == chosen, card.id in on, base) for card in cards[:MOST_CARDS])
    rest = f'<p class="tl-empty">{len(cards) - MOST_CARDS} more; search to find them.</p>' if len(cards) > MOST_CARDS else ""
    return f'<ul class="tl-cards">{made}</ul>{rest}'


def undo_html(name: str | None) -> str:
    """What was deleted last, with the way back; nothing where nothing was."""
    if name is None:
        return ""
    text = f'<span>Deleted <b>{escape(name)}</b>.</span><button type="button" class="tl-button tl-first" data-act="undo">Undo</button>'
    return f'<div class="tl-undo" role="status">{text}</div>'


def title_html(about: Mapping[str, Any] | None, thumbnail: str | None = None) -> str:
    """The head of what is inside a concept: its picture, name and trigger."""
    if about is None:
        return '<div class="tl-empty"><p>Choose a card to see what is inside: rows, gates, how it was taught.</p></div>'
    picture = f'<img class="tl-large" src="{escape(thumbnail)}" alt="Thumbnail of {escape(about["name"])}">' if thumbnail else ""
    told = f'<h3 class="tl-title">{escape(about["name"])}</h3><p class="tl-trigger"><code>{escape(about["trigger"])}</code></p>'
    return f'<div class="tl-top">{picture}<div>{told}</div></div>'
