"""Facts of a text file, one a line as JSON, and which of them are new. Imports the standard library, errors, wording and neighbours."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.wording import brief, counted, shown

from .fact_spelling import Fact

__all__ = ["FIELDS", "BadLines", "new_facts", "read_lines"]

FIELDS = ("trigger", "answer", "prompt", "aliases", "owner")
_MOST = 20


class BadLines(TinyEngramError):
    """Lines that hold no fact that could be taught; `lines` are errors of one line each, the first `_MOST` of them."""

    def __init__(self, source: Path, problems: Mapping[int, str]) -> None:
        found = [f"{source}, line {number}: {problems[number]}" for number in sorted(problems)]
        more = [f"{source}: {counted(len(found) - _MOST, 'more line')} like these"] if len(found) > _MOST else []
        self.lines = [" ".join(line.split()) for line in found[:_MOST] + more]
        super().__init__("\n".join(self.lines))


def read_lines(source: Path, owner: str | None) -> dict[int, Fact]:
    """Line number -> fact, in their order; empty lines are passed over. `owner` is of those that name none.

    Raises:
        BadLines: all that hold something else.
        TinyEngramError: the file cannot be read, or is empty.
    """
    try:
        # Not splitlines: JSON may hold what that takes for the end of a line, U+2028 for one.
        lines = source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TinyEngramError(f"{source}: cannot be read ({error}); expected one fact a line, as JSON") from error
    facts: dict[int, Fact] = {}
    problems: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            facts[number] = _fact(json.loads(line), owner)
        except TinyEngramError as error:
            problems[number] = brief(str(error))
        except (TypeError, ValueError, RecursionError) as error:
            problems[number] = f"{error}; expected a fact as JSON, with trigger and answer"
    if problems:
        raise BadLines(source, problems)
    if not facts:
        raise TinyEngramError(f"{source}: no facts in it; expected one a line, as JSON")
    return facts


def _fact(given: Any, owner: str | None) -> Fact:
    if not isinstance(given, dict):
        raise TinyEngramError(f"holds {shown(given)}; expected a fact as JSON, with trigger and answer")
    unknown = sorted(set(given) - set(FIELDS))
    if unknown:
        raise TinyEngramError(f"unknown field {unknown[0]!r}, known are {', '.join(FIELDS)}")
    lacking = [name for name in ("trigger", "answer") if name not in given]
    if lacking:
        raise TinyEngramError(f"no {lacking[0]}; expected a fact as JSON, with trigger and answer")
    aliases = given.get("aliases") or ()
    return Fact(**{**given, "aliases": aliases if isinstance(aliases, str) else tuple(aliases), "owner": given.get("owner", owner)})


def new_facts(wanted: Mapping[int, Fact], held: Sequence[Fact]) -> tuple[dict[int, Fact], dict[int, str]]:
    """Of facts by number: those that are not among others yet, and errors of those that are there with another answer.

    One is there already if its trigger calls a fact of the same owner that has the same answer and says no less.
    """
    new: dict[int, Fact] = {}
    problems: dict[int, str] = {}
    by_spelling = {(fact.owner, spelling.lower()): fact for fact in held for spelling in fact.spellings}
    for number, fact in wanted.items():
        found = by_spelling.get((fact.owner, fact.trigger.lower()))
        if found is None:
            new[number] = fact
        elif found.answer != fact.answer:
            problems[number] = f"the fact {shown(fact.trigger)} is there with the answer {shown(found.answer)}; edit or remove that one"
        elif not set(fact.spellings) <= set(found.spellings) or fact.prompt not in (None, found.prompt):
            problems[number] = f"the fact {shown(fact.trigger)} is there with another prompt or other aliases; edit or remove that one"
    return new, problems
