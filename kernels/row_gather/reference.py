"""Gather and dequantise in plain torch. Imports torch and the block_quant op."""

import torch

from ..block_quant.reference import dequantize_blocks_reference


def row_gather_reference(payload: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather; arguments and result as in :func:`row_gather`."""
    flat = slots.reshape(-1)
    absent = flat < 0
    if payload.shape[0] == 0 and bool(absent.all()):
        return torch.zeros((*slots.shape, payload.shape[1]), device=payload.device)
    safe = flat.clamp(min=0)
    # Bytes, since indexing has no float8 kernel on every device; index_select, since plain indexing of a few rows
    # already wakes torch's thread pool, which costs milliseconds when the cores are busy.
    picked = payload.view(torch.uint8).index_select(0, safe).view(torch.float8_e4m3fn)
    rows = dequantize_blocks_reference(picked, scale.index_select(0, safe))
    # where, not a product: a NaN in row 0 must not leak into an absent slot.
    return torch.where(absent.unsqueeze(-1), 0.0, rows).reshape(*slots.shape, payload.shape[1])
