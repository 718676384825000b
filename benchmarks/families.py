"""What held on which family of pipelines, as a table.

    make test-families                     # runs every check on every pipeline, and writes benchmarks/results/families-conformance.json
    python -m benchmarks.families table    # from that file: its table, and the README's

A mode holds where every check in it passed on every pipeline of the family. Imports the standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS, ROOT, fill_in, keep, load

NAME = "families-conformance"
MODES = ("span", "input", "deep", "pooled", "context")
PASSED = "passed"


def family_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each family, in the order of its pipelines."""
    rows = []
    for name in dict.fromkeys(about["family"] for about in report["pipelines"]):
        mine = [about for about in report["pipelines"] if about["family"] == name]
        tried = {about["pipeline"] for about in mine}
        results = [found for found in report["results"] if found["pipeline"] in tried]
        if not results:
            continue
        held = [mode for mode in MODES if (of := _of_mode(results, mode)) and all(found["result"] == PASSED for found in of)]
        passed = sum(found["result"] == PASSED for found in results)
        rows.append(
            {
                "family": name,
                "pipelines tried": ", ".join(sorted(tried, key=[about["pipeline"] for about in mine].index)),
                "classes": len(mine[0]["classes"]),
                "encoders": ", ".join(mine[0]["roles"]),
                "modes that hold": ", ".join(held),
                "checks passed": f"{passed} of {len(results)}",
                "published tokenizer": "yes" if all(about["real_tokenizer"] for about in mine) else "no",
            }
        )
    return rows


def _of_mode(results: Sequence[dict[str, str]], mode: str) -> list[dict[str, str]]:
    return [found for found in results if found["mode"] == mode]


def exceptions(report: dict[str, Any]) -> list[str]:
    """One line for each check that did not pass, and for each mode that a family refuses."""
    lines = [
        f"{found['pipeline']}, {found['check']}{' (' + found['mode'] + ')' if found['mode'] else ''}: {found['result']}"
        for found in report["results"]
        if found["result"] != PASSED
    ]
    refused = {(about["family"], mode): why for about in report["pipelines"] for mode, why in about["refuses"].items()}
    return lines + [f"{family} has no {mode}: {why}" for (family, mode), why in refused.items()]


def with_table(report: dict[str, Any]) -> dict[str, Any]:
    """The record with what `tables.py` puts into documents."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    says = [
        f"Tiny pipelines of the real classes with random weights, on a CPU ({versions}): `benchmarks/results/{NAME}.json`.",
        "Classes are those that `attach` recognises as the family's. Where the published tokenizer is not to be had without a model's "
        "weights, another of its class stands in.",
    ]
    others = exceptions(report)
    if others:
        says.append("Exceptions: " + "; ".join(others) + ".")
    return {**report, "table": family_rows(report), "note": " ".join(says)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=["table"])
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    try:
        keep(with_table(load(NAME)), RESULTS / f"{NAME}.json")
        arguments.readme.write_text(fill_in(arguments.readme.read_text()))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
