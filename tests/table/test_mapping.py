"""Mapped files that are cut, replaced, closed or forgotten while they are in use: an error or a note, never a dead process."""

import errno
import gc
import os

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.hot import HotRows
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.mapping import RowMapping
from tiny_engram.table.prefetch import Prefetcher
from tiny_engram.table.table_file import INDEX_SUFFIX
from tiny_engram.table.table_writer import write_table


def rows_by_rule(rows, head_dim=32, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


def handles():
    """Open files; sockets come and go with servers that other tests keep."""
    gc.collect()
    return sum(os.path.isfile(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))


def test_a_file_that_is_cut_while_mapped_is_an_error(tmp_path):
    """Reading past its end would kill the process."""
    path, ids = tmp_path / "t", torch.tensor([[19_999]])
    write_pool(path, rows_by_rule(20_000))
    table = EngramTable.open(path)
    ahead = Prefetcher(table, capacity=1, columns=1, device="cpu", dtype=torch.float32)
    hot = HotRows(table, capacity_rows=5, device="cpu", window=10)
    hot.observe(ids)
    os.truncate(path, 8192)
    ahead.start(ids)
    for action in (
        lambda: table.lookup(ids),
        lambda: table.storage.read(19_000, 5),
        lambda: table.copy_to("pageable"),
        ahead.wait,
        lambda: hot.lookup(ids),
        hot.refresh,
        lambda: write_table(tmp_path / "copy", table.storage),
    ):
        with pytest.raises(TableError, match=r"cut from [\d,]+ to 8,192 bytes"):
            action()
    assert "cut from" in table.report().notes[0] and os.listdir(tmp_path) == ["t"]


def test_a_file_that_is_closed_by_another_thread_is_not_called_cut(tmp_path):
    write_pool(tmp_path / "t", rows_by_rule(100))
    storage = map_rows(tmp_path / "t")
    check, payload = storage._check_length, storage.payload.view(torch.uint8)
    assert isinstance(storage._block, RowMapping) and check is not None
    storage._block._close_files()  # as in the midst of a close
    check()
    assert torch.equal(payload, rows_by_rule(100)[0].view(torch.uint8))


def test_a_replaced_file_is_said_in_the_report(tmp_path):
    path, ids = tmp_path / "t", torch.arange(100)
    write_pool(path, rows_by_rule(100))
    table = EngramTable.open(path)
    write_pool(path, rows_by_rule(50, seed=1), replace=True)
    assert torch.equal(table.lookup(ids), FillRule(32).values(ids))
    (note,) = table.report().notes
    assert "replaced or removed since it was mapped" in note


def test_tables_that_nobody_closes_leave_no_handles(tmp_path):
    write_pool(tmp_path / "t", rows_by_rule(100))
    before = handles()
    for _ in range(5):
        EngramTable.open(tmp_path / "t").lookup(torch.tensor([5]))
    assert handles() == before


def test_too_many_files_to_keep_open(tmp_path, monkeypatch):
    write_table(tmp_path / "t.safetensors", rows_by_rule(2 * 65_536), shard_bytes=1)
    before, duplicate, left = handles(), os.dup, [1]

    def limited(handle):
        if not left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return duplicate(handle) if left.pop() else -1

    monkeypatch.setattr(os, "dup", limited)
    with pytest.raises(TableError, match="2 files cannot be kept open .*; raise `ulimit -n`"):
        map_rows(tmp_path / f"t{INDEX_SUFFIX}")
    assert handles() == before
