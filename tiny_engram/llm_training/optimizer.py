"""One optimiser for all that Engram layers learn, for a loop of one's own. Imports torch, tiny_engram.llm, gradients and row_adam."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramLayers

from .gradients import clip_gradients
from .row_adam import RowAdam

__all__ = ["EngramOptimizer", "dense_groups"]


def dense_groups(engrams: EngramLayers, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of all parameters but the rows; the projections' matrices alone decay."""
    rows = {id(table.weight) for table in engrams.learned.values()}
    dense = {name: p for name, p in engrams.engrams.named_parameters() if id(p) not in rows}
    matrices = {name: p for name, p in dense.items() if ".projections." in name and p.ndim == 2}
    others = [p for name, p in dense.items() if name not in matrices]
    return [{"params": list(matrices.values()), "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class EngramOptimizer(torch.optim.Optimizer):
    """AdamW for projections, norms and convolution, RowAdam for the rows: what train-lm teaches with, as one optimiser.

    A step cuts all gradients to one common length and forgets them when it is done: who trains (transformers' Trainer, for one) forgets
    those of the model alone, of which Engram is no part. Schedulers and state_dict work as with every optimiser; the last group is the
    rows'. It does not add up gradients over processes, as train-lm does.
    """

    # A GradScaler then leaves it to `step` to do nothing where float16 overflowed: it would leave such gradients lying there.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        engrams: EngramLayers,
        lr: float = 1e-3,
        *,
        table_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        """Of layers that are on the device where they will learn.

        Args:
            table_lr: of the rows, which never decay; None is five times `lr` (Engram, arXiv 2601.07372).
            weight_decay: of the projections' matrices alone.
            max_grad_norm: length that gradients are cut to, all together; None leaves them.

        Raises:
            TinyEngramError: nothing in the layers learns, as after `from_pretrained`.
        """
        tables = [rows.weight for rows in engrams.learned.values()]
        groups = dense_groups(engrams, weight_decay)
        parameters = [p for group in groups for p in group["params"]] + tables
        if not tables or not all(p.requires_grad for p in parameters):
            raise TinyEngramError(
                "these Engram layers read rows that do not learn: expected layers as attach(model, EngramConfig(...), tokenizer) makes them"
            )
        self._dense = torch.optim.AdamW(groups, lr=lr, betas=betas)
        self._rows = RowAdam(tables, lr=5 * lr if table_lr is None else table_lr, betas=betas)
        self.max_grad_norm = max_grad_norm
        super().__init__([*self._dense.param_groups, *self._rows.param_groups], {"lr": lr, "betas": betas})
        self.state.update(self._rows.state)
        self._share()

    def _share(self) -> None:
        """Both parts work with this one's groups and state, so that schedulers and state_dict see and change the same."""
        self._dense.param_groups, self._rows.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        self._dense.state = self._rows.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of layers of the same config."""
        super().load_state_dict(state_dict)
        self._share()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients, which are forgotten.

        Raises:
            TinyEngramError: there are none, or they are not finite; no weight has changed then.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        scale, overflowed = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # a GradScaler's, for this call
        if overflowed is not None and bool(overflowed):
            self.zero_grad()
            return loss
        if all(p.grad is None for p in self.parameters):
            raise TinyEngramError("no Engram parameter has a gradient: expected a loss of the model with the layers attached and enabled")
        if scale is not None:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.div_(scale)
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        length = clip_gradients(self.parameters, limit)
        if not bool(length.isfinite()):
            self.zero_grad()
            raise TinyEngramError("the gradients of Engram are not finite; lower lr or table_lr")
        self._dense.step()
        self._rows.step()
        self.zero_grad()
        return loss
