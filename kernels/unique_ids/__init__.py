"""The distinct ids among many, and which of them each one is. Imports torch only."""

import torch

from ..backend import implementation_for
from .reference import unique_ids_reference

__all__ = ["unique_ids"]


def unique_ids(row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each id once, and the place of every id among them: ``unique[inverse] == row_ids.reshape(-1)`` for ids of -1 and more.

    Shapes depend on N alone, and on CUDA nothing waits for the host, so the op may be captured in a graph.

    Args:
        row_ids: int64 ``[...]``, N ids in all; a negative id is "no row".

    Returns:
        ``unique`` int64 ``[N]``: the distinct ids of 0 and more in any order (another one each run, on CUDA), then -1;
        ``inverse`` int64 ``[N]``: the place of each id in ``unique``, -1 for "no row";
        ``count`` int64 ``[1]``: how many distinct ids there are.

    Raises:
        ValueError: ids are not int64, or on CUDA more than 2**29.
    """
    if row_ids.dtype != torch.int64:
        raise ValueError(f"row ids are {row_ids.dtype}: expected torch.int64")
    if type(row_ids) is torch.Tensor and row_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        return _run(row_ids)
    return _unique_ids(row_ids)


def _run(row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if implementation_for(row_ids) == "triton":
        from .fused import unique_ids_triton

        return unique_ids_triton(row_ids)
    return unique_ids_reference(row_ids)


_unique_ids = torch.library.custom_op("tiny_engram::unique_ids", _run, mutates_args=())


@_unique_ids.register_fake
def _(row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = row_ids.new_empty(row_ids.numel())
    return flat, torch.empty_like(flat), row_ids.new_empty(1)
