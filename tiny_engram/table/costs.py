"""What a lookup costs on each path, by row count: documented defaults, a measurement, and its cache on disk.

Imports torch and tiny_engram.{errors,files}. Times are microseconds of wall clock from the call to the rows lying on the
device, since ids are made there and the host's part counts.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch

from tiny_engram.errors import TableError
from tiny_engram.files import write_atomically

__all__ = ["Curve", "HostPath", "LookupCosts", "default_costs", "measure", "resolve"]

HostPath = Literal["zero_copy", "cpu_gather"]
VARIABLE = "TINY_ENGRAM_LOOKUP_COSTS"
MEASURED_ROWS = (256, 1024, 2048, 4096, 8192, 16_384, 65_536)
_CLOSE = 0.9  # as far as measured costs can be off
_MOST_ROWS = 1 << 24  # beyond it no crossing point is looked for
_SMALL_TABLE = 64 << 20  # bytes; below it a measurement costs more than it can save
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Curve:
    """Microseconds by row count: straight lines between points, constant before the first, the last line goes on.

    Raises:
        TableError: fewer than two points, or numbers that no measurement gives.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self):
        rows = [point[0] for point in self.points]
        sane = len(rows) > 1 and rows[0] > 0 and rows == sorted(set(rows)) and all(0 < us < 1e9 for _, us in self.points)
        if not sane:
            raise TableError(f"cost points {list(self.points)}: expected two or more of (rows, microseconds), rows ascending")

    def us(self, rows: float) -> float:
        """Predicted microseconds for ``rows`` rows."""
        points = self.points
        if rows <= points[0][0]:
            return points[0][1]
        place = min(bisect_left(points, rows, key=lambda point: point[0]), len(points) - 1)
        (low, low_us), (high, high_us) = points[place - 1], points[place]
        return low_us + max(0.0, high_us - low_us) * (rows - low) / (high - low)


@dataclasses.dataclass(frozen=True)
class LookupCosts:
    """Costs of the ways to bring rows from host memory to a device.

    Attributes:
        zero_copy: the device reads host memory in place.
        cpu_gather: the CPU gathers records, and they are copied; by distinct rows.
        deduplicate: finding the distinct ids, on top of ``cpu_gather``; by ids.
        source: "default", or "measured".
    """

    zero_copy: Curve
    cpu_gather: Curve
    deduplicate: Curve
    source: str = "default"

    def deduplicates(self, rows: int, distinct: float) -> bool:
        """Does it pay to find the distinct ids first, when that share (0..1) of them is distinct?"""
        return self.deduplicate.us(rows) + self.cpu_gather.us(rows * distinct) < self.cpu_gather.us(rows)

    def cpu_gather_us(self, rows: int, distinct: float = 1.0) -> float:
        """Microseconds of the path over the CPU, duplicates dropped where that pays."""
        return min(self.cpu_gather.us(rows), self.deduplicate.us(rows) + self.cpu_gather.us(rows * distinct))

    def share_in_place(self, rows: int) -> float:
        """The share of so many rows that the device reads in place while the CPU brings the others, both ready at once; 0.2 at most.

        The two share a link, which is why more would not pay; with 10 to 20 % a lookup was 5 to 15 % faster.
        """
        low, high = 0.0, 0.2
        for _ in range(20):
            middle = (low + high) / 2
            earlier = self.zero_copy.us(rows * middle) < self.cpu_gather.us(rows * (1 - middle))
            low, high = (middle, high) if earlier else (low, middle)
        return low

    def choose(self, rows: int, distinct: float = 1.0) -> HostPath:
        """The cheaper path for ``rows`` ids, of which that share is distinct; in place, which needs no wait, where they are close."""
        return "cpu_gather" if self.cpu_gather_us(rows, distinct) < _CLOSE * self.zero_copy.us(rows) else "zero_copy"

    def crossing(self, distinct: float = 1.0) -> int:
        """The smallest row count from which the CPU's path is cheaper; 2**24 where it never is."""
        high = 1
        while self.choose(high, distinct) == "zero_copy":
            high *= 2
            if high >= _MOST_ROWS:
                return _MOST_ROWS
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.choose(middle, distinct) == "zero_copy" else (low, middle)
        return high

    def explain(self, distinct: float = 1.0) -> str:
        """The predicted times and choices as a table in text."""
        lines = [
            f"{self.source} costs, {distinct:.0%} of the ids distinct; the CPU's path from {self.crossing(distinct):,} rows on",
            f"{'rows':>10} {'zero_copy us':>14} {'cpu_gather us':>14}  choice",
        ]
        for rows in (64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1 << 20, 1 << 22):
            zero, cpu = self.zero_copy.us(rows), self.cpu_gather_us(rows, distinct)
            lines.append(f"{rows:>10,} {zero:>14,.0f} {cpu:>14,.0f}  {self.choose(rows, distinct)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: [list(point) for point in getattr(self, name).points] for name in _CURVES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From :meth:`to_dict`'s values, which were measured.

        Raises:
            TableError, KeyError, TypeError, ValueError: they are not such values.
        """
        return cls(**{name: Curve(tuple((int(rows), float(us)) for rows, us in values[name])) for name in _CURVES}, source="measured")


_CURVES = ("zero_copy", "cpu_gather", "deduplicate")


def default_costs(row_bytes: int, table_bytes: int) -> LookupCosts:
    """Costs where nothing was measured: those of one H200 with PCIe gen5 x16, in a virtual machine, for ids not read before.

    Called eagerly, by wall clock, with the native gather's 16 threads (benchmarks/results/table.json). Few rows cost the calls; then
    reading in place takes some 34 ns a row of up to 512 B, since each row is an address to translate, and 11 ns where the table has
    1 GiB or less; the CPU's path takes 8 ns a row of 264 B. Finding distinct ids was timed at 262,144; for fewer it is assumed.
    """
    wide, copied = max(1.0, row_bytes / 512), row_bytes / 264
    large = ((1024, 165.0), (4096, 192.0), (16_384, 529.0 * wide), (65_536, 2383.0 * wide), (262_144, 9031.0 * wide))
    small = ((1024, 120.0), (4096, 143.0), (16_384, 266.0 * wide), (65_536, 783.0 * wide), (262_144, 2933.0 * wide))
    by_cpu = ((4096, 600.0), (16_384, 625.0 * copied), (65_536, 1171.0 * copied), (262_144, 2361.0 * copied), (1 << 20, 8277.0 * copied))
    return LookupCosts(
        zero_copy=Curve(small if table_bytes <= 1 << 30 else large),
        cpu_gather=Curve(by_cpu),
        deduplicate=Curve(((1024, 165.0), (262_144, 493.0))),
    )


def measure(actions: Mapping[str, Callable[[torch.Tensor], object]], *, rows: int, device: torch.device, repeats: int = 9) -> LookupCosts:
    """Time each path with random ids, about a second on the machine that the defaults describe.

    Args:
        actions: "zero_copy", "cpu_gather" and "deduplicate": what to do with int64 ``[N]`` ids on the device.
        rows: rows of the table.
        repeats: timings of which the median counts, each with other ids, as the same ids again would find warm caches.
    """
    curves = {}
    for name in _CURVES:
        points = []
        for count in MEASURED_ROWS:
            draws = [torch.randint(rows, (count,), device=device) for _ in range(repeats + 1)]
            seconds = [_seconds(actions[name], ids, device) for ids in draws][1:]
            points.append((count, statistics.median(seconds) * 1e6))
        curves[name] = Curve(tuple(points))
    return LookupCosts(**curves, source="measured")


def _seconds(action: Callable[[torch.Tensor], object], ids: torch.Tensor, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    start = time.perf_counter()
    action(ids)
    wait(device)
    return time.perf_counter() - start


def cache_path() -> Path:
    """Where measured costs are kept: $XDG_CACHE_HOME or ~/.cache, then tiny-engram/lookup-costs.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tiny-engram" / "lookup-costs.json"


def machine_key(device: torch.device, row_bytes: int, table_bytes: int, home: str, layout: str, gathering: str) -> str:
    """What a measurement holds for: processor, cores, torch, who gathers, and a table of about this size and kind."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    machine = f"{name}|{os.cpu_count()} cores|{torch.get_num_threads()} threads|torch {torch.__version__}"
    return f"{machine}|{row_bytes} B|2^{max(table_bytes, 1).bit_length()} B|{home}|{layout}|{gathering}"


@dataclasses.dataclass
class _Cache:
    """Measured costs in a JSON file; one that cannot be read is said once and measured again."""

    path: Path

    @cached_property
    def entries(self) -> dict[str, Any]:
        try:
            held = json.loads(self.path.read_text())
            if held["format"] != _FORMAT or not isinstance(held["entries"], dict):
                raise ValueError(f"format {held['format']!r}, expected {_FORMAT}")
            return held["entries"]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{self.path}: cannot use the kept lookup costs ({error}); measuring again", RuntimeWarning, stacklevel=4)
            return {}

    def get(self, key: str) -> LookupCosts | None:
        if key not in self.entries:
            return None
        try:
            return LookupCosts.from_dict(self.entries[key])
        except (KeyError, TypeError, ValueError) as error:
            warnings.warn(f"{self.path}: cannot use the kept lookup costs ({error!r}); measuring again", RuntimeWarning, stacklevel=3)
            return None

    def put(self, key: str, costs: LookupCosts) -> None:
        blob = json.dumps({"format": _FORMAT, "entries": {**self.entries, key: costs.to_dict()}}, indent=1) + "\n"
        # A machine without a place to keep them measures at each start.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, blob.encode())


def resolve(key: str, *, row_bytes: int, table_bytes: int, run: Callable[[], LookupCosts]) -> LookupCosts:
    """The costs to go by: kept ones, else measured by ``run`` and kept.

    The environment's TINY_ENGRAM_LOOKUP_COSTS may say otherwise: "default" takes the defaults, "measure" measures again, all
    else is the file to keep costs in. Tables below 64 MiB take the defaults; so does, with a warning, a device whose memory
    is too full to measure.
    """
    wish = os.environ.get(VARIABLE, "")
    if wish == "default" or table_bytes < _SMALL_TABLE:
        return default_costs(row_bytes, table_bytes)
    cache = _Cache(Path(wish) if wish not in ("", "measure") else cache_path())
    kept = cache.get(key) if wish != "measure" else None
    if kept is not None:
        return kept
    try:
        measured = run()
    except torch.OutOfMemoryError:
        warnings.warn("too little device memory to measure lookup costs: the defaults are taken", RuntimeWarning, stacklevel=2)
        return default_costs(row_bytes, table_bytes)
    cache.put(key, measured)
    return measured
