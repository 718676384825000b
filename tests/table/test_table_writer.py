"""Writing tables: whole or not at all, by one writer at a time, never over what is there."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tiny_engram.errors import TableError
from tiny_engram.table import EngramTable, RowStorage
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.table_digest import BLOCK_ROWS
from tiny_engram.table.table_file import INDEX_SUFFIX, TableFile
from tiny_engram.table.table_writer import draft_path, write_table


def rows_by_rule(rows, head_dim=32, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


class Failing:
    """A source that gives out after some rows."""

    rows, head_dim = 3 * BLOCK_ROWS, 32

    def __init__(self, error=None, short=False):
        self.error, self.short = error, short

    def read(self, first_row, count):
        if first_row < BLOCK_ROWS:
            return rows_by_rule(count)
        if self.short:
            return rows_by_rule(count - 1)
        raise self.error or RuntimeError("lost")


def test_nothing_is_left_of_a_failed_write(tmp_path):
    path = tmp_path / "t.safetensors"
    for source, error, words in (
        (Failing(), RuntimeError, "lost"),
        (Failing(KeyboardInterrupt()), KeyboardInterrupt, None),
        (Failing(OSError(28, "No space left on device")), TableError, "cannot write the table .No space left"),
        (Failing(short=True), TableError, "the source gave .* expected float8_e4m3fn"),
    ):
        for shard_bytes in (None, 1):
            with pytest.raises(error, match=words):
                write_table(path, source, shard_bytes=shard_bytes)
            assert list(tmp_path.iterdir()) == []
    write_table(path, rows_by_rule(9))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="lost"):
        write_table(path, Failing(), replace=True)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("spoil", "stay"),
    [
        (None, []),
        ("holds more", ["t-00002-of-00002.safetensors"]),
        ("no table", ["t-00001-of-00002.safetensors", "t-00002-of-00002.safetensors"]),
    ],
)
def test_shards_that_a_smaller_number_leaves_over(tmp_path, spoil, stay):
    """Only files that the old index names, and that hold nothing else, are ours to remove."""
    path, index = tmp_path / "t.safetensors", tmp_path / f"t{INDEX_SUFFIX}"
    write_table(path, rows_by_rule(BLOCK_ROWS + 5), shard_bytes=1)
    second = tmp_path / "t-00002-of-00002.safetensors"
    if spoil == "holds more":
        with safe_open(second, "pt") as file:
            held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        save_file({**held, "lm_head.weight": torch.zeros(2)}, second, metadata)
    elif spoil:
        index.write_text("{}")
    write_table(path, rows_by_rule(7), shard_bytes=1, replace=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["t-00001-of-00001.safetensors", *stay, index.name])
    with TableFile(index) as file:
        assert file.rows == 7 and file.verify() == 1


def test_refuses_to_overwrite(tmp_path):
    path = tmp_path / "t.safetensors"
    write_table(path, rows_by_rule(700))
    before = path.read_bytes()
    with pytest.raises(TableError, match=r"is there already, .* pass replace=True \(--force\)"):
        write_table(path, rows_by_rule(5))
    assert path.read_bytes() == before
    write_table(path, rows_by_rule(5), replace=True)
    with TableFile(path) as file:
        assert file.rows == 5
    write_table(tmp_path / "p.safetensors", rows_by_rule(5), shard_bytes=1)
    with pytest.raises(TableError, match=r"p\.safetensors\.index\.json: is there already"):
        write_table(tmp_path / "p.safetensors", rows_by_rule(6), shard_bytes=1)
    write_table(tmp_path / "p.safetensors", rows_by_rule(6), shard_bytes=1, replace=True)
    with TableFile(tmp_path / "p.safetensors.index.json") as file:
        assert file.rows == 6 and file.verify() == 1
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "where", "cannot be made")):
        with pytest.raises(TableError, match=words):
            write_table(path, rows_by_rule(5), replace=True)
    table = EngramTable.dense(*rows_by_rule(5))
    with pytest.raises(TableError, match=r"EngramTable gives no rows by range: expected a storage \(\.storage of an EngramTable\)"):
        write_table(tmp_path / "q", table)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TableError, match="shards of 0 bytes"):
        write_table(tmp_path / "q", rows_by_rule(5), shard_bytes=0)
    with pytest.raises(TableError, match="multiple of 32"):
        write_table(tmp_path / "q", (torch.zeros(2, 33).to(torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8)))


def test_no_room_is_said_before_any_row_is_written(tmp_path):
    class Huge:
        rows, head_dim = 2**40, 256

        def read(self, first_row, count):
            raise AssertionError("no row may be read")

    with pytest.raises(TableError, match="needs [0-9,]+ bytes, [0-9,]+ are free|header would take"):
        write_table(tmp_path / "t.safetensors", Huge())

    class Large(Huge):
        rows = 2**36 // 264 * 64  # 4 TiB, whose header still fits

    with pytest.raises(TableError, match="needs [0-9,]+ bytes, [0-9,]+ are free"):
        write_table(tmp_path / "t.safetensors", Large(), shard_bytes=2**40)
    assert list(tmp_path.iterdir()) == []


def test_one_writer_at_a_time(tmp_path):
    path, at_work, go_on = tmp_path / "t.safetensors", threading.Event(), threading.Event()

    class Slow:
        rows, head_dim = 100, 32

        def read(self, first_row, count):
            at_work.set()
            assert go_on.wait(20)
            return rows_by_rule(count)

    writer = threading.Thread(target=write_table, args=(path, Slow()))
    writer.start()
    try:
        assert at_work.wait(20)
        with pytest.raises(TableError, match=f"is being written by pid {os.getpid()}"):
            write_table(path, rows_by_rule(5))
        with pytest.raises(TableError, match=f"still being written by pid {os.getpid()}"):
            map_rows(path)
        with pytest.raises(TableError, match="neither|header of|still"):
            TableFile(draft_path(path))
    finally:
        go_on.set()
        writer.join()
    assert map_rows(path).rows == 100 and not draft_path(path).exists()


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
