"""Rows gathered by the CPU in chunks: the steps that run on a device, here without streams."""

import pytest
import torch

from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.host_gather import HostGather, chunks, gather_records
from tiny_engram.table.storage import RowStorage

CPU = torch.device("cpu")


def filled(rows: int, head_dim: int = 64, layout="record", home="pageable") -> tuple[RowStorage, FillRule]:
    storage = RowStorage.allocate(rows, head_dim, home=home, layout=layout)
    rule = FillRule(head_dim)
    rule.fill(storage)
    return storage, rule


@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("head_dim", [32, 256])
def test_gathered_bytes_are_the_rows_bytes(layout, head_dim):
    storage, rule = filled(50, head_dim, layout)
    ids = torch.tensor([49, 0, 7, 7, 31])
    out = torch.zeros(5, storage.row_bytes, dtype=torch.uint8)
    gather_records(storage, ids, out)
    assert torch.equal(out, rule.records(ids))


@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_nothing_outside_the_table_is_read(layout, bad):
    storage, _ = filled(50, layout=layout)
    with pytest.raises(IndexError):
        gather_records(storage, torch.tensor([3, bad]), torch.zeros(2, storage.row_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 1000])
@pytest.mark.parametrize("largest", [1, 3, 16, 64])
def test_chunks_cover_all_rows_in_order(count, largest):
    pieces = list(chunks(count, largest))
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in pieces]
    assert all(size <= largest for size in sizes) and sizes[:-1] == sorted(sizes[:-1])
    assert count < largest or sizes[0] == max(1, largest // 4)


@pytest.mark.parametrize("count", [0, 1, 9, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_in_chunks(count, dtype):
    storage, rule = filled(200)
    gather = HostGather(storage, CPU, chunk_rows=8)
    dice = torch.Generator().manual_seed(count)
    for _ in range(2):  # the second time over used staging
        ids = torch.randint(0, 200, (count,), generator=dice)
        absent = torch.rand(count, generator=dice) < 0.2
        out = torch.full((count, 64), float("nan"), dtype=dtype)
        gather.read(ids, out)
        assert torch.equal(out, rule.values(ids, dtype))
        gather.read(ids, out, absent)
        assert torch.equal(out, rule.values(ids.masked_fill(absent, -1), dtype))


def test_expand_fetches_each_row_once():
    storage, rule = filled(200)
    gather = HostGather(storage, CPU, chunk_rows=8)
    for count in (5, 60, 40):
        ids = torch.randperm(200)[:count]
        inverse = torch.randint(-1, count, (300,))
        out = torch.full((300, 64), float("nan"))
        gather.expand(ids, inverse, out)
        assert torch.equal(out, rule.values(torch.where(inverse < 0, -1, ids[inverse])))


def test_staging_does_not_grow_with_the_lookup():
    storage, _ = filled(200)
    gather = HostGather(storage, CPU, chunk_rows=8)
    gather.read(torch.zeros(5000, dtype=torch.int64), torch.empty(5000, 64))
    assert 0 < gather.staging_bytes <= 3 * 8 * storage.row_bytes
    assert HostGather(storage, CPU).chunk_rows * storage.row_bytes <= 8 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("home", ["pinned", "pageable"])
def test_chunks_do_not_overwrite_each_other_on_streams(layout, home):
    storage, rule = filled(5000, 256, layout, home)
    device = torch.device("cuda", 0)
    gather = HostGather(storage, device, chunk_rows=512)
    for turn in range(20):  # nothing waits between the lookups: staging is reused while copies are in flight
        ids = torch.randint(0, 5000, (20_011,), generator=torch.Generator().manual_seed(turn))
        out = torch.empty(20_011, 256, device=device)
        gather.read(ids, out)
        inverse = torch.arange(20_011, device=device).flip(0)
        flipped = torch.empty_like(out)
        gather.expand(ids, inverse, flipped)
        assert torch.equal(out.cpu(), rule.values(ids)), turn
        assert torch.equal(flipped, out.flip(0)), turn
