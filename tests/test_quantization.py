import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import quantize_blocks
from tiny_engram.quantization import dequantize, fake_quantize, quantize


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, shape[-1])


def test_fake_quantize_is_what_is_stored():
    x = values(5, 96)
    assert torch.equal(fake_quantize(x), dequantize(*quantize(x)))


def test_quantising_twice_changes_nothing():
    payload, scale = quantize(values(5, 96))
    again, scale_again = quantize(dequantize(payload, scale))
    assert torch.equal(dequantize(again, scale_again), dequantize(payload, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_identity(dtype):
    x = values(3, 64).to(dtype).requires_grad_()
    upstream = torch.randn(3, 64).to(dtype)
    out = fake_quantize(x)
    assert out.dtype == dtype
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert torch.equal(gradient, upstream)


def test_zero_rows_stay_zero_and_learn():
    x = torch.zeros(2, 32, requires_grad=True)
    out = fake_quantize(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 32)) and x.grad is not None and (x.grad == 1).all()


def test_what_is_not_finite_shows_in_training_and_is_refused_for_storage():
    x = values(2, 64)
    x[1, 3] = float("nan")
    assert fake_quantize(x)[1, :32].isnan().all()
    with pytest.raises(TableError, match="1 of 128 row values are NaN or infinite"):
        quantize(x)


def test_fake_quantize_has_the_stored_bits_for_every_exponent():
    """Random bits, NaN and infinities among them; scales from the least to the largest; amax on either side of 448's fraction."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4000, 32), generator=generator).to(torch.int32).view(torch.float32)
    spread = torch.randn(4000, 32, generator=generator) * torch.exp2(torch.randint(-149, 127, (4000, 1), generator=generator).float())
    edges = torch.zeros(9, 269, 32)
    ends = torch.tensor([448.0, 447.99997, 448.00003, 1.75, 1.7500001, 1.0, 3.4028235e38, float("inf"), float("nan")])
    edges[..., 0] = ends[:, None] * torch.exp2(torch.arange(-149, 120).float())
    edges[..., 1], edges[..., 2] = -0.3 * edges[..., 0], -0.0
    for x in (bits, spread, edges):
        made, stored = fake_quantize(x), dequantize(*quantize_blocks(x))
        assert torch.equal(made.isnan(), stored.isnan())
        assert torch.equal(made.nan_to_num().view(torch.int32), stored.nan_to_num().view(torch.int32))


def test_a_width_that_blocks_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="a last size that 32 divides"):
        fake_quantize(torch.zeros(3, 33))
