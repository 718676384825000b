"""Puts the pieces of the measurements of a language model into benchmarks/results/llm.json, and what they say into the pages.

    python -m benchmarks.llm.report --everywhere build/llm/everywhere --retention build/llm/retention --facts build/llm/facts
    python -m benchmarks.llm.report                  # plots and pages alone, from the results file as it is
    python -m benchmarks.llm.report --check          # exit code 1 where a page does not say what the results say

A section is what the pieces say that are given for it, whatever it was before; sections for which none are given stay. Between the lines
`<!-- llm:NAME -->` and `<!-- /llm:NAME -->` of docs/results.md and docs/llm.md all is replaced. Imports pieces, targets, page and plots.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.llm import page, pieces, targets
from benchmarks.llm.findings import NotMeasured
from benchmarks.llm.wording import Sections
from benchmarks.tables import RESULTS, ROOT, put_section
from tiny_engram.files import write_atomically

PATH = RESULTS / "llm.json"
PAGES = (ROOT / "docs" / "results.md", ROOT / "docs" / "llm.md")  # the first has a place for every block
IMAGES = "images/llm"
ORDER = ("facts", "everywhere", "retention", "decode")
MARKED = re.compile(r"(<!-- llm:(?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- /llm:(?P=name) -->)", re.DOTALL)
PLOTS = {
    "facts": "Share of facts that are recalled, by number of facts, method and way of asking",
    "shares": "Validation loss against no table, by the share of the budget that is a table, with 95 % intervals",
    "frequency": "Validation loss against no table over training, by how often the trigram stands in the training text",
    "gates": "Mean gate by how often the trigram stands in the training text",
    "retention": "Loss on ordinary text against loss on the narrow text while it is learned",
}


def blocks(sections: Sections, folder: Path) -> dict[str, Callable[[], str]]:
    """What may stand between markers; `folder` holds the page."""

    def plot(name: str) -> str:
        if not (folder / IMAGES / f"{name}.png").exists():
            raise NotMeasured("no plot has been drawn; python -m benchmarks.llm.report draws it")
        return f"![{PLOTS[name]}]({IMAGES}/{name}.png)\n"

    made: dict[str, Callable[[], str]] = {name: lambda make=make: make(sections) for name, make in page.BLOCKS.items()}
    return made | {f"plot-{name}": lambda name=name: plot(name) for name in PLOTS}


def fill_in(text: str, sections: Sections, folder: Path) -> str:
    """The page with every marked place written anew.

    Raises:
        ValueError: a marker that is none of the blocks, or no marker at all: some other file was meant.
    """
    made = blocks(sections, folder)
    found = {match["name"] for match in MARKED.finditer(text)}
    if not found:
        raise ValueError("holds no '<!-- llm:NAME -->' ... '<!-- /llm:NAME -->'")
    if unknown := sorted(found - set(made)):
        raise ValueError(f"marker llm:{unknown[0]} is none of {', '.join(made)}")

    def replaced(match: re.Match[str]) -> str:
        try:
            block = made[match["name"]]()
        except NotMeasured as missing:
            block = f"*Not measured yet: {missing}.*\n"
        return f"{match[1]}{block}{match[4]}"

    return MARKED.sub(replaced, text)


def filled(path: Path, sections: Sections) -> tuple[str, str]:
    """A page as it is, and as it should be.

    Raises:
        OSError, ValueError: as `fill_in`, with the page's name.
    """
    text = path.read_text()
    try:
        return text, fill_in(text, sections, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def differing(path: Path, sections: Sections) -> list[str]:
    """Names of the marked places of a page that do not say what the results say."""
    old, new = (MARKED.finditer(text) for text in filled(path, sections))
    return [a["name"] for a, b in zip(old, new, strict=True) if a["old"] != b["old"]]


def collect(path: Path, section: str, places: list[Path], *, corpus: Path | None, commit: str, machine: str) -> None:
    """One section of the results file from its pieces.

    Raises:
        OSError, ValueError: pieces that are none, or that cannot be compared; nothing is written.
    """
    found = pieces.read(section, places, commit=commit, machine=machine)
    if section == "everywhere":
        figures = pieces.everywhere_figures(found, None if corpus is None else json.loads(corpus.read_text()))
    else:
        figures = {"retention": pieces.retention_figures, "facts": pieces.facts_figures}[section](found)
    put_section(path, section, {**pieces.together(found), "figures": figures, "rows": targets.ROWS[section](figures)})


def sections_of(path: Path) -> dict[str, Any]:
    """The sections of a results file in the page's order, none where it is not there.

    Raises:
        ValueError: it is no result.
    """
    if not path.exists():
        return {}
    try:
        sections = json.loads(path.read_text())["sections"]
        return {name: sections[name] for name in sorted(sections, key=lambda name: ([*ORDER, name].index(name), name))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name}: no result of sections ({error}); remove it, and give the pieces again") from None


def cli(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.report", description=(__doc__ or "").splitlines()[0])
    for section in targets.ROWS:
        parser.add_argument(f"--{section}", type=Path, nargs="+", default=[], metavar="PLACE", help="folders or files of pieces")
    parser.add_argument("--corpus", type=Path, help="corpus.json of the folder that the runs from scratch read")
    parser.add_argument("--commit", default="", help="of pieces that do not say theirs")
    parser.add_argument("--machine", default="", help="of pieces that do not say theirs")
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the pages agree with the results")
    parser.add_argument("--results", type=Path, default=PATH)
    parser.add_argument("--pages", type=Path, nargs="+", default=list(PAGES))
    args = parser.parse_args(words)
    try:
        if args.check:
            sections = sections_of(args.results)
            wrong = [(each.name, name) for each in args.pages for name in differing(each, sections)]
            for name, place in wrong:
                print(f"{name} does not agree with {args.results.name} in {place}; run this without --check", file=sys.stderr)
            return int(bool(wrong))
        for each in args.pages:
            filled(each, sections_of(args.results))  # a page that is none is said before anything is written
        for section in targets.ROWS:
            if places := getattr(args, section):
                collect(args.results, section, places, corpus=args.corpus, commit=args.commit, machine=args.machine)
        sections = sections_of(args.results)
        for section, make in targets.ROWS.items():  # by what the code says now, also of sections that were not collected anew
            if section in sections and sections[section]["rows"] != (rows := make(sections[section]["figures"])):
                sections[section] |= {"rows": rows}
                put_section(args.results, section, sections[section])
        from benchmarks.llm import plots

        drawn = plots.draw_all(sections, args.pages[0].parent / IMAGES)
        for each in args.pages:
            write_atomically(each, filled(each, sections)[1].encode())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in [*drawn, *args.pages]:
        print(f"{path.name}, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(cli())
