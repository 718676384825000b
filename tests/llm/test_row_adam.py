"""RowAdam against the same sums over dense tensors, and clipping of sparse gradients beside dense ones."""

import copy

import pytest
import torch
from torch import nn

from tiny_engram.llm_training.gradients import clip_gradients, coalesce, reduce_gradients
from tiny_engram.llm_training.row_adam import RowAdam

ROWS, WIDTH = 40, 32


def reads(steps, seed=0):
    """Rows that each step reads, some twice; every step leaves many out, and row 39 is never read."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS - 1, (12,), generator=generator) for _ in range(steps)]


def grad_of(p) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def gradients_of(table, rows, target):
    table.grad = None
    found = nn.functional.embedding(rows, table, sparse=True)
    ((found - target[rows]) ** 2).sum().backward()


def dense_row_adam(start, target, steps, *, lr, beta1, beta2, eps):
    """Each row by itself, in float64: Adam whose second moment is one number, over the steps that read the row."""
    table = start.double().clone()
    for row in range(ROWS):
        first, second, count = torch.zeros(WIDTH).double(), 0.0, 0
        for rows in steps:
            times = int((rows == row).sum())
            if times:
                gradient = times * 2 * (table[row] - target[row].double())
                count += 1
                first = beta1 * first + (1 - beta1) * gradient
                second = beta2 * second + (1 - beta2) * float(gradient.square().mean())
                table[row] -= lr * (first / (1 - beta1**count)) / ((second / (1 - beta2**count)) ** 0.5 + eps)
    return table


def test_rows_move_as_each_would_by_itself():
    generator = torch.Generator().manual_seed(1)
    start, target = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    table, steps = nn.Parameter(start.clone()), reads(25)
    optimizer = RowAdam([table], lr=0.03, betas=(0.9, 0.95))
    for rows in steps:
        before = table.detach().clone()
        gradients_of(table, rows, target)
        optimizer.step()
        others = torch.ones(ROWS, dtype=torch.bool)
        others[rows] = False
        assert torch.equal(table.detach()[others], before[others]) and not torch.equal(table.detach()[~others], before[~others])
    expected = dense_row_adam(start, target, steps, lr=0.03, beta1=0.9, beta2=0.95, eps=1e-8)
    torch.testing.assert_close(table.detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(table.detach()[39], start[39]) and int(optimizer.state[table]["steps"][39]) == 0


def test_a_row_of_one_value_that_every_step_reads_is_adam():
    """Where a row's mean square is its square, torch's own Adam is the same sum."""
    start, target = torch.randn(6, 1), torch.randn(6, 1)
    table, dense = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = RowAdam([table], lr=0.02, betas=(0.9, 0.95)), torch.optim.Adam([dense], lr=0.02, betas=(0.9, 0.95))
    for _ in range(20):
        gradients_of(table, torch.arange(6), target)
        dense.grad = (2 * (dense - target)).detach()
        ours.step()
        theirs.step()
    torch.testing.assert_close(table, dense, rtol=1e-5, atol=1e-6)


def test_a_row_read_late_begins_as_one_read_first():
    target = torch.ones(ROWS, WIDTH)
    table = nn.Parameter(torch.zeros(ROWS, WIDTH))
    optimizer = RowAdam([table], lr=0.01)
    moved = []
    for row in (0, 0, 0, 7):
        before = table.detach().clone()
        gradients_of(table, torch.tensor([row]), target)
        optimizer.step()
        moved.append((table.detach() - before)[row])
    torch.testing.assert_close(moved[3], moved[0], rtol=0, atol=0)
    torch.testing.assert_close(moved[0], torch.full((WIDTH,), 0.01), rtol=1e-5, atol=0)


def test_its_state_comes_back_to_the_bit():
    target, steps = torch.randn(ROWS, WIDTH), reads(8)
    tables = [nn.Parameter(torch.zeros(ROWS, WIDTH)) for _ in range(2)]
    first, second = (RowAdam([table], lr=0.03) for table in tables)
    for rows in steps[:4]:
        gradients_of(tables[0], rows, target)
        first.step()
    with torch.no_grad():
        tables[1].copy_(tables[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for table, optimizer in zip(tables, (first, second), strict=True):
        for rows in steps[4:]:
            gradients_of(table, rows, target)
            optimizer.step()
    assert torch.equal(tables[0], tables[1])


def test_dense_gradients_are_refused():
    table = nn.Parameter(torch.zeros(4, 32))
    table.grad = torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"gradient of a table \[4, 32\] is dense"):
        RowAdam([table]).step()


def made_gradients():
    generator = torch.Generator().manual_seed(3)
    weight, table = nn.Parameter(torch.randn(8, 8, generator=generator)), nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator))
    weight.square().sum().backward()
    gradients_of(table, torch.tensor([3, 5, 3, 9]), torch.zeros(ROWS, WIDTH))
    return weight, table


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_that_of_dense_gradients(limit):
    weight, table = made_gradients()
    dense = [nn.Parameter(p.detach().clone()) for p in (weight, table)]
    for p, of in zip(dense, (weight, table), strict=True):
        p.grad = grad_of(of).to_dense().clone()
    expected = nn.utils.clip_grad_norm_(dense, limit)
    torch.testing.assert_close(clip_gradients([weight, table], limit), expected)
    assert grad_of(table).is_sparse
    for p, of in zip(dense, (weight, table), strict=True):
        torch.testing.assert_close(grad_of(of).to_dense(), p.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_length_that_is_not_finite_scales_nothing(bad):
    weight, table = made_gradients()
    kept = grad_of(table).coalesce().values().clone()
    grad_of(weight)[0, 0] = bad
    assert not clip_gradients([weight, table], 0.5).isfinite()
    assert torch.equal(grad_of(table).coalesce().values(), kept)


def test_alone_a_process_adds_nothing_and_whoever_read_nothing_has_no_rows():
    weight, table = made_gradients()
    before = grad_of(table).to_dense()
    idle = nn.Parameter(torch.zeros(ROWS, WIDTH)), nn.Parameter(torch.zeros(4))
    assert reduce_gradients([weight, idle[1]], [table, idle[0]], torch.tensor(2.5)) == 2.5
    assert torch.equal(grad_of(table).to_dense(), before) and grad_of(table)._nnz() == 3
    assert grad_of(idle[0]).is_sparse and grad_of(idle[0])._nnz() == 0 and torch.equal(grad_of(idle[1]), torch.zeros(4))
    start = idle[0].detach().clone()
    RowAdam([idle[0]]).step()
    assert torch.equal(idle[0], start)
    coalesce([nn.Parameter(torch.zeros(2, 32))])  # without a gradient
