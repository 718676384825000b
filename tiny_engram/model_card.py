"""What the README.md of a model's folder needs, whoever writes it: front matter, a signature that tells edited ones. Imports no torch."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["CARD", "front_matter", "sign", "signed_data"]

CARD = "README.md"
# What YAML takes for text without quotes; words that it takes for something else are quoted.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)?")
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
# JSON holds these as they are, YAML only escaped.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_SIGNATURE = re.compile(r"\n<!-- tiny-engram (\{.*\}) -->\n?\Z")


def _value(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    told = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", told)


def front_matter(fields: Mapping[str, Any]) -> str:
    """The block of YAML that model hubs read at the top of a card; fields that are None or empty are left out. Values are JSON types."""
    lines = ["---"]
    for name, value in fields.items():
        if value is None or value == [] or value == "":
            continue
        if isinstance(value, list):
            lines += [f"{name}:", *(f"- {_value(each)}" for each in value)]
        else:
            lines.append(f"{name}: {_value(value)}")
    return "\n".join([*lines, "---", ""])


def _digest(text: str, data: Mapping[str, Any]) -> str:
    held = text + json.dumps(data, sort_keys=True)
    return hashlib.sha256(held.encode("utf-8", "surrogatepass")).hexdigest()


def sign(text: str, data: Mapping[str, Any]) -> str:
    """The card with a comment at its end that holds `data` (JSON types) and a digest, so that `signed_data` knows it again."""
    held = json.dumps({"sha256": _digest(text, data), **data})
    return text + "\n<!-- tiny-engram " + held.replace("<", "\\u003c").replace(">", "\\u003e") + " -->\n"


def signed_data(card: str) -> dict[str, Any] | None:
    """What `sign` put into a card; None if there is nothing, or somebody changed the card since."""
    found = _SIGNATURE.search(card)
    if found is None:
        return None
    try:
        data = json.loads(found[1])
        digest = data.pop("sha256")
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    return data if digest == _digest(card[: found.start()], data) else None
