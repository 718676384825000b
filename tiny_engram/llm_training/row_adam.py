"""Adam for tables: only rows that a step read move, and a row has one second moment. Imports torch."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["RowAdam"]


class RowAdam(torch.optim.Optimizer):
    """Adam over the rows of sparse gradients.

    Every row is a parameter of its own, which has an Adam of its own: its moments, and the count of its steps that corrects their bias,
    stand still while it is not read. A row that is first read late begins as one that is read first does. The second moment is the mean
    over the row's squares, as in row-wise AdaGrad: a row's values share their rate, and the state is ``head_dim + 2`` numbers a row where
    Adam has twice ``head_dim``. Rows that are not in the gradient keep their bits. There is no weight decay.

    State of each parameter ``[rows, head_dim]``: `exp_avg` float32 ``[rows, head_dim]``, `exp_avg_sq` and `steps` float32
    ``[rows]``.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 5e-3, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        """params: float32 ``[rows, head_dim]``."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros(len(p), device=p.device),
                "steps": torch.zeros(len(p), device=p.device),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the rows in the gradients. Raises ValueError for a gradient that is not sparse."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not p.grad.is_sparse:
                    raise ValueError(f"gradient of a table {list(p.shape)} is dense: expected a sparse one, of embedding(..., sparse=True)")
                gradient = p.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values().to(torch.float32)
                state = self.state[p]
                if state["steps"].device != p.device:  # layers follow their model, which may be moved once this is made
                    self.state[p] = state = {name: value.to(p.device) for name, value in state.items()}
                count = state["steps"][rows] + 1
                first = torch.lerp(state["exp_avg"][rows], values, 1 - beta1)
                second = torch.lerp(state["exp_avg_sq"][rows], values.square().mean(1), 1 - beta2)
                # each row is in the gradient once, so that writing is in no order that could matter
                state["steps"][rows], state["exp_avg"][rows], state["exp_avg_sq"][rows] = count, first, second
                scale = group["lr"] / (1 - beta1**count)
                spread = (second / (1 - beta2**count)).sqrt() + group["eps"]
                p[rows] -= first * (scale / spread).unsqueeze(1)
        return loss
