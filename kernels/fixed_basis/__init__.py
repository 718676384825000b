"""A concept's rows -> key or value of the encoder's width, by a basis that all concepts share. Imports torch only."""

import torch

from .reference import fixed_basis_reference

__all__ = ["fixed_basis"]


def fixed_basis(e: torch.Tensor, *, width: int, seed: int) -> torch.Tensor:
    """Multiply by a fixed matrix with orthonormal rows, without the matrix.

    Two rounds of (sign flip, fast Walsh-Hadamard transform in blocks of the largest power of two that divides D_in,
    permutation), of which the first ``width`` outputs are kept. Signs and permutations come from splitmix64, so the
    basis depends on (D_in, seed) alone; a smaller width is a prefix of a larger one. Only additions in a fixed order:
    a row has the same bits alone, in any batch and in any memory layout. Differentiable.

    Args:
        e: float ``[..., D_in]``, taken as float32.
        width: outputs kept, at most D_in.
        seed: non-negative.

    Returns:
        float32 ``[..., width]``.

    Raises:
        ValueError: width is below 1 or above D_in, or the seed is negative.
    """
    d_in = e.shape[-1]
    if not 1 <= width <= d_in:
        raise ValueError(f"width {width} with {d_in} inputs: expected 1 <= width <= inputs; raise heads or head_dim until inputs >= width")
    if seed < 0:
        raise ValueError(f"seed {seed}: expected 0 or more")
    return fixed_basis_reference(e, width, seed)
