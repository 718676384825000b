"""What Engram costs `model.generate` in transformers: a 4B-class model, rows in host memory, rows on the device, and no Engram.

    python benchmarks/llm/decode.py                  # an H200 in a host with 128 GiB: some five minutes; the figures to keep
    python benchmarks/llm/decode.py --rows 200000    # a table of so many rows, keeps no figures
    python benchmarks/llm/decode.py --dry            # a few seconds on a CPU: does it run?

One table of 94.42 GiB serves both Engram layers (published hash of DeepSeek V4.1-Flash: 24 rows of 256 values for each token and layer),
once in pinned host memory and once whole on the device; every row follows a rule. The model is transformers' Qwen3 with random weights
in bfloat16, and tokens are sampled, so that rows are as scattered as they can be. Before anything is timed the two tables must give
the same tokens, and Engram others than none. Kernels are launched one by one, as transformers does it; the same table beside a decoder that
is one CUDA graph: benchmarks/overlap.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from decode_stack import HASH, HEAD_DIM, TINY, Shape
from full_size import device, same_bits, say, synchronize
from gpu import need, record, row

from tiny_engram.hashing import NgramHasher
from tiny_engram.llm import EngramConfig, EngramLayers, attach
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.storage import RowStorage

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "bases" / "emoji-sd" / "tokenizer"
BATCHES, PROMPT, NEW, ROUNDS = (1, 32, 256), 16, 96, 5
CHECKED_NEW = 12
LIMIT, LIMIT_FROM = 0.01, 32


def decoder_model(shape: Shape, vocab: int) -> Any:
    """Random weights in bfloat16, drawn where they stay."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with device():
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def tables(rows: int) -> dict[str, EngramTable]:
    """The same rows in host memory and on the device."""
    homes = {"host": "pinned", "device": "device"} if torch.cuda.is_available() else {"host": "pageable", "device": "pageable"}
    rule, made = FillRule(HEAD_DIM, seed=7), {}
    for name, home in homes.items():
        began = time.perf_counter()
        storage = RowStorage.allocate(rows, HEAD_DIM, home=home)  # pyright: ignore[reportArgumentType]
        rule.fill(storage, device=device())
        synchronize()
        need(storage.home == home, f"the table of {name} is {storage.home}, not {home}")
        made[name] = EngramTable.over(storage, bounds="ignore")
        ids = torch.randint(0, rows, (4096,), generator=torch.Generator().manual_seed(1)).to(device())
        found = made[name].lookup(ids, dtype=torch.bfloat16)
        need(same_bits(found, rule.values(ids, torch.bfloat16)), f"rows of {name} are not the rule's")
        say(f"  {name}: {storage.nbytes / 2**30:.2f} GiB filled after {time.perf_counter() - began:.1f} s")
    return made


class Bench:
    """One model and its Engram layers, whose rows come from either table."""

    def __init__(self, shape: Shape, *, vocab: int) -> None:
        """vocab: rows asked for in each column."""
        self.shape, self.tokenizer = shape, AutoTokenizer.from_pretrained(TOKENIZER)
        self.config = EngramConfig(
            layers=shape.engram_at, max_ngram=HASH.max_ngram, heads=HASH.heads, vocab=vocab, head_dim=HEAD_DIM, form="v41", start="values"
        )
        self.model = decoder_model(shape, len(self.tokenizer))

    def rows(self) -> int:
        """What the hash of both layers needs."""
        completed = self.config.completed(compressed_vocab=1000, pad_id=0).hash_config
        return max(NgramHasher(completed, layer).rows_total for layer in self.config.layers)

    def attached(self, tables: dict[str, EngramTable]) -> EngramLayers:
        engrams = attach(self.model, self.config, self.tokenizer, tables=dict.fromkeys(self.config.layers, tables["host"]))
        with torch.no_grad():  # as after training: a value projection that says something
            for name, weight in engrams.engrams.named_parameters():
                if name.endswith("wkv.weight"):
                    weight.normal_(std=weight.shape[1] ** -0.5)
        return engrams.to(torch.bfloat16).requires_grad_(False)

    def read(self, engrams: EngramLayers, table: EngramTable) -> None:
        for layer in self.config.layers:
            engrams.use_rows(layer, table)

    def generate(self, batch: int, new: int) -> torch.Tensor:
        torch.manual_seed(3)
        prompt = torch.randint(1, len(self.tokenizer) - 2, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).to(device())
        options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new}
        return self.model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)

    def seconds(self, batch: int, new: int) -> float:
        synchronize()
        began = time.perf_counter()
        self.generate(batch, new)
        synchronize()
        return time.perf_counter() - began


def check(bench: Bench, tables: dict[str, EngramTable], plain: torch.Tensor, engrams: EngramLayers) -> None:
    """Both tables give the same tokens, and others than no Engram."""
    said = {}
    for name, table in tables.items():
        bench.read(engrams, table)
        said[name] = bench.generate(4, CHECKED_NEW)
    need(torch.equal(said["host"], said["device"]), "rows from the host and rows on the device make different tokens")
    need(not torch.equal(said["host"], plain), "Engram layers do not move what is said")
    need(len(plain[:, PROMPT:].unique()) > CHECKED_NEW, "the model says the same again and again")
    say("  host and device: the same tokens; others than without Engram")


def measure(bench: Bench, made: dict[str, EngramTable], *, rounds: int, new: int, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    plain = bench.generate(4, CHECKED_NEW)
    none: dict[int, list[float]] = {batch: [] for batch in batches}
    engram: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in made} for batch in batches}

    def without() -> None:
        for batch in batches:
            bench.generate(batch, 4)
            none[batch] += [bench.seconds(batch, new) for _ in range(max(1, rounds // 2))]

    without()
    engrams = bench.attached(made)
    check(bench, made, plain, engrams)
    for batch in batches:
        for number in range(rounds + 1):
            # Whichever is second finds the machine as the first left it: they take turns.
            for name in sorted(made, reverse=bool(number % 2)):
                bench.read(engrams, made[name])
                bench.generate(batch, 2)
                taken = bench.seconds(batch, new)
                if number:
                    engram[batch][name].append(taken)
    engrams.detach()
    without()
    figures = []
    for batch in batches:
        seconds = {**engram[batch], "none": none[batch]}
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        each = sorted(host / near - 1 for host, near in zip(engram[batch]["host"], engram[batch]["device"], strict=True))
        figures.append(
            {
                "batch": batch,
                "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
                "tokens_per_s": {name: batch * new / value for name, value in middle.items()},
                "slowdown_against_device": statistics.median(each),
                "slowdown_range": [each[0], each[-1]],
                "slowdown_against_none": middle["host"] / middle["none"] - 1,
                "device_against_none": middle["device"] / middle["none"] - 1,
            }
        )
        say(f"  batch {batch}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures[-1].items() if isinstance(v, float)) + f" {middle}")
    return figures


def lines_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    batch, slow, rate = figures["batch"], figures["slowdown_against_device"], figures["tokens_per_s"]
    asked = batch >= LIMIT_FROM
    low, high = figures["slowdown_range"]
    compared = f"{rate['host']:,.0f} against {rate['device']:,.0f} tokens/s, {slow:+.2%} ({low:+.2%} to {high:+.2%})"
    target = f"<= {LIMIT:.0%} slower" if asked else ""
    against = f"{rate['none']:,.0f} tokens/s; host {figures['slowdown_against_none']:+.2%}, device {figures['device_against_none']:+.2%}"
    return [
        row(f"generate, batch {batch}: rows in host memory against on the device", compared, target, slow <= LIMIT if asked else None),
        row(f"generate, batch {batch}: no Engram layers", against),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, help="rows of the table, about; fewer than the published keep no figures")
    parser.add_argument("--dry", action="store_true", help="a model and a table of almost nothing")
    options = parser.parse_args()
    rows = 20_000 if options.dry else options.rows
    shape = TINY if options.dry else Shape()
    with torch.inference_mode():
        bench = Bench(shape, vocab=HASH.vocab if rows is None else max(64, rows // HASH.columns))
        made = tables(bench.rows())
        if options.dry:
            measure(bench, made, rounds=2, new=6, batches=(1, 4))
            return
        figures = measure(bench, made, rounds=ROUNDS, new=NEW, batches=BATCHES)
    if rows is None and torch.cuda.is_available():
        about = {"shape": {name: getattr(shape, name) for name in shape.__dataclass_fields__}, "prompt": PROMPT, "new_tokens": NEW}
        about["table_bytes"] = made["host"].storage.nbytes
        kept = {**about, "batches": figures}
        record("llm", "decode", figures=kept, rows=[line for one in figures for line in lines_of(one)], packages=("transformers",))


if __name__ == "__main__":
    main()
