import hashlib

import pytest
import torch

from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.fixed_basis.reference import splitmix64

SIZES = [(1, 1), (32, 32), (33, 20), (96, 64), (192, 160), (768, 768)]


def matrix(d_in, width, seed=0):
    return fixed_basis(torch.eye(d_in), width=width, seed=seed).T.contiguous()


def test_splitmix64_is_the_published_generator():
    # First outputs for seed 1234567, as Rosetta Code and the generator's C source print them.
    state, drawn = 1234567, []
    for _ in range(3):
        state, value = splitmix64(state)
        drawn.append(value)
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("d_in, width", SIZES)
def test_rows_are_orthonormal(d_in, width):
    basis = matrix(d_in, width).double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-6)


def test_bits_are_pinned():
    # Files hold rows, not this basis: should these bits ever change, every concept file changes its meaning.
    digest = hashlib.sha256(b"".join(matrix(d, w, s).numpy().tobytes() for d, w, s in [(192, 160, 0), (192, 160, 1), (768, 768, 0)]))
    assert digest.hexdigest() == "3a6d3d4e9e3cc972244f9093118ad3b45fa53b19a10271a5db11d35eaa332ca6"


@pytest.mark.parametrize("d_in, width", [(96, 64), (192, 160)])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_layout(d_in, width):
    e = torch.randn(37, d_in, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([fixed_basis(row, width=width, seed=3) for row in e])
    assert torch.equal(fixed_basis(e, width=width, seed=3), alone)
    assert torch.equal(fixed_basis(e.view(1, 37, d_in)[:, 5:9], width=width, seed=3)[0], alone[5:9])
    strided = torch.empty(d_in, 74).T[::2]
    strided.copy_(e)
    assert not strided.is_contiguous()
    assert torch.equal(fixed_basis(strided, width=width, seed=3), alone)


def test_error_at_most_twice_a_matrix_product(rms_error):
    e = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    basis = matrix(192, 160)
    exact = e.double() @ basis.double().T
    assert rms_error(fixed_basis(e, width=160, seed=0), exact) <= 2 * rms_error(e @ basis.T, exact)


def test_gradient_is_the_transpose():
    e = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    upstream = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(fixed_basis(e, width=64, seed=0), e, upstream)
    torch.testing.assert_close(gradient, upstream @ matrix(96, 64), rtol=1e-5, atol=1e-5)


def test_works_after_a_first_use_in_inference_mode():
    with torch.inference_mode():
        fixed_basis(torch.ones(1, 64), width=32, seed=991)
    e = torch.ones(1, 64, requires_grad=True)
    fixed_basis(e, width=32, seed=991).sum().backward()
    assert e.grad is not None


def test_seeds_and_widths():
    e = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fixed_basis(e, width=10, seed=0), fixed_basis(e, width=96, seed=0)[:, :10])
    assert not torch.equal(fixed_basis(e, width=96, seed=0), fixed_basis(e, width=96, seed=1))
    assert fixed_basis(torch.zeros(0, 96), width=64, seed=0).shape == (0, 64)


@pytest.mark.parametrize("width, seed, match", [(97, 0, "width 97 with 96 inputs"), (0, 0, "width 0"), (9, -1, "seed -1")])
def test_refuses_what_does_not_fit(width, seed, match):
    with pytest.raises(ValueError, match=match):
        fixed_basis(torch.zeros(96), width=width, seed=seed)
