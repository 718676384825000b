"""What it costs to look rows up in host memory, by path and row count, and how near the planner's choice is to the best.

    python benchmarks/host_lookup.py                # on a machine with a GPU: benchmarks/results/table.json, section host_lookup
    python benchmarks/host_lookup.py --tune         # threads, chunk sizes, a share read in place beside the copies; prints only
    python benchmarks/host_lookup.py --dry          # the same steps with a small table on the CPU, nothing kept

Nothing is timed before every path gave exactly the rows that the filling rule says. Times are wall clock from the call until
the device has the rows, since ids are made on the GPU and the host's part counts; each timing has ids of its own, as the same
ids again would find warm caches. A row is 256 values: 256 B of payload count, the 8 B of scales are moved too. Rows are
returned as bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import device_us, need, record, row

from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.kernels.unique_ids import unique_ids
from tiny_engram.table import host_gather
from tiny_engram.table.costs import VARIABLE, Curve, LookupCosts, default_costs
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.host_gather import gather_records
from tiny_engram.table.planner import LookupPlanner
from tiny_engram.table.storage import RowStorage

HEAD_DIM = 256
COUNTS = (64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1 << 20, 1 << 22)
GB_S, GB_S_AT = 40.0, 262_144
US, US_AT = 35.0, 1024
NEAR = 1.1
DTYPE = torch.bfloat16
Action = Callable[[torch.Tensor, torch.Tensor], object]


class Bench:
    """A device, and the sizes that fit it."""

    def __init__(self, dry: bool):
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self.counts = tuple(count for count in COUNTS if not dry or count <= 4096)
        self.paths = ("device", "cpu_gather") if dry else ("zero_copy", "cpu_gather")

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def table(self, gib: float, layout: Any = "record") -> tuple[RowStorage, FillRule]:
        """A filled table in registered host memory."""
        rows = 20_000 if self.dry else int(gib * 2**30) // (HEAD_DIM + HEAD_DIM // 32)
        started = time.perf_counter()
        storage = RowStorage.allocate(rows, HEAD_DIM, home="pageable" if self.dry else "pinned", layout=layout)
        need(self.dry or storage.home == "pinned", f"the table could not be registered: {storage.report()}")
        rule = FillRule(HEAD_DIM)
        rule.fill(storage, device=self.device)
        print(f"{storage.nbytes / 2**30:.1f} GiB, {layout}: allocated and filled in {time.perf_counter() - started:.1f} s", flush=True)
        return storage, rule

    def times(self, actions: dict[str, Action], draws: Callable[[], torch.Tensor], repeats: int) -> dict[str, float]:
        """Median microseconds of each, in turn with the others, each time with ids that no one has read."""
        out = torch.empty((draws().numel(), HEAD_DIM), dtype=DTYPE, device=self.device)
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(repeats + 1):
            for name, action in actions.items():
                ids = draws()
                self.wait()
                started = time.perf_counter()
                action(ids, out)
                self.wait()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
        return {name: statistics.median(found) * 1e6 for name, found in seconds.items()}

    def ids(self, rows: int, count: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randint(rows, (count,), device=self.device)

    def zipf(self, rows: int, count: int) -> Callable[[], torch.Tensor]:
        """Frequency falls as 1 / rank; ranks are scattered over the table."""
        top = torch.log(torch.tensor(float(rows), dtype=torch.float64)).item()

        def draw() -> torch.Tensor:
            rank = torch.exp(torch.rand(count, dtype=torch.float64, device=self.device) * top).long()
            return rank * 2654435761 % rows

        return draw


def check(bench: Bench, planner: LookupPlanner, rule: FillRule) -> None:
    """Every path against the rule: duplicates, no row, and sizes beyond a chunk."""
    rows = planner.storage.rows
    for count in (1, 1000, 20_000, *(() if bench.dry else (300_000,))):
        ids = torch.cat((bench.ids(rows, count)(), torch.tensor([0, rows - 1, -1, 0], device=bench.device)))
        expected = rule.values(ids, DTYPE)
        for path in (*bench.paths, None):
            for _ in range(3):  # the first two count distinct ids, the third need not
                found = planner.lookup(ids, dtype=DTYPE, path=path)
                need(torch.equal(found, expected), f"{count} rows by {path or 'choice'}")


def looked_up(planner: LookupPlanner, path: Any = None) -> Action:
    return lambda ids, out: planner.lookup(ids, dtype=DTYPE, bounds="ignore", path=path)


def repeats_for(count: int) -> int:
    return 60 if count <= 16_384 else 20 if count <= 262_144 else 5


def sweep(bench: Bench, planner: LookupPlanner, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Each path and the planner's choice at each row count."""
    lines = []
    for count in counts:
        actions = {path: looked_up(planner, path) for path in bench.paths} | {"planner": looked_up(planner)}
        found = bench.times(actions, bench.ids(planner.storage.rows, count), 3 if bench.dry else repeats_for(count))
        best = min(found[path] for path in bench.paths)
        line = {"rows": count, "us": found, "chosen": planner.choose(count), "over_best": found["planner"] / best}
        line["gb_s"] = count * HEAD_DIM / found["planner"] / 1e3
        lines.append(line)
        print(line, flush=True)
    return lines


def replayed_us(planner: LookupPlanner, count: int) -> float:
    """Wall clock of a lookup as decoding does it: captured in a graph, new ids each time."""
    rows, device = planner.storage.rows, planner.device
    ids, out = torch.randint(rows, (count,), device=device), torch.empty((count, HEAD_DIM), dtype=DTYPE, device=device)
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    planner.lookup(ids, bounds="warn", out=out, violations=violations, path="zero_copy")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.lookup(ids, bounds="warn", out=out, violations=violations)
    seconds = []
    for _ in range(100):
        ids.copy_(torch.randint(rows, (count,), device=device))
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    need(torch.equal(out, planner.lookup(ids, dtype=DTYPE)) and violations.tolist() == [0, 0], "a replayed lookup")
    return statistics.median(seconds) * 1e6


def parts(bench: Bench, planner: LookupPlanner, count: int) -> dict[str, float]:
    """Where the path over the CPU spends its time: its steps alone, one after the other, in microseconds."""
    storage, device = planner.storage, planner.device
    pinned = torch.empty((count, storage.row_bytes), dtype=torch.uint8, pin_memory=True)
    staged = torch.empty((count, storage.row_bytes), dtype=torch.uint8, device=device)
    host_ids = torch.empty(count, dtype=torch.int64, pin_memory=True)
    places = torch.arange(count, device=device)

    def gather(ids: torch.Tensor, _: torch.Tensor) -> None:
        gather_records(storage, host_ids, pinned)

    def copy_ids(ids: torch.Tensor, _: torch.Tensor) -> None:
        host_ids.copy_(ids, non_blocking=True)

    def dequantise(ids: torch.Tensor, out: torch.Tensor) -> None:
        row_gather(staged[:, :HEAD_DIM].view(torch.float8_e4m3fn), staged[:, HEAD_DIM:], places, bounds="ignore", out=out)

    actions: dict[str, Action] = {
        "ids to the host": copy_ids,
        "gather": gather,  # of the ids that the step before brought
        "copy": lambda ids, out: staged.copy_(pinned, non_blocking=True),
        "dequantise": dequantise,
        "distinct ids": lambda ids, out: unique_ids(ids),
    }
    return bench.times(actions, bench.ids(storage.rows, count), 15)


def tune(bench: Bench, storage: RowStorage) -> None:
    """Print the path over the CPU by threads, chunk rows and chunks a launch; then with a share read in place beside it."""
    device, cores = bench.device, os.cpu_count() or 1
    for count in (16_384, 65_536, 262_144) if not bench.dry else (4096,):
        for threads in sorted({min(cores, wanted) for wanted in (4, 8, 16)}):
            torch.set_num_threads(threads)
            for chunk_rows in (4096, 8192, 16_384, 32_768, 65_536):
                for group in (1, 2, 4):
                    host_gather._GROUP_CHUNKS = group
                    planner = without_deduplication(storage, device, default_costs(storage.row_bytes, storage.nbytes), chunk_rows)
                    actions = {"read": looked_up(planner, "cpu_gather")}
                    us = bench.times(actions, bench.ids(storage.rows, count), 3 if bench.dry else 11)["read"]
                    rate = count * HEAD_DIM / us / 1e3
                    print(
                        f"{count:>8} rows, {threads:>2} threads, chunk {chunk_rows:>6} x {group}: {us:8.0f} us {rate:6.1f} GB/s", flush=True
                    )
        host_gather._GROUP_CHUNKS = 2
        torch.set_num_threads(cores)
    if bench.dry:
        return
    side, planner = torch.cuda.Stream(), LookupPlanner(storage, device)
    for count in (16_384, 65_536, 262_144):
        for share in (0.0, 0.05, 0.1, 0.15, 0.2):
            cut = int(count * share)

            def both(ids: torch.Tensor, out: torch.Tensor, cut: int = cut) -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    row_gather(storage.payload, storage.scale, ids[:cut], bounds="ignore", out=out[:cut])
                planner.lookup(ids[cut:], bounds="ignore", out=out[cut:], path="cpu_gather")
                torch.cuda.current_stream().wait_stream(side)

            us = bench.times({"both": both}, bench.ids(storage.rows, count), 15)["both"]
            print(f"{count:>8} rows, {share:.0%} read in place meanwhile: {us:8.0f} us", flush=True)


def rendered(lines: list[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """Rows of the result table for one sweep."""
    out = []
    for line in lines:
        us = line["us"]
        measure = f"lookup from host memory, {table}, {line['rows']:,} rows of {HEAD_DIM} B"
        figure = f"{us['planner']:,.0f} us, {line['gb_s']:.1f} GB/s (in place {us['zero_copy']:,.0f}, over the CPU {us['cpu_gather']:,.0f})"
        out.append(row(measure, figure, f"<= {NEAR} x best path", line["over_best"] <= NEAR))
        if table == "16 GiB table" and line["rows"] == GB_S_AT:
            out.append(row(f"{measure}, rate", f"{line['gb_s']:.1f} GB/s", f">= {GB_S:.0f} GB/s", line["gb_s"] >= GB_S))
        if table == "16 GiB table" and line["rows"] == US_AT:
            out.append(row(f"{measure}, time", f"{us['planner']:.1f} us", f"<= {US:.0f} us", us["planner"] <= US))
    return out


def without_deduplication(storage: RowStorage, device: torch.device, costs: LookupCosts, chunk_rows: int | None = None) -> LookupPlanner:
    """A planner for which finding distinct ids never pays; it still counts them in its first two large lookups."""
    never = Curve(((1, 1e8), (2, 1e8)))
    return LookupPlanner(storage, device, costs=dataclasses.replace(costs, deduplicate=never), chunk_rows=chunk_rows)


def zipf_times(bench: Bench, planner: LookupPlanner, count: int) -> dict[str, float]:
    """With and without dropping duplicates."""
    plain = without_deduplication(planner.storage, bench.device, planner.costs)
    learning = LookupPlanner(planner.storage, bench.device, costs=planner.costs)
    draw = bench.zipf(planner.storage.rows, count)
    actions = {"as they come": looked_up(plain, "cpu_gather"), "planner": looked_up(learning)}
    for _ in range(3):  # the share of duplicates is learnt in the first lookups
        for action in actions.values():
            action(draw(), torch.empty((count, HEAD_DIM), dtype=DTYPE, device=bench.device))
    found = bench.times(actions, draw, 15)
    return {**found, "distinct_share": learning.distinct_share}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try threads and chunk sizes, print, keep nothing")
    parser.add_argument("--dry", action="store_true", help="small table on the CPU, keep nothing")
    parser.add_argument("--gib", type=float, default=16.0, help="size of the large table")
    arguments = parser.parse_args(argv)
    bench = Bench(arguments.dry)
    storage, rule = bench.table(arguments.gib)
    if arguments.tune:
        tune(bench, storage)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = str(Path(folder) / "costs.json")
        figures, rows = measured(bench, storage, rule)
    if not bench.dry:
        record("table", "host_lookup", figures=figures, rows=rows)
    for line in rows:
        print(line)


def measured(bench: Bench, storage: RowStorage, rule: FillRule) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All figures and rows of the section."""
    figures, rows = of_large_table(bench, storage, rule)
    storage.close()
    if bench.dry:
        return figures, rows
    for name, gib, layout in (("split_16_gib", 16.0, "split"), ("record_1_gib", 1.0, "record")):
        other, _ = bench.table(gib, layout)
        planner = LookupPlanner(other, bench.device)
        check(bench, planner, rule)
        figures[name] = sweep(bench, planner, (US_AT, 16_384, GB_S_AT) if layout == "split" else bench.counts[:-1])
        rows += rendered(figures[name], "1 GiB table" if layout == "record" else "16 GiB table in two arrays")
        other.close()
    return figures, rows


def of_large_table(bench: Bench, storage: RowStorage, rule: FillRule) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The sweep with targets, and where the time goes."""
    planner = LookupPlanner(storage, bench.device)
    check(bench, planner, rule)
    print(planner.explain(), flush=True)
    figures: dict[str, Any] = {"record_16_gib": sweep(bench, planner, bench.counts)}
    if bench.dry:
        return figures, []
    figures["costs"] = planner.costs.to_dict()
    rows = rendered(figures["record_16_gib"], "16 GiB table")
    figures["parts_us"] = parts(bench, planner, GB_S_AT)
    print(figures["parts_us"], flush=True)
    replayed = figures["replayed_us"] = {count: replayed_us(planner, count) for count in (64, US_AT)}
    measure = f"the same in a captured graph, {US_AT:,} rows"
    rows.append(row(measure, f"{replayed[US_AT]:.1f} us", f"<= {US:.0f} us", replayed[US_AT] <= US))
    drawn = itertools.cycle([bench.ids(storage.rows, US_AT)() for _ in range(64)])
    figures["device_us"] = device_us(lambda: planner.lookup(next(drawn), dtype=DTYPE, bounds="ignore", path="zero_copy"))
    for count in (GB_S_AT, 1 << 20):
        found = figures[f"zipf_{count}"] = zipf_times(bench, planner, count)
        text = f"{found['planner']:,.0f} us ({found['as they come']:,.0f} with duplicates fetched again)"
        rows.append(row(f"Zipf ids, {count:,} rows, {found['distinct_share']:.0%} distinct", text))
    return figures, rows


if __name__ == "__main__":
    main()
