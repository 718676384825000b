"""Rows between float32 masters and the stored e4m3 + e8m0 form. Imports torch, kernels and tiny_engram.errors."""

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import dequantize_blocks, quantize_blocks


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


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return dequantize_blocks(*quantize_blocks(x)).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """``dequantize(*quantize(x))`` with an identity gradient (straight through to the masters, none to the scale).

    Args:
        x: float32 ``[..., D]``; other float types come back in their own type. NaN stays NaN, so a loss shows it.
    """
    return _FakeQuantize.apply(x)  # pyright: ignore[reportReturnType]
