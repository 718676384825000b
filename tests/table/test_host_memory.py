import gc
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table.host_memory import HostBlock
from tiny_engram.table.pinning import register_range
from tiny_engram.table.report import huge_page_share, numa_nodes

MIB = 1 << 20


@pytest.fixture
def shared():
    """A name in /dev/shm that nobody has."""
    path = Path(f"/dev/shm/tiny-engram-test-{os.getpid()}")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def resident():
    """Bytes that this process holds in memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def silent(nbytes, **kwargs):
    """A block, whatever this machine cannot do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return HostBlock.allocate(nbytes, **kwargs)


def test_every_page_is_touched_in_rounds_and_holds_zeros():
    nbytes, told, before = 130 * MIB + 5, [], resident()
    with silent(nbytes, threads=1, register=False, progress=lambda done, total: told.append((done, total))) as block:
        assert resident() - before > 0.95 * nbytes
        assert told == [(64 * MIB, nbytes), (128 * MIB, nbytes), (nbytes, nbytes)]
        assert block.tensor.shape == (nbytes,) and block.tensor.dtype == torch.uint8 and not block.tensor.any()
        block.tensor[-1] = 7
        assert int(block.tensor.sum()) == 7
        for share in (block.huge_page_share(), huge_page_share(block.tensor.data_ptr(), 4096)):
            assert share is None or 0 <= share <= 1


def test_the_kernel_says_where_pages_are():
    with silent(3 * MIB, register=False) as block:
        nodes, why = block.numa_nodes()
    if nodes is None:
        assert why
    else:
        assert nodes and not why and all(Path(f"/sys/devices/system/node/node{node}").exists() or node == 0 for node in nodes)
    assert numa_nodes(0, 0) == (None, "no bytes")
    assert huge_page_share(1, 1) is None  # nothing is mapped there


def test_an_empty_block():
    with HostBlock.allocate(0) as block:
        assert block.tensor.shape == (0,) and not block.registered and block.notes == () and block.huge_page_share() is None


def test_closing_twice_and_use_after_it():
    block = HostBlock.allocate(8192, register=False)
    kept = block.tensor[4096:]
    kept.fill_(3)
    block.close()
    block.close()
    assert block.closed and not block.registered
    with pytest.raises(TableError, match="closed"):
        _ = block.tensor
    with pytest.raises(TableError, match="closed"):
        block.huge_page_share()
    assert int(kept.sum()) == 3 * 4096  # a view that outlives its block never dangles


def test_memory_goes_back():
    silent(32 * MIB, register=False).close()
    before = resident()
    for turn in range(50):
        block = silent(32 * MIB, register=False)
        block.tensor[turn] = 1
        if turn % 2:
            block.close()
        del block
    gc.collect()
    assert resident() - before < 8 * MIB


def test_shared_memory_is_seen_by_its_name_and_stays(shared):
    with silent(MIB + 3, shared=shared, register=False) as block:
        block.tensor[-3:] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert block.path == shared and shared.stat().st_size == MIB + 3
    assert shared.read_bytes()[-3:] == b"\1\2\3"
    with pytest.raises(TableError, match="there already"):
        HostBlock.allocate(1, shared=shared)
    assert shared.stat().st_size == MIB + 3


def test_too_little_shared_memory_is_known_before_a_page_is_touched(shared):
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize
    with pytest.raises(TableError, match=rf"{free + 2**40:,} B do not fit, [\d,]+ B are free on /dev/shm; .*private memory"):
        HostBlock.allocate(free + 2**40, shared=shared)
    assert not shared.exists()
    with pytest.raises(TableError, match="cannot be made"):
        HostBlock.allocate(1, shared=shared / "no" / "folder")


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_more_than_any_machine_has(nbytes):
    with pytest.raises(TableError, match=f"{nbytes:,} B of host memory"):
        HostBlock.allocate(nbytes)
    with pytest.raises(TableError, match="-1 bytes"):
        HostBlock.allocate(-1)


def test_what_the_system_refuses(shared):
    """In a process of its own, since limits cannot be raised again and a fault of ours would end the process."""
    code = """
        import json, os, resource, sys, warnings
        from tiny_engram.errors import TableError
        from tiny_engram.table.host_memory import HostBlock
        found = {}
        try:
            cut = lambda done, total: os.truncate(sys.argv[1], 0)
            HostBlock.allocate(192 << 20, shared=sys.argv[1], threads=1, register=False, huge_pages=False, progress=cut)
        except TableError as error:
            found["gave out"] = str(error)
        found["left"] = os.path.exists(sys.argv[1])

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found["unregistered"] = HostBlock.allocate(4096, register=True).notes
            found["not asked for"] = HostBlock.allocate(4096).notes
        found["without a GPU"] = [str(w.message) for w in told]

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)  # the limit does not hold for root
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            block = HostBlock.allocate((2 << 20) - 1, lock=True, register=False)
            small = HostBlock.allocate(4096, lock=True, register=False)
        block.tensor.fill_(9)
        found["locked"], found["small"], found["warnings"] = block.locked, small.locked, [str(w.message) for w in told]
        found["notes"] = block.notes

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20),) * 2)
        try:
            HostBlock.allocate(1 << 30, register=False)
        except TableError as error:
            found["no room"] = str(error)
        print(json.dumps(found))
    """
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(code), str(shared)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=without_gpu)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "gave out after 67,108,864 of 201,326,592 B" in found["gave out"] and not found["left"]
    assert found["unregistered"] == ["not registered with a GPU: CUDA is not available"] and found["not asked for"] == []
    assert len(found["without a GPU"]) == 1 and found["unregistered"][0] in found["without a GPU"][0]
    assert not found["locked"] and found["small"]
    assert "locking 2,097,151 B failed" in found["notes"][0] and "the limit is 1,048,576 B" in found["notes"][0]
    assert len(found["warnings"]) == 1 and found["notes"][0] in found["warnings"][0]
    assert "1,073,741,824 B of host memory cannot be had" in found["no room"]


@pytest.mark.gpu
def test_registered_memory_is_pinned_until_it_is_closed():
    block = HostBlock.allocate(16 * MIB)
    view = block.tensor[5 * MIB :]
    assert block.registered and "regist" not in str(block.notes) and block.pieces == ((block.tensor.data_ptr(), 16 * MIB),)
    assert block.tensor.is_pinned() and view.is_pinned()
    view.copy_(torch.full_like(view, 6))
    assert int(view.to("cuda", non_blocking=True).sum(dtype=torch.int64)) == 6 * 11 * MIB
    block.close()
    assert not view.is_pinned() and int(view[0]) == 6


@pytest.mark.gpu
def test_a_tensor_keeps_its_registration_without_the_block():
    view = HostBlock.allocate(4 * MIB).tensor[MIB:]
    gc.collect()
    assert view.is_pinned()


@pytest.mark.gpu
def test_a_failed_registration_spoils_no_later_launch():
    with HostBlock.allocate(4 * MIB) as block:
        assert "CUDA error" in register_range(block.tensor.data_ptr(), 4 * MIB, [])  # it is registered already
        assert int(torch.arange(5, device="cuda").sum()) == 10
        torch.cuda.synchronize()
