"""The distinct ids among many: by torch, and by the hash set in Triton."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.unique_ids import unique_ids

NAMES = ("reference", "triton")


def check(row_ids: torch.Tensor) -> int:
    """Hold the whole promise against plain torch; the number of distinct ids."""
    flat = row_ids.reshape(-1)
    unique, inverse, count = unique_ids(row_ids)
    number = int(count)
    assert unique.shape == inverse.shape == flat.shape and count.shape == (1,)
    assert unique.dtype == inverse.dtype == count.dtype == torch.int64
    expected = flat[flat >= 0].unique()
    assert torch.equal(unique[:number].sort().values, expected)
    assert bool((unique[number:] == -1).all())
    assert torch.equal(inverse == -1, flat < 0)
    assert torch.equal(unique[inverse[flat >= 0]], flat[flat >= 0])
    return number


@pytest.mark.parametrize("name", NAMES)
def test_every_id_is_found_once(name):
    dice = torch.Generator().manual_seed(1)
    with implementation(name):
        for total, spread in ((1, 5), (2, 1), (127, 40), (129, 10**9), (300, 2**62), (513, 3)):
            row_ids = torch.randint(0, spread, (total,), generator=dice)
            assert check(row_ids) == row_ids.unique().numel()


@pytest.mark.parametrize("name", NAMES)
def test_no_row_has_no_place(name):
    row_ids = torch.tensor([[7, -1, 7], [2**63 - 1, 0, -1]])
    with implementation(name):
        assert check(row_ids) == 3
        unique, inverse, _ = unique_ids(row_ids)
        assert torch.equal(unique[inverse], row_ids.reshape(-1))  # the last place is -1 whenever an id is
        assert check(torch.full((5,), -1)) == 0
        assert check(torch.tensor([-5, 4, -(2**63)])) == 1


@pytest.mark.parametrize("name", NAMES)
def test_empty_strided_and_scalar_input(name):
    row_ids = torch.arange(24).reshape(4, 6) // 5
    with implementation(name):
        assert check(row_ids[:0]) == 0
        assert check(row_ids.t()) == 5
        assert check(row_ids[:, ::2]) == 5
        assert check(torch.tensor(3)) == 1


def test_ids_that_fall_on_one_slot_probe_on():
    # 256 slots and neighbours by the thousand: runs of occupied slots form, and the last ones wrap around the end.
    with implementation("triton"):
        assert check(torch.arange(128) * 2**32) == 128
        assert check(torch.arange(128) << 48) == 128


def test_other_types_are_refused():
    with pytest.raises(ValueError, match=r"int32: expected torch.int64"):
        unique_ids(torch.zeros(3, dtype=torch.int32))


def test_fake_and_compiled_shapes():
    row_ids = torch.tensor([[3, 3, 1]])
    torch.library.opcheck(torch.ops.tiny_engram.unique_ids.default, (row_ids,))
    for name in NAMES:
        with implementation(name):
            assert [part.shape[0] for part in unique_ids(row_ids.to("meta"))] == [3, 3, 1]
            with FakeTensorMode():
                assert [part.shape[0] for part in unique_ids(torch.zeros(2, 4, dtype=torch.int64))] == [8, 8, 1]


def zipf_ids(total: int, rows: int, device: str) -> torch.Tensor:
    """Ids whose frequency falls as 1 / rank, the ranks scattered over the table."""
    uniform = torch.rand(total, device=device, generator=torch.Generator(device).manual_seed(3))
    rank = torch.exp(uniform.double() * torch.log(torch.tensor(float(rows), dtype=torch.float64))).long()
    return rank * 2654435761 % rows


@pytest.mark.gpu
@pytest.mark.parametrize("total", [1, 1000, 1 << 20])
def test_on_the_device_with_zipf_duplicates(total):
    row_ids = zipf_ids(total, 384_006_168, "cuda")
    row_ids[::97] = -1
    number = check(row_ids)
    assert number <= total
    assert check(torch.arange(total, device="cuda") * 3) == total
    assert check(torch.zeros(total, dtype=torch.int64, device="cuda")) == 1


@pytest.mark.gpu
def test_captured_in_a_graph():
    row_ids = torch.randint(0, 100, (5000,), device="cuda")
    unique_ids(row_ids)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unique, inverse, count = unique_ids(row_ids)
    for high in (100, 10**9):
        row_ids.copy_(torch.randint(0, high, (5000,), device="cuda"))
        graph.replay()
        assert int(count) == row_ids.unique().numel()
        assert torch.equal(unique[inverse], row_ids)
