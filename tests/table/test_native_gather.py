"""The pool of threads in C that gathers rows, how it is built and kept, and what happens where it cannot be."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tiny_engram.table import native_gather
from tiny_engram.table.costs import cache_path
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.native_gather import GatherThreads, Tuning, load, thread_count
from tiny_engram.table.storage import RowStorage

ROWS = 3001


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_gather, "_FLAGS", (*native_gather._FLAGS, "-O0"))  # builds fast
    return cache_path().parent


def filled(head_dim=256, layout="record") -> tuple[RowStorage, FillRule]:
    storage = RowStorage.allocate(ROWS, head_dim, home="pageable", layout=layout)
    rule = FillRule(head_dim)
    rule.fill(storage)
    return storage, rule


def gathered(pool: GatherThreads, storage: RowStorage, ids: torch.Tensor, chunk_rows: int = 300, bays: int = 3) -> torch.Tensor:
    """All records, taken out of a ring of staging chunk by chunk."""
    ring = torch.full((bays * chunk_rows, storage.row_bytes), 0xEE, dtype=torch.uint8)
    found = []
    with pool.job(storage, ids, ring, chunk_rows=chunk_rows) as job:
        for chunk in range(-(-ids.numel() // chunk_rows)):
            job.wait(chunk)
            place = chunk % bays * chunk_rows
            found.append(ring[place : place + min(chunk_rows, ids.numel() - chunk * chunk_rows)].clone())
            job.release(chunk + 1 + bays)
    return torch.cat(found) if found else ring[:0]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("tuning", [Tuning(), Tuning(ahead=0), Tuning(ahead=200, far=False)], ids=str)
@pytest.mark.parametrize(("head_dim", "layout"), [(256, "record"), (256, "split"), (32, "record"), (32, "split")])
def test_same_bytes_as_index_select(library, threads, tuning, head_dim, layout):
    storage, rule = filled(head_dim, layout)
    pool = GatherThreads(library, threads, tuning)
    dice = torch.Generator().manual_seed(threads)
    for count in (0, 1, 2, 127, 128, 129, 299, 300, 301, 2003, 5009):
        ids = torch.randint(0, ROWS, (count,), generator=dice)
        expected = rule.records(ids)
        assert torch.equal(gathered(pool, storage, ids), expected)
        assert torch.equal(gathered(pool, storage, ids, chunk_rows=7, bays=1), expected)
        assert torch.equal(gathered(pool, storage, ids, chunk_rows=8192, bays=1), expected)
    pool.close()


@pytest.mark.parametrize("bad", [-1, ROWS, 2**62, -(2**63)])
def test_ids_outside_are_named_and_nothing_outside_is_read(library, bad):
    storage, rule = filled()
    pool = GatherThreads(library, 4)
    ids = torch.arange(2500) % ROWS
    for places in ([0], [2499], [700, 701, 2000]):
        wrong = ids.clone()
        wrong[places] = bad
        wrong[places[-1]] = ROWS + 5 if len(places) > 1 else bad
        with pytest.raises(IndexError, match=rf"^row id {bad} is outside \[0, {ROWS}\)$"):
            gathered(pool, storage, wrong)
        assert torch.equal(gathered(pool, storage, ids), rule.records(ids))
    pool.close()


def test_a_chunk_is_not_overwritten_before_it_is_released(library):
    storage, rule = filled()
    pool = GatherThreads(library, 4)
    ids = torch.arange(2000)
    ring = torch.zeros(2 * 100, storage.row_bytes, dtype=torch.uint8)
    for _ in range(20):
        with pool.job(storage, ids, ring, chunk_rows=100) as job:
            job.wait(1)
            with pytest.raises(IndexError, match="chunk 2 waited for"):
                job.wait(2)
            assert torch.equal(ring, rule.records(ids[:200]))
            job.release(3)
            job.wait(2)
            assert torch.equal(ring[:100], rule.records(ids[200:300])) and torch.equal(ring[100:], rule.records(ids[100:200]))
        # left with chunks that no one waited for
    pool.close()


def test_many_jobs_from_several_threads(library):
    storage, rule = filled(32)
    pools = [GatherThreads(library, 3), GatherThreads(library, 2)]
    wrong = []

    def read(pool: GatherThreads, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        for _ in range(100):
            ids = torch.randint(0, ROWS, (int(torch.randint(0, 900, (1,), generator=dice)),), generator=dice)
            pool.alert()
            if not torch.equal(gathered(pool, storage, ids), rule.records(ids)):
                wrong.append(seed)

    readers = [threading.Thread(target=read, args=(pools[turn % 2], turn)) for turn in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong
    for pool in pools:
        pool.close()
        assert torch.equal(gathered(pool, storage, torch.arange(9)), rule.records(torch.arange(9)))  # starts again
        pool.close()


def test_arguments_that_do_not_fit(library):
    storage, _ = filled()
    pool = GatherThreads(library, 2)
    ids, ring = torch.arange(10), torch.zeros(8, storage.row_bytes, dtype=torch.uint8)
    for wrong_ids, wrong_ring in (
        (ids.int(), ring),
        (ids[::2], ring),
        (ids.view(2, 5), ring),
        (ids, ring[:0]),
        (ids, ring[:7]),
        (ids, ring[:, :-1]),
        (ids, ring.view(torch.int8)),
    ):
        with pytest.raises(ValueError, match="expected int64"), pool.job(storage, wrong_ids, wrong_ring, chunk_rows=4):
            pass


FORK = """
import os, threading, torch
from tiny_engram.table import native_gather
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.host_gather import HostGather
from tiny_engram.table.storage import RowStorage

torch.set_num_threads(1)  # OpenMP's threads, which the comparison would use, do not survive a fork
storage, rule = RowStorage.allocate(3000, 64, home="pageable"), FillRule(64)
rule.fill(storage)
gather = HostGather(storage, torch.device("cpu"), chunk_rows=100)
assert gather._threads is native_gather.shared_threads() is not None
ids, out = torch.arange(3000), torch.empty(3000, 64)

def right():
    out.zero_()
    gather.read(ids, out)
    return torch.equal(out, rule.values(ids))

assert right()
held = gather._threads.job(storage, ids, torch.zeros(100, 66, dtype=torch.uint8), chunk_rows=100)
held.__enter__()  # another thread could be in the middle of a job
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        os._exit(0 if right() and right() else 3)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
child = os.fork()
if not child:
    held.__exit__(None, None, None)
    os._exit(0 if right() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
held.__exit__(None, None, None)
assert right()
print("done")
"""


def test_forked_children_have_threads_of_their_own():
    # Python 3.12 warns of any fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")


def test_without_a_compiler_there_is_a_reason(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_gather, "_shared", None)
    monkeypatch.setattr(native_gather, "_reason", None)
    assert native_gather.shared_threads() is None
    assert native_gather.reason() == "no C compiler found (CC, cc, gcc, clang)"
    assert not cache.exists()


def test_turned_off(monkeypatch):
    monkeypatch.setenv(native_gather.VARIABLE, "0")
    assert native_gather.shared_threads() is None and native_gather.reason() == "TINY_ENGRAM_NATIVE=0"


def test_a_compiler_that_fails(cache, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(OSError, match="false failed"):
        load()
    assert not list(cache.glob("*.so"))


def kept(cache: Path) -> Path:
    (found,) = cache.iterdir()
    return found


def test_built_once_and_private(cache, monkeypatch):
    load()
    made = kept(cache)
    assert made.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(native_gather, "_build", None)  # not built again
    load()
    assert kept(cache) == made


def test_a_damaged_library_is_built_again(cache):
    load()
    made = kept(cache)
    blob = made.read_bytes()
    for damaged in (blob[: len(blob) // 2], bytes([*blob[:5000], blob[5000] ^ 1, *blob[5001:]]), b""):
        made.unlink()  # not written in place: this process has it mapped
        made.write_bytes(damaged)
        made.chmod(0o600)
        load()
        again = kept(cache).read_bytes()
        assert hashlib.sha256(again[:-32]).digest() == again[-32:]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(cache, what):
    load()
    made = kept(cache)
    made.unlink()
    made.write_bytes(b"not a library")  # would be built again if it were looked at
    (cache if what == "folder" else made).chmod(0o777)
    storage, rule = filled()
    pool = GatherThreads(load(), 2)  # built for this process alone
    assert torch.equal(gathered(pool, storage, torch.arange(50)), rule.records(torch.arange(50)))
    pool.close()
    assert made.read_bytes() == b"not a library"


def test_nowhere_to_keep_it(cache):
    cache.parent.write_text("a file where the cache's folder should be")
    GatherThreads(load(), 2).close()


def test_processes_that_build_at_once(cache):
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            try:
                load()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert kept(cache).suffix == ".so"


def test_threads_are_the_cores_shared_among_ranks(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for cores, ranks, threads in ((2, "1", 2), (16, "1", 16), (192, "8", 16), (32, "8", 4), (4, "8", 1), (8, "nonsense", 8), (8, "0", 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert thread_count() == threads
