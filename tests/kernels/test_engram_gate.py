import math

import pytest
import torch
from torch.nn import functional

from tiny_engram.kernels.engram_gate import engram_gate

FORMS = ["v41", "paper"]


def plain(x, key, value, q_weight, k_weight, eps, form):
    """The gate as one writes it in torch, every step in the inputs' own type."""
    size = x.shape[-1]
    query = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * q_weight
    normed = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + eps) * k_weight
    dot = (query * normed).sum(-1) / math.sqrt(size)
    root = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(torch.copysign(root, dot) if form == "v41" else root * dot.sign())
    return x + gate.unsqueeze(-1) * value.unsqueeze(-2)


def inputs(tokens, copies, size, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, copies, size), (tokens, copies, size), (tokens, size), (copies, size), (copies, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def test_golden(golden):
    entry = golden["gate_v41"]
    x, key, value, q_weight, k_weight = (torch.tensor(entry[n]).unsqueeze(0) for n in ("x", "key", "value", "q_weight", "k_weight"))
    out = engram_gate(x, key, value, q_weight[0], k_weight[0], eps=entry["eps"], form="v41")
    torch.testing.assert_close(out[0], torch.tensor(entry["out"]), rtol=0, atol=2e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 33), (5, 1, 160)])
def test_error_at_most_twice_plain_torch(form, dtype, shape, rms_error):
    args = inputs(*shape, dtype=dtype)
    exact = plain(*(a.double() for a in args), eps=1e-6, form=form)
    out = engram_gate(*args, eps=1e-6, form=form)
    assert out.dtype == dtype and out.shape == args[0].shape
    # One unit of the last place of slack, for sizes at which plain torch happens to be exact.
    assert rms_error(out, exact) <= 2 * rms_error(plain(*args, eps=1e-6, form=form), exact) + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_float64(form):
    args = [a.requires_grad_() for a in inputs(3, 2, 17)]
    assert torch.autograd.gradcheck(lambda *a: engram_gate(*a, eps=1e-6, form=form), args)
    wide = torch.autograd.grad(engram_gate(*args, eps=1e-6, form=form).square().sum(), args)
    narrow_args = [a.detach().float().requires_grad_() for a in args]
    narrow = torch.autograd.grad(engram_gate(*narrow_args, eps=1e-6, form=form).square().sum(), narrow_args)
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("form", FORMS)
def test_dot_of_plus_and_minus_zero(form, sign):
    # The one product is the smallest float32, which the norm of x then takes below it: a dot of +0 or -0. (Products that
    # are all -0 would not do: torch adds them to a +0.)
    x = torch.tensor([[[1.0, 1e3, 1e3, 1e3]]])
    key = torch.tensor([[[sign, 0.0, 0.0, 0.0]]])
    q_weight, k_weight = torch.full((1, 4), 1e-20), torch.full((1, 4), 1.4e-25)
    out = engram_gate(x, key, torch.ones(1, 4), q_weight, k_weight, eps=1e-20, form=form, residual=False)
    if form == "paper":
        assert (out == 0.5).all()
    else:
        torch.testing.assert_close(out, torch.sigmoid(torch.tensor(sign * 1e-3)).expand(1, 1, 4), rtol=0, atol=6e-8)


@pytest.mark.parametrize("form, gate", [("v41", 0.50025), ("paper", 0.5)])
def test_a_zero_key(form, gate):
    ones = torch.ones(1, 4)
    out = engram_gate(torch.randn(1, 1, 4), torch.zeros(1, 1, 4), ones, ones, ones, eps=1e-20, form=form, residual=False)
    torch.testing.assert_close(out, torch.full((1, 1, 4), gate), rtol=0, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_come_back_bit_for_bit(form, dtype):
    x, key, value, q_weight, k_weight = inputs(4, 2, 33, dtype=dtype)
    key[1] = float("nan")
    x[1, 0, 0] = -0.0
    mask = torch.tensor([False, True, False, True])
    out = engram_gate(x, key, value, q_weight, k_weight, eps=1e-6, form=form, mask=mask)
    assert torch.equal(out[mask].view(torch.uint8), x[mask].view(torch.uint8))
    assert torch.equal(out[0], engram_gate(x[:1], key[:1], value[:1], q_weight, k_weight, eps=1e-6, form=form)[0])
    gated = engram_gate(x, key, value, q_weight, k_weight, eps=1e-6, form=form, mask=mask, residual=False)
    assert torch.equal(gated[mask], torch.zeros_like(gated[mask]))


def test_paper_form_is_torch_rms_norm():
    x, key, value, q_weight, k_weight = inputs(3, 1, 32, dtype=torch.float32)
    eps = torch.finfo(torch.float32).eps
    query = functional.rms_norm(x, (32,)) * q_weight
    normed = functional.rms_norm(key, (32,)) * k_weight
    dot = (query * normed).sum(-1) / math.sqrt(32)
    gate = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * dot.sign())
    out = engram_gate(x, key, value, q_weight, k_weight, eps=eps, form="paper")
    torch.testing.assert_close(out, x + gate.unsqueeze(-1) * value.unsqueeze(-2), rtol=1e-6, atol=1e-6)


def test_no_tokens_and_refusals():
    args = inputs(0, 2, 8)
    assert engram_gate(*args, eps=1e-6, form="v41").shape == (0, 2, 8)
    with pytest.raises(ValueError, match="form"):
        engram_gate(*args, eps=1e-6, form="v42")
    x, key, value, q_weight, k_weight = inputs(3, 2, 8)
    with pytest.raises(ValueError, match="value"):
        engram_gate(x, key, value[:, :4], q_weight, k_weight, eps=1e-6, form="v41")
    with pytest.raises(ValueError, match="q_weight"):
        engram_gate(x, key, value, q_weight[:1], k_weight, eps=1e-6, form="v41")
