import math

import pytest
import torch

from tiny_engram.kernels.block_quant import dequantize_blocks, quantize_blocks

FINITE_CODES = [code for code in range(256) if code not in (0x7F, 0xFF)]


def block_of(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def test_golden_scales(golden):
    ones = torch.ones(1, 32).to(torch.float8_e4m3fn)
    for entry in golden["e8m0"]:
        out = dequantize_blocks(ones, torch.tensor([[entry["byte"]]], dtype=torch.uint8))[0, 0]
        expected = {"2**-127": 2.0**-127, "2**-126": 2.0**-126, "2**127": 2.0**127}.get(entry["value"])
        expected = float(entry["value"]) if expected is None else expected
        assert math.isnan(out) if math.isnan(expected) else out.item() == expected


def test_every_scale_byte():
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    out = dequantize_blocks(torch.ones(256, 32).to(torch.float8_e4m3fn), scale)[:, 0]
    assert out[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert out[255].isnan()


def test_every_code_round_trips():
    # Each code beside 448, which pins the block's scale to 1.
    codes = torch.tensor([[code, 0x7E, *[0] * 30] for code in FINITE_CODES], dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((len(FINITE_CODES), 1), 127, dtype=torch.uint8)
    payload, again = quantize_blocks(dequantize_blocks(codes, scale))
    assert torch.equal(payload.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again, scale)


@pytest.mark.parametrize("byte", [0, 1, 60, 126, 128, 200, 245])
def test_powers_of_two_shift_only_the_scale(byte):
    codes = torch.tensor([0x7E, 0x01, 0x88, 0x38, *[0] * 28], dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([byte], dtype=torch.uint8)
    payload, again = quantize_blocks(dequantize_blocks(codes, scale))
    assert torch.equal(again, scale)
    assert torch.equal(payload.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("amax, byte", [(448.0, 127), (449.0, 128), (224.0, 126), (224.5, 127), (1.0, 119), (0.0, 127), (1e-45, 0)])
def test_scale_is_the_least_power_that_holds_the_block(amax, byte):
    payload, scale = quantize_blocks(block_of(amax, -amax / 2))
    assert scale.tolist() == [byte]
    assert payload.float().abs().max() <= 448


def test_rounds_to_nearest_even_and_keeps_the_sign_of_zero():
    # Between 16 and 32 e4m3 steps by 2: 17 and 19 are ties, and go to 16 and 20.
    payload, scale = quantize_blocks(block_of(448.0, 17.0, 19.0, -17.0, 17.01, -0.0))
    assert scale.tolist() == [127]
    assert payload[:5].float().tolist() == [448.0, 16.0, 20.0, -16.0, 18.0]
    assert payload[5:6].view(torch.uint8).item() == 0x80


def test_the_largest_values_keep_a_finite_payload():
    payload, scale = quantize_blocks(block_of(3.2e38, -3.2e38, torch.finfo(torch.float32).max))
    assert scale.tolist() == [247] and payload.float().isfinite().all()
    assert dequantize_blocks(payload, scale)[:2].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_shows_and_its_neighbour_is_untouched(bad):
    payload, scale = quantize_blocks(torch.cat((block_of(bad, 1.0), block_of(1.0))))
    assert scale.tolist() == [255, 119]
    out = dequantize_blocks(payload, scale)
    assert out[:32].isnan().all() and torch.equal(out[32:], block_of(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (0, 64), (3, 5, 96)])
def test_shapes_types_and_error_bound(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload, scale = quantize_blocks(x)
    assert payload.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8
    assert payload.shape == x.shape and scale.shape == (*shape[:-1], shape[-1] // 32)
    # Half a step of a 3-bit mantissa, or half the smallest step under the block's scale.
    step = (2.0**-9 * torch.exp2(scale.float() - 127)).repeat_interleave(32, dim=-1)
    assert ((dequantize_blocks(payload, scale) - x.float()).abs() <= torch.maximum(x.float().abs() / 16, step / 2)).all()


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="32 divides"):
        quantize_blocks(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="D / 32"):
        dequantize_blocks(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8))
