import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tiny_engram.errors import TableError
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.sharding import ShardedTable, _checksum, shard_range
from tiny_engram.table.storage import RowStorage

SCRIPT = Path(__file__).with_name("ranks.py")
_spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
assert _spec is not None and _spec.loader is not None
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def run_ranks(scenarios, world, folder, dying=()):
    """What each rank saw, in the order of ranks; the ranks of `dying` end with 1 and say nothing."""
    command = [sys.executable, str(SCRIPT), ",".join(scenarios)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[2])}
    started = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    for rank, (process, error) in enumerate(zip(started, errors, strict=True)):
        assert process.returncode == (1 if rank in dying else 0), f"rank {rank}: {error}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(world) if rank not in dying]


@pytest.fixture(scope="module", params=[2, 3])
def seen(request, tmp_path_factory):
    """Per rank, scenario -> what it saw, in groups of 2 and 3."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = ranks.table()
    save_file({"embed.weight": whole.payload.contiguous(), "embed.scale": whole.scale.contiguous()}, folder / "table.safetensors")
    names = ["lookups", "disagreements"] + (["host_shared"] if request.param == 3 else [])
    return run_ranks(names, request.param, folder)


def unsharded(ids, dtype=torch.float32):
    whole = ranks.table()
    return row_gather(whole.payload, whole.scale, ids, dtype=dtype)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 384_016_682])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_ranges_cover_every_row_once(rows, world):
    ranges = [shard_range(rows, rank, world) for rank in range(world)]
    assert ranges[0][0] == 0 and sum(count for _, count in ranges) == rows
    assert all(first + count == after for (first, count), (after, _) in zip(ranges, ranges[1:], strict=False))
    assert max(count for _, count in ranges) - min(count for _, count in ranges) <= 1


@pytest.mark.parametrize(("rows", "rank", "world"), [(5, 3, 3), (5, -1, 3), (-1, 0, 1), (5, 0, 0)])
def test_no_range_for_a_rank_that_is_none(rows, rank, world):
    with pytest.raises(TableError, match="expected a rank"):
        shard_range(rows, rank, world)


@pytest.mark.parametrize("dtype", ranks.DTYPES)
def test_every_rank_gets_the_bits_of_the_whole_table(seen, dtype):
    wanted = unsharded(ranks.same_ids(), dtype)
    assert bool((wanted.view(torch.uint8) == 0x80).any()) and bool(wanted.isnan().any())
    for rank, saw in enumerate(seen):
        assert same_bits(saw["lookups"]["same", dtype], wanted)
        assert same_bits(saw["lookups"]["own", dtype], unsharded(ranks.own_ids(rank), dtype))


def test_nothing_asked_and_almost_nothing_there(seen):
    for saw in seen:
        assert saw["lookups"]["none"].shape == (0, 3, ranks.HEAD_DIM)
        assert torch.equal(saw["lookups"]["few", 0], torch.zeros(2, ranks.HEAD_DIM))
        assert torch.equal(saw["lookups"]["few", 2], FillRule(ranks.HEAD_DIM).values(torch.tensor([1, -1])))


def test_ids_outside_the_table(seen):
    wanted = unsharded(torch.tensor([-1, 3, -1, -1]))
    # Every rank sees the four ids once, and in the second lookup those of all ranks.
    count = 3 + (1 if len(seen) == 2 else 2)
    for saw in (s["lookups"] for s in seen):
        assert same_bits(saw["ignore"], wanted) and same_bits(saw["warn"], wanted)
        assert saw["counted"] == count and saw["counted anew"] == 0
        assert f"{count} row ids looked up on cpu are not in the table, the first was {ranks.ROWS}" in saw["first"]
        assert f"row id {ranks.ROWS} is outside" in saw["fatal same"] and f"row id {ranks.ROWS} is outside" in saw["fatal own"]


def test_a_prefetcher_takes_it(seen):
    for rank, saw in enumerate(s["lookups"] for s in seen):
        for got, ids in zip(saw["prefetched"], (ranks.same_ids(), ranks.same_ids().flip(0)), strict=True):
            assert same_bits(got, unsharded(ids.reshape(-1), torch.bfloat16))
        same_memory, into = saw["into"]
        assert same_memory and same_bits(into, unsharded(ranks.own_ids(rank), torch.float16))
        assert "expected contiguous [4, 50, 64]" in saw["wrong out"]


def test_a_group_is_in_step_after_errors(seen):
    for saw in (s["lookups"] for s in seen):
        assert "rank 0 torch.float32 fatal same_ids=False, rank 1 torch.bfloat16 fatal same_ids=False" in saw["dtypes"]
        assert "torch.int32" in saw["int32"]
        assert same_bits(saw["after"], unsharded(ranks.same_ids()))


@pytest.mark.parametrize("case", ["other ids", "other order", "other count", "one outside"])
def test_other_ids_on_a_rank_are_an_error_on_all_of_them(seen, case):
    for saw in (s["lookups"] for s in seen):
        assert "ranks ask for different row ids (rank 0 " in saw[case] and "pass same_ids=False where" in saw[case], saw[case]


def test_ranks_that_ask_in_different_ways_all_hear_of_it(seen):
    for saw in (s["lookups"] for s in seen):
        assert "rank 0 torch.float32 fatal same_ids=True, rank 1 torch.float32 fatal same_ids=False" in saw["other same_ids"]
        assert "rank 0 torch.float32 fatal same_ids=True, rank 1 torch.bfloat16 fatal same_ids=True" in saw["other dtype"]
    assert len({int(_checksum(ids)) for ids in (torch.arange(2), torch.tensor([1, 0]), torch.tensor([3, -1]), torch.zeros(2).long())}) == 4


def test_each_rank_reads_its_part_of_a_file(seen):
    for rank, saw in enumerate(s["lookups"] for s in seen):
        assert same_bits(saw["file"], unsharded(ranks.same_ids()))
        assert saw["file rows"] == shard_range(ranks.ROWS, rank, len(seen))[1]
        assert f"failed on {len(seen) - 1} of {len(seen)} ranks" in saw["no file"] and "rank 1: TableError" in saw["no file"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("rows_total", r"rows_total differs between ranks \(rank 0: 1003, rank 1: 1004"),
        ("head_dim", r"head_dim differs between ranks \(rank 0: 64, rank 1: 128"),
        ("mode", "mode differs between ranks"),
        ("gap", "belong to no rank"),
        ("overlap", "belong to two ranks"),
        ("too few ranks", "end at row [0-9]+ of 1003"),
        ("shared parts", "hold a part of 1003 rows"),
        ("empty and elsewhere", r"rank 1 holds rows 1004\.\.1003 of 1003"),
        ("digest", r"digests differ between ranks \(rank 0: [0-9a-f]{16}, rank 1: "),
        ("good", "nothing was raised"),
    ],
)
def test_ranks_that_do_not_agree_all_hear_of_it(seen, case, message):
    for saw in seen:
        assert re.search(message, saw["disagreements"][case]), saw["disagreements"][case]


@pytest.mark.parametrize("seen", [3], indirect=True)
def test_one_copy_for_a_host(seen):
    for saw in (s["host_shared"] for s in seen):
        assert same_bits(saw["shared"], unsharded(saw["ids"]))
        assert same_bits(saw["bf16"], unsharded(ranks.same_ids(), torch.bfloat16))
        assert saw["mapped"] and saw["home"] == "mapped"
        assert "failed on 1 of 3 ranks (rank 0: MemoryError: no room)" in saw["failed"]


def test_a_rank_that_died_is_an_error(tmp_path):
    (saw,) = run_ranks(["dead_rank"], 2, tmp_path, dying=[1])
    assert "not all 2 ranks took part" in saw["dead_rank"]["same"] and "not all 2 ranks took part" in saw["dead_rank"]["own"]


def test_needs_a_group():
    with pytest.raises(TableError, match="no process group"):
        ShardedTable(ranks.table(3), first_row=0, rows_total=3)


def gpu_rank(rank, world, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    rule, rows = FillRule(256), 100_003
    first, count = shard_range(rows, rank, world)
    for home in ("device", "pinned"):
        storage = RowStorage.allocate(count, 256, home=home)
        rule.fill(storage, first_row=first, device="cuda")
        sharded = ShardedTable(storage, first_row=first, rows_total=rows)
        for dtype in (torch.float32, torch.bfloat16):
            ids = torch.randint(-1, rows, (3, 5000), generator=torch.Generator().manual_seed(0)).cuda()
            assert torch.equal(sharded.lookup(ids, dtype=dtype), rule.values(ids, dtype))
            own = ids[:, rank * 7 : 2000 + rank * 1000]
            assert torch.equal(sharded.lookup(own, dtype=dtype, same_ids=False), rule.values(own, dtype))
        with pytest.raises(TableError, match="row id 100003 is outside"):
            sharded.lookup(torch.tensor([5, rows], device="cuda"))
        with pytest.raises(TableError, match="on a device that the group's backend serves"):
            sharded.lookup(torch.tensor([5]))
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_gpus_or_one_by_nccl():
    world = min(torch.cuda.device_count(), 2)
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys, test_sharding; test_sharding.gpu_rank(int(sys.argv[1]), {world}, {folder!r})"
        # NVLink multicast is not to be had on every shared machine, and a few rows do not need it.
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": f"{SCRIPT.parents[2]}:{SCRIPT.parent}"}
        started = [
            subprocess.Popen([sys.executable, "-c", code, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        errors = [process.communicate(timeout=180)[1] for process in started]
        assert [process.returncode for process in started] == [0] * world, "\n".join(errors)
