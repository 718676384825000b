import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import dequantize
from tiny_engram.table.fill_rule import FillRule, ids_to_check
from tiny_engram.table.mapped import map_rows, write_pool
from tiny_engram.table.storage import RowStorage

M64 = (1 << 64) - 1
FAR = [0, 1, 2, 7, 384_006_167, (1 << 31) + 1, (1 << 40) + 3]


def mixed(number):
    """splitmix64's finaliser on Python integers."""
    state = number * 0x9E3779B97F4A7C15 & M64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & M64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & M64
    return state ^ state >> 31


def record(row, head_dim):
    payload = b"".join((mixed(row * 4096 + w) & 0xBFBFBFBFBFBFBFBF).to_bytes(8, "little") for w in range(head_dim // 8))
    scale = b"".join(bytes(120 + (b & 7) for b in mixed(row * 4096 + 2048 + w).to_bytes(8, "little")) for w in range(4096 // 256))
    return list(payload + scale[: head_dim // 32])


def storage(rows, head_dim, layout, home="pageable"):
    return RowStorage.allocate(rows, head_dim, home=home, layout=layout)


@pytest.mark.parametrize("head_dim", [32, 96, 256, 1056])
def test_bytes_are_the_rules(head_dim):
    records = FillRule(head_dim).records(torch.tensor(FAR))
    assert records.dtype == torch.uint8 and records.tolist() == [record(row, head_dim) for row in FAR]


def test_rows_are_plausible_and_differ():
    payload, scale = FillRule(64).rows(torch.arange(4000).view(40, 100))
    assert payload.shape == (40, 100, 64) and scale.shape == (40, 100, 2)
    values = payload.float()
    assert values.isfinite().all() and values.abs().max() == 1.875 and bool((payload.view(torch.uint8) == 0x80).any())
    assert scale.unique().tolist() == list(range(120, 128))
    assert len({bytes(row) for row in payload.view(torch.uint8).reshape(4000, 64).numpy()}) == 4000
    other, _ = FillRule(64, seed=1).rows(torch.arange(4000))
    assert bool((other.view(torch.uint8) != payload.view(torch.uint8).reshape(4000, 64)).any(dim=1).all())


def test_values_are_what_a_lookup_returns():
    rule = FillRule(32)
    ids = torch.tensor([[5, -1], [9, 5]])
    values = rule.values(ids)
    assert torch.equal(values[0, 0], dequantize(*rule.rows(torch.tensor(5)))) and torch.equal(values[0, 0], values[1, 1])
    assert torch.equal(values[0, 1], torch.zeros(32))
    assert torch.equal(rule.values(ids, torch.bfloat16).float(), values)


@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 1003])
def test_fills_either_layout(layout, threads, rows):
    rule = FillRule(96)
    made = storage(rows, 96, layout)
    rule.fill(made, first_row=10**9, chunk_rows=100, threads=threads)
    payload, scale = rule.rows(torch.arange(10**9, 10**9 + rows))
    assert torch.equal(made.payload.view(torch.uint8), payload.view(torch.uint8)) and torch.equal(made.scale, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("home", ["pageable", "pinned", "device"])
def test_a_gpu_fills_host_memory_with_the_same_bytes(layout, home):
    rule = FillRule(256)
    made = storage(100_003, 256, layout, home)
    rule.fill(made, first_row=7, device="cuda", chunk_rows=4096)
    payload, scale = rule.rows(torch.arange(7, 100_010))
    assert torch.equal(made.payload.cpu().view(torch.uint8), payload.view(torch.uint8)) and torch.equal(made.scale.cpu(), scale)


@pytest.mark.gpu
def test_a_gpu_fills_across_the_seam_of_two_registrations():
    rule = FillRule(256)
    made = storage(100_003, 256, "record")
    start, half = made.payload.data_ptr(), made.nbytes // 2 // 4096 * 4096
    pieces = [(start, half), (start + half, made.nbytes - half)]
    runtime = torch.cuda.cudart()
    assert runtime is not None
    assert [int(runtime.cudaHostRegister(address, nbytes, 3)) for address, nbytes in pieces] == [0, 0]
    try:
        rule.fill(made, device="cuda", chunk_rows=30_000)
    finally:
        assert [int(runtime.cudaHostUnregister(address)) for address, _ in pieces] == [0, 0]
    payload, scale = rule.rows(torch.arange(100_003))
    assert torch.equal(made.payload.view(torch.uint8), payload.view(torch.uint8)) and torch.equal(made.scale, scale)


def test_ids_to_check_lie_at_the_ends_and_around_the_limits():
    ids = ids_to_check(384_006_168, 264).tolist()
    assert ids[0] == 0 and ids[-1] == 384_006_167 and ids == sorted(set(ids))
    for limit, unit in ((1 << 31, 264), (1 << 31, 256), (1 << 32, 256), (1 << 33, 264)):
        assert {limit // unit, limit // unit - 1, limit // unit + 1} <= set(ids)
    assert ids_to_check(1, 264).tolist() == [0] and ids_to_check(0, 264).tolist() == []


@pytest.mark.parametrize("head_dim", [0, 40, 32_768])
def test_refuses_widths_that_no_row_has(head_dim):
    with pytest.raises(TableError, match="multiple of 32"):
        FillRule(head_dim)


def test_refuses_storage_of_another_width():
    with pytest.raises(TableError, match="rows of 64 values"):
        FillRule(32).fill(storage(3, 64, "record"))


def test_a_rule_does_not_fill_a_mapping(tmp_path):
    """The process would be killed."""
    write_pool(tmp_path / "t", FillRule(32).rows(torch.arange(10)))
    with pytest.raises(TableError, match="home 'mapped' is read-only"):
        FillRule(32).fill(map_rows(tmp_path / "t"))
