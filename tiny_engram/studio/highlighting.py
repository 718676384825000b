"""Where triggers stand in a prompt, by characters for the prompt box and by encoder for the Explain panel, and why each fires or not.

May import errors, requests and the engine's book. Nothing here waits for the pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiny_engram.explanation import Explanation, FiredSpan, PromptExplanation, Unfired
from tiny_engram.mount_names import describe_maps, describe_mounts
from tiny_engram.studio.requests import checked_text
from tiny_engram.studio.trigger_book import Known

if TYPE_CHECKING:
    from tiny_engram.studio.engine import Engine

__all__ = ["ExplainRow", "Explained", "Piece", "explain_rows", "highlight", "rows_of"]

MOST_ABSENT = 12
Piece = tuple[str, str | None, bool, str]


@dataclass(frozen=True, slots=True)
class ExplainRow:
    """One trigger in one prompt at one encoder.

    `tokens` are the positions `[start, end)` that the encoder sees, None for a trigger that does not stand in the prompt; `text` what
    stands there; `reason` one line.
    """

    id: str
    name: str
    text: str
    fired: bool
    tokens: tuple[int, int] | None
    strength: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Explained:
    """One prompt at one encoder: its tokens inside the text window, begin and end included, and a row for each trigger.

    `fired_tokens` are the positions at which a trigger fires; `left_out` counts loaded concepts that are not in the prompt and have no row.
    """

    role: str
    negative: bool
    prompt: str
    tokens: tuple[str, ...]
    fired_tokens: frozenset[int]
    rows: tuple[ExplainRow, ...]
    left_out: int = 0


def _chosen(engine: "Engine", strengths: Mapping[str, float] | None) -> tuple[Mapping[str, float], list[str]]:
    """The strengths that count, and the ids on the shelf."""
    shelf = [each.id for each in engine.loaded()]
    return (dict.fromkeys(shelf, 1.0) if strengths is None else strengths), shelf


def highlight(prompt: str, engine: "Engine", strengths: Mapping[str, float] | None = None, typed: Known | None = None) -> list[Piece]:
    """The prompt in pieces, which joined are the prompt: (text, concept id or None, fired, reason).

    Args:
        prompt: at most 2,000 characters.
        engine: whose library and shelf count.
        strengths: concepts that act, by id, as in a request; None: all on the shelf, at 1.
        typed: a trigger that is in no library yet, of `engine.book.typed`.

    A piece with an id that did not fire is a trigger that stands there but will do nothing: `reason` says why. With several encoders a
    trigger counts as fired where any of them sees it.

    Raises StudioError for a prompt that is too long.
    """
    prompt = checked_text("prompt", prompt)
    counted, shelf = _chosen(engine, strengths)
    places: list[tuple[int, int, str, bool, str]] = []
    for explained in engine.book.explain(prompt, None, counted, loaded=shelf, typed=typed):
        _, offsets = engine.book.encode(explained.role, prompt)
        for span in explained.fired:
            low, high = _trim(prompt, offsets[span.start][0], offsets[span.end - 1][1])
            places.append((low, high, span.name, True, f"fires, strength {span.strength:g}"))
        for seen in explained.unfired:
            low = prompt.find(seen.text, offsets[seen.start][0])
            if low >= 0 and seen.text.strip():
                low, high = _trim(prompt, low, low + len(seen.text))
                places.append((low, high, seen.name, False, seen.reason))
    places.sort(key=lambda place: (not place[3], place[0], -place[1]))
    kept: list[tuple[int, int, str, bool, str]] = []
    for place in places:
        if all(place[1] <= low or place[0] >= high for low, high, *_ in kept):
            kept.append(place)
    pieces: list[Piece] = []
    at = 0
    for low, high, id, fired, reason in sorted(kept):
        if low > at:
            pieces.append((prompt[at:low], None, False, ""))
        pieces.append((prompt[low:high], id, fired, reason))
        at = high
    return [*pieces, (prompt[at:], None, False, "")] if at < len(prompt) else pieces


def _trim(text: str, low: int, high: int) -> tuple[int, int]:
    """Without white space at the edges, which some tokenizers count to a word."""
    while low < high and text[low].isspace():
        low += 1
    while high > low and text[high - 1].isspace():
        high -= 1
    return low, high


def explain_rows(
    prompt: str,
    negative_prompt: str,
    engine: "Engine",
    strengths: Mapping[str, float] | None = None,
    typed: Known | None = None,
) -> tuple[Explained, ...]:
    """Per prompt and encoder, why each trigger fires or does not; the negative prompt's come last, an empty one has none.

    As `highlight` without waiting for the pipeline. Raises StudioError for a prompt that is too long.
    """
    prompt, negative_prompt = checked_text("prompt", prompt), checked_text("negative prompt", negative_prompt or "")
    counted, shelf = _chosen(engine, strengths)
    found = engine.book.explain(prompt, negative_prompt, counted, loaded=shelf, typed=typed)
    mine = {} if typed is None else {typed.id: typed}
    return _rows(found, {**engine.book.known(), **mine}, [*mine, *dict.fromkeys([*counted, *shelf])])


def rows_of(explanation: Explanation, engine: "Engine") -> tuple[Explained, ...]:
    """The same of an explanation that came with a picture."""
    return _rows(explanation.prompts, engine.book.known(), ())


def _rows(found: Sequence[PromptExplanation], known: Mapping[str, Known], expected: Sequence[str]) -> tuple[Explained, ...]:
    def name(id: str) -> str:
        return known[id].name if id in known else id

    def fired_row(span: FiredSpan) -> ExplainRow:
        where = [describe_mounts(span.mounts)] if span.mounts else []
        where += [describe_maps(span.maps)] if span.maps else []
        reason = "its tokens stand there as a word of their own" + (f"; acts at {', '.join(where)}" if where else "")
        return ExplainRow(span.name, name(span.name), span.text, True, (span.start, span.end), span.strength, reason)

    def unfired_row(seen: Unfired) -> ExplainRow:
        return ExplainRow(seen.name, name(seen.name), seen.text, False, (seen.start, seen.start + 1), None, _named(seen.reason, known))

    explained: list[Explained] = []
    for each in found:
        rows = sorted([*map(fired_row, each.fired), *map(unfired_row, each.unfired)], key=lambda row: row.tokens or (0, 0))
        # a negative prompt seldom holds a trigger, and need not
        absent = [] if each.negative else [id for id in expected if id in known and all(row.id != id for row in rows)]
        rows += [ExplainRow(id, name(id), known[id].trigger, False, None, None, "not in the prompt") for id in absent[:MOST_ABSENT]]
        fired = frozenset(position for span in each.fired for position in range(span.start, span.end))
        left_out = max(0, len(absent) - MOST_ABSENT)
        explained.append(Explained(each.role, each.negative, each.prompt, each.tokens, fired, tuple(rows), left_out))
    return tuple(explained)


def _named(reason: str, known: Mapping[str, Known]) -> str:
    """A reason with names in place of ids."""
    for id, concept in known.items():
        if repr(id) in reason:
            reason = reason.replace(repr(id), repr(concept.name))
    return reason
