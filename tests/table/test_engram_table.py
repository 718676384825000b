import time

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.table import EngramTable
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
    with pytest.raises(TableError, match="row 7 is not in the table"):
        table.lookup(torch.tensor([0, 7, 9]))


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


def test_collisions_raise_and_add_nothing():
    table = EngramTable.virtual(32)
    table.add(torch.tensor([1, 2, 3]), *stored(3))
    with pytest.raises(TableError, match="2 of 3 row ids are in the table already"):
        table.add(torch.tensor([3, 4, 1]), *stored(3))
    with pytest.raises(TableError, match="1 of 3 row ids are given twice"):
        table.add(torch.tensor([7, 8, 7]), *stored(3))
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
