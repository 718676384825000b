"""What copies of hot rows on the device save, under Zipf traffic over a table in host memory, and what looking for them costs.

    python benchmarks/hot_rows.py          # on a machine with a GPU: benchmarks/results/table.json, section hot_rows
    python benchmarks/hot_rows.py --tune   # programs and rows in flight of the kernel; prints only
    python benchmarks/hot_rows.py --dry    # the same steps with a small table on the CPU, nothing kept

Row ids come up with probability 1 / rank ** s. Hot rows are chosen by what was observed, as in service, and rated on ids drawn
afterwards; the law's own share, that of the rows that are most frequent in truth, stands beside it. Nothing is timed before the rows
read were exactly those that the filling rule says. Times are of calls in a captured graph, each with ids of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu import graph_us, need, record, row

from tiny_engram.kernels.hot_gather import fused
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.hot import HotRows
from tiny_engram.table.storage import RowStorage

HEAD_DIM = 256
DTYPE = torch.bfloat16
EXPONENTS = (1.0, 1.2)
DRAWS = 1 << 16  # ids of one observed call
SPREAD = 2654435761  # a prime: rank -> row id, so that neighbours in rank are none in the table


class Sizes:
    """What is measured, and a small copy of it for the CPU."""

    def __init__(self, dry: bool, gib: float):
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self.rows = 20_000 if dry else int(gib * 2**30) // (HEAD_DIM + HEAD_DIM // 32)
        self.capacities = (0, 100, 1000) if dry else (0, 100_000, 1_000_000)
        self.window = 1 << 18 if dry else 1 << 24
        # Row count -> calls in a graph; together they read more than the L2 cache holds.
        self.calls = {64: 4, 256: 2} if dry else {1024: 256, 6144: 64, 65_536: 16}

    def microseconds(self, action: Callable[[], object], calls: int) -> float:
        if not self.dry:
            return graph_us(action, calls=calls)
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds) * 1e6


class Zipf:
    """Row ids by Zipf's law with an exponent."""

    def __init__(self, sizes: Sizes, exponent: float):
        self.rows, self.device = sizes.rows, sizes.device
        need(self.rows % SPREAD != 0, f"{self.rows} rows cannot be spread")
        ranks = torch.arange(1, self.rows + 1, dtype=torch.float64, device=self.device)
        self.up_to = ranks.pow(-exponent).cumsum(0)

    def draw(self, count: int) -> torch.Tensor:
        at = torch.rand(count, dtype=torch.float64, device=self.device) * self.up_to[-1]
        return torch.searchsorted(self.up_to, at).clamp(max=self.rows - 1) * SPREAD % self.rows

    def share(self, capacity: int) -> float:
        """Share of the reads that the most frequent rows get: H_K / H_N where the exponent is 1."""
        return float(self.up_to[capacity - 1] / self.up_to[-1]) if capacity else 0.0


def drawn_from(ids: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Draws evenly from these ids."""
    return lambda count: ids[torch.randint(len(ids), (count,), device=ids.device)]


def warmed(sizes: Sizes, table: EngramTable, traffic: Zipf, capacity: int) -> tuple[HotRows, float]:
    """Hot rows after a window of traffic, and the seconds that choosing and copying took."""
    hot = HotRows(table, capacity_rows=capacity, device=sizes.device, window=sizes.window)
    for _ in range(sizes.window // DRAWS):
        hot.observe(traffic.draw(DRAWS))
    started = time.perf_counter()
    hot.refresh()
    if not sizes.dry:
        torch.cuda.synchronize()
    return hot, time.perf_counter() - started


def check(sizes: Sizes, hot: HotRows, traffic: Zipf, rule: FillRule) -> None:
    """Rows by traffic, evenly drawn and absent ones, against the rule."""
    ends = torch.tensor([0, sizes.rows - 1, -1], device=sizes.device)
    for count in (1, 1000, 50_000):
        ids = torch.cat((traffic.draw(count), torch.randint(sizes.rows, (count,), device=sizes.device), ends))
        need(torch.equal(hot.lookup(ids, dtype=DTYPE), rule.values(ids, DTYPE)), f"{count} rows, {hot.capacity} of them hot")


def timed(sizes: Sizes, lookup: Callable[..., object], draw: Callable[[int], torch.Tensor], count: int) -> float:
    """Microseconds of one lookup of `count` rows."""
    calls = sizes.calls[count]
    sets = itertools.cycle([draw(count) for _ in range(calls)])
    out = torch.empty((count, HEAD_DIM), dtype=DTYPE, device=sizes.device)
    return sizes.microseconds(lambda: lookup(next(sets), bounds="ignore", out=out), calls)


def measured(sizes: Sizes, storage: RowStorage, rule: FillRule) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    table = EngramTable.over(storage)
    figures: dict[str, Any] = {"rows": sizes.rows, "table_bytes": storage.nbytes, "window": sizes.window, "traffic": {}}
    lines: list[dict[str, Any]] = []

    def in_place(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        return row_gather(storage.payload, storage.scale, ids, **more)

    for exponent in EXPONENTS:
        traffic = Zipf(sizes, exponent)
        plain = {count: timed(sizes, in_place, traffic.draw, count) for count in sizes.calls}
        found: dict[str, Any] = {"in_place_us": plain, "hot": {}}
        figures["traffic"][f"{exponent:g}"] = found
        for capacity in sizes.capacities:
            hot, seconds = warmed(sizes, table, traffic, capacity)
            check(sizes, hot, traffic, rule)
            before = hot.report()
            hot.lookup(traffic.draw(1 << (14 if sizes.dry else 20)), dtype=DTYPE, bounds="ignore")
            after = hot.report()
            rate = (after.hits - before.hits) / (after.lookups - before.lookups)
            need(capacity > 0 or rate == 0.0, "hits without hot rows")
            us = {count: timed(sizes, hot.lookup, traffic.draw, count) for count in sizes.calls}
            part = {"hit_rate": rate, "law": traffic.share(capacity), "us": us, "refresh_seconds": seconds, "device_bytes": hot.nbytes}
            if capacity:
                among = drawn_from(hot._keys[hot._keys >= 0])
                part["all_hits_us"] = {count: timed(sizes, hot.lookup, among, count) for count in sizes.calls}
            found["hot"][str(capacity)] = part
            print(f"Zipf({exponent:g}), {capacity:,} hot: {part}", flush=True)
            lines += rendered(exponent, capacity, sizes.rows, part, plain)
            del hot
    return figures, lines


def tune(sizes: Sizes, storage: RowStorage) -> None:
    """Print the time of a lookup by programs and bytes in flight, at the largest capacity and without hot rows."""
    traffic, table = Zipf(sizes, EXPONENTS[0]), EngramTable.over(storage)
    for capacity in (0, sizes.capacities[-1]):
        hot, _ = warmed(sizes, table, traffic, capacity)
        for fused.HOST_PROGRAMS, fused.HOST_TILE in itertools.product((64, 128, 256, 512, 1024), (1024, 4096, 8192)):
            us = {count: round(timed(sizes, hot.lookup, traffic.draw, count), 1) for count in sizes.calls}
            print(f"{capacity:>9,} hot, {fused.HOST_PROGRAMS:>5} programs of {fused.HOST_TILE:>5} B: {us}", flush=True)


def rendered(exponent: float, capacity: int, rows: int, part: dict[str, Any], plain: dict[int, float]) -> list[dict[str, Any]]:
    """Rows of the result table for one capacity."""
    name = f"Zipf({exponent:g}) over {rows:,} rows in host memory, {capacity:,} hot"
    lines = []
    if capacity:
        rate = f"{part['hit_rate']:.1%} (the most frequent rows: {part['law']:.1%})"
        lines.append(row(f"{name}, hit rate", rate))
        lines.append(row(f"{name}, choosing and copying them", f"{part['refresh_seconds']:.2f} s, {part['device_bytes'] / 2**20:,.0f} MiB"))
    for count, us in part["us"].items():
        figure = f"{us:,.1f} us (in place {plain[count]:,.1f})"
        if capacity:
            figure += f", all hits {part['all_hits_us'][count]:,.1f}"
        what = "lookup" if capacity else "lookup, no hits: what the probe costs"
        lines.append(row(f"{name}, {what}, {count:,} rows", figure))
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try launches of the kernel, print, keep nothing")
    parser.add_argument("--dry", action="store_true", help="small table on the CPU, keep nothing")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the table")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    sizes = Sizes(arguments.dry, arguments.gib)
    storage = RowStorage.allocate(sizes.rows, HEAD_DIM, home="pageable" if sizes.dry else "pinned")
    need(sizes.dry or storage.home == "pinned", f"the table could not be registered: {storage.report()}")
    rule = FillRule(HEAD_DIM)
    rule.fill(storage, device=sizes.device)
    if arguments.tune:
        tune(sizes, storage)
        return
    figures, lines = measured(sizes, storage, rule)
    if not sizes.dry:
        record("table", "hot_rows", figures=figures, rows=lines)
    for line in lines:
        print(f"{line['measure']}: {line['figure']}")


if __name__ == "__main__":
    main()
