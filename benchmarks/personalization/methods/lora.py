"""LoRA (Hu et al. 2021, arXiv 2106.09685) on the attention of the denoiser, of the text encoder, or of both.

Set up as diffusers' scripts do with peft: `LoraConfig(r, lora_alpha=r, init_lora_weights="gaussian")` on to_q, to_k, to_v and
to_out.0 of every attention of the denoiser, and on the projections of the text encoder's; AdamW, weight decay
1e-2, a constant rate. Written as hooks, so that many runs share a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.runs import Run

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Lora", "LoraBoth8", "LoraCross8", "LoraText4", "LoraText8", "LoraUnet4", "LoraUnet8"]


@dataclass(frozen=True, slots=True)
class _Target:
    """One adapted module: where it is, its widths, and where its factors lie in a run's values."""

    part: str
    name: str
    inputs: int
    outputs: int

    def sizes(self, rank: int) -> tuple[int, int]:
        """Values of A and of B."""
        return rank * self.inputs, self.outputs * rank


class Lora(Adapters):
    """`factors` `[runs, values]`: for each target A^T `[inputs, rank]`, then B^T `[rank, outputs]`.

    One matrix for all targets, since a batch then gathers its rows' factors, and sums their gradients, in one go. Transposed,
    since gradients then come out of the products as they lie here, and none is copied.
    """

    rank: int
    parts: tuple[str, ...]
    # Part of the pipeline -> how the names of its adapted Linear modules end; None for what the base says.
    adapted: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    weight_decay = 1e-2

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        adapted = self.adapted or base.spec.adapted
        # what the pipeline calls its parts, in files
        self.prefixes = {"denoiser": base.spec.denoiser, "text_encoder": "text_encoder"}
        self.targets = tuple(
            _Target(part, name, module.in_features, module.out_features)
            for part in self.parts
            for name, module in getattr(base, part).named_modules()
            if name.endswith(adapted[part]) and isinstance(module, nn.Linear)
        )
        self.factors = nn.Parameter(torch.stack([self._start(run.seed) for run in self.runs]).to(base.device))

    def _start(self, seed: int) -> torch.Tensor:
        """A normal with deviation 1 / rank, B zero, as peft's "gaussian" has it; equal for all runs of a seed."""
        generator = torch.Generator("cpu").manual_seed(seed)
        pieces = []
        for target in self.targets:
            down, up = target.sizes(self.rank)
            pieces += [torch.randn(down, generator=generator) / self.rank, torch.zeros(up)]
        return torch.cat(pieces)

    def _gathered(self, part: str, rows: Rows) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Module of a part -> A^T `[batch, inputs, slots * rank]` and B^T `[batch, slots * rank, outputs]` of each row."""
        batch, slots = rows.run.shape
        own = [target for target in self.targets if target.part == part]
        before = sum(sum(target.sizes(self.rank)) for target in self.targets[: self.targets.index(own[0])])
        sizes = [size for target in own for size in target.sizes(self.rank)]
        factors = self.factors.narrow(1, before, sum(sizes)).index_select(0, rows.run.clamp(min=0).flatten()).view(batch, slots, -1)
        # zeros rather than a product with 0: a run that diverged must not reach rows that it has no part in
        factors = factors.masked_fill((rows.run < 0)[:, :, None], 0.0)
        pieces = factors.split(sizes, 2)
        found = {}
        for target, down, up in zip(own, pieces[::2], pieces[1::2], strict=True):
            a = down.view(batch, slots, target.inputs, self.rank).transpose(1, 2).reshape(batch, target.inputs, slots * self.rank)
            found[target.name] = a, up.reshape(batch, slots * self.rank, target.outputs)
        return found

    @contextmanager
    def _hooked(self, base: Base, part: str, rows: Rows) -> Iterator[None]:
        """Inside, this part of the pipeline runs with the factors of `rows` in it."""
        gathered = self._gathered(part, rows)
        with ExitStack() as stack:
            for name, module in getattr(base, part).named_modules():
                if name in gathered:
                    stack.callback(module.register_forward_hook(_Product(*gathered[name])).remove)
            yield

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        if "text_encoder" not in self.parts:
            return rows.states
        with self._hooked(base, "text_encoder", rows):
            return base.encoded(rows.ids)

    @contextmanager
    def attached(self, base: Base, rows: Rows, states: torch.Tensor) -> Iterator[None]:
        if "denoiser" not in self.parts:
            yield
            return
        with self._hooked(base, "denoiser", rows):
            yield

    def values(self, run: int) -> dict[str, torch.Tensor]:
        """float16 under the names that `pipe.load_lora_weights` reads."""
        pieces = self.factors[run].detach().half().cpu().split([s for t in self.targets for s in t.sizes(self.rank)])
        found = {}
        for target, down, up in zip(self.targets, pieces[::2], pieces[1::2], strict=True):
            name = f"{self.prefixes[target.part]}.{target.name}"
            found[f"{name}.lora_A.weight"] = down.view(target.inputs, self.rank).T.contiguous()
            found[f"{name}.lora_B.weight"] = up.view(self.rank, target.outputs).T.contiguous()
        return found


class _Product:
    """A forward hook that adds x A^T B^T, with factors of their own for each row of the batch."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out + (args[0] @ self.a) @ self.b


class LoraUnet4(Lora):
    rank, parts = 4, ("denoiser",)


class LoraUnet8(Lora):
    rank, parts = 8, ("denoiser",)


class LoraText4(Lora):
    rank, parts = 4, ("text_encoder",)


class LoraText8(Lora):
    rank, parts = 8, ("text_encoder",)


class LoraBoth8(Lora):
    rank, parts = 8, ("denoiser", "text_encoder")


class LoraCross8(Lora):
    """What the projections of the text states alone can hold: keys and values of the cross-attentions."""

    rank, parts = 8, ("denoiser",)
    adapted: ClassVar[Mapping[str, tuple[str, ...]] | None] = {"denoiser": ("attn2.to_k", "attn2.to_v")}
