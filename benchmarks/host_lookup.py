"""What it costs to look rows up in host memory, by path and row count, and how near the planner's choice is to the best.

    python benchmarks/host_lookup.py                # on a machine with a GPU: benchmarks/results/table.json, section host_lookup
    python benchmarks/host_lookup.py --tune         # the native gather by threads, prefetching and chunk sizes; prints only
    python benchmarks/host_lookup.py --dry          # the same steps with a small table on the CPU, nothing kept

Nothing is timed before every path gave exactly the rows that the filling rule says. Times are wall clock from the call until
the device has the rows, since ids are made on the GPU and the host's part counts; each timing has ids of its own, as the same
ids again would find warm caches. The few rows of a decoding step are read in captured graphs, so there the device's time of one
lookup among others in a graph counts, and the eager call's wall clock stands beside it. A row is 256 values: 256 B of payload
count, the 8 B of scales are moved too. Rows are returned as bfloat16.
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
from gpu import need, record, row

from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.kernels.unique_ids import unique_ids
from tiny_engram.table import host_gather, native_gather
from tiny_engram.table.costs import VARIABLE, Curve, LookupCosts, default_costs
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.host_gather import HostGather, gather_records, gathering
from tiny_engram.table.native_gather import GatherThreads, Tuning
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

    def times(
        self, actions: dict[str, Action], draws: Callable[[], torch.Tensor], repeats: int, *, rotate: bool = True
    ) -> dict[str, float]:
        """Median microseconds of each, in turn with the others, each time with ids that no one has read.

        The order rotates, unless one needs what another left: after the CPU's gather, whose threads are still awake, every
        action takes longer.
        """
        out = torch.empty((draws().numel(), HEAD_DIM), dtype=DTYPE, device=self.device)
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        order = list(actions.items())
        for turn in range(repeats + 1):
            if rotate:
                order.append(order.pop(0))
            for name, action in order:
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


def captured_us(planner: LookupPlanner, count: int, *, calls: int = 20, repeats: int = 15) -> float:
    """Median device time of one lookup among ``calls`` of them in a captured graph, each with ids of its own in every replay."""
    rows, device = planner.storage.rows, planner.device
    ids = torch.randint(rows, (calls, count), device=device)
    out = torch.empty((calls, count, HEAD_DIM), dtype=DTYPE, device=device)
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    planner.lookup(ids[0], bounds="warn", out=out[0], violations=violations, path="zero_copy")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            planner.lookup(ids[turn], bounds="warn", out=out[turn], violations=violations)
    taken = []
    for _ in range(repeats + 2):
        ids.copy_(torch.randint(rows, ids.shape, device=device))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / calls)
    need(torch.equal(out, planner.lookup(ids, dtype=DTYPE)) and violations.tolist() == [0, 0], "a replayed lookup")
    return statistics.median(taken[2:])


def parts(bench: Bench, planner: LookupPlanner, count: int) -> dict[str, float]:
    """Where the path over the CPU spends its time: its steps alone, one after the other, in microseconds."""
    storage, device = planner.storage, planner.device
    pinned = torch.empty((count, storage.row_bytes), dtype=torch.uint8, pin_memory=True)
    staged = torch.empty((count, storage.row_bytes), dtype=torch.uint8, device=device)
    host_ids = torch.empty(count, dtype=torch.int64, pin_memory=True)
    places = torch.arange(count, device=device)

    gatherers = native_gather.shared_threads()

    def gather(ids: torch.Tensor, _: torch.Tensor) -> None:
        if gatherers is not None:
            gather_all(gatherers, storage, host_ids, pinned)

    def select(ids: torch.Tensor, _: torch.Tensor) -> None:
        gather_records(storage, host_ids, pinned)

    def copy_ids(ids: torch.Tensor, _: torch.Tensor) -> None:
        host_ids.copy_(ids, non_blocking=True)

    def dequantise(ids: torch.Tensor, out: torch.Tensor) -> None:
        row_gather(staged[:, :HEAD_DIM].view(torch.float8_e4m3fn), staged[:, HEAD_DIM:], places, bounds="ignore", out=out)

    actions: dict[str, Action] = {
        "ids to the host": copy_ids,
        "gather": gather,  # of the ids that the step before brought
        "ids to the host again": copy_ids,
        "gather by index_select": select,
        "copy": lambda ids, out: staged.copy_(pinned, non_blocking=True),
        "dequantise": dequantise,
        "distinct ids": lambda ids, out: unique_ids(ids),
    }
    return bench.times(actions, bench.ids(storage.rows, count), 15, rotate=False)


def gather_all(pool: GatherThreads, storage: RowStorage, ids: torch.Tensor, out: torch.Tensor) -> None:
    """The native gather alone, in chunks that nothing waits for."""
    chunk_rows = 8192 if out.shape[0] % 8192 == 0 else out.shape[0]
    with pool.job(storage, ids, out, chunk_rows=chunk_rows) as job:
        for chunk in range(out.shape[0] // chunk_rows):
            job.wait(chunk)


def tune(bench: Bench, storage: RowStorage) -> None:
    """Print the native gather, alone and in a lookup, by how it reads memory and by threads; then lookups by share and by chunks."""
    library, most = native_gather.load(), native_gather.thread_count()
    count = GB_S_AT if not bench.dry else 4096
    repeats = 3 if bench.dry else 9
    staged = torch.empty((count, storage.row_bytes), dtype=torch.uint8, pin_memory=not bench.dry)
    read: dict[tuple[int, Tuning], float] = {}
    for threads, ahead, far in itertools.product((8, 12, 16), (4, 8, 16, 32), (False, True)):
        tuning = Tuning(ahead=ahead, far=far)
        pool = GatherThreads(library, min(threads, most), tuning)
        planner = planner_with(storage, bench.device, pool)
        alone = bench.times({"": lambda ids, _, pool=pool: gather_all(pool, storage, ids.cpu(), staged)}, bench.ids(storage.rows, count), 3)
        copied = bench.times({"": lambda ids, _: ids.cpu()}, bench.ids(storage.rows, count), 3)
        us = read[threads, tuning] = bench.times({"": looked_up(planner, "cpu_gather")}, bench.ids(storage.rows, count), repeats)[""]
        print(
            f"{count} rows, {pool.count:>2} threads, {tuning}: gather {alone[''] - copied['']:6.0f} us, "
            f"lookup {us:6.0f} us, {count * HEAD_DIM / us / 1e3:5.1f} GB/s",
            flush=True,
        )
        pool.close()
    threads, tuning = min(read, key=lambda key: read[key])
    print(f"best: {threads} threads, {tuning}", flush=True)
    pool = GatherThreads(library, min(threads, most), tuning)
    for count, chunk_rows in itertools.product(
        (16_384, 65_536, 262_144, 1 << 20) if not bench.dry else (4096,), (2048, 4096, 8192, 16_384, 32_768)
    ):
        for bays, group in ((4, 1), (4, 2), (4, 4), (8, 2)):
            host_gather._BAYS, host_gather._GROUP_CHUNKS = bays, group
            planner = planner_with(storage, bench.device, pool, chunk_rows)
            us = bench.times({"": looked_up(planner, "cpu_gather")}, bench.ids(storage.rows, count), repeats)[""]
            rate = count * HEAD_DIM / us / 1e3
            print(f"{count:>8} rows, chunk {chunk_rows:>6}, {bays} bays, {group} a launch: {us:6.0f} us {rate:5.1f} GB/s", flush=True)


def planner_with(
    storage: RowStorage, device: torch.device, pool: GatherThreads, chunk_rows: int | None = None, share: float = 0.0
) -> LookupPlanner:
    """A planner whose rows these threads gather, but for a share that the device reads in place."""
    planner = without_deduplication(storage, device, default_costs(storage.row_bytes, storage.nbytes))
    planner.__dict__["_gather"] = HostGather(storage, device, chunk_rows=chunk_rows, threads=pool)
    planner.__dict__["_share"] = share
    planner._large_lookups = 2  # past the lookups whose distinct ids are counted
    return planner


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
    parser.add_argument("--tune", action="store_true", help="try threads, prefetching and chunk sizes, print, keep nothing")
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
    figures["costs"], figures["gathering"] = planner.costs.to_dict(), gathering()
    rows = rendered(figures["record_16_gib"], "16 GiB table")
    figures["parts_us"] = parts(bench, planner, GB_S_AT)
    print(figures["parts_us"], flush=True)
    captured = figures["captured_us"] = {count: captured_us(planner, count) for count in (64, 256, US_AT, 4096)}
    eager = next(line["us"]["planner"] for line in figures["record_16_gib"] if line["rows"] == US_AT)
    print(f"captured: {captured}", flush=True)
    measure = f"lookup from host memory, 16 GiB table, {US_AT:,} rows of {HEAD_DIM} B, device time in a captured graph"
    figure = f"{captured[US_AT]:.1f} us (called eagerly, by wall clock: {eager:.1f} us)"
    rows.append(row(measure, figure, f"<= {US:.0f} us", captured[US_AT] <= US))
    for count in (GB_S_AT, 1 << 20):
        found = figures[f"zipf_{count}"] = zipf_times(bench, planner, count)
        text = f"{found['planner']:,.0f} us ({found['as they come']:,.0f} with duplicates fetched again)"
        rows.append(row(f"Zipf ids, {count:,} rows, {found['distinct_share']:.0%} distinct", text))
    return figures, rows


if __name__ == "__main__":
    main()
