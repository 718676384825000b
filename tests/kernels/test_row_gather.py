import pytest
import torch

from tiny_engram.kernels.block_quant import dequantize_blocks, quantize_blocks
from tiny_engram.kernels.row_gather import row_gather


def test_gathers_and_dequantises():
    payload, scale = quantize_blocks(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)))
    slots = torch.tensor([[6, 0, -1], [3, 3, 5]])
    out = row_gather(payload, scale, slots)
    rows = dequantize_blocks(payload, scale)
    assert out.dtype == torch.float32 and out.shape == (2, 3, 64)
    assert torch.equal(out[0, 0], rows[6]) and torch.equal(out[1, 0], out[1, 1])
    assert torch.equal(out[0, 2], torch.zeros(64))


def test_an_absent_slot_does_not_see_a_broken_row_0():
    payload = torch.ones(1, 32).to(torch.float8_e4m3fn)
    assert torch.equal(row_gather(payload, torch.tensor([[255]], dtype=torch.uint8), torch.tensor([-1])), torch.zeros(1, 32))


def test_empty_table_and_empty_request():
    payload, scale = quantize_blocks(torch.zeros(0, 32))
    assert torch.equal(row_gather(payload, scale, torch.tensor([-1, -1])), torch.zeros(2, 32))
    assert row_gather(payload, scale, torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 32)


def test_refuses_what_does_not_fit():
    payload, scale = quantize_blocks(torch.zeros(2, 32))
    with pytest.raises(IndexError):
        row_gather(payload, scale, torch.tensor([2]))
    with pytest.raises(ValueError, match="int64"):
        row_gather(payload, scale, torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match="D / 32"):
        row_gather(payload, torch.zeros(2, 2, dtype=torch.uint8), torch.tensor([0]))
