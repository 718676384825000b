"""Gather and dequantise in plain torch. Imports torch and the block_quant op."""

import torch

from ..block_quant.reference import dequantize_blocks_reference


def row_gather_reference(
    payload: torch.Tensor, scale: torch.Tensor, row_ids: torch.Tensor, first_row: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Gather; arguments and result as in :func:`row_gather`, with zeros for every id that is not in ``[first_row, first_row + R)``.

    ``payload`` may be given as bytes.
    """
    slots = row_ids.reshape(-1) - first_row if first_row else row_ids.reshape(-1)
    rows, width = payload.shape
    shape = (*row_ids.shape, width)
    if rows == 0 or slots.numel() == 0:
        return torch.zeros(shape, dtype=dtype, device=row_ids.device)
    absent = (slots < 0) | (slots >= rows)
    safe = slots.masked_fill(absent, 0)
    # Bytes, since indexing has no float8 kernel on every device; index_select, since plain indexing of a few rows
    # already wakes torch's thread pool, which costs milliseconds when the cores are busy.
    picked = payload.view(torch.uint8).index_select(0, safe).view(torch.float8_e4m3fn)
    values = dequantize_blocks_reference(picked, scale.index_select(0, safe))
    # where, not a product: a NaN in row 0 must not leak into an absent slot.
    return torch.where(absent.unsqueeze(-1), 0.0, values).reshape(shape).to(dtype)
