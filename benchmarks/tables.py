"""Puts the tables of benchmarks/results into Markdown files, so that no figure in a document is typed by hand.

    python benchmarks/tables.py README.md assets/bases/emoji-sd/README.md

Between the lines `<!-- table:NAME -->` and `<!-- /table:NAME -->` everything is replaced by the table of
benchmarks/results/NAME.json. Such a file is a JSON object with

    table      a list of flat objects, one a row, all with the same keys, which are the column heads; required
    note       a sentence to stand under the table
    commit, machine, versions    what `circumstances` returns: where the figures come from

Imports the standard library only; benchmarks take `circumstances` from here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- /table:(?P=name) -->)", re.DOTALL)

NUMBERS = re.compile(r"\[\s+([^\[\]{}\"]+?)\s+\]")  # a list of bare values, as json writes it with an indent


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def circumstances(*packages: str, depends_on: Sequence[str] = (".",), accelerator: str | None = None) -> dict[str, Any]:
    """Commit, machine and versions of Python and `packages`, to be merged into a result.

    The commit ends in "-dirty" while tracked files under `depends_on`, relative to the repository, differ from it, results
    and Markdown aside: such figures are not for keeping. The machine is named by its kind, never by its host:
    `accelerator`, or the number and architecture of its cores. Where there is no repository (a copied tree on a machine with
    an accelerator) the commit is taken from the environment's TINY_ENGRAM_COMMIT.
    """
    given = os.environ.get("TINY_ENGRAM_COMMIT")
    commit = given or _git("rev-parse", "HEAD")
    if not given and _git("status", "--porcelain", "--untracked-files=no", "--", *depends_on, ":!*.md", ":!benchmarks/results"):
        commit += "-dirty"
    machine = accelerator or f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU"
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return {"commit": commit, "machine": machine, "versions": versions}


def keep(report: dict[str, Any], path: Path) -> None:
    """Write a benchmark's report, as `load` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def row(measure: str, figure: str, target: str = "", met: bool | None = None) -> dict[str, Any]:
    """One line of a section: `met` is None where nothing was asked for."""
    return {"measure": measure, "figure": figure, "target": target, "met": met}


def put_section(path: Path, section: str, content: dict[str, Any]) -> None:
    """Put one section, which holds `rows`, into a result of several; the other sections stay, and `table` is the rows of all.

    A list of bare values takes one line of the file, so that a curve of a hundred points is not a hundred lines.
    """
    report = json.loads(path.read_text()) if path.exists() else {"table": [], "sections": {}}
    report["sections"][section] = content
    report["table"] = [line for part in report["sections"].values() for line in part["rows"]]
    text = NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(report, indent=1))
    path.write_text(text + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def render(report: dict[str, Any], source: str) -> str:
    """The Markdown table of one result, with its note and a line that says where the figures come from."""
    rows = report.get("table")
    if not rows:
        raise ValueError(f"{source}: holds no 'table' of one or more rows; run the benchmark that writes it")
    heads = list(rows[0])
    wrong = [i for i, row in enumerate(rows) if list(row) != heads]
    if wrong:
        raise ValueError(f"{source}: rows {wrong} have other keys than the first, {heads}: every row needs the same columns")
    numeric = [all(isinstance(row[head], int | float) for row in rows) for head in heads]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---:' if n else '---' for n in numeric)} |"]
    lines += [f"| {' | '.join(_cell(value) for value in row.values())} |" for row in rows]
    if report.get("note"):
        lines += ["", report["note"]]
    if report.get("commit"):
        versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
        lines += ["", f"Measured on a {report['machine']} ({versions}) at commit {report['commit'][:12]}: `{source}`."]
    return "\n".join(lines) + "\n"


def load(name: str) -> dict[str, Any]:
    """The result benchmarks/results/NAME.json.

    Raises:
        FileNotFoundError, ValueError: it is not there, or no JSON object; one line says what to do.
    """
    path = RESULTS / f"{name}.json"
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {path.relative_to(ROOT)}; run the benchmark that writes it") from error
    except ValueError as error:
        raise ValueError(f"{path.relative_to(ROOT)}: no JSON ({error}); run the benchmark that writes it") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path.relative_to(ROOT)}: expected a JSON object; run the benchmark that writes it")
    return report


def fill_in(text: str) -> str:
    """`text` with every marked place replaced by the table of its result."""

    def replaced(match: re.Match[str]) -> str:
        table = render(load(match["name"]), str((RESULTS / f"{match['name']}.json").relative_to(ROOT)))
        return f"{match[1]}{table}{match[4]}"

    return MARKED.sub(replaced, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        try:
            text = path.read_text()
            filled = fill_in(text)
        except (OSError, ValueError) as error:
            parser.exit(2, f"{path}: {error}\n")
        found = [match["name"] for match in MARKED.finditer(text)]
        if not found:
            parser.error(f"{path}: holds no '<!-- table:NAME -->' ... '<!-- /table:NAME -->'")
        path.write_text(filled)
        print(f"{path}: {', '.join(found)}")


if __name__ == "__main__":
    main()
