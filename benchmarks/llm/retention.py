"""What a language model forgets while it learns a narrow text: Engram layers against LoRA r8.

    python -m benchmarks.llm.retention MODEL --ordinary build/llm/ordinary.txt --out build/llm/retention  # MODEL: a folder or GGUF file

The narrow text is this project's own documentation, which no model has seen; ordinary text is documentation of installed packages. Both
methods are taught on the same windows in the same order, each at several learning rates; while they learn, the loss on the narrow text and
on ordinary text is noted. Compared is the loss on ordinary text where both have come to the same loss on the narrow one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.llm.pieces import here, keep_piece
from tiny_engram.llm import EngramConfig, EngramLayers
from tiny_engram.llm.loading import load_causal_lm

ROOT = Path(__file__).resolve().parents[2]
WINDOW, BATCH = 256, 16


def windows(tokenizer: Any, texts: list[str], count: int | None = None) -> torch.Tensor:
    """int64 ``[N, WINDOW]``."""
    ids = [token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    rows = len(ids) // WINDOW
    found = torch.tensor(ids[: rows * WINDOW]).view(rows, WINDOW)
    return found if count is None else found[:: max(1, rows // count)][:count]


def narrow() -> list[str]:
    return [path.read_text() for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])]


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: Any, rows: torch.Tensor, device: torch.device) -> float:
    return float(sum(loss_of(model, part.to(device)) * len(part) for part in rows.split(BATCH)) / len(rows))


@dataclass
class Learner:
    parameters: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    count: int


@contextmanager
def engram(model: Any, tokenizer: Any, rate: float) -> Iterator[Learner]:
    layers = EngramLayers.attach(model, EngramConfig(layers=(4, 14), vocab=16_384, head_dim=32), tokenizer)
    tables = [rows.weight for rows in layers.learned.values()]
    dense = [p for p in layers.engrams.parameters() if not any(p is table for table in tables)]
    try:
        optimizers = [torch.optim.AdamW(dense, lr=rate, weight_decay=0.0), torch.optim.SparseAdam(tables, lr=5 * rate)]
        yield Learner([*tables, *dense], optimizers, sum(p.numel() for p in [*tables, *dense]))
    finally:
        layers.detach()


@contextmanager
def lora(model: Any, tokenizer: Any, rate: float) -> Iterator[Learner]:
    from peft import LoraConfig, get_peft_model

    taught = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    parameters = [p for p in taught.parameters() if p.requires_grad]
    try:
        yield Learner(parameters, [torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)], sum(p.numel() for p in parameters))
    finally:
        taught.unload()


METHODS: dict[str, Callable[[Any, Any, float], Any]] = {"engram": engram, "lora": lora}
RATES = {"engram": (3e-4, 1e-3, 3e-3), "lora": (1e-4, 3e-4, 1e-3)}


def teach(
    name: str, rate: float, model: Any, tokenizer: Any, taught: torch.Tensor, judged: dict[str, torch.Tensor], steps: int, seed: int
) -> dict[str, Any]:
    device = next(model.parameters()).device
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    points, began = [], time.perf_counter()
    with METHODS[name](model, tokenizer, rate) as learner:
        for step in range(steps + 1):
            if step in (0, 5, 10, 20, 40) or step % 60 == 0:
                points.append({"step": step, **{what: mean_loss(model, rows, device) for what, rows in judged.items()}})
            if step == steps:
                break
            rows = taught[torch.randint(len(taught), (BATCH,), generator=generator)].to(device)
            loss_of(model, rows).backward()
            for optimizer in learner.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("first", group["lr"]) * min(1.0, (step + 1) / 20)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        count = learner.count
    print(name, rate, seed, points[-1], flush=True)
    told = {"method": name, "rate": rate, "seed": seed, "parameters": count, "seconds": round(time.perf_counter() - began, 1)}
    return {**told, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ordinary", type=Path, required=True, help="a text file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    where = here("peft")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_causal_lm(args.model, device=device)
    taught = windows(tokenizer, narrow())
    judged = {"narrow": taught[::4], "ordinary": windows(tokenizer, [args.ordinary.read_text()], 128)}
    for seed in range(args.seeds):
        for name in args.methods:
            for rate in RATES[name]:
                path = args.out / f"{name}-{rate:g}-{seed}.json"
                if not path.exists():
                    keep_piece(path, {**teach(name, rate, model, tokenizer, taught, judged, args.steps, seed), **where})


if __name__ == "__main__":
    main()
