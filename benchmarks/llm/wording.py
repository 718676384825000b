"""How names and figures of the language side are written. Imports findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.llm.findings import Mean, NotMeasured

KINDS = {"size-1": "one row", "hot": "hot tier"}
METHODS = {"engram": "Engram", "lora": "LoRA r8"}
WORDS = {"as taught": "as taught", "context": "behind another text", "alias": "registered alias", "other paraphrase": "other paraphrase"}
Sections = Mapping[str, Any]


def figures(sections: Sections, name: str) -> Mapping[str, Any]:
    if name not in sections:
        raise NotMeasured(f"no runs; benchmarks/llm/{name}.py makes them")
    return sections[name]["figures"]


def ranged(mean: Mean, *, signed: bool = False, digits: int = 3) -> str:
    """A mean, and its 95 % interval where there is one."""
    form = f"{'+' if signed else ''}.{digits}f"
    if mean.half is None:
        return f"{mean.value:{form}}"
    return f"{mean.value:{form}} [{mean.low:{form}}, {mean.high:{form}}]"


def seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(100 * share - round(100 * share)) < 1e-6 else 1}f} %"


def buckets(figures: Mapping[str, Any]) -> list[str]:
    """How often the trigram in front of a token stands in the training text, in words for each bucket."""
    starts = figures["buckets"]
    ends = [end - 1 for end in starts[1:]]
    middle = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=False)]
    return ["never" if text == "0" else text for text in middle] + [f"{starts[-1]} or more"]
