"""Which implementation an op runs: Triton on CUDA tensors, the torch reference on everything else. Imports torch only.

Triton itself is imported by the ops' `fused.py`, when one first runs: a machine without it, or without a GPU, never sees it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch.autograd import forward_ad

Implementation = Literal["reference", "triton"]
_forced: Implementation | None = None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def implementation_for(tensor: torch.Tensor) -> Implementation:
    """What an op does with this tensor: the tensor that decides is the one that says where the result goes."""
    if _forced is not None:
        return _forced
    return "triton" if tensor.is_cuda and has_triton() else "reference"


def carries_tangents(*tensors: torch.Tensor) -> bool:
    """Whether forward-mode differentiation passes through: a custom op would drop the tangents without a word, the references keep them."""
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Make every op take one implementation, for tests and benchmarks; not for use by several threads at once.

    "triton" on CPU tensors needs Triton's interpreter (`TRITON_INTERPRET=1` before Triton is first imported).

    Raises:
        ValueError: an unknown name.
    """
    global _forced
    if name not in ("reference", "triton"):
        raise ValueError(f"implementation {name!r}: expected 'reference' or 'triton'")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
