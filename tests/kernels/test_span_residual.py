import math

import pytest
import torch

from tiny_engram.kernels.span_residual import span_residual
from tiny_engram.kernels.span_residual.reference import _exact_sigmoid


def plain(h, key, value, gain, bias, scale, mean_norm):
    """The formula as one writes it in torch, in the inputs' own type."""

    def rms(x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    dot = (rms(h) * rms(key)).sum(-1) / math.sqrt(h.shape[-1])
    gate = torch.sigmoid(gain * torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot) + bias)
    return (scale * mean_norm * gate / value.norm(dim=-1).clamp_min(1.0)).unsqueeze(-1) * value


def inputs(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h, key, value = (torch.randn(rows, width, generator=generator) for _ in range(3))
    gain, bias, scale, mean_norm = (torch.rand(rows, generator=generator) + 0.5 for _ in range(4))
    return [h, key, value], {"gain": gain, "bias": bias, "scale": scale, "mean_norm": mean_norm}


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 33), (40, 160), (7, 768)])
def test_error_at_most_twice_plain_torch(rows, width, rms_error):
    args, factors = inputs(rows, width)
    exact = plain(*(a.double() for a in args), **{k: v.double() for k, v in factors.items()})
    out = span_residual(*args, **factors)
    assert out.dtype == torch.float32
    assert rms_error(out, exact) <= 2 * rms_error(plain(*args, **factors), exact) + 1e-8


@pytest.mark.parametrize("width", [33, 160])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_layout(width):
    args, factors = inputs(53, width)
    whole = span_residual(*args, **factors)
    for start, stop in [(0, 1), (52, 53), (7, 20), (16, 48)]:
        part = span_residual(*(a[start:stop] for a in args), **{k: v[start:stop] for k, v in factors.items()})
        assert torch.equal(part, whole[start:stop])
    backwards = torch.arange(52, -1, -1)
    assert torch.equal(span_residual(*(a[backwards] for a in args), **{k: v[backwards] for k, v in factors.items()}), whole[backwards])
    strided = [a.T.contiguous().T for a in args]
    assert torch.equal(span_residual(*strided, **factors), whole)


def test_sigmoid_is_right_to_the_last_bit():
    z = torch.cat((torch.linspace(-110, 110, 20001), torch.tensor([0.0, -0.0, 1e30, -1e30])))
    exact = torch.sigmoid(z.double()).float()
    out = _exact_sigmoid(z)
    assert ((out - exact).abs() <= exact.abs() * 2**-23).all()
    assert out[-4:].tolist() == [0.5, 0.5, 1.0, 0.0]


def test_zero_key_gives_one_gate_whatever_the_signs_of_h():
    h = torch.stack((torch.ones(8), -torch.ones(8)))
    ones = torch.ones(2)
    value = torch.full((2, 8), 0.1)
    out = span_residual(h, torch.zeros(2, 8), value, gain=ones, bias=ones * 0, scale=ones, mean_norm=ones)
    assert torch.equal(out[0], out[1])
    torch.testing.assert_close(out, torch.sigmoid(torch.tensor(0.001)) * value)


def test_the_residual_is_bounded():
    args, factors = inputs(5, 64)
    args[2] = args[2] * 1000
    norms = span_residual(*args, **factors).norm(dim=-1)
    assert (norms <= factors["scale"] * factors["mean_norm"] * 1.0001).all()


def test_zero_scale_or_value_gives_zero():
    args, factors = inputs(3, 16)
    assert torch.equal(span_residual(*args, **{**factors, "scale": torch.zeros(3)}), torch.zeros(3, 16))
    assert torch.equal(span_residual(args[0], args[1], torch.zeros(3, 16), **factors), torch.zeros(3, 16))


def test_gradients_at_the_start_where_key_and_value_are_zero():
    args, factors = inputs(3, 16)
    leaves = [args[0].requires_grad_(), torch.zeros(3, 16, requires_grad=True), torch.zeros(3, 16, requires_grad=True)]
    factors = {k: v.requires_grad_() for k, v in factors.items()}
    span_residual(*leaves, **factors).sum().backward()
    for leaf in [*leaves, *factors.values()]:
        assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert (leaves[2].grad != 0).all()


def test_gradients_equal_float64():
    args, factors = inputs(4, 33)
    tensors = [a.requires_grad_() for a in args] + [v.requires_grad_() for v in factors.values()]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    names = list(factors)
    narrow_out = span_residual(tensors[0], tensors[1], tensors[2], **dict(zip(names, tensors[3:], strict=True)))
    wide_out = plain(*wide[:3], **dict(zip(names, wide[3:], strict=True)))
    narrow = torch.autograd.grad(narrow_out.square().sum(), tensors)
    for a, b in zip(narrow, torch.autograd.grad(wide_out.square().sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_no_rows_and_refusals():
    args, factors = inputs(0, 16)
    assert span_residual(*args, **factors).shape == (0, 16)
    args, factors = inputs(3, 16)
    with pytest.raises(ValueError, match="gain"):
        span_residual(*args, **{**factors, "gain": torch.ones(1)})
    with pytest.raises(ValueError, match="key"):
        span_residual(args[0], args[1][:, :4], args[2], **factors)
