"""View models as HTML. Pure functions; every text goes through `escape`, and `studio.css` beside this file gives the looks.

What the tabs Teach, Create and Library alone show is beside them, in `ui/*_html.py`. May import the view models and html_parts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tiny_engram.studio.highlighting import Explained, ExplainRow, Piece
from tiny_engram.studio.html_parts import (
    badge,
    date_in_words,
    empty,
    encoder,
    escape,
    facts,
    file_size,
    notice,
    plural,
    shown_token,
    table,
    wrap,
)
from tiny_engram.studio.registering import Report, RoleTokens

__all__ = ["explained", "highlighted", "inspected", "pictures_refused", "report", "settings", "token_chips"]

MOST_VARIANTS = 12
MOST_NAMES = 4  # of files that were left out for one reason
_LOOK_ALIKE = {"\u2013": "with an en dash", "\u2011": "with a non-breaking hyphen"}


# -- register ----------------------------------------------------------------------------------------------------------------


def token_chips(tokens: Sequence[tuple[str, int | None]], fired: Collection[int] = (), label: str = "tokens") -> str:
    """Chips of (token as the vocabulary writes it, id or None); those at `fired` positions stand out."""
    ends = any(text.endswith("</w>") for text, _ in tokens)
    chips = []
    for k, (text, id) in enumerate(tokens):
        shown, special = shown_token(text)
        kinds = ["te-token", *(["te-fires"] if k in fired else []), *(["te-special"] if special else [])]
        kinds += ["te-open"] if ends and not special and not text.endswith("</w>") else []
        number = "" if id is None else f"<small>{id}</small>"
        chips.append(f'<li class="{" ".join(kinds)}" title="{escape(text)}"><span>{escape(shown)}</span>{number}</li>')
    return f'<ul class="te-tokens" aria-label="{escape(label)}">{"".join(chips)}</ul>'


def _role_tokens(role: RoleTokens) -> str:
    rows = []
    for text, chips in role.spellings[:MOST_VARIANTS]:
        count = plural(len(chips), "token")
        tokens = token_chips([(chip.text, chip.id) for chip in chips], label=f"tokens of {text}")
        rows.append(
            f'<div class="te-spelling"><span class="te-word">{escape(text)}</span>{tokens}<span class="te-soft">{count}</span></div>'
        )
    more = len(role.spellings) - MOST_VARIANTS
    rows += [f'<p class="te-soft">and {more} more ways in which it is written</p>'] if more > 0 else []
    window = "" if role.window is None else f' <span class="te-soft">reads {role.window} tokens of a prompt</span>'
    return f"<h4>{escape(encoder(role.role).capitalize())}{window}</h4>{''.join(rows)}"


def _verdict(fires: bool) -> str:
    return badge("fires", "good") if fires else badge("does not fire", "quiet")


def report(model: Report) -> str:
    """What a trigger is worth, section by section."""
    if model.problem is not None:
        return wrap(notice("error", model.problem))
    if not model.roles:
        return wrap(
            empty("Type a trigger", "A made-up word that no prompt holds by chance, such as zed-quack. You see at once what it is worth.")
        )
    if any(each.blocks for each in model.collisions):
        parts = [notice("error", "Taken: choose another trigger.")]
    elif not all(place.fires for place in model.places):
        parts = [notice("warning", "It will not fire everywhere.")]
    else:
        parts = [notice("warning", "It works, with warnings.") if model.warnings else notice("good", "A good trigger.")]
    for each in model.collisions:
        name = f"{each.name!r}" if each.name == each.trigger else f"{each.name!r} ({each.trigger})"
        parts.append(notice("error" if each.blocks else "warning", f"{'draft' if each.draft else 'concept'} {name} {each.reason}"))
    parts += [notice("warning", warning) for warning in model.warnings]
    parts.append(f"<section><h3>Tokens</h3>{''.join(map(_role_tokens, model.roles))}</section>")
    places = []
    for place in model.places:
        kind = "te-fires" if place.fires else "te-dead"
        marked = f'<mark class="{kind}">{escape(place.text[place.start : place.end])}</mark>'
        text = f"{escape(place.text[: place.start])}{marked}{escape(place.text[place.end :])}"
        reason = f'<span class="te-soft">{escape(place.reason)}</span>' if place.reason else ""
        places.append(f"<li>{_verdict(place.fires)}<span>{text}</span>{reason}</li>")
    parts.append(f'<section><h3>Where it fires</h3><ul class="te-lines">{"".join(places)}</ul></section>')
    for fires, title in ((True, "Other spellings that call it"), (False, "Near misses")):
        rows = []
        for miss in (each for each in model.misses if each.fires is fires):
            signs = [name for sign, name in _LOOK_ALIKE.items() if sign in miss.text]
            why = escape(", ".join([miss.reason, *signs]))
            rows.append(f'<li>{_verdict(fires)}<span class="te-word">{escape(miss.text)}</span><span class="te-soft">{why}</span></li>')
        if rows:
            parts.append(f'<section><h3>{title}</h3><ul class="te-lines">{"".join(rows)}</ul></section>')
    return wrap(*parts)


# -- create ------------------------------------------------------------------------------------------------------------------


def highlighted(pieces: Sequence[Piece], names: Mapping[str, str]) -> str:
    """The prompt with its triggers marked, and a line on each that stands there; `names` are the concepts' by id."""
    if not "".join(text for text, *_ in pieces).strip():
        return wrap(empty("Nothing typed yet", "Write a prompt. Triggers in it light up here.", small=True))
    marks, lines = [], []
    for text, id, fired, reason in pieces:
        if id is None:
            marks.append(escape(text))
            continue
        kind = "te-fires" if fired else "te-dead"
        marks.append(f'<mark class="{kind}" title="{escape(reason)}">{escape(text)}</mark>')
        why = escape(f"{names.get(id, 'a concept')}: {reason}")
        lines.append(f'<li>{_verdict(fired)}<span class="te-word">{escape(text)}</span><span class="te-soft">{why}</span></li>')
    legend = f'<ul class="te-lines">{"".join(dict.fromkeys(lines))}</ul>' if lines else '<p class="te-soft">No trigger in this prompt.</p>'
    return wrap(f'<p class="te-prompt">{"".join(marks)}</p>{legend}')


def settings(told: Mapping[str, Any]) -> str:
    """The settings that a picture was drawn with."""
    concepts = (
        ", ".join(f"{c.get('trigger')} at {c.get('strength'):g}" for c in told.get("concepts") or () if isinstance(c, Mapping)) or "none"
    )
    rows = [
        ("Prompt", told.get("prompt") or "(empty)"),
        ("Negative prompt", told.get("negative_prompt") or "(empty)"),
        ("Concepts", concepts),
    ]
    rows += [(key.capitalize(), told[key]) for key in ("seed", "steps", "guidance", "base") if told.get(key) not in (None, "")]
    rows += [("Size", f"{told['width']} x {told['height']}")] if told.get("width") and told.get("height") else []
    return wrap(facts(rows))


# -- explain -----------------------------------------------------------------------------------------------------------------


def _explain_row(row: ExplainRow) -> tuple[str, ...]:
    tokens = (
        "" if row.tokens is None else f"{row.tokens[0]}" if row.tokens[1] - row.tokens[0] == 1 else f"{row.tokens[0]}-{row.tokens[1] - 1}"
    )
    strength = "" if row.strength is None else f"{row.strength:g}"
    return (_verdict(row.fired), escape(row.name), f'<span class="te-word">{escape(row.text)}</span>', tokens, strength, escape(row.reason))


def explained(found: Sequence[Explained]) -> str:
    """Per prompt and encoder, each trigger and why it fires or not."""
    if not any(each.prompt.strip() for each in found):
        return wrap(empty("Nothing to explain", "Write a prompt; this panel says at which tokens each concept fires, and if not, why."))
    parts = []
    for each in found:
        tokens = token_chips([(text, None) for text in each.tokens], each.fired_tokens, label=f"tokens at {each.role}")
        title = f"{'Negative prompt' if each.negative else 'Prompt'} at the {encoder(each.role)}"
        heads = ("", "Concept", "Text", "Tokens", "Strength", "Why")
        rows = (
            table(heads, [_explain_row(row) for row in each.rows], title, stacks=True)
            if each.rows
            else '<p class="te-soft">No trigger in it.</p>'
        )
        more = f'<p class="te-soft">{plural(each.left_out, "more loaded concept")} not in the prompt</p>' if each.left_out else ""
        count = f'<span class="te-soft">{plural(len(each.tokens), "token")}</span>'
        parts.append(f"<section><h3>{escape(title)} {count}</h3>{tokens}{rows}{more}</section>")
    return wrap(*parts)


# -- library -----------------------------------------------------------------------------------------------------------------


def _numbers(values: Sequence[float]) -> str:
    shown = " ".join(f"{value:.3g}" for value in values[:24])
    return escape(shown + (f" and {len(values) - 24} more" if len(values) > 24 else ""))


def _broken(name: str) -> str:
    """A name with dots, which may go on in a new line after each."""
    return escape(name).replace(".", ".<wbr>")


def inspected(told: Mapping[str, Any]) -> str:
    """What `Library.inspect` says: rows and gates per mount, maps, recipe."""
    aliases = ", ".join(told["aliases"]) or "none"
    untrained = f" (added after teaching: {', '.join(told['untrained'])})" if told.get("untrained") else ""
    steps = "not known" if told.get("steps") is None else f"{told['steps']:,}"
    size = f"{file_size(told['file_bytes'])}, of which {file_size(told['table_bytes'])} are rows, gates and maps"
    top = [("Name", told["name"]), ("Trigger", told["trigger"]), ("Aliases", aliases + untrained), ("Base", told["base"] or "not known")]
    parts = [facts([*top, ("Steps", steps), ("File", size), ("Date", date_in_words(told["created"]))])]
    for role, place in told["roles"].items():
        heads = ("Place", "Rows", "Bytes", "Size at each position", "Gain", "Bias")
        rows = [
            (_broken(m["mount"]), f"{m['rows']:,}", f"{m['bytes']:,}", _numbers(m["size"]), _numbers(m["gain"]), _numbers(m["bias"]))
            for m in place["mounts"]
        ]
        title = f"Rows and gates at the {encoder(role)}"
        parts.append(f"<section><h3>{escape(title)}</h3>{table(heads, rows, title, stacks=True)}</section>")
        if place["maps"]:
            rows = [
                (_broken(m["map"]), f"{m['rank']}", f"{m['channels']:,}", f"{m['bytes']:,}", _numbers([m["size"]])) for m in place["maps"]
            ]
            title, heads = f"Maps at the {encoder(role)}", ("Map", "Rank", "Channels", "Bytes", "Size")
            parts.append(f"<section><h3>{escape(title)}</h3>{table(heads, rows, title)}</section>")
    recipe = [(str(key), value) for key, value in told["recipe"].items()]
    if recipe:
        parts.append(f"<details><summary>Recipe ({plural(len(recipe), 'setting')})</summary>{facts(recipe)}</details>")
    return wrap(*parts)


# -- teach -------------------------------------------------------------------------------------------------------------------


def pictures_refused(refused: Sequence[tuple[str, str]]) -> str:
    """Files that were not taken: (shown name, reason). Empty if there are none."""
    if not refused:
        return ""
    by_reason: dict[str, list[str]] = {}
    for name, why in refused:
        by_reason.setdefault(why, []).append(name)
    lines = ""
    for why, names in by_reason.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        told = f"{', '.join(names[:MOST_NAMES])}{more}"
        lines += f'<li><span class="te-word">{escape(told)}</span><span class="te-soft">{escape(why)}</span></li>'
    said = notice("warning", f"{plural(len(refused), 'file')} left out")
    return wrap(f'{said}<ul class="te-lines">{lines}</ul>')
