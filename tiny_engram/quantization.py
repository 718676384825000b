"""Rows between float32 masters and the stored e4m3 + e8m0 form. Imports torch, kernels and tiny_engram.errors."""

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK, dequantize_blocks, quantize_blocks

# What takes a float's fraction past the next exponent where it is above 448's, 1.75.
_UP = 0x1FFFFF


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored form of rows: payload float8_e4m3fn ``[..., D]``, scale uint8 ``[..., D / 32]``.

    Raises:
        TableError: a value is NaN or infinite, which no file should ever hold.
    """
    if not bool(x.isfinite().all()):
        bad = int((~x.isfinite()).sum())
        raise TableError(f"{bad} of {x.numel()} row values are NaN or infinite: expected finite; lower the learning rate")
    return quantize_blocks(x)


def dequantize(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., D]`` of the stored form."""
    return dequantize_blocks(payload, scale)


def _round_trip(x: torch.Tensor) -> torch.Tensor:
    """The bits of ``dequantize(*quantize(x))`` in a third of the launches: the bytes of the scale are never made.

    A training step of a small model waits for kernels to be launched, not for numbers.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = torch.linalg.vector_norm(blocks, float("inf"), -1, keepdim=True)
    # A float's exponent, one more where its fraction is above 448's, is 8 more than the scale's byte, which is no less than 0.
    byte = ((largest.view(torch.int32) + _UP) >> 23).clamp(min=8)
    # The power of two that takes the block to e4m3's range; NaN, as the whole block is to be, where 0 * largest is.
    power = torch.add(((262 - byte) << 23).view(torch.float32), largest, alpha=0)
    return ((blocks * power).to(torch.float8_e4m3fn).to(torch.float32) / power).flatten(-2)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.shape[-1:].numel() % BLOCK:
            return dequantize_blocks(*quantize_blocks(x)).to(x.dtype)
        return _round_trip(x)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """``dequantize(*quantize(x))`` with an identity gradient (straight through to the masters, none to the scale).

    Args:
        x: float32 ``[..., D]``; other float types come back in their own type. NaN stays NaN, so a loss shows it.
    """
    return _FakeQuantize.apply(x)  # pyright: ignore[reportReturnType]
