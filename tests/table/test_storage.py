import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import quantize
from tiny_engram.table import EngramTable, RowStorage
from tiny_engram.table.host_memory import HostBlock, _private
from tiny_engram.table.hot import HotRows
from tiny_engram.table.prefetch import Prefetcher

HOMES = ["pageable", "pinned"]


def made(rows, head_dim=64, seed=0):
    """Payload and scale of random rows, among them exact zeros."""
    x = torch.randn(rows, head_dim, generator=torch.Generator().manual_seed(seed))
    x[::5] = 0
    return quantize(x)


def allocate(*args, **kwargs):
    """A storage, and whether the home is what was asked for: without a GPU nothing can be pinned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        storage = RowStorage.allocate(*args, **kwargs)
    fell_back = kwargs["home"] == "pinned" and not torch.cuda.is_available() and storage.rows > 0
    assert len(told) == fell_back, [str(warning.message) for warning in told]
    assert storage.home == ("pageable" if fell_back or not storage.rows else kwargs["home"])
    return storage


def records_of(storage):
    assert storage.records is not None
    return storage.records


def same(found, expected):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_homes_and_layouts_hold_the_same_bytes(rows, head_dim):
    expected = made(rows, head_dim)
    for home in HOMES:
        for layout in ("record", "split"):
            storage = allocate(rows, head_dim, home=home, layout=layout)
            assert not any(part.view(torch.uint8).any() for part in storage.read(0, rows))
            for first in range(0, rows, 10):
                storage.write(first, *(part[first : first + 10] for part in expected))
            assert same(storage.read(0, rows), expected) and same((storage.payload, storage.scale), expected)
            assert storage.rows == rows and storage.row_bytes == head_dim * 33 // 32 and storage.nbytes == rows * storage.row_bytes
            if layout == "record":
                assert torch.equal(storage.records, torch.cat((expected[0].view(torch.uint8), expected[1]), 1))
                assert records_of(storage).is_contiguous()
            else:
                assert storage.records is None and storage.payload.is_contiguous() and storage.scale.is_contiguous()


def test_reads_are_copies():
    storage = allocate(3, 32, home="pageable", layout="split")
    payload, _ = storage.read(1, 1)
    storage.write(1, *made(1, 32, seed=3))
    assert not payload.view(torch.uint8).any()


def test_converts_between_homes_and_layouts():
    expected, told = made(100, 96), []
    records = allocate(100, 96, home="pageable")
    records.write(0, *expected)
    split = records.copy_to("pageable", layout="split", progress=lambda done, total: told.append((done, total)))
    assert same(split.read(0, 100), expected) and same(split.copy_to("pageable").read(0, 100), expected)
    assert told == [(9900, 9900)]


def test_existing_memory_is_not_copied():
    payload, scale = made(5, 96)
    split = RowStorage(payload, scale, home="pageable", layout="split")
    split.write(4, *made(1, 96, seed=1))
    assert same(split.read(0, 5), (payload, scale)) and split.records is None
    records = torch.cat((payload.view(torch.uint8), scale), 1)
    views = records[1:, :96].view(torch.float8_e4m3fn), records[1:, 96:]
    held = RowStorage(*views, home="pageable", layout="record")
    assert torch.equal(held.records, records[1:]) and records_of(held).data_ptr() == records[1:].data_ptr()
    with pytest.raises(TableError, match="expected views of records of 99 B"):
        RowStorage(payload, scale, home="pageable", layout="record")


def test_the_mapped_home_is_never_written():
    payload, scale = made(4)
    before = payload.clone(), scale.clone()
    mapped = RowStorage(payload, scale, home="mapped", layout="split")
    with pytest.raises(TableError, match="home 'mapped' is read-only"):
        mapped.write(0, *made(1, seed=2))
    assert mapped.read_only and same(mapped.read(0, 4), before)
    with pytest.raises(TableError, match=r"EngramTable\.open"):
        RowStorage.allocate(4, 64, home="mapped")


def test_offsets_beyond_32_bits():
    """A table as large as a published layer: untouched pages cost nothing."""
    rows, head_dim = 384_006_168, 256
    block = HostBlock(_private(rows * 264), rows * 264)
    records = block.tensor.view(rows, 264)
    storage = RowStorage(records[:, :256].view(torch.float8_e4m3fn), records[:, 256:], home="pageable", layout="record", block=block)
    assert storage.nbytes == 101_377_628_352
    expected = made(3, head_dim)
    storage.write(rows - 3, *expected)
    assert same(storage.read(rows - 3, 3), expected)
    assert not storage.read(rows - 1000, 997)[1].any()
    storage.close()


def test_shared_rows_are_seen_by_their_name():
    path = Path(f"/dev/shm/tiny-engram-rows-{os.getpid()}")
    try:
        storage = allocate(9, 32, home="pageable", path=path)
        storage.write(0, *made(9, 32))
        assert path.read_bytes() == records_of(storage).numpy().tobytes()
        storage.close()
        assert path.stat().st_size == 9 * 33
    finally:
        path.unlink(missing_ok=True)


def test_report_says_where_the_rows_are():
    storage = allocate(30_000, 64, home="pageable")
    report = storage.report()
    assert (report.rows, report.head_dim, report.row_bytes, report.nbytes) == (30_000, 64, 66, 1_980_000)
    assert (report.home, report.layout, report.device, report.registered, report.locked) == ("pageable", "record", "cpu", False, False)
    assert report.huge_page_share is None or 0 <= report.huge_page_share <= 1
    assert report.numa_nodes is not None or "NUMA" in str(report.notes)
    said = json.loads(json.dumps(report.to_dict()))
    assert said["rows"] == 30_000 and said["notes"] == list(report.notes) and said["out_of_bounds"] == 0
    assert "30,000 rows of 64 values, 66 B each (record)" in str(report) and "home pageable" in str(report)


def test_what_was_not_to_be_had_is_in_the_report():
    report = allocate(5, 64, home="pinned").report()
    if torch.cuda.is_available():
        assert report.home == "pinned" and report.registered
    else:
        assert report.home == "pageable" and not report.registered
        assert "note: not registered with a GPU: CUDA is not available" in str(report)


def test_closing_twice_and_use_after_it():
    with allocate(6, 64, home="pageable") as storage:
        payload = storage.payload
    storage.close()
    assert storage.closed
    for use in (
        lambda: storage.payload,
        lambda: storage.records,
        lambda: storage.read(0, 1),
        lambda: storage.write(0, *made(1)),
        storage.report,
        lambda: storage.copy_to("pageable"),
    ):
        with pytest.raises(TableError, match="closed"):
            use()
    assert not payload.view(torch.uint8).any()  # a view that outlives the storage never dangles


def test_allocating_and_closing_keeps_memory_flat():
    def resident():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))

    sizes = []
    for _ in range(50):
        storage = allocate(30_000, 64, home="pageable")
        storage.write(29_000, *made(1000))
        sizes.append(resident())
        storage.close()
    assert sizes[-1] - sizes[5] < 1 << 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rows=3, head_dim=33, home="pageable"), "multiple of 32"),
        (dict(rows=-1, head_dim=32, home="pageable"), "-1 rows"),
        (dict(rows=3, head_dim=32, home="attic"), "home 'attic'"),
        (dict(rows=3, head_dim=32, home="pageable", layout="columns"), "layout 'columns'"),
        (dict(rows=3, head_dim=32, home="pageable", device="cuda"), "a device for 'device'"),
        (dict(rows=3, head_dim=32, home="device", path="/dev/shm/x"), "a path for host memory"),
        (dict(rows=1 << 55, head_dim=256, home="pageable"), "B of host memory"),
        (dict(rows=1, head_dim=32, home="device", device="cuda:77"), "cuda:77 cannot be had"),
    ],
)
def test_refuses_nonsense(arguments, message):
    with pytest.raises(TableError, match=message):
        RowStorage.allocate(**arguments)


def test_refuses_rows_that_do_not_fit():
    storage = allocate(5, 64, home="pageable")
    for first, count in ((-1, 2), (4, 2), (6, 0)):
        with pytest.raises(TableError, match="expected a range inside 0 to 5"):
            storage.write(first, *made(count))
        with pytest.raises(TableError, match="expected a range inside 0 to 5"):
            storage.read(first, count)
    with pytest.raises(TableError, match="values per scale"):
        storage.write(0, *made(2, 32))
    with pytest.raises(TableError, match="float8_e4m3fn"):
        storage.write(0, torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.uint8))
    assert not storage.payload.view(torch.uint8).any()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["record", "split"])
def test_device_and_pinned_homes(layout):
    expected = made(1000, 96)
    pinned = RowStorage.allocate(1000, 96, home="pinned", layout=layout)
    pinned.write(0, *(part.cuda() for part in expected))
    report = pinned.report()
    assert pinned.home == "pinned" and report.registered and pinned.payload.is_pinned() and pinned.scale.is_pinned()
    device = pinned.copy_to("device", layout=layout)
    assert device.device.type == "cuda" and same((part.cpu() for part in device.read(0, 1000)), expected)
    assert device.report().device == str(device.device) and (device.records is None) == (layout == "split")
    back = device.copy_to("pageable")
    assert same(back.read(0, 1000), expected) and not back.report().registered
    kept = pinned.payload
    pinned.close()
    assert not kept.is_pinned() and same((kept,), expected[:1])


def test_a_copy_that_fails_leaves_no_file(tmp_path):
    def fail(*_):
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        RowStorage.allocate(5, 32, home="pageable").copy_to("pageable", path=tmp_path / "copy", progress=fail)
    assert os.listdir(tmp_path) == []


def test_devices_that_are_none():
    table = EngramTable.dense(*made(10, 32))
    for action in (
        lambda: Prefetcher(table, capacity=1, columns=1, device="nowhere", dtype=torch.float32),
        lambda: HotRows(table, capacity_rows=1, device="nowhere"),
        lambda: RowStorage.allocate(1, 32, home="device", device="nowhere"),
    ):
        with pytest.raises(TableError, match="on nowhere cannot be had"):
            action()
