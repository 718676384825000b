"""Tables about the final subjects on the second base, each a function from its results to Markdown. Imports tables and formats."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.personalization import tables_development, tables_final
from benchmarks.personalization.formats import table
from benchmarks.personalization.results import Results

__all__ = ["TABLES"]


def runs(results: Results) -> str:
    """What was taught: every method's learning rate, subjects and seeds."""
    rows = []
    for label in results.methods(tables_final.STAGE):
        records = results.records(tables_final.STAGE, label)
        rates, seeds = (sorted({record[name] for record in records}) for name in ("learning_rate", "seed"))
        rows.append(
            [label, ", ".join(f"{rate:g}" for rate in rates), str(len({r["subject"] for r in records})), ", ".join(map(str, seeds))]
        )
    return table(["method", "learning rate", "subjects", "seeds"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": tables_final.summary,
    "runs": runs,
    "differences": tables_final.differences,
    "hard": tables_final.hard,
    "costs": tables_final.costs,
    "judges": tables_development.judges,
    "circumstances": tables_development.circumstances,
}
