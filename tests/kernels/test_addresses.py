"""Every address that a kernel reads or writes belongs to one of its arguments: Triton's interpreter, with each access checked."""

import random

import numpy as np
import pytest
import torch

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.engram_gate import engram_gate
from tiny_engram.kernels.hot_gather import hot_gather
from tiny_engram.kernels.ngram_hash import ngram_hash
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.kernels.short_conv import short_conv
from tiny_engram.kernels.unique_ids import unique_ids
from tiny_engram.table.perfect_hash import PerfectHash

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last; empty for a tensor without elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """The number of accesses that were checked, in a list."""
    from triton.runtime import interpreter

    allowed: list[tuple[int, int]] = []
    seen = [0]
    run = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        allowed[:] = [extent(a) for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        return run(self, *args, **kwargs)

    def check(pointers, mask=None):
        at = np.asarray(pointers.data, dtype=np.uint64)
        at = at[np.broadcast_to(mask.data, at.shape).astype(bool)] if mask is not None else at.reshape(-1)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        good = np.zeros(at.shape, dtype=bool)
        for start, end in allowed:
            good |= (at >= start) & (at + np.uint64(size) <= end)
        assert good.all(), f"{(~good).sum()} of {at.size} addresses belong to no argument, {size} bytes each"
        seen[0] += at.size

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3), ("create_atomic_cas", None)):
        original = getattr(builder, name)

        def access(self, *args, name=name, mask_at=mask_at, original=original):
            pointers = args[1] if name == "create_atomic_rmw" else args[0]
            check(pointers, args[mask_at] if mask_at is not None else None)
            return original(self, *args)

        monkeypatch.setattr(builder, name, access)
    with implementation("triton"):
        yield seen
    assert seen[0] > 0


def test_the_check_sees_an_address_behind_the_end():
    import triton
    import triton.language as tl

    @triton.jit
    def beyond(x, SIZE: tl.constexpr):
        tl.store(x + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)))

    held = torch.zeros(8)
    beyond[(1,)](held, 8)
    with pytest.raises(Exception, match="1 of 4 addresses"):
        beyond[(1,)](held[:3], 4)


@pytest.mark.parametrize("seed", range(3))
def test_gate(seed):
    draw = random.Random(seed)
    for leading, size in (((draw.randint(1, 9),), draw.choice((1, 33, 100))), ((2, draw.randint(1, 3)), draw.choice((64, 320)))):
        copies, dtype = draw.randint(1, 8), draw.choice(DTYPES)
        wide = torch.randn(*leading, copies + 1, size).to(dtype)
        x = torch.randn(*leading, copies, size).to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
        weights = [torch.ones(copies, size) for _ in range(2)]
        args = [t.requires_grad_() for t in (x, wide[..., :copies, :], wide[..., copies, :], *weights)]
        mask = torch.rand(leading) < 0.4 if draw.random() < 0.6 else None
        out = engram_gate(*args, eps=1e-6, form="v41", mask=mask, residual=draw.random() < 0.5)
        torch.autograd.grad(out, args, torch.randn(copies, size).to(dtype).expand_as(out))


@pytest.mark.parametrize("seed", range(3))
def test_convolution(seed):
    draw = random.Random(seed)
    time, size, taps = draw.choice((1, 2, 17, 40)), draw.choice((1, 33, 100)), (4, 1, 2)[seed]
    v = torch.randn(time, draw.randint(1, 2), draw.randint(1, 3), size).to(draw.choice(DTYPES)).transpose(0, 1)
    args = [t.requires_grad_() for t in (v, torch.randn(*v.shape[2:], taps), torch.randn(v.shape[2:]))]
    out = short_conv(*args, dilation=draw.choice((1, 3, 7)), eps=1e-6)
    torch.autograd.grad(out, args, torch.randn(v.shape).to(v.dtype))


@pytest.mark.parametrize("seed", range(6))
def test_hash(seed):
    draw = random.Random(seed)
    order, heads, batch, length = draw.choice((2, 3, 5)), draw.choice((1, 3, 8)), draw.randint(1, 3), draw.choice((1, 2, 300))
    ids = torch.randint(0, 100, (length, batch)).to(draw.choice((torch.int64, torch.int32, torch.uint8))).t()
    given = {"blocked": torch.rand(length) < 0.3, "salt": torch.randint(0, 99, (batch, length))}
    if draw.random() < 0.6:
        given |= {"history": torch.randint(0, 99, (batch, order - 1)), "history_blocked": torch.rand(order - 1) < 0.3}
    primes = torch.randint(3, 2 ** draw.choice((20, 40)), (order - 1, heads))
    ngram_hash(ids, multipliers=torch.randint(1, 99, (order,)), primes=primes, pad_id=1, **given)


@pytest.mark.parametrize("seed", range(4))
def test_gathers(seed):
    draw = random.Random(seed)
    for width, most in ((32 * draw.choice((1, 2, 3, 5)), 30), (draw.choice((256, 4128)), 3)):
        rows, row = draw.choice((1, 9, 40)), width + width // 32 + draw.choice((0, 0, 1, 4))
        bytes_ = torch.randint(0, 256, (draw.choice((0, 4, 5)) + rows * row,), dtype=torch.uint8)[-rows * row :].view(rows, row)
        there = bytes_[:, :width].view(torch.float8_e4m3fn), bytes_[:, width : width + width // 32]
        far = [-(2**63), 2**63 - 1, 2**31, -2, rows]
        ids = torch.tensor([draw.choice((-1, draw.randrange(rows), rows - 1, draw.choice(far))) for _ in range(draw.randint(1, most))])
        for first in (0, 5, 2**40):
            row_gather(*there, ids, first_row=first, bounds="ignore", dtype=draw.choice(DTYPES))
        index = PerfectHash.build(torch.arange(0, rows, 3))
        hot = torch.zeros(index.keys.numel(), width + width // 32 + 3, dtype=torch.uint8)
        held = hot[:, :width].view(torch.float8_e4m3fn), hot[:, width : width + width // 32], index.keys, index.displacement
        hot_gather(*held, *there, ids, bounds="warn", violations=ids.new_zeros(2), hits=ids.new_zeros(2))


def test_distinct_ids():
    for total in (1, 127, 128, 200):
        unique_ids(torch.randint(-2, 150, (total,)))
    # Ids that all fall on the last slots, behind which the search goes on at the first.
    ids = torch.arange(200_000)
    slots = ((ids ^ (ids >> 29)) * -7046029254386353131 >> 20) & 255
    ids = ids[slots >= 253][:128]
    unique, inverse, count = unique_ids(ids)
    assert ids.numel() == 128 and int(count) == 128 and torch.equal(unique[inverse], ids)
