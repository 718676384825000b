"""Rows gathered by the CPU in chunks: the steps that run on a device, here without streams."""

import warnings

import pytest
import torch

from tiny_engram.table import host_gather, native_gather
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.host_gather import HostGather, gather_records, gathering
from tiny_engram.table.native_gather import VARIABLE
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


def test_index_select_by_words_gives_the_same_bytes():
    for head_dim, count in ((256, 9000), (32, 9000)):  # rows of 264 B are words of 8 bytes, rows of 33 B are not
        storage, rule = filled(300, head_dim)
        ids = torch.randint(0, 300, (count,))
        out = torch.zeros(count, storage.row_bytes, dtype=torch.uint8)
        gather_records(storage, ids, out)
        assert torch.equal(out, rule.records(ids))


@pytest.fixture(params=["native", "index_select"], autouse=True)
def gathered_by(request, monkeypatch):
    """Both ways to gather; without a C compiler a CUDA machine has the second alone."""
    if request.param == "index_select":
        monkeypatch.setenv(VARIABLE, "0")
    assert gathering().startswith("native" if request.param == "native" else "torch.index_select (no native gather: TINY_ENGRAM_NATIVE=0)")
    return request.param


def test_that_a_compiler_lacks_is_said_once(monkeypatch, gathered_by):
    monkeypatch.setattr(host_gather, "_warned", False)
    if gathered_by == "index_select":  # asked for
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            host_gather._warn()
        return
    monkeypatch.setattr(native_gather, "_shared", None)
    monkeypatch.setattr(native_gather, "_reason", "no C compiler found")
    with pytest.warns(RuntimeWarning, match="slower: no C compiler found; install a C compiler, or set TINY_ENGRAM_NATIVE=0") as said:
        host_gather._warn()
        host_gather._warn()
    assert len(said) == 1 and gathering() == "torch.index_select (no native gather: no C compiler found)"


def test_chunks_go_by_the_lookups_size(gathered_by):
    gather = HostGather(filled(10)[0], CPU)
    sizes = [gather.chunk_rows(count) for count in (1, 1000, 16_384, 65_536, 100_000, 262_144, 1 << 20)]
    native = [8192, 8192, 8192, 16_384, 32_768, 32_768, 32_768]
    assert sizes == (native if gathered_by == "native" else [1, 1024, 16_384, 65_536, 65_536, 65_536, 65_536])
    assert HostGather(filled(10)[0], CPU, chunk_rows=5).chunk_rows(1000) == 5


def test_ids_outside_are_refused_and_the_next_lookup_is_right(gathered_by):
    storage, rule = filled(200)
    gather = HostGather(storage, CPU, chunk_rows=8)
    ids = torch.arange(100)
    out = torch.empty(100, 64)
    for bad in (-1, 200, 2**62, -(2**63)):
        with pytest.raises(IndexError):
            gather.read(ids.where(ids != 77, bad), out)
        gather.read(ids, out)
        assert torch.equal(out, rule.values(ids))


def test_a_lookup_broken_off_leaves_nothing_open():
    storage, rule = filled(200)
    gather = HostGather(storage, CPU, chunk_rows=8)
    ids, out = torch.arange(100), torch.empty(100, 64)
    for _ in range(3):
        with pytest.raises((ValueError, RuntimeError)):
            gather.read(ids, torch.empty(100, 32))
        gather.read(ids, out)
        assert torch.equal(out, rule.values(ids))


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
    assert 0 < gather.staging_bytes <= 4 * 8 * storage.row_bytes
    large = HostGather(storage, CPU)
    large.read(torch.zeros(300_000, dtype=torch.int64), torch.empty(300_000, 64))
    assert 0 < large.staging_bytes <= (1 << 17) * storage.row_bytes


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
