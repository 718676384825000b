"""Tiers: places where rows may live, and what fetching them costs. Imports errors.

Measured figures are those of one H200 with 16 CPU cores and PCIe gen5 x16 (random rows of 256 B from a table of 16 GiB, without the
time that ids take to the host). The others are assumed, and say from what.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_engram.errors import TableError

__all__ = ["DEFAULT_TIERS", "DEVICE", "LEAST", "MOST", "Tier", "load_tiers", "tiers_from_dict"]

DEVICE = "device"
LEAST, MOST = 1e-9, 1e15  # of any figure: what is computed from them stays a number
_MAX_FILE = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place for rows.

    Attributes:
        name: of the tier.
        latency_us: a fetch takes at least this.
        ns_per_row: each row adds this, whatever its bytes.
        gb_per_s: bytes (10^9) of rows per second at most.
        points: measured (rows, microseconds), ascending; where given they replace latency and time per row, with straight lines
            between them, from (0, latency) before the first, and the last line going on.
        capacity_gib: room for a table; None where it is whatever was bought.
        source: where the figures are from.
    """

    name: str
    latency_us: float
    ns_per_row: float
    gb_per_s: float
    points: tuple[tuple[float, float], ...] = ()
    capacity_gib: float | None = None
    source: str

    def __post_init__(self):
        for field in ("latency_us", "ns_per_row", "gb_per_s", *(("capacity_gib",) if self.capacity_gib is not None else ())):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
                raise TableError(f"tier {self.name!r}: {field} is {str(value)[:40]!r}, expected a number from 0 to {MOST:.0e}")
        if self.gb_per_s < LEAST:
            raise TableError(f"tier {self.name!r}: gb_per_s is {self.gb_per_s}, expected more")
        rows = [point[0] for point in self.points]
        if rows != sorted(set(rows)) or any(not (0 < n <= MOST and 0 < us <= MOST) for n, us in self.points):
            raise TableError(f"tier {self.name!r}: points {list(self.points)[:4]}, expected (rows, microseconds) with rows ascending")

    def fetch_us(self, rows: float, row_bytes: int) -> float:
        """Microseconds until ``rows`` rows of ``row_bytes`` are there; 0 for none."""
        if rows <= 0:
            return 0.0
        by_bytes = rows * row_bytes / self.gb_per_s / 1e3
        # Measured times hold their latency already.
        return max(self._by_count(rows), by_bytes if self.points else self.latency_us + by_bytes)

    def _by_count(self, rows: float) -> float:
        if not self.points:
            return self.latency_us + rows * self.ns_per_row / 1e3
        points = ((0.0, min(self.latency_us, self.points[0][1])), *self.points)
        place = min(bisect_left(points, rows, lo=1, key=lambda point: point[0]), len(points) - 1)
        (low, low_us), (high, high_us) = points[place - 1], points[place]
        return low_us + max(0.0, high_us - low_us) * (rows - low) / (high - low)


DEFAULT_TIERS = (
    Tier(
        name=DEVICE,
        latency_us=5.0,
        ns_per_row=0.0,
        gb_per_s=1950.0,
        points=((16_384, 42.0), (262_144, 64.0), (4_194_304, 579.0)),
        capacity_gib=139.0,
        source="measured on one H200; the latency of few rows is assumed, a launch inside a CUDA graph",
    ),
    Tier(
        name="dram zero-copy",
        latency_us=5.0,
        ns_per_row=26.0,
        gb_per_s=55.4,
        points=((1_024, 25.0), (16_384, 428.0), (262_144, 8_500.0)),
        source="measured on one H200; the latency of few rows is assumed, a launch and a trip over PCIe and back",
    ),
    Tier(
        name="dram gather+dma",
        latency_us=20.0,
        ns_per_row=5.8,
        gb_per_s=43.9,
        points=((1_024, 29.0), (16_384, 135.0), (262_144, 1_530.0)),
        source="measured on one H200 with 16 cores, probably with rows in the CPU's caches (262,144 rows never read before took 2,361 us); "
        "the latency of few rows is assumed, a copy's start",
    ),
    Tier(
        name="cxl zero-copy",
        latency_us=5.5,
        ns_per_row=33.0,
        gb_per_s=25.0,
        source="assumed: as dram zero-copy, with 0.3 us more on about 1 us per read (2-5x DRAM's latency is published), one x8 link",
    ),
    Tier(
        name="rdma",
        latency_us=10.0,
        ns_per_row=100.0,
        gb_per_s=45.0,
        source="assumed: one 400 Gb/s adapter, one-sided reads of 5 us behind a request from the host, 10 million messages per second",
    ),
    Tier(
        name="nvme",
        latency_us=90.0,
        ns_per_row=1000.0,
        gb_per_s=7.0,
        source="assumed: one gen4 drive, 1 million random reads of 4 KiB per second, a page for each row",
    ),
)


def tiers_from_dict(found: Mapping[str, Any], row_bytes: int, where: str = "tiers") -> tuple[Tier, ...]:
    """Tiers from plain values.

    Args:
        found: ``{"tiers": {name: {"latency_us": ..., "ns_per_row": ..., "gb_per_s": ..., "points": [[rows, us], ...],
            "capacity_gib": ..., "source": ...}}}``, of which a tier that is known by default may give some, and others need the
            first three; or a cache of lookup costs as the planner keeps it, ``{"entries": {machine: {"zero_copy": [[rows, us], ...],
            "cpu_gather": [...]}}}``, of which the last entry for rows of this size counts.
        row_bytes: of a row.
        where: for messages.

    Returns:
        The defaults, with these in their places or behind them.
    """
    known = {tier.name: tier for tier in DEFAULT_TIERS}
    entries = found.get("entries")
    described = _of_costs(entries, row_bytes, where) if isinstance(entries, Mapping) else found.get("tiers")
    if not isinstance(described, Mapping) or not described:
        raise TableError(f"{where}: expected {{'tiers': {{name: figures}}}}, or a cache of lookup costs with 'entries'")
    fields = {"latency_us", "ns_per_row", "gb_per_s", "points", "capacity_gib", "source"}
    for name, about in described.items():
        if not isinstance(about, Mapping) or (unknown := set(about) - fields):
            what = f"unknown {sorted(unknown)}" if isinstance(about, Mapping) else repr(about)  # pyright: ignore[reportPossiblyUnboundVariable]
            raise TableError(f"{where}: tier {name[:60]!r} has {what[:100]}, expected {sorted(fields)}")
        if not name.isprintable() or not str(about.get("source", "")).isprintable():
            raise TableError(f"{where}: tier {name[:60]!r} or its source does not print: expected words")
        base = known.get(name)
        start = {} if base is None else {field: getattr(base, field) for field in fields - {"source"}}
        if base is not None and {"latency_us", "ns_per_row"} & set(about):
            start["points"] = ()  # the old points would hide the new figures
        values = {"source": f"given in {where}", **start, **about}
        lacking = {"latency_us", "ns_per_row", "gb_per_s"} - set(values)
        if lacking:
            raise TableError(f"{where}: tier {name!r} lacks {sorted(lacking)}; only {sorted(known)} have defaults")
        try:
            values["points"] = tuple((float(rows), float(us)) for rows, us in values.get("points", ()))
        except (TypeError, ValueError, OverflowError) as error:
            points = str(values["points"])[:100]
            raise TableError(f"{where}: tier {name!r} has points {points}, expected [[rows, microseconds], ...]") from error
        known[name] = Tier(name=str(name), **values)
    return tuple(known.values())


def _of_costs(entries: Mapping[str, Any], row_bytes: int, where: str) -> dict[str, Any]:
    fitting = [(key, entry) for key, entry in entries.items() if f"|{row_bytes} B|" in key]
    if not fitting:
        raise TableError(f"{where}: no costs for rows of {row_bytes} B among {len(entries)} entries; measure some, or give 'tiers'")
    key, entry = fitting[-1]
    names = {"zero_copy": "dram zero-copy", "cpu_gather": "dram gather+dma"}
    found = {}
    for old, new in names.items():
        points: Any = entry.get(old) if isinstance(entry, Mapping) else None
        try:
            fastest = max(rows * row_bytes / us / 1e3 for rows, us in points)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise TableError(f"{where}: entry {key!r} has {old} {str(points)[:100]}, expected [[rows, microseconds], ...]") from error
        # Fewer rows than were measured take as long as the fewest.
        found[new] = {"points": points, "latency_us": points[0][1], "gb_per_s": fastest, "source": f"measured: {key}"}
    return found


def load_tiers(path: Path, row_bytes: int) -> tuple[Tier, ...]:
    """The defaults with the tiers of a JSON file, see :func:`tiers_from_dict`. Raises TableError."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE + 1)
        found = json.loads(text) if len(text) <= _MAX_FILE else None
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"{path}: cannot read the tiers ({error}); expected JSON") from error
    if not isinstance(found, dict):
        raise TableError(f"{path}: expected a JSON object of at most {_MAX_FILE} bytes")
    return tiers_from_dict(found, row_bytes, str(path))
