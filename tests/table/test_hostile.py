"""What a stranger or an attacker does to a table: each ends in one clear line, and nothing hangs, dies, leaks or stays behind."""

import errno
import gc
import json
import os
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.hot_gather import bucket_of, mix
from tiny_engram.table import EngramTable, RowStorage
from tiny_engram.table.collision_free import CollisionFreeTier
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.hot import HotRows
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.mapping import RowMapping
from tiny_engram.table.perfect_hash import PerfectHash
from tiny_engram.table.prefetch import Prefetcher
from tiny_engram.table.table_file import INDEX_SUFFIX, KEY, TableFile
from tiny_engram.table.table_writer import write_table


def rows_by_rule(rows, head_dim=32, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


def handles():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def written(path, header, data=bytes(66)):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def headers(prefix="", metadata=None, **more):
    found = {
        f"{prefix}embed.weight": {"dtype": "F8_E4M3", "shape": [2, 32], "data_offsets": [0, 64]},
        f"{prefix}embed.scale": {"dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [64, 66]},
    }
    return {**found, **more, **({} if metadata is None else {"__metadata__": {KEY: metadata}})}


# -- names of files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", ".", "/", "", "a\0b.json"])
def test_names_that_no_file_has(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for action in (TableFile, map_rows, lambda path: write_table(path, rows_by_rule(3)), lambda path: write_pool(path, rows_by_rule(3))):
        with pytest.raises(TableError) as caught:
            action(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(TableError):
        write_table(name, rows_by_rule(3), shard_bytes=1)
    assert os.listdir(tmp_path) == []


def test_folders_links_and_pipes_are_no_tables(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(TableError, match="is a folder"):
        write_table(tmp_path / "folder", rows_by_rule(3), shard_bytes=1)
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    with pytest.raises(TableError, match="is there already"):
        write_table(tmp_path / "link", rows_by_rule(3))
    os.mkfifo(tmp_path / f"pipe{INDEX_SUFFIX}")
    with pytest.raises(TableError, match="the index is no sound JSON"):
        TableFile(tmp_path / f"pipe{INDEX_SUFFIX}")
    with pytest.raises(TableError, match="cannot be made"):
        RowStorage.allocate(3, 32, home="pageable", path="a\0b")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", f"pipe{INDEX_SUFFIX}"]


def test_files_that_cannot_be_read_or_keep_nothing(tmp_path):
    with pytest.raises(TableError, match="/proc/self/mem: cannot be read at byte 0"):
        TableFile("/proc/self/mem")
    with pytest.raises(TableError, match="/dev/zero: keeps nothing of what was written"):
        write_pool("/dev/zero", rows_by_rule(3))


# -- what files say ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (headers("\ud800."), "its header is no sound JSON"),
        (headers(metadata="\ud800"), "its header is no sound JSON"),
        (headers("\x1b[31m."), "holds no table"),
        (headers(q="text"), "'q': 'text' describes none"),
        (headers(q={"dtype": ["U8"], "shape": [], "data_offsets": [0, 0]}), "is unknown"),
        (headers(q={"dtype": "x" * 10_000, "shape": [], "data_offsets": [0, 0]}), "type 'xxx"),
        (headers(**{"n" * 10_000: 3}), "tensor 'nnn"),
        (headers(metadata=json.dumps({"format": "x" * 10_000})), "table format 'xxx"),
    ],
)
def test_headers_that_attack_the_reader(tmp_path, header, words):
    with pytest.raises(TableError, match=words) as caught:
        TableFile(written(tmp_path / "t", header))
    assert len(str(caught.value)) < 800


def test_other_tensors_may_have_types_smaller_than_a_byte(tmp_path):
    other = {"dtype": "F4", "shape": [2, 4], "data_offsets": [66, 70]}
    with TableFile(written(tmp_path / "t", headers(q=other), bytes(70))) as file:
        assert file.rows == 2
    with pytest.raises(TableError, match="4 bytes for F4"):
        TableFile(written(tmp_path / "u", headers(q={**other, "shape": [2, 5]}), bytes(70)))


def test_one_of_several_tables_of_a_file(tmp_path):
    second = {name: {**about, "data_offsets": [66 + at for at in about["data_offsets"]]} for name, about in headers("b.").items()}
    data = [b"".join(part.view(torch.uint8).numpy().tobytes() for part in rows_by_rule(2, seed=seed)) for seed in (1, 2)]
    path = written(tmp_path / "t", headers("a.", **second), b"".join(data))
    for home in ("mapped", "pageable"):
        table = EngramTable.open(path, home, prefix="b.")
        assert torch.equal(table.lookup(torch.arange(2)), FillRule(32, 2).values(torch.arange(2)))
    with pytest.raises(TableError, match="holds 2 tables"):
        EngramTable.open(path)


@pytest.mark.parametrize("prefix", ["a\nb", "\ud800", "\x1b[31m"])
def test_prefixes_that_could_not_be_read_again(tmp_path, prefix):
    with pytest.raises(TableError, match="expected characters that print"):
        write_table(tmp_path / "t", rows_by_rule(3), prefix=prefix)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "rows", [(torch.zeros(3), torch.zeros(3)), (torch.zeros(0, 32), torch.zeros(0, 1)), (rows_by_rule(5)[0], rows_by_rule(9)[1])]
)
def test_rows_that_are_none_are_not_written(tmp_path, rows):
    with pytest.raises(TableError, match="expected"):
        write_table(tmp_path / "t", rows)
    assert os.listdir(tmp_path) == []


# -- while a table is in use ---------------------------------------------------------------------------------------------------


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


def test_a_closed_file_is_not_read_by_the_number_of_another(tmp_path):
    write_table(tmp_path / "t", rows_by_rule(100))
    with TableFile(tmp_path / "t") as file:
        part = file.parts[0]
    with open(tmp_path / "t", "rb"), pytest.raises(TableError, match="Bad file descriptor"):
        part.payload_file.read_into(0, np.empty(4, np.uint8))


def test_a_rule_does_not_fill_a_mapping(tmp_path):
    """The process would be killed."""
    write_pool(tmp_path / "t", rows_by_rule(10))
    with pytest.raises(TableError, match="home 'mapped' is read-only"):
        FillRule(32).fill(map_rows(tmp_path / "t"))


def test_a_copy_that_fails_leaves_no_file(tmp_path):
    def fail(*_):
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        RowStorage.allocate(5, 32, home="pageable").copy_to("pageable", path=tmp_path / "copy", progress=fail)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_a_limit_is_not_full(tmp_path, monkeypatch):
    about = os.statvfs(tmp_path)
    unlimited = os.statvfs_result([*about[:2], 0, 0, 0, *about[5:10]])
    monkeypatch.setattr(os, "fstatvfs", lambda handle: unlimited)
    write_table(tmp_path / "t", rows_by_rule(10))
    with TableFile(tmp_path / "t") as file:
        assert file.verify() == 1


def test_a_second_writer_of_shards_does_not_take_the_index(tmp_path):
    class Slow:
        rows, head_dim = 70_000, 32

        def read(self, first_row, count):
            if not first_row:
                write_table(tmp_path / "t.safetensors", rows_by_rule(5), shard_bytes=1)
            return rows_by_rule(count)

    with pytest.raises(TableError, match="is there already"):
        write_table(tmp_path / "t.safetensors", Slow(), shard_bytes=1)
    assert sorted(os.listdir(tmp_path)) == ["t-00001-of-00001.safetensors", f"t{INDEX_SUFFIX}"]
    with TableFile(tmp_path / f"t{INDEX_SUFFIX}") as file:
        assert file.rows == 5 and file.verify() == 1


def test_a_writer_that_is_killed_is_taken_over(tmp_path):
    path = tmp_path / "t"
    program = f"""
        import os, signal, torch
        from tiny_engram.table.table_writer import write_table
        class Killed:
            rows, head_dim = 10, 32
            def read(self, first_row, count):
                os.kill(os.getpid(), signal.SIGKILL)
        write_table({str(path)!r}, Killed())
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60).returncode == -9
    with pytest.raises(TableError, match="ended before it was complete"):
        map_rows(path)
    write_table(path, rows_by_rule(10))
    assert os.listdir(tmp_path) == ["t"] and map_rows(path).rows == 10


def test_a_fork_prefetches_with_a_thread_of_its_own():
    table = EngramTable.dense(*rows_by_rule(10))
    ahead = Prefetcher(table, capacity=4, columns=2, device="cpu", dtype=torch.float32)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    ahead.start(ids)
    child = os.fork()
    if not child:  # no assertion may leave this block: it would run the rest of the tests twice
        import signal

        signal.alarm(20)
        code = 1
        try:
            ahead.wait()
        except TableError as error:
            ahead.start(ids)
            code = 0 if "forked" in str(error) and ahead.wait().shape == (4, 64) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ahead.wait().shape == (4, 64)


# -- ids and keys --------------------------------------------------------------------------------------------------------------


def test_no_row_is_ever_added_at_the_id_of_none():
    table = EngramTable.virtual(32)
    with pytest.raises(TableError, match="-1 stands for no row"):
        table.add(torch.tensor([5, -1]), *rows_by_rule(2))
    assert len(table) == 0 and not table.lookup(torch.tensor([-1])).any()


def test_devices_that_are_none():
    table = EngramTable.dense(*rows_by_rule(10))
    for action in (
        lambda: Prefetcher(table, capacity=1, columns=1, device="nowhere", dtype=torch.float32),
        lambda: HotRows(table, capacity_rows=1, device="nowhere"),
        lambda: RowStorage.allocate(1, 32, home="device", device="nowhere"),
    ):
        with pytest.raises(TableError, match="on nowhere cannot be had"):
            action()


def test_keys_that_were_chosen_to_collide():
    drawn = torch.unique(torch.randint(0, 1 << 62, (5000,), generator=torch.Generator().manual_seed(0)))
    keys = drawn[torch.from_numpy(bucket_of(mix(drawn.numpy()), 25) == 0)][:100]
    assert keys.numel() == 100
    with pytest.raises(TableError, match="not chosen to collide"):
        PerfectHash.build(keys)
    with pytest.raises(TableError, match=r"torch\.bfloat16"):
        PerfectHash.build(torch.ones(1, dtype=torch.bfloat16))


def test_arguments_of_the_collision_free_tier():
    keys = torch.tensor([[1, 2, 3]])
    with pytest.raises(TableError, match="columns of 1 or more"):
        CollisionFreeTier(keys, torch.zeros(1, 0, 32, dtype=torch.float8_e4m3fn), torch.zeros(1, 0, 1, dtype=torch.uint8), pad_id=0)
    tier = CollisionFreeTier(keys, rows_by_rule(1)[0][:, None], rows_by_rule(1)[1][:, None], pad_id=0)
    one = torch.zeros(1, 2, dtype=torch.int64)
    for more, words in (
        ({"history": one.expand(5, 2)}, "history is torch.int64"),
        ({"history": one.float()}, "history is torch.float32"),
        ({"blocked": one.bool()}, "blocked is torch.bool"),
        ({"history": one, "history_blocked": one}, "history_blocked is torch.int64"),
    ):
        with pytest.raises(TableError, match=words):
            tier.find(keys, **more)
    assert tier.find(keys, history=one, history_blocked=one.bool()).tolist()[0][-1] >= 0
