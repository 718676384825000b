"""The residual of many mounts in few launches, with gradients written by hand: against its slopes and the product's own."""

import pytest
import torch

from benchmarks.personalization.methods import spans
from benchmarks.personalization.methods.method import Rows
from benchmarks.personalization.methods.spans import Places, gathered, moved
from tiny_engram.residual import apply_spans

WIDTH, COLUMNS, MOUNTS = 64, 2, 2


def parts(dtype, lengths):
    """Places of spans of these lengths; states, rows, gain, bias and scale with gradients."""
    generator = torch.Generator().manual_seed(0)
    where = tuple((row, 0, 1 + row, length) for row, length in enumerate(lengths))
    ids = torch.zeros(len(lengths), 9, dtype=torch.int64)
    places = Places.of(Rows(ids, torch.zeros(*ids.shape, WIDTH), torch.zeros(len(lengths), 1, dtype=torch.int64), where), 3)
    n = len(places)
    rows = torch.randn(MOUNTS, n, 1, 32, generator=generator, dtype=dtype) * torch.tensor([0.05, 0.5], dtype=dtype)[:, None, None, None]
    gates = [torch.randn(MOUNTS, n, generator=generator, dtype=dtype) for _ in range(2)]
    scale = torch.rand(MOUNTS, n, generator=generator, dtype=dtype) + 0.5
    leaves = (torch.randn(n, WIDTH, generator=generator, dtype=dtype), rows, *gates, scale)
    return places, [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("lengths", [(2, 2), (1, 3)])
def test_gradients_are_the_slopes(lengths):
    """With values both shorter and longer than 1, where the bound sets in."""
    places, leaves = parts(torch.float64, lengths)
    value = leaves[1].flatten(2) @ spans.basis_matrices(COLUMNS * 32, WIDTH, leaves[0].device)[1, :32].double()
    assert value[0].norm(dim=-1).max() < 1 < value[1].norm(dim=-1).min()
    assert torch.autograd.gradcheck(lambda *given: moved(given[0], places, *given[1:], columns=COLUMNS), leaves)


@pytest.mark.parametrize("lengths", [(2, 2), (1, 3)])
def test_values_and_gradients_are_the_products(lengths):
    places, leaves = parts(torch.float32, lengths)
    here, rows, gain, bias, scale = leaves
    made = moved(here, places, rows, gain, bias, scale, columns=COLUMNS)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, COLUMNS - 1)).flatten(0, 1)
    gates = (x.flatten() for x in (gain, bias, scale.detach()))
    wanted = apply_spans(here.expand(MOUNTS, -1, -1), places.line(MOUNTS), padded, *gates, basis_seed=spans.CONFIG.basis_seed)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(made.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(made, leaves[:4], upstream), torch.autograd.grad(wanted, leaves[:4], upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [0, 1 << 22])
@pytest.mark.parametrize("size", [1, 4])
def test_a_gathers_gradient_is_that_of_an_index(monkeypatch, few, size):
    monkeypatch.setattr(spans, "_FEW", few)
    table, index = torch.randn(size, 5, requires_grad=True), torch.tensor([0, 2, 2, 0, 3]) % size
    upstream = torch.randn(5, 5)
    (gradient,) = torch.autograd.grad(gathered(table, index), table, upstream)
    (wanted,) = torch.autograd.grad(table[index], table, upstream)
    torch.testing.assert_close(gradient, wanted)
    upstream[1, 3] = torch.nan  # a row that diverged takes no other with it
    (gradient,) = torch.autograd.grad(gathered(table, index), table, upstream)
    kept = [row for row in range(size) if row != int(index[1])]
    torch.testing.assert_close(gradient[kept], wanted[kept])
    assert gradient[index[1], 3].isnan()
