import time
import warnings

import numpy as np
import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.table import EngramTable
from tiny_engram.table.mapped import write_pool
from tiny_engram.table.virtual_index import VirtualRows

FAR = 51_539_607_552  # concept addresses go far beyond 32 bits


def stored(rows, head_dim=32, seed=0):
    return quantize(torch.randn(rows, head_dim, generator=torch.Generator().manual_seed(seed)))


def rows_held(table):
    """Slots of a virtual table, with and without a row."""
    assert isinstance(table._rows, VirtualRows)
    return table._rows.payload.shape[0] + table._rows.free.numel()


def ids_of(count, seed=0):
    return (torch.randperm(count * 3, generator=torch.Generator().manual_seed(seed))[:count] + 1) * FAR // 1000


def test_dense_row_id_is_slot():
    payload, scale = stored(7, 64)
    table = EngramTable.dense(payload, scale)
    assert len(table) == 7 and table.head_dim == 64 and table.nbytes == 7 * 66
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(table.lookup(ids), dequantize(payload, scale)[ids])
    assert table.contains(torch.tensor([-1, 0, 6, 7])).tolist() == [False, True, True, False]
    assert torch.equal(table.lookup(torch.tensor([7, -1]), bounds="ignore"), torch.zeros(2, 64))
    with pytest.raises(TableError, match=r"row 7 is not in the table \(2 of 3 missing\): expected 0 to 6, or -1 for no row; mend the ids"):
        table.lookup(torch.tensor([0, 7, 9]))
    for ids, said in (([1, 2], "list"), (3, "int"), (np.arange(3), "ndarray")):
        for call in (table.lookup, table.contains):
            with pytest.raises(TableError, match=f"row ids are of type {said}: expected a tensor of torch.int64"):
                call(ids)


def test_dense_refuses_to_grow():
    table = EngramTable.dense(*stored(3))
    with pytest.raises(TableError, match="cannot add rows of a dense table"):
        table.add(torch.tensor([9]), *stored(1))
    with pytest.raises(TableError, match="cannot remove"):
        table.remove(torch.tensor([1]))


def test_virtual_rows_come_back_whatever_the_order():
    payload, scale = stored(1000)
    ids = ids_of(1000)
    table = EngramTable.virtual(32)
    for part in torch.arange(1000).split(173):
        table.add(ids[part], payload[part], scale[part])
    order = torch.randperm(1000).view(10, 100)
    assert len(table) == 1000 and table.nbytes == 1000 * 33
    assert torch.equal(table.lookup(ids[order]), dequantize(payload, scale)[order])


def test_add_and_remove_of_many_dimensions():
    payload, scale = stored(24, 64)
    table = EngramTable.virtual(64)
    ids = ids_of(24).view(2, 3, 4)
    table.add(ids, payload.view(2, 3, 4, 64), scale.view(2, 3, 4, 2))
    assert torch.equal(table.lookup(ids), dequantize(payload, scale).view(2, 3, 4, 64))
    table.remove(ids[0])
    assert table.contains(ids).tolist() == [[[False] * 4] * 3, [[True] * 4] * 3]


def test_missing_rows():
    table = EngramTable.virtual(32)
    ids = torch.tensor([[5, FAR]])
    assert torch.equal(table.lookup(ids, bounds="ignore"), torch.zeros(1, 2, 32))
    payload, scale = stored(1)
    table.add(torch.tensor([5]), payload, scale)
    with pytest.raises(TableError, match=rf"row {FAR} is not in the table \(1 of 2 missing\)"):
        table.lookup(ids)
    assert torch.equal(table.lookup(ids, bounds="ignore")[0, 0], dequantize(payload, scale)[0])
    assert table.lookup(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 32)


def test_a_table_lies_over_a_storage_only():
    with pytest.raises(TableError, match="EngramTable is no storage of rows: expected a RowStorage"):
        EngramTable.over(EngramTable.dense(*stored(3)))  # pyright: ignore[reportArgumentType]


def test_collisions_raise_and_add_nothing():
    table = EngramTable.virtual(32)
    table.add(torch.tensor([1, 2, 3]), *stored(3))
    with pytest.raises(TableError, match="2 of 3 row ids are in the table already"):
        table.add(torch.tensor([3, 4, 1]), *stored(3))
    with pytest.raises(TableError, match="1 of 3 row ids are given twice"):
        table.add(torch.tensor([7, 8, 7]), *stored(3))
    for call in (lambda ids: table.add(ids, *stored(3)), table.remove):
        with pytest.raises(TableError, match="row ids are of type list"):
            call([7, 8, 9])
    assert len(table) == 3 and not table.contains(torch.tensor([4, 7, 8])).any()


def test_remove_is_exact():
    table = EngramTable.virtual(32)
    (first, second), ids = (stored(50), stored(50, seed=1)), ids_of(100)
    table.add(ids[:50], *first)
    table.add(ids[50:], *second)
    table.remove(ids[:50])
    assert len(table) == 50 and not table.contains(ids[:50]).any()
    assert torch.equal(table.lookup(ids[50:]), dequantize(*second))
    with pytest.raises(TableError, match="not in the table"):
        table.remove(ids[49:51])
    assert len(table) == 50
    table.add(ids[:50], *first)
    assert torch.equal(table.lookup(ids), torch.cat((dequantize(*first), dequantize(*second))))


def test_load_and_unload_in_turn_keep_memory_flat():
    table = EngramTable.virtual(32)
    ids, rows = ids_of(3000), stored(3000)
    sizes = []
    for _ in range(50):
        table.add(ids, *rows)
        table.remove(ids)
        sizes.append(rows_held(table))
    assert len(table) == 0 and table.nbytes == 0 and set(sizes) == {0}


def test_works_across_inference_mode():
    table = EngramTable.virtual(32)
    payload, scale = stored(2)
    with torch.inference_mode():
        table.add(torch.tensor([4, 9]), payload, scale)
        table.lookup(torch.tensor([4]))
    table.add(torch.tensor([5]), payload[:1], scale[:1])
    assert torch.equal(table.lookup(torch.tensor([4, 5])), dequantize(payload, scale)[[0, 0]])


def test_many_concepts_are_cheap_to_load_and_to_read():
    table = EngramTable.virtual(32)
    table.add(ids_of(300_000), *(part.expand(300_000, -1) for part in stored(1)))
    few = torch.arange(30) * 2 + 1_000_000_000_000_000
    rows = stored(30)

    def best(action, repeats=15):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    def load_and_unload():
        table.add(few, *rows)
        table.remove(few)

    # Sorting 300,000 ids takes some 20 ms, shifting them about one: far from both, for machines under load.
    assert best(load_and_unload) < 0.015
    table.add(few, *rows)
    assert best(lambda: table.lookup(few)) < 0.002


@pytest.mark.parametrize("head_dim", [0, 33])
def test_refuses_what_does_not_fit(head_dim):
    with pytest.raises(TableError, match="multiple of 32"):
        EngramTable.virtual(head_dim)
    table = EngramTable.virtual(32)
    with pytest.raises(TableError, match="values per scale"):
        table.add(torch.tensor([1, 2]), *stored(3))
    with pytest.raises(TableError, match="int32"):
        table.lookup(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(TableError, match="float8_e4m3fn"):
        EngramTable.dense(torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.uint8))


# -- homes

CPU_HOMES = [("pageable", "record"), ("pageable", "split"), ("pinned", "record"), ("pinned", "split")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(values):
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def filled(rows, head_dim, home, layout="record", **kwargs):
    """A table of random rows in a home, and their values by the reference."""
    payload, scale = stored(rows, head_dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # without a GPU nothing can be pinned
        table = EngramTable.allocate(rows, head_dim, home=home, layout=layout, **kwargs)
    table.storage.write(0, payload, scale)
    return table, dequantize(payload, scale)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize(("home", "layout"), CPU_HOMES)
def test_every_home_and_layout_reads_the_same_bits(home, layout, head_dim):
    table, values = filled(50, head_dim, home, layout)
    ids = torch.tensor([[49, 0, -1], [7, 7, 12]])
    expected = torch.where((ids < 0).unsqueeze(-1), 0.0, values[ids])
    assert len(table) == 50 and table.head_dim == head_dim and table.nbytes == 50 * head_dim * 33 // 32
    for dtype in DTYPES:
        found = table.lookup(ids, dtype=dtype)
        assert found.dtype == dtype and torch.equal(bits(found), bits(expected.to(dtype)))
        out = torch.full_like(found, torch.nan)
        assert table.lookup(ids, out=out) is out and torch.equal(bits(out), bits(found))
    assert table.lookup(ids[:0]).shape == (0, 3, head_dim)
    assert torch.equal(EngramTable.over(table.storage).lookup(ids), expected)


def test_an_empty_table_has_no_rows():
    table, _ = filled(0, 64, "pageable")
    assert torch.equal(table.lookup(torch.tensor([-1, -1])), torch.zeros(2, 64)) and not table.contains(torch.tensor([0, -1])).any()
    with pytest.raises(TableError, match="row 0 is not in the table"):
        table.lookup(torch.tensor([0]))


@pytest.mark.parametrize("kind", ["dense", "virtual"])
def test_bounds(kind):
    if kind == "dense":
        table, values = filled(10, 32, "pageable")
    else:
        payload, scale = stored(10)
        table, values = EngramTable.virtual(32), dequantize(payload, scale)
        table.add(torch.arange(10), payload, scale)
    ids = torch.tensor([3, -1, 10, FAR, -7])
    expected = torch.cat((values[3:4], torch.zeros(4, 32)))
    assert table.bounds == "fatal"
    with pytest.raises(TableError, match=r"row 10 is not in the table \(3 of 5 missing\)"):
        table.lookup(ids)
    assert torch.equal(table.lookup(ids, bounds="ignore"), expected) and table.report().out_of_bounds == 0
    assert table.check_bounds() == 0
    table.bounds = "warn"
    for _ in range(2):
        assert torch.equal(table.lookup(ids), expected)
    assert table.report().out_of_bounds == 6 and "6 row ids outside the table" in str(table.report())
    with pytest.warns(RuntimeWarning, match="6 row ids looked up on cpu are not in the table, the first was 10") as told:
        assert table.check_bounds() == 6
    assert len(told) == 1 and table.check_bounds() == 0 and table.report().out_of_bounds == 0
    with torch.inference_mode():
        table.lookup(ids)
    assert table.report().out_of_bounds == 3
    with pytest.raises(TableError, match="bounds 'strict': expected one of"):
        table.lookup(ids, bounds="strict")
    with pytest.raises(TableError, match="bounds 'strict'"):
        EngramTable.allocate(1, 32, home="pageable", bounds="strict")


def test_opens_a_file_in_any_home(tmp_path):
    payload, scale = stored(300, 64)
    write_pool(tmp_path / "table.safetensors", (payload, scale))
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    with EngramTable.open(tmp_path / "table.safetensors").storage as mapped:
        table = EngramTable.over(mapped, bounds="ignore")
        assert mapped.home == "mapped" and torch.equal(table.lookup(ids), dequantize(payload, scale)[ids])
        with pytest.raises(TableError, match="read-only"):
            mapped.write(0, payload[:1], scale[:1])
        copy = table.copy_to("pageable", layout="split")
    assert copy.bounds == "ignore" and copy.storage.layout == "split"
    told = []
    with pytest.raises(TableError, match="home 'mapped' with device 'cpu': expected home 'device' with it"):
        EngramTable.open(tmp_path / "table.safetensors", device="cpu")
    opened = EngramTable.open(tmp_path / "table.safetensors", "pageable", progress=lambda done, total: told.append(done / total))
    assert opened.storage.home == "pageable" and opened.storage.layout == "record" and told[-1] == 1
    for table in (copy, opened):
        assert torch.equal(table.lookup(ids), dequantize(payload, scale)[ids])


def test_a_closed_table_says_so():
    table, _ = filled(4, 32, "pageable")
    table.storage.close()
    with pytest.raises(TableError, match="closed"):
        table.lookup(torch.tensor([1]))


def test_a_virtual_table_reports_but_has_no_storage():
    table = EngramTable.virtual(64)
    table.add(torch.tensor([FAR]), *stored(1, 64))
    report = table.report()
    assert (report.rows, report.nbytes, report.home, report.registered) == (1, 66, "pageable", False)
    with pytest.raises(TableError, match="no storage"):
        table.copy_to("pageable")
    assert torch.equal(table.lookup(torch.tensor([FAR]), dtype=torch.bfloat16), table.lookup(torch.tensor([FAR])).bfloat16())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(out=torch.zeros(3, 32)), "expected contiguous"),
        (dict(out=torch.zeros(2, 32, dtype=torch.float64)), "float64"),
    ],
)
def test_refuses_what_rows_cannot_be_written_to(arguments, message):
    table, _ = filled(4, 32, "pageable")
    with pytest.raises(TableError, match=message):
        table.lookup(torch.tensor([1, 2]), **arguments)


GPU_HOMES = [("device", "record"), ("device", "split"), *CPU_HOMES]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize(("home", "layout"), GPU_HOMES)
def test_ids_on_a_device_read_every_home_bit_for_bit(home, layout, head_dim):
    table, values = filled(5000, head_dim, home, layout)
    assert table.storage.home == home
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 700, 20_000):
        ids = torch.randint(-1, 5000, (count,), generator=generator)
        expected = torch.where((ids < 0).unsqueeze(-1), 0.0, values[ids])
        for dtype in DTYPES:
            found = table.lookup(ids.cuda(), dtype=dtype)
            assert found.is_cuda and torch.equal(bits(found.cpu()), bits(expected.to(dtype))), (count, dtype)
            out = torch.full_like(found, torch.nan)
            assert table.lookup(ids.cuda(), out=out) is out and torch.equal(bits(out), bits(found))
            on_cpu = table.lookup(ids, dtype=dtype)
            assert on_cpu.device.type == "cpu" and torch.equal(bits(on_cpu), bits(expected.to(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned", "pageable"])
def test_bounds_on_a_device(home):
    table, values = filled(10, 64, home)
    ids = torch.tensor([3, -1, 10, FAR], device="cuda")
    expected = torch.cat((values[3:4], torch.zeros(3, 64)))
    with pytest.raises(TableError, match="10"):
        table.lookup(ids)
    assert torch.equal(table.lookup(ids, bounds="ignore").cpu(), expected)
    assert torch.equal(table.lookup(ids, bounds="warn").cpu(), expected)
    assert table.report().out_of_bounds == 2
    with pytest.warns(RuntimeWarning, match="2 row ids looked up on cuda:0 are not in the table, the first was 10"):
        assert table.check_bounds() == 2


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_a_captured_lookup_reads_the_ids_of_each_replay(home):
    table, values = filled(1000, 64, home)
    ids = torch.zeros(300, dtype=torch.int64, device="cuda")
    out = torch.empty(300, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TableError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        table.lookup(ids, out=out)
    with pytest.raises(TableError, match="look up once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        table.lookup(ids, bounds="warn", out=out)
    table.lookup(ids, bounds="warn", out=out)
    with torch.cuda.graph(graph):
        table.lookup(ids, bounds="warn", out=out)
    for seed in range(3):
        asked = torch.randint(1000, (300,), generator=torch.Generator().manual_seed(seed))
        ids.copy_(asked)
        graph.replay()
        assert torch.equal(out.cpu(), values[asked])
    ids[5] = 1000
    graph.replay()
    graph.replay()
    assert table.report().out_of_bounds == 2 and not out[5].any()


@pytest.mark.gpu
def test_a_dense_table_over_pinned_tensors_and_a_virtual_one_take_ids_of_a_device():
    payload, scale = stored(20, 64)
    pinned = EngramTable.dense(payload.pin_memory(), scale.pin_memory())
    ids = torch.tensor([[4, 19]], device="cuda")
    assert pinned.storage.home == "pinned" and torch.equal(pinned.lookup(ids).cpu(), dequantize(payload, scale)[ids.cpu()])
    virtual = EngramTable.virtual(64)
    virtual.add(torch.arange(20), payload, scale)
    assert torch.equal(virtual.lookup(ids), pinned.lookup(ids)) and virtual.lookup(ids).is_cuda
    with pytest.raises(TableError, match="row 77 is not in the table"):
        virtual.lookup(torch.tensor([77], device="cuda"))


@pytest.mark.gpu
def test_a_file_goes_to_the_device(tmp_path):
    payload, scale = stored(300, 64)
    write_pool(tmp_path / "table.safetensors", (payload, scale))
    ids = torch.arange(300, device="cuda")
    for home in ("mapped", "pinned", "device"):
        table = EngramTable.open(tmp_path / "table.safetensors", home)
        assert table.storage.home == home and torch.equal(table.lookup(ids).cpu(), dequantize(payload, scale))


def test_no_row_is_ever_added_at_the_id_of_none():
    table = EngramTable.virtual(32)
    with pytest.raises(TableError, match="-1 stands for no row"):
        table.add(torch.tensor([5, -1]), *stored(2))
    assert len(table) == 0 and not table.lookup(torch.tensor([-1])).any()
