"""How figures and tables are written on the results page. Imports results and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.personalization.results import NotMeasured
from benchmarks.personalization.statistics import Estimate

ABSENT = "not measured"


def ranged(value: Estimate, *, signed: bool = False) -> str:
    """A mean and its 95 % interval."""
    sign = "+" if signed else ""
    return f"{value.value:{sign}.3f} [{value.low:{sign}.3f}, {value.high:{sign}.3f}]"


def about(value: Estimate) -> str:
    """A mean and half the width of its 95 % interval."""
    return f"{value.value:.2f} ± {(value.high - value.low) / 2:.2f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def percents(value: Estimate) -> str:
    """A rate and its 95 % interval, in percent."""
    return f"{percent(value.value)} [{100 * value.low:.0f}, {100 * value.high:.0f}]"


def ratio(bigger: float, smaller: float) -> str:
    return f"1/{bigger / smaller:.1f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.1f} MiB"


def change(value: float) -> str:
    """A difference that may be exactly zero, which must not look like a small one."""
    return "0" if value == 0 else f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def verdict(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"


def cell(make: Callable[[], str]) -> str:
    """What `make` gives, or that it was not measured."""
    try:
        return make()
    except NotMeasured:
        return ABSENT


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns of figures are aligned right.

    Raises:
        ValueError: a row has another number of cells than there are heads.
    """
    body = [list(row) for row in rows]
    if wrong := [row for row in body if len(row) != len(heads)]:
        raise ValueError(f"row {wrong[0]}: expected {len(heads)} cells, one for each of {list(heads)}")
    columns = list(zip(*body, strict=True)) or [()] * len(heads)
    figures = [bool(column) and all(c in ("", ABSENT) or c.lstrip("*+-<= ")[:1].isdigit() for c in column) for column in columns]
    lines = [heads, ["---:" if figure else "---" for figure in figures], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
