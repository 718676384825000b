"""The Triton gate on a CUDA device: every type at real sizes, graphs, compilation, streams, offsets beyond 2^31."""

import math

import pytest
import torch

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.engram_gate import engram_gate

pytestmark = pytest.mark.gpu
EPS = 1e-20
NAMES = ("x", "key", "value", "q_weight", "k_weight")


def plain(x, key, value, q_weight, k_weight):
    """The gate as one writes it in torch, every step in the inputs' own type."""
    query = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * q_weight
    normed = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + EPS) * k_weight
    dot = (query * normed).sum(-1) / math.sqrt(x.shape[-1])
    root = dot.abs().clamp_min(1e-6).sqrt()
    return x + torch.sigmoid(torch.copysign(root, dot)).unsqueeze(-1) * value.unsqueeze(-2)


def inputs(tokens, copies, size, dtype, seed=0):
    """As a V4.1 layer has them: key and value are parts of one projection. Dot products stay away from 0."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    x, wkv = normal(tokens, copies, size), normal(tokens, copies + 1, size)
    wkv[:, :copies] += normal(tokens, copies, 1).sign() * x
    wkv = wkv.to(dtype)
    weights = [(1 + 0.1 * normal(copies, size)).to(dtype) for _ in range(2)]
    return [x.to(dtype), wkv[:, :copies], wkv[:, copies], *weights]


def gate(*args, **options):
    return engram_gate(*args, eps=EPS, form="v41", **options)


def gradients(function, args, above):
    args = [a.detach().requires_grad_() for a in args]
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out, args, above.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 4, 5120), (37, 4, 5120), (1500, 4, 5120), (900, 1, 768), (3001, 1, 2048), (11, 8, 33), (5, 1, 20000)], ids=str
)
def test_output_and_gradients_within_twice_plain_torch(dtype, shape, rms_error):
    args = inputs(*shape, dtype)
    above = torch.randn(args[0].shape, device="cuda").to(dtype)
    ours, rough = gradients(gate, args, above), gradients(plain, args, above)
    exact = gradients(plain, [a.double() for a in args], above)
    for name, a, b, e in zip(("out", *NAMES), ours, rough, exact, strict=True):
        assert a.dtype == dtype and a.shape == e.shape, name
        # A quarter of a unit in the last place of slack, for what plain torch happens to have exact.
        slack = torch.finfo(dtype).eps / 4 * float(e.square().mean().sqrt())
        assert rms_error(a, e) <= 2 * rms_error(b, e) + slack, name


@pytest.mark.parametrize("form", ["v41", "paper"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dot_of_plus_and_minus_zero(form, sign):
    # As in test_engram_gate.py; the device must not take subnormal numbers for zeros of either sign.
    x = torch.tensor([[[1.0, 1e3, 1e3, 1e3]]], device="cuda")
    key = torch.tensor([[[sign, 0.0, 0.0, 0.0]]], device="cuda")
    q_weight, k_weight = torch.full((1, 4), 1e-20, device="cuda"), torch.full((1, 4), 1.4e-25, device="cuda")
    out = engram_gate(x, key, torch.ones(1, 4, device="cuda"), q_weight, k_weight, eps=EPS, form=form, residual=False)
    expected = 0.5 if form == "paper" else torch.sigmoid(torch.tensor(sign * 1e-3)).item()
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0, atol=6e-8)


@pytest.mark.parametrize("residual", [True, False])
def test_masked_tokens_keep_their_bits(residual):
    args = inputs(300, 4, 5120, torch.bfloat16)
    mask = torch.arange(300, device="cuda") % 3 == 0
    args[1][mask] = float("nan")
    out = gate(*args, mask=mask, residual=residual)
    wanted = args[0][mask] if residual else torch.zeros_like(args[0][mask])
    assert torch.equal(out[mask].view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(out[~mask], gate(*args, residual=residual)[~mask])
    found = gradients(lambda *a: gate(*a, mask=mask, residual=residual), args, torch.ones_like(args[0]))
    assert not any(f.isnan().any() for f in found[1:])


def test_two_runs_give_the_same_bits():
    args = inputs(2000, 4, 5120, torch.bfloat16)
    above = torch.randn(args[0].shape, device="cuda").bfloat16()
    for a, b in zip(gradients(gate, args, above), gradients(gate, args, above), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [1, 8, 1000])
def test_captured_and_replayed_with_other_inputs(tokens):
    args, other = inputs(tokens, 4, 5120, torch.bfloat16), inputs(tokens, 4, 5120, torch.bfloat16, seed=1)
    expected = gate(*other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gate(*args)
    for a, b in zip(args, other, strict=True):
        a.copy_(b)
    graph.replay()
    assert torch.equal(out, expected)


def test_forward_and_backward_in_one_captured_graph():
    args = [a.clone().requires_grad_() for a in inputs(64, 4, 5120, torch.bfloat16)]

    def step():
        return torch.autograd.grad(gate(*args).float().square().sum(), args)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        args[0].mul_(0.5)
    graph.replay()
    for a, b in zip(found, step(), strict=True):
        assert torch.equal(a, b)


def test_compiles_whole_by_inductor():
    args = inputs(130, 4, 5120, torch.bfloat16)
    above = torch.randn(args[0].shape, device="cuda").bfloat16()
    torch._dynamo.reset()
    ours = gradients(torch.compile(lambda *a: gate(*a) * 2.0, fullgraph=True), args, above)
    expected = gradients(lambda *a: gate(*a) * 2.0, args, above)
    # Inductor may round once where eager rounds twice (the doubled result, the weights' gradient).
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_another_stream():
    args = inputs(500, 4, 5120, torch.bfloat16)
    expected = gate(*args)
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(a) for a in args]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # The gate must run after what this stream still has to do.
        torch.cuda._sleep(50_000_000)
        for a, b in zip(late, args, strict=True):
            a.copy_(b)
        out = gate(*late)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_offsets_beyond_two_to_the_31():
    tokens, copies, size = 110_000, 4, 5120
    assert tokens * copies * size > 2**31
    x = torch.randn(tokens, copies, size, device="cuda", dtype=torch.bfloat16)
    wkv = torch.randn(tokens, copies + 1, size, device="cuda", dtype=torch.bfloat16)
    weights = [torch.ones(copies, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    x.requires_grad_()
    wkv.requires_grad_()
    out = gate(x, wkv[:, :copies], wkv[:, copies], *weights)
    (grad_x,) = torch.autograd.grad(out, x, torch.ones_like(out))
    last = slice(-5, None)
    leaf = x.detach()[last].clone().requires_grad_()
    with implementation("reference"):
        expected = gate(leaf, wkv[last, :copies], wkv[last, copies], *weights)
        (expected_grad,) = torch.autograd.grad(expected, leaf, torch.ones_like(expected))
    torch.testing.assert_close(out[last], expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(grad_x[last], expected_grad, rtol=2**-6, atol=2**-7)
