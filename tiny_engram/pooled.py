"""What a concept adds to a pooled vector, where that is all that a pipeline uses of an encoder. May import store and residual.

A pooled vector has no positions: what is added acts on the whole picture, whenever the trigger stands in the prompt.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tiny_engram.fired import Fired
from tiny_engram.residual import Spans, apply_spans

__all__ = ["apply_pooled", "pooled_vector", "with_pooled_vector"]


def apply_pooled(pooled: torch.Tensor, fired: Sequence[Fired]) -> torch.Tensor:
    """Pooled vectors `[batch, width]` with what fires in their prompts: for each span, the mean of what its positions would add to a state
    that equals the vector. Rows without a span keep their bits; differentiable.
    """
    for one in fired:
        spans, count = one.spans, len(one.spans)
        longest = int(spans.length.max())
        at = spans.batch.to(pooled.device)
        states = pooled[at].float()[:, None].expand(-1, longest, -1)
        own = Spans(torch.arange(count), torch.zeros_like(spans.start), spans.length, spans.offset)
        moved = apply_spans(states, own, one.rows, one.gain, one.bias, one.scale, basis_seed=one.basis_seed)
        added = (moved - states).sum(1) / spans.length.to(pooled.device)[:, None]
        for k, row in enumerate(spans.batch.tolist()):
            pooled = pooled.index_put((torch.tensor([row], device=pooled.device),), (pooled[row].float() + added[k]).to(pooled.dtype)[None])
    return pooled


def pooled_vector(output: Any) -> torch.Tensor:
    """The pooled vector in an encoder's output, `[batch, width]`."""
    return output[1] if isinstance(output, tuple) else output["pooler_output"]


def with_pooled_vector(output: Any, pooled: torch.Tensor) -> Any:
    """The same output, in a copy, with another pooled vector."""
    if isinstance(output, tuple):
        return (output[0], pooled, *output[2:])
    return type(output)(**{**output, "pooler_output": pooled})
