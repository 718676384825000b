"""Does an Engram table help a small GPT trained from scratch, at equal parameters and equal steps?

    python -m benchmarks.llm.corpus build/llm
    python -m benchmarks.llm.everywhere build/llm --out build/llm/everywhere --workers 3      # on a GPU, some minutes

All runs have one budget of parameters beside the token embeddings. A share of it is a table, read at two layers (n = 3, 8 heads, rows of
32 values); the feed-forward layers give it up, so that attention is the same in all. `size-1` has the layers of a share and a table of one
row: what the extra layers do by themselves. `hot` gives the most frequent trigrams rows of their own, without collisions, out of the
table's share. Rows learn through the FP8 quantiser, by Adam for sparse gradients at five times the rate, without decay.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.llm.pieces import BUCKETS, here, keep_piece
from tiny_engram.kernels.engram_gate import engram_gate
from tiny_engram.llm import EngramConfig, EngramLayers
from tiny_engram.llm.rows import LearnedRows

VOCAB, HIDDEN, LAYERS, HEADS, CONTEXT = 8192, 512, 8, 8, 512
FULL = 1536  # width of the feed-forward layers without a table
MOUNTS = (1, 4)
NGRAM, COLUMNS, HEAD_DIM = 3, 16, 32
ATTENTION, PER_WIDTH = 4 * HIDDEN * HIDDEN, 3 * HIDDEN
BUDGET = LAYERS * (ATTENTION + FULL * PER_WIDTH)
# What the layers hold beside the table: two projections with biases, norms, convolution.
ENGRAM_DENSE = len(MOUNTS) * (2 * (COLUMNS * HEAD_DIM + 1) * HIDDEN + 7 * HIDDEN)


@dataclass(frozen=True)
class Plan:
    """One run. share: of the budget that is a table; kind: plain, table, size-1 or hot."""

    kind: str
    share: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.share:.2f}-{self.seed}"

    @property
    def width(self) -> int:
        """Of the feed-forward layers: what is left of the budget, in eights."""
        if self.kind == "plain":
            return FULL
        left = BUDGET * (1 - self.share) - ENGRAM_DENSE - LAYERS * ATTENTION
        return max(8, int(left / (LAYERS * PER_WIDTH)) // 8 * 8)

    @property
    def rows(self) -> int:
        """Asked for in each column of each mount."""
        return max(2, int(BUDGET * self.share / (len(MOUNTS) * COLUMNS * HEAD_DIM)))


def plans(seeds: int, shares: Sequence[float]) -> list[Plan]:
    found = []
    for seed in range(seeds):
        found += [Plan("plain", 0.0, seed)]
        found += [Plan("table", share, seed) for share in shares]
        found += [Plan("size-1", 0.2, seed), Plan("hot", 0.2, seed)]
    return found


class OneRow(LearnedRows):
    """A table of one row in each column: whatever the n-gram is, it says the same."""

    def lookup(self, row_ids: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return super().lookup(torch.arange(row_ids.shape[-1], device=row_ids.device).expand_as(row_ids), dtype=dtype)


class HotRows(LearnedRows):
    """Hashed rows, and rows of their own for the trigrams that are most frequent, in the columns of trigrams."""

    hot: torch.Tensor

    def __init__(self, rows: int, hot: torch.Tensor, vocab: int) -> None:
        """hot: int64 ``[K]`` sorted, trigrams as one number."""
        super().__init__(rows + len(hot) * (COLUMNS // 2), HEAD_DIM)
        self.first, self.base = rows, vocab
        self.register_buffer("hot", hot)
        self.canonical: torch.Tensor | None = None  # of the batch, [B, T]

    def lookup(self, row_ids: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        assert self.canonical is not None
        grams = trigrams(self.canonical, self.base)
        place = torch.searchsorted(self.hot, grams).clamp(max=len(self.hot) - 1)
        found = (self.hot[place] == grams).unsqueeze(-1)
        half = COLUMNS // 2
        own = self.first + place.unsqueeze(-1) * half + torch.arange(half, device=place.device)
        trigram = torch.where(found, own, row_ids[..., half:])
        return super().lookup(torch.cat((row_ids[..., :half], trigram), dim=-1), dtype=dtype)


def trigrams(canonical: torch.Tensor, vocab: int) -> torch.Tensor:
    """The trigram that ends at each place as one number, -1 where there is none: int64 of ``[..., T]``."""
    padded = nn.functional.pad(canonical, (2, 0), value=-1)
    a, b, c = padded[..., :-2], padded[..., 1:-1], padded[..., 2:]
    return torch.where(a < 0, -1, (a * vocab + b) * vocab + c)


class Data:
    """Windows of the corpus, and how often the trigrams of its canonical ids occur."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        held = np.load(folder / "corpus.npz")
        self.train, self.validation = (torch.from_numpy(held[name].astype(np.int64)).to(device) for name in ("train", "validation"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")
        self.tokenizer.pad_token = self.tokenizer.eos_token

    def count(self, canonical: torch.Tensor, vocab: int) -> None:
        """Trigrams of the training text, sorted, and their counts."""
        self.grams, self.counts = trigrams(canonical[self.train], vocab).unique(return_counts=True)

    def frequency(self, grams: torch.Tensor) -> torch.Tensor:
        place = torch.searchsorted(self.grams, grams).clamp(max=len(self.grams) - 1)
        return torch.where(self.grams[place] == grams, self.counts[place], 0)

    def batch(self, size: int, generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(self.train) - CONTEXT - 1, (size,), generator=generator)
        at = starts[:, None] + torch.arange(CONTEXT + 1)
        return self.train[at.to(self.train.device)]


def build(plan: Plan, data: Data, device: torch.device) -> tuple[LlamaForCausalLM, EngramLayers | None]:
    torch.manual_seed(plan.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=plan.width,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model = model.to(device)
    if plan.kind == "plain":
        return model, None
    rows = plan.rows
    hot = 0
    if plan.kind == "hot":  # half of the trigrams' rows are given to the most frequent ones
        hot = rows // 2
        rows -= hot // 2  # two halves of the columns are hashed, one has rows of its own
    asked = EngramConfig(layers=MOUNTS, max_ngram=NGRAM, heads=COLUMNS // 2, vocab=rows, head_dim=HEAD_DIM, seed=plan.seed, form="paper")
    engram = EngramLayers.attach(model, asked, data.tokenizer)
    data.count(engram.tokenizer.canonical.to(device), engram.tokenizer.size)
    for layer in MOUNTS:
        mounted: Any = engram.engrams[str(layer)]
        learned: LearnedRows | None = None
        if plan.kind == "size-1":
            learned = OneRow(COLUMNS, HEAD_DIM)
        elif plan.kind == "hot":
            known = data.grams >= 0
            best = data.counts[known].topk(hot).indices
            learned = HotRows(mounted.hasher.rows_total, data.grams[known][best].sort().values, engram.tokenizer.size)
        if learned is not None:
            mounted.table = learned.to(device)
    return model, engram


def optimizers(model: nn.Module, engram: EngramLayers | None, rate: float) -> list[torch.optim.Optimizer]:
    tables = [] if engram is None else [p for rows in engram.learned.values() for p in rows.parameters()]
    dense = [*model.parameters(), *(() if engram is None else engram.engrams.parameters())]
    taken = {id(each) for each in tables}
    unique = list({id(each): each for each in dense if id(each) not in taken}.values())
    groups = [
        {"params": [p for p in unique if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in unique if p.ndim < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=unique[0].is_cuda)]
    if tables:
        found.append(torch.optim.SparseAdam(tables, lr=5 * rate, betas=(0.9, 0.95)))
    return found


def see(engram: EngramLayers | None, ids: torch.Tensor) -> None:
    """The hot rows are found by the ids of the batch."""
    for learned in () if engram is None else engram.learned.values():
        if isinstance(learned, HotRows):
            learned.canonical = engram.tokenizer.canonical.to(ids.device)[ids]  # pyright: ignore[reportOptionalMemberAccess]


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, engram: EngramLayers | None, data: Data, canonical: torch.Tensor, vocab: int) -> dict[str, Any]:
    """Loss on the validation text, and by how often the trigram in front of a token stands in the training text; gates likewise."""
    model.eval()
    count = len(data.validation) // CONTEXT
    losses, seen, gates = [], [], {layer: [] for layer in MOUNTS}
    read = None
    if engram is not None:
        read = engram.at

        def at(layer: int, hidden: torch.Tensor, call: Any, prepared: Any) -> torch.Tensor:
            mounted: Any = engram.engrams[str(layer)]
            key, _ = mounted._projected(hidden.unsqueeze(2), mounted.rows(prepared[layer]))
            ones = torch.ones_like(hidden, dtype=torch.float32)
            arguments = (hidden.unsqueeze(2).float(), key.float(), ones, mounted.q_weight, mounted.k_weight)
            gates[layer].append(engram_gate(*arguments, eps=mounted.config.eps, form="paper", residual=False)[..., 0, 0])
            return read(layer, hidden, call, prepared)

        engram.at = at  # pyright: ignore[reportAttributeAccessIssue]
    for start in range(0, count, 64):
        rows = data.validation[: count * CONTEXT].view(count, CONTEXT)[start : start + 64]
        see(engram, rows)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            logits = model(rows).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(rows), -1))
        seen.append(data.frequency(trigrams(canonical[rows], vocab))[:, :-1])
    if engram is not None:
        del engram.at
    model.train()
    loss, times = torch.cat(losses), torch.cat(seen)
    place = torch.bucketize(times, torch.tensor(BUCKETS[1:], device=times.device), right=True)
    told: dict[str, Any] = {"loss": float(loss.mean())}
    told["by_frequency"] = [float(loss[place == k].mean()) for k in range(len(BUCKETS))]
    told["tokens"] = [int((place == k).sum()) for k in range(len(BUCKETS))]
    for layer, values in gates.items():
        if values:
            gate = torch.cat(values)[:, :-1]
            told[f"gate_{layer}"] = [float(gate[place == k].mean()) for k in range(len(BUCKETS))]
    return told


def run(plan: Plan, data: Data, device: torch.device, *, steps: int, batch: int, rate: float, looks: int) -> dict[str, Any]:
    model, engram = build(plan, data, device)
    if engram is None:
        from tiny_engram.tokenizer import CompressedTokenizer

        compressed = CompressedTokenizer(data.tokenizer, pad_id=0)
        canonical, vocab = compressed.canonical.to(device), compressed.size
        data.count(canonical, vocab)
    else:
        canonical, vocab = engram.tokenizer.canonical.to(device), engram.tokenizer.size
    both = optimizers(model, engram, rate)
    starts = [[group["lr"] for group in each.param_groups] for each in both]
    generator = torch.Generator().manual_seed(1000 + plan.seed)
    curve, began, trained = [], time.perf_counter(), 0.0
    for step in range(steps):
        share = min((step + 1) / 100, 1.0) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimizer, rates in zip(both, starts, strict=True):
            for group, start in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = start * share
        ids = data.batch(batch, generator)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        see(engram, inputs)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in both[0].param_groups for p in group["params"]], 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, steps // looks) == 0 or step + 1 == steps:
            trained += time.perf_counter() - began
            curve.append({"step": step + 1, **evaluate(model, engram, data, canonical, vocab)})
            print(plan.name, step + 1, f"loss {curve[-1]['loss']:.4f}", f"{trained:.0f} s", flush=True)
            began = time.perf_counter()
    engrams = 0 if engram is None else sum(p.numel() for name, p in engram.engrams.named_parameters() if ".table." not in name)
    tables = 0 if engram is None else sum(rows.weight.numel() for rows in engram.learned.values())
    dense = sum(p.numel() for p in model.parameters()) - VOCAB * HIDDEN
    counted = {"dense": dense, "engram": engrams, "table": tables, "width": plan.width}
    settings = {"steps": steps, "batch": batch, "rate": rate}
    return {**asdict(plan), "parameters": counted, "curve": curve, "seconds": round(trained, 1), **settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for each run; those that are there are not run again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4, 0.6], help="of the kind table")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--looks", type=int, default=8, help="evaluations")
    parser.add_argument("--workers", type=int, default=1, help="processes on the one device")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="kinds or runs, with commas: plain,table-0.10-2")
    args = parser.parse_args()
    where = here()
    if args.workers > 1 and args.worker is None:
        again = [sys.executable, "-m", "benchmarks.llm.everywhere", *sys.argv[1:], "--worker"]
        children = [subprocess.Popen([*again, str(number)]) for number in range(args.workers)]
        sys.exit(max(child.wait() for child in children))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    data = Data(args.folder, device)
    kinds = args.only.split(",") if args.only else None
    asked = [plan for plan in plans(args.seeds, args.shares) if kinds is None or {plan.kind, plan.name} & {*kinds}]
    asked = [plan for plan in asked if not (args.out / f"{plan.name}.json").exists()]
    for plan in asked[args.worker or 0 :: args.workers]:
        path = args.out / f"{plan.name}.json"
        if path.exists():
            continue
        told = run(plan, data, device, steps=args.steps, batch=args.batch, rate=args.rate, looks=args.looks)
        keep_piece(path, {**told, **where})


if __name__ == "__main__":
    main()
