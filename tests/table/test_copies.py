"""Copies of tables share the rows, and pickles are refused; sizes, types and rules that are none are one clear line."""

import copy
import io
import pickle

import pytest
import torch

from tiny_engram.config import HashConfig, LayerConfig
from tiny_engram.errors import TableError
from tiny_engram.layer import EngramLayer
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.table import EngramTable, RowStorage
from tiny_engram.table.hot import HotRows
from tiny_engram.table.mapped import write_pool
from tiny_engram.table.prefetch import Prefetcher

IDS = torch.tensor([3, 0, -1, 7])


def stored(rows=10, seed=0):
    return quantize(torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def mapped(tmp_path):
    write_pool(tmp_path / "t", stored())
    return EngramTable.open(tmp_path / "t")


def allocated():
    table = EngramTable.allocate(10, 32, home="pageable", bounds="warn")
    table.storage.write(0, *stored())
    return table


def layer_over(table):
    hashes = HashConfig(max_ngram=3, heads=1, vocab=101, pad_id=2, compressed_vocab=90, layer_ids=(0,))
    return EngramLayer(LayerConfig(hash=hashes, layer_id=0, hidden=32, copies=1, head_dim=32), table)


def test_a_deep_copy_shares_the_rows(mapped):
    for table in (allocated(), mapped, EngramTable.dense(*stored())):
        twin, shallow = copy.deepcopy(table), copy.copy(table)
        assert twin is not table and twin.storage is shallow.storage is table.storage and twin.bounds == table.bounds
        assert torch.equal(twin.lookup(IDS), table.lookup(IDS))
        twin.lookup(torch.tensor([99]), bounds="warn")
        assert (twin.report().out_of_bounds, table.report().out_of_bounds) == (1, 0)
        assert copy.deepcopy([table, table])[0].storage is table.storage


def test_a_deep_copy_of_a_virtual_table_is_independent():
    payload, scale = stored()
    table = EngramTable.virtual(32)
    table.add(torch.arange(10), payload, scale)
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        twin.remove(torch.tensor([3]))
        twin.add(torch.tensor([77]), *stored(1, seed=1))
        assert len(twin) == 10 and not bool(twin.contains(torch.tensor([3])))
        assert torch.equal(table.lookup(torch.arange(10)), dequantize(payload, scale)) and not bool(table.contains(torch.tensor([77])))


def test_models_over_tables_are_copied_without_the_rows(mapped):
    model = layer_over(mapped)
    twin = copy.deepcopy(model)
    assert isinstance(twin.table, EngramTable) and twin.table.storage is mapped.storage and twin.q_weight is not model.q_weight
    buffer = io.BytesIO()
    with pytest.raises(TableError, match="RowStorage cannot be pickled.*state_dict"):
        torch.save(model, buffer)
    torch.save(model.state_dict(), buffer)


def test_hot_rows_and_prefetchers(mapped):
    hot = HotRows(mapped, capacity_rows=4, device="cpu")
    assert copy.deepcopy(hot) is copy.copy(hot) is hot and copy.deepcopy(layer_over(hot)).table is hot
    ahead = Prefetcher(mapped, capacity=4, columns=1, device="cpu", dtype=torch.bfloat16, bounds="ignore")
    ahead.start(IDS[:, None])
    twins = copy.deepcopy(ahead), copy.copy(ahead)
    ahead.wait()
    for twin in twins:
        assert twin.staging.data_ptr() != ahead.staging.data_ptr() and twin.bounds == "ignore"
        twin.start(IDS.flip(0)[:, None])
        assert torch.equal(twin.wait(), mapped.lookup(IDS.flip(0), dtype=torch.bfloat16))
    assert torch.equal(ahead.staging[:, 0], mapped.lookup(IDS, dtype=torch.bfloat16))


def test_pickles_are_refused(mapped):
    for kept in (
        allocated(),
        mapped,
        mapped.storage,
        HotRows(mapped, capacity_rows=4, device="cpu"),
        Prefetcher(EngramTable.virtual(32), capacity=4, columns=1, device="cpu", dtype=torch.float32),
    ):
        with pytest.raises(TableError, match=r"cannot be pickled.*EngramTable\.open\(path\)"):
            pickle.dumps(kept)


def prefetcher(**changes):
    given = {"capacity": 4, "columns": 1, "device": "cpu", "dtype": torch.float32}
    return Prefetcher(allocated(), **(given | changes))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: prefetcher(bounds="x"), "bounds 'x': expected one of"),
        (lambda: prefetcher(dtype="float16"), r"dtype 'float16': expected torch\.float32"),
        (lambda: prefetcher(capacity=1.5), "capacity is 1.5 of type float: expected a whole number"),
        (lambda: HotRows(allocated(), capacity_rows=1.5, device="cpu"), "capacity_rows is 1.5 of type float"),
        (lambda: HotRows(allocated(), capacity_rows=1, device="cpu").lookup(IDS, bounds="x"), "bounds 'x'"),
        (lambda: EngramTable.allocate(1e6, 32, home="pageable"), "rows is 1000000.0 of type float: expected a whole number"),
        (lambda: EngramTable.allocate("5", 32, home="pageable"), "rows is '5' of type str"),
        (lambda: EngramTable.allocate(5, 32.0, home="pageable"), "head_dim is 32.0 of type float"),
        (lambda: EngramTable.virtual("32"), "head_dim is '32' of type str"),
        (lambda: EngramTable.allocate(5, 32, home="device", device="cpu"), "home 'device' with device 'cpu': expected a GPU"),
        (lambda: allocated().copy_to("device", device=torch.device("cpu")), "home 'device' with device 'cpu': expected a GPU"),
        (lambda: allocated().lookup(IDS, dtype="float16"), r"dtype 'float16': expected torch\.float32"),
        (lambda: allocated().lookup(IDS, dtype=torch.float64), r"dtype torch\.float64: expected torch\.float32"),
        (lambda: EngramTable.virtual(32).lookup(IDS, dtype="bfloat16", bounds="ignore"), "dtype 'bfloat16'"),
    ],
)
def test_arguments_that_make_no_sense(action, message):
    with pytest.raises(TableError, match=message):
        action()


def test_whole_numbers_of_any_kind_are_sizes():
    assert RowStorage.allocate(torch.tensor(5), 32, home="pageable").rows == 5  # pyright: ignore[reportArgumentType]


def test_known_ids_are_refused_in_words_of_tables():
    table = EngramTable.virtual(32)
    table.add(torch.tensor([1, 2]), *stored(2))
    with pytest.raises(TableError, match="1 of 2 row ids are in the table already: remove them first, or use other ids"):
        table.add(torch.tensor([2, 3]), *stored(2))
    with pytest.raises(TableError, match="1 of 2 row ids are given twice: give each once"):
        table.add(torch.tensor([3, 3]), *stored(2))
