import pytest
import torch
from torch.nn import functional

from tiny_engram.kernels.short_conv import short_conv

EPS = 1e-6


def plain(v, weight, norm_weight, dilation):
    """With torch's own depthwise conv1d, every step in the inputs' own type."""
    batch, length, copies, size = v.shape
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * norm_weight
    channels = normed.reshape(batch, length, copies * size).transpose(1, 2)
    past = (weight.shape[-1] - 1) * dilation
    mixed = functional.conv1d(
        functional.pad(channels, (past, 0)), weight.reshape(copies * size, 1, -1), dilation=dilation, groups=copies * size
    )
    return v + functional.silu(mixed).transpose(1, 2).reshape(v.shape)


def inputs(batch, length, copies, size, taps, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, copies, size), (copies, size, taps), (copies, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, dilation", [((1, 1, 1, 8, 4), 3), ((2, 11, 2, 9, 4), 3), ((1, 20, 4, 5, 2), 1)])
def test_error_at_most_twice_plain_torch(dtype, shape, dilation, rms_error):
    args = inputs(*shape, dtype)
    exact = plain(*(a.double() for a in args), dilation=dilation)
    out = short_conv(*args, dilation=dilation, eps=EPS)
    assert out.dtype == dtype
    assert rms_error(out, exact) <= 2 * rms_error(plain(*args, dilation=dilation), exact)


def test_gradients_equal_float64():
    args = [a.requires_grad_() for a in inputs(1, 5, 2, 3, 2, torch.float64)]
    assert torch.autograd.gradcheck(lambda *a: short_conv(*a, dilation=2, eps=EPS), args)


def test_a_zero_weight_changes_nothing():
    v, weight, norm_weight = inputs(2, 7, 2, 16, 4, torch.float32)
    assert torch.equal(short_conv(v, torch.zeros_like(weight), norm_weight, dilation=3, eps=EPS), v)


def test_is_causal():
    v, weight, norm_weight = inputs(1, 9, 1, 8, 4, torch.float32)
    changed = v.clone()
    changed[:, 5] += 1
    a, b = (short_conv(x, weight, norm_weight, dilation=3, eps=EPS) for x in (v, changed))
    moved = [t for t in range(9) if not torch.equal(a[:, t], b[:, t])]
    assert moved == [5, 8]


def test_no_time_and_refusals():
    v, weight, norm_weight = inputs(1, 0, 2, 8, 4, torch.float32)
    assert short_conv(v, weight, norm_weight, dilation=3, eps=EPS).shape == v.shape
    with pytest.raises(ValueError, match="dilation 0"):
        short_conv(v, weight, norm_weight, dilation=0, eps=EPS)
    with pytest.raises(ValueError, match="norm_weight"):
        short_conv(v, weight, norm_weight[:1], dilation=3, eps=EPS)
    with pytest.raises(ValueError, match="K of 1 or more"):
        short_conv(v, weight[..., :0], norm_weight, dilation=3, eps=EPS)
