"""The pool with real processes: one writes, many map and read, memory counts once; a race, and a writer that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.table_writer import draft_path

ROWS, HEAD_DIM = 60_000, 256  # 15.8 MB, far more than a process maps of anything else here
NBYTES = ROWS * (HEAD_DIM + HEAD_DIM // 32)

READER = f"""
import re, sys
import torch
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import map_rows

path, seed = sys.argv[1], int(sys.argv[2])
table = EngramTable.over(map_rows(path, wait=20))
ids = torch.randperm({ROWS}, generator=torch.Generator().manual_seed(seed))
for part in ids.split(8192):
    assert torch.equal(table.lookup(part), FillRule({HEAD_DIM}).values(part)), "wrong rows"
print("read", flush=True)
sys.stdin.readline()  # until all have read
rss = pss = written = 0
inside = False
for line in open("/proc/self/smaps"):
    if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
        inside = line.rstrip().endswith(path)
    elif inside and line.startswith(("Rss:", "Pss:", "Private_Dirty:")):
        name, value = line.split()[:2]
        rss += int(value) * 1024 * (name == "Rss:")
        pss += int(value) * 1024 * (name == "Pss:")
        written += int(value) * 1024 * (name == "Private_Dirty:")
print(rss, pss, written, flush=True)
sys.stdin.readline()  # until all have looked: whoever leaves changes the others' share
"""

WRITER = f"""
import sys, time
import torch
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import write_pool

class Slow:
    rows, head_dim = {ROWS}, {HEAD_DIM}

    def read(self, first_row, count):
        print("writing", flush=True)
        sys.stdin.readline()
        return FillRule({HEAD_DIM}).rows(torch.arange(first_row, first_row + count))

print(write_pool(sys.argv[1], Slow()), flush=True)
"""


@pytest.fixture
def pool():
    """A name in shared memory."""
    path = Path(f"/dev/shm/tiny-engram-pool-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)
    draft_path(path).unlink(missing_ok=True)


@pytest.fixture
def start():
    """Starts Python with one thread; whatever still runs at the end is killed."""
    started = []

    def call(code, *argv):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", code, *map(str, argv)]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def line_of(process):
    line = process.stdout.readline().strip()
    if not line:
        raise AssertionError(process.communicate(timeout=20)[1])
    return line


def say(process):
    process.stdin.write("\n")
    process.stdin.flush()


def by_rule():
    return FillRule(HEAD_DIM).rows(torch.arange(ROWS))


def test_four_processes_hold_the_table_once(pool, start):
    # They start before there is a pool, and wait for it.
    readers = [start(READER, pool, seed) for seed in range(4)]
    write_pool(pool, by_rule())
    assert [line_of(reader) for reader in readers] == ["read"] * 4
    found = []
    for reader in readers:
        say(reader)
        found.append([int(word) for word in line_of(reader).split()])
    for reader in readers:
        say(reader)
        assert reader.wait(20) == 0
    page = os.sysconf("SC_PAGE_SIZE")
    for rss, pss, written in found:
        assert NBYTES <= rss <= NBYTES + 4 * page and written == 0  # each sees all of it
        assert pss == pytest.approx(NBYTES / 4, rel=0.01)
    assert sum(pss for _, pss, _ in found) == pytest.approx(NBYTES, rel=0.01)


def test_readers_and_writers_during_a_write(pool, start):
    writer = start(WRITER, pool)
    assert line_of(writer) == "writing"
    with pytest.raises(TableError, match=f"still being written by pid {writer.pid}; wait for it"):
        map_rows(pool)
    began = time.monotonic()
    with pytest.raises(TableError, match=f"still being written by pid {writer.pid} after 0.2 s"):
        map_rows(pool, wait=0.2)
    assert 0.2 <= time.monotonic() - began < 10
    with pytest.raises(TableError, match=f"is being written by pid {writer.pid}; wait for it, or stop it first"):
        write_pool(pool, by_rule())
    reader = start(READER, pool, 0)
    say(writer)
    assert len(line_of(writer)) == 64 and line_of(reader) == "read"
    assert not draft_path(pool).exists()
    with pytest.raises(TableError, match="is there already"):
        write_pool(pool, by_rule())


def test_one_of_several_loaders_writes(pool, start):
    """Every rank of a host may try: one writes, the others are told, and all can map."""
    writers = [start(WRITER, pool) for _ in range(2)]
    for writer in writers:
        say(writer)
    ends = [writer.communicate(timeout=60) for writer in writers]
    won = [out for out, _ in ends if "writing" in out]
    assert len(won) == 1 and [writer.returncode for writer in writers].count(0) == 1
    for out, err in ends:
        assert out in won or "is being written by pid" in err or "is there already" in err
    assert map_rows(pool).rows == ROWS


def test_a_killed_writer_is_taken_over(pool, start):
    writer = start(WRITER, pool)
    assert line_of(writer) == "writing"
    writer.send_signal(signal.SIGKILL)
    writer.wait(20)
    assert draft_path(pool).exists() and not pool.exists()
    with pytest.raises(TableError, match=f"its writer, pid {writer.pid}, ended before it was complete; write it again"):
        map_rows(pool)
    digest = write_pool(pool, by_rule())
    assert not draft_path(pool).exists() and len(digest) == 64
    storage = map_rows(pool)
    assert torch.equal(storage.payload.view(torch.uint8), by_rule()[0].view(torch.uint8))
