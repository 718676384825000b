"""Words of messages: numbers with their nouns, and quoted values at a length that a line can bear. Imports the standard library."""

import re

__all__ = ["brief", "counted", "shown"]

MOST = 60
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"")


def counted(count: int, noun: str) -> str:
    """ "1 fact", "2 facts", "1,000 facts"; for nouns that take an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _cut(text: str, most: int) -> str:
    tail = most // 4
    return text if len(text) <= most else f"{text[: most - tail - 1]}\u2026{text[-tail:]}"


def shown(value: object, most: int = MOST) -> str:
    """A value as errors quote it; a long text without its middle."""
    return repr(_cut(value, most)) if isinstance(value, str) else _cut(repr(value), most)


def brief(message: str, most: int = 2 * MOST) -> str:
    """A message whose quoted values may be whole texts: those without their middle."""
    return _QUOTED.sub(lambda found: found[0][0] + _cut(found[0][1:-1], most) + found[0][-1], message)
