"""A table for two GPUs of one host: rows split over their memories and summed by NCCL, or one copy in host memory that both read.

    python benchmarks/sharding.py            # two GPUs, 64 GiB of host memory: about a minute
    python benchmarks/sharding.py --dry      # two processes on a CPU by gloo, a small table; keeps no figures

Split: layer 1 of DeepSeek V4.1-Flash in its real dimensions, 384,006,168 rows, 47.2 GiB on each GPU. Shared: as many rows as half of
/dev/shm holds, 33.5 M at most (8.25 GiB). Every rank compares what it reads with the rule that filled the table before anything is
timed. Times are those of the slower rank, from a common start until its rows are there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from full_size import HASH, HEAD_DIM, LAYERS, device, same_bits, say, synchronize
from gpu import need, record, row

from tiny_engram.hashing import NgramHasher
from tiny_engram.table.fill_rule import FillRule, ids_to_check
from tiny_engram.table.sharding import ShardedTable, shard_range
from tiny_engram.table.storage import RowStorage

COUNTS = (6144, 262_144)
SHARED_ROWS = 1 << 25
ROW_BYTES = HEAD_DIM + HEAD_DIM // 32
LOOKUP: dict[str, Any] = {"dtype": torch.bfloat16, "bounds": "ignore"}


def slowest_us(action: Callable[[], object], repeats: int) -> float:
    """Median microseconds of the slower rank."""
    taken = []
    for _ in range(repeats + 3):
        synchronize()
        dist.barrier()
        started = time.perf_counter()
        action()
        synchronize()
        taken.append(time.perf_counter() - started)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, taken[3:])
    return statistics.median(max(times) for times in zip(*everywhere, strict=True)) * 1e6


def random_ids(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed)).to(device())


def check(table: ShardedTable, rule: FillRule, what: str) -> None:
    """The edges and random rows, the same on all ranks and each its own, in another number."""
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32):
        ids = torch.cat((ids_to_check(table.rows_total, ROW_BYTES).to(device()), random_ids(table.rows_total, 10_000, 0)))
        need(same_bits(table.lookup(ids, dtype=dtype), rule.values(ids, dtype)), f"{what}: rows are not the rule's on rank {rank}")
        own = random_ids(table.rows_total, 5000 + 100 * rank, 1 + rank)
        rows = table.lookup(own, dtype=dtype, same_ids=False)
        need(same_bits(rows, rule.values(own, dtype)), f"{what}: rows of its own ids are not the rule's on rank {rank}")


def split_table(rows: int, rule: FillRule) -> ShardedTable:
    first, count = shard_range(rows, dist.get_rank(), dist.get_world_size())
    storage = RowStorage.allocate(count, HEAD_DIM, home="device" if torch.cuda.is_available() else "pageable")
    rule.fill(storage, first_row=first)
    synchronize()
    return ShardedTable(storage, first_row=first, rows_total=rows)


def shared_table(rows: int, rule: FillRule, path: Path) -> ShardedTable:
    def load() -> RowStorage:
        storage = RowStorage.allocate(rows, HEAD_DIM, home="pageable")
        rule.fill(storage, device=device())
        synchronize()
        return storage

    return ShardedTable.share_on_host(path, load)


def rank_main(rank: int, world: int, meeting: str, pool: str, split_rows: int, shared_rows: int, dry: bool) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
        device_id=device() if cuda else None,
    )
    try:
        measure(rank, world, Path(pool), split_rows, shared_rows, dry)
    finally:
        dist.destroy_process_group()


def measure(rank: int, world: int, pool: Path, split_rows: int, shared_rows: int, dry: bool) -> None:
    rule = FillRule(HEAD_DIM, seed=1)
    repeats = 3 if dry else 30

    def tell(text: str) -> None:
        if rank == 0:
            say(text)

    started = time.perf_counter()
    split = split_table(split_rows, rule)
    tell(f"split: {split_rows:,} rows over {world} ranks, filled in {time.perf_counter() - started:.1f} s")
    check(split, rule, "split")
    started = time.perf_counter()
    shared = shared_table(shared_rows, rule, pool)
    tell(f"shared: {shared_rows:,} rows, loaded by one rank and attached in {time.perf_counter() - started:.1f} s")
    tell(str(shared.storage.report()))
    check(shared, rule, "shared")
    figures, lines = [], []
    for count in COUNTS[:1] if dry else COUNTS:
        same, own = random_ids(split_rows, count, 2), random_ids(split_rows, count, 3 + rank)
        here = random_ids(shared_rows, count, 3 + rank)
        times = {
            "split_same_ids": slowest_us(lambda ids=same: split.lookup(ids, **LOOKUP), repeats),
            "split_own_ids": slowest_us(lambda ids=own: split.lookup(ids, same_ids=False, **LOOKUP), repeats),
            "host_shared": slowest_us(lambda ids=here: shared.lookup(ids, **LOOKUP), repeats),
        }
        figures.append({"rows": count, "us": times})
        tell(f"  {count:,} rows: " + ", ".join(f"{name} {value:,.0f} us" for name, value in times.items()))
        figure = f"{times['split_same_ids']:,.0f} us the same ids, {times['split_own_ids']:,.0f} us own ids on each"
        lines.append(row(f"{count:,} rows from {split_rows:,} split over {world} GPUs", figure))
        shared_figure = f"{times['host_shared']:,.0f} us own ids on each"
        lines.append(row(f"{count:,} rows from one copy of {shared_rows:,} in host memory, {world} GPUs", shared_figure))
    if rank == 0 and not dry and world > 1:
        kept = {"ranks": world, "split_rows": split_rows, "shared_rows": shared_rows, "lookups": figures}
        record("table", "sharding", figures=kept, rows=lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=NgramHasher(HASH, LAYERS[0]).rows_total, help="rows of the split table")
    parser.add_argument("--dry", action="store_true", help="a small table, whatever the machine")
    options = parser.parse_args()
    if torch.cuda.is_available() and options.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {options.ranks}: this machine has {torch.cuda.device_count()} GPUs, and each rank takes one")
    # Multicast over NVLink is not to be had on every shared machine; all variants go without.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rows = 100_003 if options.dry else options.rows
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        free = shutil.disk_usage(folder).free
        shared_rows = min(SHARED_ROWS, rows, free // 2 // ROW_BYTES)
        arguments = (options.ranks, f"{folder}/meeting", f"{folder}/pool", rows, shared_rows, options.dry)
        torch.multiprocessing.spawn(rank_main, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
