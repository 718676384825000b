"""The mapped home: rows where they lie, read-only, at any offset, over files, parts and devices; clear words for what cannot be mapped."""

import gc
import json
import mmap
import os
import struct
import weakref
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import dequantize
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.header import build_header
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.mapping import RowMapping
from tiny_engram.table.open_file import DEVICE_PAGE
from tiny_engram.table.storage import RowStorage
from tiny_engram.table.table_digest import BLOCK_ROWS
from tiny_engram.table.table_file import INDEX_SUFFIX, TableFile
from tiny_engram.table.table_writer import draft_path, write_table


def open_files() -> int:
    """Without sockets, which come and go with servers that other tests keep."""
    return sum(os.path.isfile(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))


def rows_by_rule(rows, head_dim=256, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


def same(storage, expected):
    found = storage.payload.view(torch.uint8), storage.scale
    return torch.equal(found[0], expected[0].view(torch.uint8)) and torch.equal(found[1], expected[1])


def mappings_of(path):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def test_rows_are_looked_up_where_they_lie(tmp_path):
    rows = rows_by_rule(1000)
    write_pool(tmp_path / "pool", rows)
    storage = map_rows(tmp_path / "pool", random=True)
    assert (storage.home, storage.layout, storage.rows, storage.head_dim, storage.row_bytes) == ("mapped", "split", 1000, 256, 264)
    ids = torch.tensor([[999, 0], [17, 17]])
    assert torch.equal(EngramTable.over(storage).lookup(ids), dequantize(*rows)[ids])
    report = storage.report()
    assert report.home == "mapped" and not report.registered and not report.locked and report.notes == ()
    assert storage.payload.data_ptr() % mmap.PAGESIZE == 0
    with pytest.raises(TableError, match="read-only"):
        storage.write(0, rows[0][:1], rows[1][:1])
    assert all(" r--s " in line for line in mappings_of(tmp_path / "pool")) and len(mappings_of(tmp_path / "pool")) >= 1


def test_memory_returns_with_the_last_view(tmp_path):
    path = tmp_path / "pool"
    write_pool(path, rows_by_rule(100))
    handles = open_files()
    storage = map_rows(path)
    row = storage.payload[99].view(torch.uint8)
    expected = row.clone()
    storage.close()
    with pytest.raises(TableError, match="closed"):
        storage.payload  # noqa: B018
    gc.collect()
    assert mappings_of(path) and torch.equal(row, expected)
    gone = weakref.ref(row)
    del row, storage
    gc.collect()
    assert gone() is None and not mappings_of(path) and open_files() == handles


def test_parts_stand_in_one_run(tmp_path):
    rows = rows_by_rule(2 * BLOCK_ROWS + 77, 32)
    write_table(tmp_path / "t.safetensors", rows, shard_bytes=1)
    storage = map_rows(tmp_path / f"t{INDEX_SUFFIX}", populate=True)
    assert same(storage, rows)
    ids = torch.tensor([BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS - 1, 2 * BLOCK_ROWS, 2 * BLOCK_ROWS + 76])
    assert torch.equal(EngramTable.over(storage).lookup(ids), dequantize(*rows)[ids])


def test_parts_that_cannot_are_named(tmp_path):
    """Parts of others, whose rows do not end on pages: readable by range, but no run of addresses."""
    places = {}
    for number, (first, count) in enumerate(((0, 10), (10, 20))):
        payload, scale = FillRule(32).rows(torch.arange(first, first + count))
        names = f"embed.weight.rows.{first}", f"embed.scale.rows.{first}"
        header, _ = build_header([(names[0], "F8_E4M3", (count, 32)), (names[1], "F8_E8M0", (count, 1))], {})
        name = f"{number}.safetensors"
        (tmp_path / name).write_bytes(header + payload.view(torch.uint8).numpy().tobytes() + scale.numpy().tobytes())
        places |= dict.fromkeys(names, name)
    index = tmp_path / f"x{INDEX_SUFFIX}"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(TableError, match="shard 1 begins at byte .* expected multiples of 4096: .* table convert"):
        map_rows(index)
    with TableFile(index) as file:
        write_table(tmp_path / "whole.safetensors", file)
    assert same(map_rows(tmp_path / "whole.safetensors"), rows_by_rule(30, 32))


def sparse_table(path, rows, head_dim=256):
    """A table of which only the rows that somebody writes take room."""
    header, placed = build_header([("embed.weight", "F8_E4M3", (rows, head_dim)), ("embed.scale", "F8_E8M0", (rows, head_dim // 32))], {})
    with open(path, "wb") as file:
        file.truncate(len(header) + rows * (head_dim + head_dim // 32))
        file.write(header)
    return placed


def test_a_whole_layer_of_real_size(tmp_path):
    """384,006,168 rows, 94.42 GiB of addresses: rows at the far end, and where 32-bit offsets would wrap."""
    path, rows = tmp_path / "layer.safetensors", 384_006_168
    placed = sparse_table(path, rows)
    limits = [2**31 // 256, 2**32 // 256, 2**31 // 264, 2**32 // 264, 2**31 // 8, rows - 2]
    ids = torch.tensor(sorted({row + step for row in limits for step in (-1, 0, 1)}))
    payload, scale = FillRule(256).rows(ids)
    with open(path, "r+b") as file:
        for row, values, scales in zip(ids.tolist(), payload.view(torch.uint8).numpy(), scale.numpy(), strict=True):
            for name, data in (("embed.weight", values), ("embed.scale", scales)):
                file.seek(placed.tensors[name].offset + row * len(data))
                file.write(data.tobytes())
    assert path.stat().st_blocks * 512 < 2**21
    storage = map_rows(path, random=True)
    assert (storage.rows, storage.nbytes) == (rows, 101_377_628_352)
    assert torch.equal(EngramTable.over(storage).lookup(ids), FillRule(256).values(ids))
    with pytest.raises(TableError, match=str(rows)):
        EngramTable.over(storage).lookup(torch.tensor([rows]))
    with TableFile(path) as file:
        assert torch.equal(file.read(rows - 3, 3)[0].view(torch.uint8), payload[-3:].view(torch.uint8))


def test_files_that_change_while_mapped(tmp_path):
    path = tmp_path / "pool"
    old, new = rows_by_rule(500), rows_by_rule(400, seed=1)
    write_pool(path, old)
    storage = map_rows(path)
    mapping = storage._block
    assert isinstance(mapping, RowMapping)
    mapping.check()
    write_pool(path, new, replace=True)
    assert same(storage, old)
    with pytest.raises(TableError, match="replaced or removed since it was mapped, the rows are still the old ones"):
        mapping.check()
    anew = map_rows(path)
    assert same(anew, new)
    os.truncate(path, 8192)
    assert isinstance(anew._block, RowMapping)
    with pytest.raises(TableError, match=r"cut from [\d,]+ to 8,192 bytes since it was mapped"):
        anew._block.check()
    with pytest.raises(TableError, match="truncated"):
        map_rows(path)
    path.unlink()
    with pytest.raises(TableError, match="replaced or removed"):
        mapping.check()


def test_what_cannot_be_mapped(tmp_path):
    with pytest.raises(TableError, match="No such file"):
        map_rows(tmp_path / "none", wait=0.1)
    (tmp_path / "empty").touch()
    with pytest.raises(TableError, match="0 bytes, expected at least a header"):
        map_rows(tmp_path / "empty", wait=5)
    write_pool(tmp_path / "pool", rows_by_rule(10))
    with pytest.raises(TableError, match="is there already"):
        write_pool(tmp_path / "pool", rows_by_rule(10))


def test_registration_that_fails_is_a_note(tmp_path):
    if torch.cuda.is_available():
        return  # there it works, see below
    write_pool(tmp_path / "pool", rows_by_rule(10))
    storage = map_rows(tmp_path / "pool", register=True)
    (note,) = storage.report().notes
    assert "not registered with a GPU" in note and "CUDA is not available" in note and not storage.report().registered


def test_drivers_that_cannot_pin_read_only_memory(tmp_path, monkeypatch):
    """Memory is writable for them while they pin it, and read-only again afterwards."""
    path, calls = tmp_path / "pool", []

    class Driver:
        code = 0

        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            kinds = {line.split()[1] for line in mappings_of(path) if int(line.split("-")[0], 16) == address}
            calls.append((address, flags, kinds))
            return 801 if flags & 8 else self.code

        def cudaHostUnregister(self, address):  # noqa: N802
            calls.remove(address)
            return 0

        def cudaGetErrorString(self, code):  # noqa: N802
            return "not supported"

    driver = Driver()
    monkeypatch.setattr("tiny_engram.table.pinning._cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("tiny_engram.table.pinning._clear_last_error", lambda: None)
    write_pool(path, rows_by_rule(5000))
    storage = map_rows(path, register=True)
    assert storage.report().registered and storage.report().notes == ()
    assert [(flags, kinds) for _, flags, kinds in calls] == [(11, {"r--s"}), (3, {"rw-s"})] * 2
    assert all(" r--s " in line for line in mappings_of(path))
    taken = [address for address, flags, _ in calls if flags == 3]
    calls[:] = taken
    storage.close()
    assert calls == []  # what was registered is given back, once

    driver.code = 1
    storage = map_rows(path, register=True)
    (note,) = storage.report().notes
    assert not storage.report().registered and "CUDA error 801, not supported as read-only; CUDA error 1" in note
    assert same(storage, rows_by_rule(5000))


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_the_gpu_reads_a_mapping_in_place(tmp_path, place):
    from tiny_engram.kernels.row_gather import row_gather

    path = tmp_path / "pool" if place == "disk" else Path(f"/dev/shm/tiny-engram-test-{os.getpid()}")
    rows = rows_by_rule(5000)
    write_pool(path, rows)
    try:
        storage = map_rows(path, register=True)
        report = storage.report()
        ids = torch.tensor([4999, 0, 17, -1], device="cuda")
        expected = FillRule(256).values(ids.cpu())
        if not report.registered:
            assert any("not registered" in note for note in report.notes)
            assert torch.equal(EngramTable.over(storage).lookup(ids.cpu()), expected)
            assert place == "disk", f"memory in /dev/shm must register: {report.notes}"  # files of a disk may be refused
            return
        assert torch.equal(row_gather(storage.payload, storage.scale, ids).cpu(), expected)
        storage.close()
        torch.cuda.synchronize()
        assert torch.equal(torch.ones(3, device="cuda").cpu(), torch.ones(3))  # no error stays behind
    finally:
        path.unlink(missing_ok=True)


# -- devices -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dax(tmp_path, monkeypatch):
    """A file that is treated as a DAX device: it can be mapped in steps of 2 MiB, and its size is not asked for."""
    path = tmp_path / "dax0.0"
    with open(path, "wb") as file:
        file.truncate(8 * DEVICE_PAGE)
    for module in ("open_file", "mapped", "mapping"):
        monkeypatch.setattr(f"tiny_engram.table.{module}.is_device", lambda about: about.st_size == 8 * DEVICE_PAGE)
    return path


def test_a_pool_on_a_device(dax):
    rows = rows_by_rule(40_000)
    with pytest.raises(TableError, match="header of 0 bytes"):
        map_rows(dax)
    digest = write_pool(dax, rows)
    storage = map_rows(dax)
    assert same(storage, rows) and dax.stat().st_size == 8 * DEVICE_PAGE
    with TableFile(dax) as file:
        assert file.digest == digest and file.verify() == 1
    with pytest.raises(TableError, match="holds a table already"):
        write_pool(dax, rows)
    other = rows_by_rule(100, seed=2)
    write_pool(dax, other, replace=True)
    assert same(map_rows(dax), other)

    class Failing:
        rows, head_dim = 10, 32

        def read(self, first_row, count):
            with pytest.raises(TableError, match=f"still being written by pid {os.getpid()}"):
                map_rows(dax)
            with pytest.raises(TableError, match="is being written by another process"):
                write_pool(dax, other, replace=True)
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write_pool(dax, Failing(), replace=True)
    with pytest.raises(TableError, match=f"its writer, pid {os.getpid()}, ended before it was complete; write it again"):
        map_rows(dax)
    write_pool(dax, rows)
    assert same(map_rows(dax), rows)


def test_a_device_is_not_converted_onto_itself(dax):
    """Its rows would be overwritten before they are read."""
    write_pool(dax, rows_by_rule(100))
    with TableFile(dax) as file:
        with pytest.raises(TableError, match="is read and to be written at once"):
            write_pool(dax, file, prefix="another.", replace=True)
        assert file.verify() == 1
    assert same(map_rows(dax), rows_by_rule(100))


def test_devices_that_are_none():
    with pytest.raises(TableError, match="header of 0 bytes"):
        map_rows("/dev/zero")
    with pytest.raises(TableError, match="/dev/null: .* cannot be mapped"):
        map_rows("/dev/null")
    with pytest.raises(TableError, match="/dev/null: cannot write to the device|cannot be mapped"):
        write_pool("/dev/null", rows_by_rule(3))


def test_a_table_that_a_storage_holds_in_records(tmp_path):
    storage = RowStorage.allocate(300, 64, home="pageable", layout="record")
    storage.write(0, *rows_by_rule(300, 64))
    write_pool(tmp_path / "pool", storage, prefix="a.b")
    assert same(map_rows(tmp_path / "pool", prefix="a.b."), rows_by_rule(300, 64))
    (length,) = struct.unpack("<Q", (tmp_path / "pool").read_bytes()[:8])
    assert (length + 8) % 4096 == 0 and not draft_path(tmp_path / "pool").exists()


def test_files_that_cannot_be_read_or_keep_nothing(tmp_path):
    with pytest.raises(TableError, match="/proc/self/mem: cannot be read at byte 0"):
        TableFile("/proc/self/mem")
    with pytest.raises(TableError, match="/dev/zero: keeps nothing of what was written"):
        write_pool("/dev/zero", rows_by_rule(3))
