"""One rank of test_sharding's process groups: `python ranks.py SCENARIO RANK WORLD FOLDER` saves what it saw to FOLDER/RANK.pt.

Scenarios run one after the other in one group: starting processes is what costs.
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tiny_engram.errors import TableError
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.prefetch import Prefetcher
from tiny_engram.table.sharding import ShardedTable, shard_range
from tiny_engram.table.storage import RowStorage
from tiny_engram.table.table_writer import write_table

HEAD_DIM = 64
ROWS = 1003  # divisible by neither 2 nor 3
NEGATIVE_ZEROS, NANS = 500, 1002
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def table(rows=ROWS, layout="record"):
    """The whole table: the rule's rows, one of -0.0 and one of NaN."""
    storage = RowStorage.allocate(rows, HEAD_DIM, home="pageable", layout=layout)
    FillRule(HEAD_DIM).fill(storage)
    if rows > NANS:
        storage.payload.view(torch.uint8)[NEGATIVE_ZEROS] = 0x80
        storage.scale[NANS] = 255
    return storage


def part(first, count, source):
    storage = RowStorage.allocate(count, source.head_dim, home="pageable")
    storage.write(0, *source.read(first, count))
    return storage


def split(rank, world, source):
    first, count = shard_range(source.rows, rank, world)
    return ShardedTable(part(first, count, source), first_row=first, rows_total=source.rows)


def same_ids():
    ids = torch.randint(0, ROWS, (4, 50), generator=torch.Generator().manual_seed(0))
    ids[0, :6] = torch.tensor([0, ROWS - 1, NEGATIVE_ZEROS, NANS, -1, ROWS // 2])
    return ids


def own_ids(rank):
    """Rank 0 asks for nothing, the others for more and more."""
    ids = torch.randint(0, ROWS, (rank, 7), generator=torch.Generator().manual_seed(rank))
    if rank:
        ids[0, :4] = torch.tensor([NANS, -1, NEGATIVE_ZEROS, rank])
    return ids


def said(action):
    try:
        action()
    except TableError as error:
        return str(error)
    return "nothing was raised"


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def lookups(rank, world, folder):
    out = {}
    sharded = split(rank, world, table())
    for dtype in DTYPES:
        out["same", dtype] = sharded.lookup(same_ids(), dtype=dtype)
        out["own", dtype] = sharded.lookup(own_ids(rank), dtype=dtype, same_ids=False)
    out["none"] = sharded.lookup(torch.zeros(0, 3, dtype=torch.int64), same_ids=False)
    outside = torch.tensor([ROWS, 3, -2, 1 << 40])
    out["ignore"] = sharded.lookup(outside, bounds="ignore")
    out["warn"] = sharded.lookup(outside, bounds="warn")
    sharded.lookup(outside[rank : rank + 1], bounds="warn", same_ids=False)
    out["counted"], (out["first"],) = sharded.report().out_of_bounds, warned(sharded.check_bounds)
    out["counted anew"] = sharded.check_bounds()
    ahead = Prefetcher(sharded, capacity=200, columns=1, device="cpu", dtype=torch.bfloat16)
    for ids in (same_ids(), same_ids().flip(0)):
        ahead.start(ids.reshape(-1, 1))
        out.setdefault("prefetched", []).append(ahead.wait().clone())
    place = torch.empty(*own_ids(rank).shape, HEAD_DIM, dtype=torch.float16)
    out["into"] = sharded.lookup(own_ids(rank), out=place, same_ids=False).data_ptr() == place.data_ptr(), place
    out["wrong out"] = said(lambda: sharded.lookup(same_ids(), out=place))
    out["fatal same"] = said(lambda: sharded.lookup(outside))
    out["fatal own"] = said(lambda: sharded.lookup(torch.tensor([1, ROWS if rank == world - 1 else 2]), same_ids=False))
    out["dtypes"] = said(lambda: sharded.lookup(torch.tensor([1]), dtype=DTYPES[min(rank, 1)], same_ids=False))
    turned = same_ids().flip(1) if rank else same_ids()
    for case, ids in {
        "other ids": torch.tensor([[1, 2], [3, 4 + rank]]),
        "other order": turned,
        "other count": torch.arange(3 + rank),
        "one outside": torch.tensor([ROWS if rank else 3]),
    }.items():
        out[case] = said(lambda ids=ids: sharded.lookup(ids))
    out["other same_ids"] = said(lambda: sharded.lookup(torch.tensor([1]), same_ids=rank == 0))
    out["other dtype"] = said(lambda: sharded.lookup(torch.tensor([1]), dtype=DTYPES[min(rank, 1)]))
    out["int32"] = said(lambda: sharded.lookup(torch.tensor([1], dtype=torch.int32)))
    out["after"] = sharded.lookup(same_ids())  # the group is in step after every error
    for rows in (0, 2):
        out["few", rows] = split(rank, world, table(rows)).lookup(torch.tensor([rows - 1, -1]))
    out["file"] = ShardedTable.from_file(folder / "table.safetensors").lookup(same_ids())
    out["file rows"] = ShardedTable.from_file(folder / "table.safetensors").storage.rows
    out["no file"] = said(lambda: ShardedTable.from_file(folder / ("absent" if rank else "table.safetensors")))
    return out


def disagreements(rank, world, folder):
    source = table()
    first, count = shard_range(ROWS, rank, world)
    held = part(first, count, source)

    def make(**changes):
        arguments = {"storage": held, "first_row": first, "rows_total": ROWS} | changes
        return said(lambda: ShardedTable(arguments.pop("storage"), **arguments))

    wider = RowStorage.allocate(count, HEAD_DIM * (1 + rank), home="pageable")
    more = shard_range(ROWS, rank, world + 1)
    for number in range(2 * (rank == 0)):
        write_table(folder / f"digest-{number}", FillRule(HEAD_DIM, number).rows(torch.arange(9)))
    dist.barrier()
    return {
        "rows_total": make(rows_total=ROWS + rank),
        "head_dim": make(storage=wider),
        "mode": make(mode="host_shared" if rank else "split"),
        "gap": make(first_row=first + (10 if rank == world - 1 else 0), rows_total=ROWS + 10),
        "overlap": make(first_row=first - (10 if rank == world - 1 else 0)),
        "too few ranks": make(storage=part(*more, source), first_row=more[0]),
        "shared parts": make(mode="host_shared"),
        "empty and elsewhere": make(storage=part(0, 0 if rank else ROWS, source), first_row=rank and ROWS + 1),
        "digest": said(lambda: ShardedTable.from_file(folder / f"digest-{min(rank, 1)}")),
        "good": make(),
    }


def host_shared(rank, world, folder):
    pool = folder / "pool"

    def load():
        (folder / f"loaded by {rank}").touch()
        return table()

    def fail():
        raise MemoryError("no room")

    failed = said(lambda: ShardedTable.share_on_host(folder / "failed", fail))
    shared = ShardedTable.share_on_host(pool, load)
    different = torch.arange(rank, ROWS, world)  # in another number on each rank: nobody waits for anybody
    out = {"failed": failed, "shared": shared.lookup(different), "ids": different, "bf16": shared.lookup(same_ids(), dtype=torch.bfloat16)}
    maps = Path("/proc/self/maps").read_text()
    return out | {"mapped": str(pool) in maps, "home": shared.storage.home}


def dead_rank(rank, world, folder):
    sharded = split(rank, world, table())
    if rank == world - 1:
        os._exit(1)
    return {"same": said(lambda: sharded.lookup(same_ids())), "own": said(lambda: sharded.lookup(same_ids(), same_ids=False))}


SCENARIOS = {"lookups": lookups, "disagreements": disagreements, "host_shared": host_shared, "dead_rank": dead_rank}


def main():
    names, rank, world, folder = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=20))
    torch.save({name: SCENARIOS[name](rank, world, folder) for name in names}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
