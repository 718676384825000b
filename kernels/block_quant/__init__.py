"""Rows as e4m3 payload with one e8m0 scale per 32 values (264 B for 256 values). Imports torch only."""

import torch

from .reference import BLOCK, dequantize_blocks_reference, quantize_blocks_reference

__all__ = ["BLOCK", "dequantize_blocks", "quantize_blocks"]


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension in blocks of 32.

    The scale is ``2 ** ceil(log2(amax / 448))`` (byte 127 for an all-zero block), so nothing saturates but by rounding;
    values round to nearest even. A block that holds NaN or infinity gets byte 255 and reads back as NaN throughout.

    Args:
        x: float ``[..., D]``, D a multiple of 32; taken as float32.

    Returns:
        payload float8_e4m3fn ``[..., D]`` and scale uint8 ``[..., D / 32]``.

    Raises:
        ValueError: D is no multiple of 32, or x is not floating point.
    """
    if not x.is_floating_point() or x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: expected floating point with a last size that {BLOCK} divides")
    return quantize_blocks_reference(x)


def dequantize_blocks(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., D]`` from payload float8_e4m3fn ``[..., D]`` and scale uint8 ``[..., D / 32]``.

    Scale byte b means 2 ** (b - 127), byte 0 included; byte 255 is NaN (OCP MX v1.0).

    Raises:
        ValueError: a type is another one, or the shapes do not belong together.
    """
    if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise ValueError(f"payload {payload.dtype} and scale {scale.dtype}: expected float8_e4m3fn and uint8")
    if payload.shape[-1] % BLOCK or (*payload.shape[:-1], payload.shape[-1] // BLOCK) != tuple(scale.shape):
        raise ValueError(f"payload {list(payload.shape)} and scale {list(scale.shape)}: expected [..., D] and [..., D / {BLOCK}]")
    return dequantize_blocks_reference(payload, scale)
