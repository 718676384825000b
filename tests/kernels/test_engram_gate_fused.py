"""The Triton gate against float64 and against the reference, by the interpreter; what needs a GPU is in the _gpu file."""

import math
import mmap

import pytest
import torch

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.engram_gate import engram_gate
from tiny_engram.kernels.engram_gate.launch import launch_for, programs_for, row_blocks

NAMES = ("x", "key", "value", "q_weight", "k_weight")
FORMS = ["v41", "paper"]
EPS = 1e-6


def plain(x, key, value, q_weight, k_weight, form, residual=True):
    """The gate as one writes it in torch, every step in the inputs' own type."""
    query = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * q_weight
    normed = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + EPS) * k_weight
    dot = (query * normed).sum(-1) / math.sqrt(x.shape[-1])
    root = dot.abs().clamp_min(1e-6).sqrt()
    gated = torch.sigmoid(torch.copysign(root, dot) if form == "v41" else root * dot.sign()).unsqueeze(-1) * value.unsqueeze(-2)
    return x + gated if residual else gated


def inputs(leading, copies, size, dtype, seed=0):
    """Random, but with dot products away from 0, where the root's slope turns the luck of one rounding into all of the error."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*leading, copies, size), (*leading, copies, size), (*leading, size), (copies, size), (copies, size)]
    x, key, value, q_weight, k_weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    side = torch.randn((*leading, copies, 1), generator=generator, dtype=torch.float64).sign()
    return [a.to(dtype) for a in (x, key + side * x, value, 1 + 0.1 * q_weight, 1 + 0.1 * k_weight)]


def fused(*args, form="v41", **options):
    with implementation("triton"):
        return engram_gate(*args, eps=EPS, form=form, **options)


def gradients(function, args, above):
    args = [a.detach().requires_grad_() for a in args]
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out, args, above.to(out.dtype))]


def fused_gradients(args, above, **options):
    with implementation("triton"):
        return gradients(lambda *a: engram_gate(*a, eps=EPS, **options), args, above)


# A masked block, one full block, several blocks, several masked ones; one to eight copies; more tokens than programs.
SHAPES = [((5,), 1, 3), ((3,), 4, 33), ((70,), 1, 64), ((2,), 4, 5120), ((9,), 8, 40), ((2,), 3, 1100)]
CASES = [(shape, torch.float32) for shape in SHAPES] + [(((2, 3), 2, 768), dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
def test_output_and_gradients_within_twice_plain_torch(shape, dtype, rms_error):
    args = inputs(*shape, dtype=dtype)
    form, residual = FORMS[shape[2] % 2], shape[1] != 2
    above = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    exact = gradients(lambda *a: plain(*a, form=form, residual=residual), [a.double() for a in args], above)
    rough = gradients(lambda *a: plain(*a, form=form, residual=residual), args, above)
    ours = fused_gradients(args, above, form=form, residual=residual)
    for name, a, b, e in zip(("out", *NAMES), ours, rough, exact, strict=True):
        assert a.dtype == dtype and a.shape == e.shape and a.is_contiguous(), name
        # A quarter of a unit in the last place of slack, for what plain torch happens to have exact. The interpreter cuts bf16 off
        # where a GPU rounds to nearest: up to one unit, of which the root mean square is 1 / sqrt(3).
        slack = torch.finfo(dtype).eps * (3**-0.5 if dtype == torch.bfloat16 else 0.25) * float(e.square().mean().sqrt())
        assert rms_error(a, e) <= 2 * rms_error(b, e) + slack, name


@pytest.mark.parametrize("form", FORMS)
def test_fused_projection_is_read_in_place(form, monkeypatch):
    x, *_, q_weight, k_weight = inputs((2, 3), 4, 96, torch.float32)
    wkv = torch.randn(2, 3, 5 * 96).unflatten(-1, (5, 96))
    key, value = wkv[..., :4, :], wkv[..., 4, :]
    expected = engram_gate(x, key, value, q_weight, k_weight, eps=EPS, form=form)
    monkeypatch.setattr(torch.Tensor, "contiguous", _only_if_contiguous)
    out = fused(x, key, value, q_weight, k_weight, form=form)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def _only_if_contiguous(self):
    assert self.is_contiguous(), "a copy was made"
    return self


def test_gradient_of_a_fused_projection():
    x, *_, q_weight, k_weight = inputs((5,), 2, 48, torch.float32)
    wkv = torch.randn(5, 3 * 48, generator=torch.Generator().manual_seed(2))

    def run(name):
        leaf = wkv.clone().requires_grad_()
        parts = leaf.unflatten(-1, (3, 48))
        with implementation(name):
            engram_gate(x, parts[..., :2, :], parts[..., 2, :], q_weight, k_weight, eps=EPS, form="v41").square().sum().backward()
        return leaf.grad

    torch.testing.assert_close(run("triton"), run("reference"), rtol=1e-4, atol=1e-4)


def strided(kind):
    x, key, value, q_weight, k_weight = inputs((4, 3), 2, 40, torch.float32)
    if kind == "leading transposed":
        x, value = x.transpose(0, 1).contiguous().transpose(0, 1), value.transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "copies transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "copies of key outermost":
        key = key.flatten(0, 1).transpose(0, 1).contiguous().transpose(0, 1).unflatten(0, (4, 3))
    elif kind == "last not contiguous":
        key, q_weight = key.transpose(-1, -2).contiguous().transpose(-1, -2), q_weight.t().contiguous().t()
    elif kind == "every second":
        key, value = key.repeat_interleave(2, -1)[..., ::2], value.repeat_interleave(2, 1)[:, ::2]
    elif kind == "expanded":
        value = value[:1, :1].expand(4, 3, 40)
    return x, key, value, q_weight, k_weight


@pytest.mark.parametrize(
    "kind", ["leading transposed", "copies transposed", "copies of key outermost", "last not contiguous", "every second", "expanded"]
)
def test_strides(kind):
    args = strided(kind)
    assert not all(a.is_contiguous() for a in args)
    above = torch.randn(args[0].shape).transpose(0, 1).contiguous().transpose(0, 1)
    expected = fused_gradients([a.contiguous() for a in args], above.contiguous(), form="v41")
    for a, b in zip(fused_gradients(args, above, form="v41"), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies, size", [(1, 33), (4, 64)])
def test_masked_tokens_keep_their_bits_and_pass_gradients_through(residual, dtype, copies, size):
    args = inputs((6,), copies, size, dtype)
    mask = torch.tensor([False, True, True, False, True, False])
    args[0][1, 0, :2] = torch.tensor([-0.0, float("nan")])
    args[1][2] = float("nan")
    args[2][4] = float("inf")
    above = torch.randn(args[0].shape).to(dtype)
    out, grad_x, *others = fused_gradients(args, above, form="v41", mask=mask, residual=residual)
    wanted = args[0] if residual else torch.zeros_like(args[0])
    assert torch.equal(out[mask].view(torch.uint8), wanted[mask].view(torch.uint8))
    assert torch.equal(grad_x[mask], above[mask] if residual else torch.zeros_like(above[mask]))
    assert not others[0][mask].any() and not others[1][mask].any()
    kept = [*(a[~mask] for a in args[:3]), *args[3:]]
    alone = fused_gradients(kept, above[~mask], form="v41", residual=residual)
    for a, b in zip((out[~mask], grad_x[~mask], others[0][~mask], others[1][~mask]), alone[:4], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(others[2:], alone[4:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_what_stands_at_a_masked_token_reaches_no_gradient(name, residual):
    args = inputs((3,), 2, 33, torch.float32)
    above, mask = torch.randn(args[0].shape), torch.tensor([False, True, False])

    def run(given):
        with implementation(name):
            return gradients(lambda *a: engram_gate(*a, eps=EPS, form="v41", mask=mask, residual=residual), given, above)

    broken = [a.clone() for a in args]
    broken[0][1, 0, 3] = float("inf")
    broken[1][1], broken[2][1] = float("nan"), float("inf")
    for a, b in zip(run(broken)[1:], run(args)[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_below_the_floor_nothing_passes_through_the_gate(form):
    args = inputs((2,), 2, 33, torch.float32)
    args[1] *= 1e-12  # dot products of about 1e-8
    above = torch.randn(args[0].shape)
    _, grad_x, grad_key, _, *weights = fused_gradients(args, above, form=form)
    assert torch.equal(grad_x, above) and not any(g.any() for g in (grad_key, *weights))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros(form):
    args = inputs((3,), 2, 33, torch.float32)
    args[0][0], args[1][1], args[2][2] = 0, 0, 0
    above = torch.randn(args[0].shape)
    expected = gradients(lambda *a: engram_gate(*a, eps=EPS, form=form), args, above)
    for a, b in zip(fused_gradients(args, above, form=form), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [torch.tensor([True]).expand(4), torch.tensor([True, False] * 4)[::2]], ids=["expanded", "strided"])
def test_a_mask_that_is_not_contiguous(mask):
    args = inputs((4,), 2, 33, torch.float32)
    assert torch.equal(fused(*args, mask=mask), args[0])


@pytest.mark.parametrize("copies", [1, 2])
def test_a_gradient_that_is_nan_at_a_masked_token_reaches_nothing_else(copies):
    args = inputs((3,), copies, 33, torch.float32)
    above = torch.randn(args[0].shape)
    above[1] = float("nan")
    found = fused_gradients(args, above, form="v41", mask=torch.tensor([False, True, False]), residual=False)
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("residual", [True, False])
def test_weights_that_are_not_finite_leave_masked_tokens_alone(residual):
    args = inputs((2,), 2, 33, torch.float32)
    args[3][1, 5] = float("nan")
    above = torch.randn(args[0].shape)
    _, grad_x, grad_key, *_ = fused_gradients(args, above, form="v41", mask=torch.tensor([True, False]), residual=residual)
    assert torch.equal(grad_x[0], above[0] if residual else torch.zeros_like(above[0])) and not grad_key[0].any()
    assert grad_x[1, 1].isnan().all()


def test_a_gradient_whose_copies_lie_beyond_32_bits():
    # Two strides below 2^31 make a place beyond it. Pages that nobody touches take no memory.
    held = mmap.mmap(-1, 2 * (2**31 + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    args = inputs((1,), 3, 33, torch.bfloat16)
    above = torch.frombuffer(held, dtype=torch.bfloat16).as_strided((1, 3, 33), (33, 2**30, 1))
    above.copy_(torch.randn(1, 3, 33))
    for a, b in zip(fused_gradients(args, above, form="v41"), fused_gradients(args, above.contiguous(), form="v41"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("form", FORMS)
def test_dot_of_plus_and_minus_zero(form, sign):
    # As in test_engram_gate.py: one product of the smallest float32, which the norm of x takes below it.
    x = torch.tensor([[[1.0, 1e3, 1e3, 1e3]]])
    key = torch.tensor([[[sign, 0.0, 0.0, 0.0]]])
    q_weight, k_weight = torch.full((1, 4), 1e-20), torch.full((1, 4), 1.4e-25)
    with implementation("triton"):
        out = engram_gate(x, key, torch.ones(1, 4), q_weight, k_weight, eps=1e-20, form=form, residual=False)
    expected = 0.5 if form == "paper" else torch.sigmoid(torch.tensor(sign * 1e-3)).item()
    torch.testing.assert_close(out, torch.full((1, 1, 4), expected), rtol=0, atol=6e-8 if form == "v41" else 0)


@pytest.mark.parametrize("form, gate", [("v41", 0.50025), ("paper", 0.5)])
def test_products_that_are_all_minus_zero_count_as_plus_zero(form, gate):
    key = torch.zeros(1, 1, 64)
    out = fused(-torch.ones(1, 1, 64), key, torch.ones(1, 64), torch.ones(1, 64), torch.ones(1, 64), form=form, residual=False)
    torch.testing.assert_close(out, torch.full((1, 1, 64), gate), rtol=0, atol=1e-7)


def test_golden(golden):
    entry = golden["gate_v41"]
    x, key, value, q_weight, k_weight = (torch.tensor(entry[n]).unsqueeze(0) for n in NAMES)
    with implementation("triton"):
        out = engram_gate(x, key, value, q_weight[0], k_weight[0], eps=entry["eps"], form="v41")
    torch.testing.assert_close(out[0], torch.tensor(entry["out"]), rtol=0, atol=2e-7)


def test_nan_goes_through():
    args = inputs((2,), 1, 32, torch.float32)
    args[1][1, 0, 3] = float("nan")
    out = fused(*args)
    assert not out[0].isnan().any() and out[1].isnan().all()


@pytest.mark.parametrize("learning", range(5), ids=NAMES)
def test_only_what_needs_a_gradient_gets_one(learning):
    args = inputs((5,), 2, 33, torch.float32)
    full = fused_gradients(args, torch.ones_like(args[0]), form="paper")[1:]
    args[learning].requires_grad_()
    fused(*args, form="paper").sum().backward()
    assert [a.grad is None for a in args] == [k != learning for k in range(5)]
    torch.testing.assert_close(args[learning].grad, full[learning], rtol=1e-6, atol=1e-6)


def test_no_tokens():
    args = inputs((0, 3), 2, 40, torch.bfloat16)
    out, *found = fused_gradients(args, torch.empty(0, 3, 2, 40), form="v41")
    assert out.shape == (0, 3, 2, 40) and [f.shape for f in found] == [a.shape for a in args]
    assert not found[3].any() and not found[4].any()


def test_no_copies():
    _, *found = fused_gradients(inputs((3,), 0, 40, torch.float32), torch.empty(3, 0, 40), form="v41")
    assert torch.equal(found[2], torch.zeros(3, 40))


@pytest.mark.parametrize("learning", range(5), ids=NAMES)
def test_forward_mode_keeps_its_tangents(learning):
    args = inputs((2,), 2, 8, torch.float32)

    def along(name):
        with implementation(name):
            gate = lambda a: engram_gate(*args[:learning], a, *args[learning + 1 :], eps=EPS, form="v41")  # noqa: E731
            return torch.func.jvp(gate, (args[learning],), (torch.ones_like(args[learning]),))[1]

    expected = along("reference")
    assert expected.any() and torch.equal(along("triton"), expected)


def test_second_derivatives_are_refused():
    args = [a.requires_grad_() for a in inputs((2,), 2, 8, torch.float32)]
    first = torch.autograd.grad(fused(*args).square().sum(), args, create_graph=True)
    for found in first:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(found.sum(), args, retain_graph=True)


def test_no_leading_dimension_and_mixed_types():
    x, key, value, q_weight, k_weight = inputs((), 2, 40, torch.float32)
    out = fused(x.half(), key, value.bfloat16(), q_weight.double(), k_weight, mask=torch.tensor(False))
    expected = engram_gate(x.half(), key, value.bfloat16(), q_weight.double(), k_weight, eps=EPS, form="v41")
    assert out.dtype == torch.float16 and out.shape == x.shape
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_float64_stays_on_the_reference():
    args = [a.requires_grad_() for a in inputs((2,), 2, 5, torch.float64)]
    assert torch.autograd.gradcheck(lambda *a: fused(*a), args)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("masked", [False, True])
def test_is_a_sound_custom_op(name, masked):
    args = [a.requires_grad_() for a in inputs((3,), 2, 33, torch.float32)]
    mask = torch.tensor([False, True, False]) if masked else None
    with implementation(name):
        torch.library.opcheck(torch.ops.tiny_engram.engram_gate.default, (*args, EPS, "v41", mask, not masked, True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_compiles_whole_with_gradients(backend, name):
    args = inputs((4,), 2, 40, torch.float32)
    mask = torch.tensor([False, True, False, False])
    above = torch.randn(args[0].shape)

    def gate(*a):
        return engram_gate(*a, eps=EPS, form="v41", mask=mask)

    expected = gradients(gate, args, above)
    torch._dynamo.reset()
    with implementation(name):
        ours = gradients(torch.compile(gate, backend=backend, fullgraph=True), args, above)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_written_gradients_of_the_reference_are_autograds(form):
    args = inputs((3,), 2, 7, torch.float64)
    mask = torch.tensor([False, True, False])
    above = torch.randn(args[0].shape, dtype=torch.float64)
    expected = gradients(lambda *a: engram_gate(*a, eps=EPS, form=form, mask=mask), args, above)
    leaves = [a.clone().requires_grad_() for a in args]
    out = torch.ops.tiny_engram.engram_gate(*leaves, EPS, form, mask, True, True)[0]
    for a, b in zip((out, *torch.autograd.grad(out, leaves, above)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 33, 768, 1000, 1024, 2048, 4096, 5120, 8448, 20000])
def test_a_row_is_cut_into_few_blocks_with_little_waste(size):
    block, chunks = row_blocks(size)
    assert block & (block - 1) == 0 and (chunks - 1) * block < size <= block * chunks and chunks <= 8
    assert block * chunks < max(2 * size, 65)
    for direction in ("forward", "backward"):
        launch = launch_for(direction, size)
        assert 1 <= launch.warps <= 16
        # Rows of float32 that wait in shared memory, of which the smallest devices have 99 KiB for a program.
        assert (launch.stages - 1) * 3 * 4 * block * chunks <= 99 << 10
        for tokens in (1, 7, 100_000):
            assert 1 <= programs_for(launch, tokens, 4, torch.device("cpu")) <= tokens


def test_a_mask_of_another_shape_is_refused():
    args = inputs((3,), 2, 8, torch.float32)
    with pytest.raises(ValueError, match="mask"):
        engram_gate(*args, eps=EPS, form="v41", mask=torch.zeros(3, 2, dtype=torch.bool))
