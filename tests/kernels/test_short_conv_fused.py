"""The Triton convolution against float64 and against the reference, by the interpreter and (marked gpu) on a device."""

import pytest
import torch
from torch.nn import functional

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.short_conv import short_conv

NAMES = ("v", "weight", "norm_weight")
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


def inputs(batch, length, copies, size, taps, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, copies, size), (copies, size, taps), (copies, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def gradients(function, args, above):
    args = [a.detach().requires_grad_() for a in args]
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out, args, above.to(out.dtype))]


def fused_gradients(args, above, dilation):
    with implementation("triton"):
        return gradients(lambda *a: short_conv(*a, dilation=dilation, eps=EPS), args, above)


def check(shape, dilation, dtype, device, rms_error):
    args = inputs(*shape, dtype, device)
    above = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device, dtype)
    exact = gradients(lambda *a: plain(*a, dilation), [a.double() for a in args], above)
    rough = gradients(lambda *a: plain(*a, dilation), args, above)
    ours = fused_gradients(args, above, dilation)
    cut = dtype == torch.bfloat16 and device == "cpu"
    for name, a, b, e in zip(("out", *NAMES), ours, rough, exact, strict=True):
        assert a.dtype == dtype and a.shape == e.shape, name
        # A quarter of a unit in the last place of slack. The interpreter cuts bf16 off where a GPU rounds to nearest.
        slack = torch.finfo(dtype).eps * (3**-0.5 if cut else 0.25) * float(e.square().mean().sqrt())
        assert rms_error(a, e) <= 2 * rms_error(b, e) + slack, name


# Below the receptive field, fewer steps than phases, segments of time that do not end together, several blocks of a row, one tap.
SHAPES = [
    ((1, 1, 1, 8, 4), 3),
    ((2, 7, 2, 9, 4), 3),
    ((1, 3, 1, 5, 3), 5),
    ((1, 101, 1, 12, 3), 2),
    ((1, 3, 1, 1100, 4), 1),
    ((3, 4, 1, 5, 1), 3),
]
CASES = [(shape, torch.float32) for shape in SHAPES] + [(((2, 19, 2, 33, 2), 1), dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("case, dtype", CASES, ids=str)
def test_output_and_gradients_within_twice_plain_torch(case, dtype, rms_error):
    check(*case, dtype, "cpu", rms_error)


def test_sequences_of_a_batch_do_not_meet():
    v, weight, norm_weight = inputs(3, 5, 2, 16, 4, torch.float32)
    above = torch.randn(v.shape)
    out, grad_v, *_ = fused_gradients([v, weight, norm_weight], above, 2)
    for b in range(3):
        alone = fused_gradients([v[b : b + 1], weight, norm_weight], above[b : b + 1], 2)
        assert torch.equal(out[b], alone[0][0]) and torch.equal(grad_v[b], alone[1][0])


def test_is_causal_both_ways():
    v, weight, norm_weight = inputs(1, 12, 1, 8, 3, torch.float32)
    above = torch.zeros(v.shape)
    above[:, 6] = 1
    _, grad_v, *_ = fused_gradients([v, weight, norm_weight], above, 2)
    assert [t for t in range(12) if grad_v[:, t].any()] == [2, 4, 6]


def test_strides():
    v, weight, norm_weight = inputs(2, 6, 2, 40, 4, torch.float32)
    odd = [
        v.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        weight.transpose(0, 2).contiguous().transpose(0, 2),
        norm_weight.t().contiguous().t(),
    ]
    above = torch.randn(v.shape)
    expected = fused_gradients([v, weight, norm_weight], above, 3)
    for a, b in zip(fused_gradients(odd, above.transpose(-1, -2).contiguous().transpose(-1, -2), 3), expected, strict=True):
        assert torch.equal(a, b)


def test_a_zero_weight_changes_nothing():
    v, weight, norm_weight = inputs(2, 7, 2, 16, 4, torch.bfloat16)
    with implementation("triton"):
        assert torch.equal(short_conv(v, torch.zeros_like(weight), norm_weight, dilation=3, eps=EPS), v)


@pytest.mark.parametrize("learning", range(3), ids=NAMES)
def test_only_what_needs_a_gradient_gets_one(learning):
    args = inputs(1, 9, 2, 33, 4, torch.float32)
    full = fused_gradients(args, torch.ones_like(args[0]), 2)[1:]
    args[learning].requires_grad_()
    with implementation("triton"):
        short_conv(*args, dilation=2, eps=EPS).sum().backward()
    assert [a.grad is None for a in args] == [k != learning for k in range(3)]
    torch.testing.assert_close(args[learning].grad, full[learning], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 2, 8, 4), (0, 3, 2, 8, 4)], ids=str)
def test_no_time_or_no_sequence(shape):
    args = inputs(*shape, torch.float32)
    out, *found = fused_gradients(args, torch.empty(args[0].shape), 3)
    assert out.shape == args[0].shape and [f.shape for f in found] == [a.shape for a in args]
    assert not found[1].any() and not found[2].any()


@pytest.mark.parametrize("learning", range(3), ids=NAMES)
def test_forward_mode_keeps_its_tangents(learning):
    args = inputs(1, 5, 2, 8, 2, torch.float32)

    def along(name):
        with implementation(name):
            conv = lambda a: short_conv(*args[:learning], a, *args[learning + 1 :], dilation=2, eps=EPS)  # noqa: E731
            return torch.func.jvp(conv, (args[learning],), (torch.ones_like(args[learning]),))[1]

    expected = along("reference")
    assert expected.any() and torch.equal(along("triton"), expected)


def test_float64_stays_on_the_reference():
    args = [a.requires_grad_() for a in inputs(1, 4, 1, 3, 2, torch.float64)]
    with implementation("triton"):
        assert torch.autograd.gradcheck(lambda *a: short_conv(*a, dilation=2, eps=EPS), args)


def test_written_gradients_of_the_reference_are_autograds():
    args = inputs(2, 6, 2, 5, 3, torch.float64)
    above = torch.randn(args[0].shape, dtype=torch.float64)
    expected = gradients(lambda *a: short_conv(*a, dilation=2, eps=EPS), args, above)
    ours = gradients(lambda *a: torch.ops.tiny_engram.short_conv(*a, 2, EPS)[0], args, above)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_is_a_sound_custom_op(name):
    args = [a.requires_grad_() for a in inputs(2, 5, 2, 9, 3, torch.float32)]
    with implementation(name):
        torch.library.opcheck(torch.ops.tiny_engram.short_conv.default, (*args, 2, EPS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_compiles_whole_with_gradients(backend, name):
    args = inputs(1, 9, 2, 33, 4, torch.float32)
    above = torch.randn(args[0].shape)

    def conv(*a):
        return short_conv(*a, dilation=3, eps=EPS)

    expected = gradients(conv, args, above)
    torch._dynamo.reset()
    with implementation(name):
        ours = gradients(torch.compile(conv, backend=backend, fullgraph=True), args, above)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, dilation", [((2, 7, 2, 9, 4), 3), ((2, 600, 4, 1280, 4), 3), ((1, 1025, 1, 768, 4), 3)], ids=str)
def test_on_a_device_within_twice_plain_torch(dtype, shape, dilation, rms_error):
    check(shape, dilation, dtype, "cuda", rms_error)


@pytest.mark.gpu
def test_captured_and_replayed_with_other_inputs():
    args = inputs(2, 33, 2, 768, 4, torch.bfloat16, "cuda")
    short_conv(*args, dilation=3, eps=EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = short_conv(*args, dilation=3, eps=EPS)
    args[0].copy_(args[0].flip(1))
    graph.replay()
    assert torch.equal(out, short_conv(*args, dilation=3, eps=EPS))


@pytest.mark.gpu
def test_rows_that_begin_at_odd_places():
    # Their loads are too narrow to run ahead of the walk.
    v, weight, norm_weight = inputs(2, 150, 2, 1280, 4, torch.bfloat16, "cuda")
    odd = torch.zeros(2, 150, 2, 1283, dtype=v.dtype, device="cuda")[..., 1:1281].copy_(v)
    above = torch.randn_like(v)
    found, expected = (fused_gradients([a, weight, norm_weight], above, 3) for a in (odd, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
