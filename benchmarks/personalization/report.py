"""Writes docs/results.md's tables, plots and contact sheets from the results file, and says whether the page agrees with it.

    python -m benchmarks.personalization.report                       # tables, plots, and sheets from build/personalization
    python -m benchmarks.personalization.report --check               # exit code 1 where the page's tables differ

Between the lines `<!-- results:NAME -->` and `<!-- /results:NAME -->` everything is replaced, and between `<!-- dit:NAME -->` and
its end what was measured on the second base; no figure stands elsewhere on the page. What has not been measured says so, and which
stage of the bench measures it. Imports the tables, plots and sheets.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.personalization import tables_development, tables_final, tables_second
from benchmarks.personalization.bases import EMOJI_PIXART
from benchmarks.personalization.results import PATH, ROOT, NotMeasured, Results
from tiny_engram.files import write_atomically

PAGE = ROOT / "docs" / "results.md"
IMAGES = "images/personalization"


def _marked(prefix: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {prefix}:(?P<name>[\w-]+) -->\n)(?P<old>.*?)(<!-- /{prefix}:(?P=name) -->)", re.DOTALL)


MARKED, ON_SECOND = _marked("results"), _marked("dit")
PATH_SECOND = EMOJI_PIXART.results_path
PICTURES, PICTURES_SECOND = ROOT / "build" / "personalization", ROOT / "build" / f"personalization-{EMOJI_PIXART.name}"
# Of the second base the sheets of a few subjects are enough to look at, beside that of pairs.
ON_SECOND_SHEETS = ("robot", "dragon", "teapot")
TABLES: dict[str, Callable[[Results], str]] = {**tables_final.TABLES, **tables_development.TABLES}
PLOTS = {
    "fidelity": "Concept fidelity against prompt fidelity, with 95 % intervals",
    "seconds": "Concept fidelity against seconds of training",
    "bytes": "Concept fidelity against bytes",
}


def _pictures(folder: Path, names: dict[str, str]) -> str:
    """Links to those that are there, one a paragraph."""
    there = [f"![{text}]({IMAGES}/{name}.png)\n" for name, text in names.items() if (folder / IMAGES / f"{name}.png").exists()]
    if not there:
        raise NotMeasured("no pictures have been drawn; python -m benchmarks.personalization report draws them")
    return "\n".join(there)


def _sheets(folder: Path, prefix: str) -> str:
    stems = sorted(path.stem for path in (folder / IMAGES).glob(f"{prefix}-*.png"))
    return _pictures(folder, {stem: stem.removeprefix(f"{prefix}-").replace("-", " ").capitalize() for stem in stems})


def blocks(results: Results, folder: Path) -> dict[str, Callable[[], str]]:
    """What may stand between markers; `folder` holds the page."""

    made: dict[str, Callable[[], str]] = {name: lambda make=make: make(results) for name, make in TABLES.items()}
    plots = {f"plot-{name}": lambda name=name, text=text: _pictures(folder, {name: text}) for name, text in PLOTS.items()}
    return made | plots | {"sheets": lambda: _sheets(folder, "sheet")}


def fill_in(text: str, results: Results, folder: Path) -> str:
    """The page with every marked place written anew.

    Raises:
        ValueError: a marker that is none of the blocks, or a block that the page has no place for.
    """
    return _filled(text, MARKED, "results", blocks(results, folder))


def fill_in_second(text: str, results: Results, folder: Path) -> str:
    """The page with every place of the second base written anew. Raises ValueError as `fill_in` does."""
    made: dict[str, Callable[[], str]] = {name: lambda make=make: make(results) for name, make in tables_second.TABLES.items()}
    return _filled(text, ON_SECOND, "dit", made | {"sheets": lambda: _sheets(folder, "second")})


def _filled(text: str, marked: re.Pattern[str], prefix: str, made: dict[str, Callable[[], str]]) -> str:
    found = [match["name"] for match in marked.finditer(text)]
    if unknown := sorted(set(found) - set(made)):
        raise ValueError(f"marker {prefix}:{unknown[0]} is none of {', '.join(made)}")
    if lacking := [name for name in made if name not in found]:
        raise ValueError(f"the page has no place for {lacking[0]}: put '<!-- {prefix}:{lacking[0]} -->' and its end there, a line each")

    def replaced(match: re.Match[str]) -> str:
        try:
            block = made[match["name"]]()
        except NotMeasured as missing:
            block = f"*Not measured yet: {missing}.*\n"
        return f"{match[1]}{block}{match[4]}"

    return marked.sub(replaced, text)


def differing(text: str, results: Results, folder: Path) -> list[str]:
    """Names of the marked places of a page that do not say what the results say."""
    return _apart(text, fill_in(text, results, folder), MARKED)


def _apart(text: str, filled: str, marked: re.Pattern[str]) -> list[str]:
    anew = {match["name"]: match["old"] for match in marked.finditer(filled)}
    return [match["name"] for match in marked.finditer(text) if match["old"] != anew[match["name"]]]


def main(
    results: Path = PATH, pictures: Path | None = None, page: Path = PAGE, second: Path = PATH_SECOND, pictures_second: Path | None = None
) -> None:
    """Draw plots and, where the folders `pictures` and `pictures_second` hold pieces, sheets, and fill in the page.

    Raises:
        ValueError: the results file is none, or the page lacks a marker.
    """
    measured, on_second = Results.load(results), Results.load(second)
    from benchmarks.personalization import plots, sheets
    from benchmarks.personalization.store import Pictures

    folder = page.parent / IMAGES
    drawn = plots.draw_all(measured, folder)
    if pictures is not None and any(pictures.glob("*.zip")):
        drawn += sheets.draw_all(measured, Pictures(pictures), folder)
    if pictures_second is not None and any(pictures_second.glob("*.zip")):
        drawn += sheets.draw_all(on_second, Pictures(pictures_second), folder, prefix="second", only=ON_SECOND_SHEETS)
    text = fill_in(page.read_text(), measured, page.parent)
    write_atomically(page, fill_in_second(text, on_second, page.parent).encode())
    for path in [*drawn, page]:
        print(f"{path.name}, {path.stat().st_size:,} bytes")


def check(results: Path = PATH, page: Path = PAGE, second: Path = PATH_SECOND) -> list[str]:
    """Names of the places of the page that differ from the results files; none where they agree."""
    text = page.read_text()
    others = _apart(text, fill_in_second(text, Results.load(second), page.parent), ON_SECOND)
    return differing(text, Results.load(results), page.parent) + [f"dit:{name}" for name in others]


def cli(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.personalization.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the page agrees with the results")
    parser.add_argument("--results", type=Path, default=PATH)
    parser.add_argument("--second", type=Path, default=PATH_SECOND, help="results on the second base")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="the folder of pieces")
    parser.add_argument("--pictures-second", type=Path, default=PICTURES_SECOND, help="that of pieces on the second base")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(words)
    try:
        if not args.check:
            main(args.results, args.pictures, args.page, args.second, args.pictures_second)
            return 0
        wrong = check(args.results, args.page, args.second)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if wrong:
        print(f"{args.page.name} does not agree with {args.results.name} in {', '.join(wrong)}; run this without --check", file=sys.stderr)
        return 1
    print(f"{args.page.name} agrees with {args.results.name}")
    return 0


if __name__ == "__main__":
    sys.exit(cli())
