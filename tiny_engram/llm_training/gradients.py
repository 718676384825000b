"""Gradients of one step, of all processes: dense ones of projections, sparse ones of tables. Imports torch.

No wrapper of torch.nn.parallel does it: the layers run inside another model's forward pass, and NCCL reduces no sparse tensors.
"""

from collections.abc import Sequence

import torch
from torch import distributed, nn

__all__ = ["clip_gradients", "coalesce", "reduce_gradients"]


def coalesce(tables: Sequence[nn.Parameter]) -> None:
    """Each row once in a table's gradient: what passes of a step add would otherwise lie behind one another in memory."""
    for table in tables:
        if table.grad is not None:
            table.grad = table.grad.coalesce()


def reduce_gradients(dense: Sequence[nn.Parameter], tables: Sequence[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
    """Sum the gradients, and a scalar, over all processes, in place; the scalar's sum is returned.

    Every process takes part with every parameter, whatever its batch read: one without a gradient adds zeros, or no rows. All end with
    the same bits, in the order of ranks.
    """
    for p in dense:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for table in tables:
        if table.grad is None:
            table.grad = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64, device=table.device),
                table.new_zeros((0, table.shape[1])),
                table.shape,
                check_invariants=False,
            )
    coalesce(tables)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return loss
    grads = [p.grad for p in dense if p.grad is not None]
    flat = torch.cat([loss.reshape(1).float(), *(grad.flatten() for grad in grads)])
    distributed.all_reduce(flat)
    start = 1
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
    for table in tables:
        table.grad = _sum_rows(table)
    return flat[0].to(loss.dtype)


def _sum_rows(table: nn.Parameter) -> torch.Tensor:
    """A table's coalesced gradient, summed over all processes."""
    grad = table.grad
    assert grad is not None
    ranks = distributed.get_world_size()
    own = torch.tensor([grad._nnz()], device=table.device)
    counts = [torch.zeros_like(own) for _ in range(ranks)]
    distributed.all_gather(counts, own)
    most = int(max(int(count) for count in counts))
    # collectives take equal shapes; the padding is cut off again
    rows = torch.zeros(most, dtype=torch.int64, device=table.device)
    values = table.new_zeros((most, table.shape[1]))
    rows[: len(grad.values())], values[: len(grad.values())] = grad.indices()[0], grad.values()
    all_rows, all_values = [torch.zeros_like(rows) for _ in range(ranks)], [torch.zeros_like(values) for _ in range(ranks)]
    distributed.all_gather(all_rows, rows)
    distributed.all_gather(all_values, values)
    kept = [int(count) for count in counts]
    indices = torch.cat([part[:count] for part, count in zip(all_rows, kept, strict=True)])
    found = torch.cat([part[:count] for part, count in zip(all_values, kept, strict=True)])
    return torch.sparse_coo_tensor(indices.unsqueeze(0), found, table.shape, check_invariants=False).coalesce()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    """Scale all gradients so that their common length is at most `limit`, and return the length that they had.

    torch's own refuses sparse ones. A length that is not finite scales nothing: the step is not to be taken.
    """
    coalesce([p for p in parameters if p.grad is not None and p.grad.is_sparse])
    values = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each.float()) for each in values]))
    factor = limit / (length + 1e-6)
    if bool(factor < 1) and bool(length.isfinite()):
        for each in values:
            each.mul_(factor)
    return length
