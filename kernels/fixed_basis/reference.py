"""The fixed orthonormal basis in plain torch. Imports torch only.

A transform rather than a matrix: sign flips, additions in a fixed order and permutations are the same bits on every
machine, in every batch and with every BLAS.
"""

from functools import lru_cache

import torch

ROUNDS = 2
_MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """One step of Steele, Lea and Flood's generator: (next state, 64-bit output)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return state, z ^ (z >> 31)


@torch.compiler.assume_constant_result  # else a compiler would go through the loops of what makes it, draw by draw
def _plan(d_in: int, width: int, seed: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return _made_plan(d_in, width, seed, device)


@lru_cache(maxsize=64)
def _made_plan(d_in: int, width: int, seed: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per round: signs float32 ``[d_in]`` and the order int64 that the outputs take (``[width]`` in the last round)."""
    state = (seed ^ (d_in * 0xD1B54A32D192ED03)) & _MASK
    rounds = []
    for _ in range(ROUNDS):
        signs = []
        for _ in range(d_in):
            state, draw = splitmix64(state)
            signs.append(-1.0 if draw >> 63 else 1.0)
        order = list(range(d_in))
        for last in range(d_in - 1, 0, -1):  # Fisher-Yates
            state, draw = splitmix64(state)
            other = draw % (last + 1)
            order[last], order[other] = order[other], order[last]
        rounds.append((signs, order))
    rounds[-1][1][width:] = []
    # Tensors made in inference mode could never again be saved for a backward pass, and these live in a cache.
    with torch.inference_mode(False):
        return [
            (
                torch.tensor(signs, dtype=torch.float32, device=device),
                torch.tensor(order, dtype=torch.int64, device=device),
            )
            for signs, order in rounds
        ]


def _hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """Unscaled fast Walsh-Hadamard transform of each run of ``block`` values: ``[N, D]`` -> ``[N, D]``."""
    shape = x.shape
    half = 1
    while half < block:
        low, high = x.reshape(shape[0], shape[1] // (2 * half), 2, half).unbind(dim=2)
        x = torch.stack((low + high, low - high), dim=2)
        half *= 2
    return x.reshape(shape)


def fixed_basis_reference(e: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Transform; arguments and result as in :func:`fixed_basis`."""
    d_in = e.shape[-1]
    block = d_in & -d_in
    # Each round would be scaled by 1 / sqrt(block); both together are a power of two, which rounds nothing.
    x = e.reshape(e.numel() // d_in, d_in).to(torch.float32) * (1.0 / block)
    for signs, order in _plan(d_in, width, seed, e.device):
        x = _hadamard(x * signs, block).index_select(1, order)
    return x.reshape(*e.shape[:-1], width)
