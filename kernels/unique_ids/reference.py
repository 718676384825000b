"""Distinct ids in plain torch; on CUDA this synchronises. Imports torch only."""

import torch


def unique_ids_reference(row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct ids; arguments and result as in :func:`unique_ids`."""
    flat = row_ids.reshape(-1)
    distinct, inverse = torch.unique(flat, return_inverse=True)
    # Sorted, so that the ids that mean "no row" come first: dropping them shifts every other place.
    absent = int((distinct < 0).sum())
    inverse = (inverse - absent).clamp(min=-1)
    count = distinct.numel() - absent
    unique = torch.full_like(flat, -1)
    unique[:count] = distinct[absent:]
    return unique, inverse, torch.full((1,), count, dtype=torch.int64, device=flat.device)
