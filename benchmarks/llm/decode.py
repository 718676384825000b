"""What Engram costs a decoder of transformers: a 4B-class model, rows in host memory, rows on the device, and no Engram.

    python benchmarks/llm/decode.py                  # an H200 in a host with 128 GiB: some four minutes; the figures to keep
    python benchmarks/llm/decode.py --rows 200000    # a table of so many rows, keeps no figures
    python benchmarks/llm/decode.py --dry            # a few seconds on a CPU, without graphs: does it run?

One table of 94.42 GiB serves both Engram layers (published hash of DeepSeek V4.1-Flash: 24 rows of 256 values for each token and layer),
once in pinned host memory and once whole on the device; every row follows a rule. The model is transformers' Qwen3 with random weights
in bfloat16, shared by the three variants, and tokens are sampled on the device, so that rows are as scattered as they can be.

    graph    one step as a CUDA graph over a StaticCache, sampling included: what the device needs
    eager    the same step as transformers launches it, one kernel after the other, over a DynamicCache: what the host needs, too

Variants take turns, in runs of steps (graph) or step by step (eager), so that a moment of a busy machine meets all of them. Before
anything is timed the two tables must give the same tokens, and Engram others than none.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from decode_stack import HASH, HEAD_DIM, TINY, Shape
from full_size import device, same_bits, say, synchronize
from gpu import captured, need, record, row
from overlap import step_ms

from tiny_engram.hashing import NgramHasher
from tiny_engram.llm import EngramConfig, attach
from tiny_engram.llm.decoders import decoder_of
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.storage import RowStorage

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "bases" / "emoji-sd" / "tokenizer"
BATCHES, PROMPT = (1, 32, 256), 16
CONTEXT = 128  # of the static cache; also the most steps that follow each other
ROUNDS, STEPS = 12, 50
EAGER_STEPS = 100
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


class Variants:
    """One model three times, over the same weights: with rows of each table, and by itself."""

    def __init__(self, shape: Shape, *, vocab: int) -> None:
        """vocab: rows asked for in each column."""
        self.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        self.config = EngramConfig(
            layers=shape.engram_at, max_ngram=HASH.max_ngram, heads=HASH.heads, vocab=vocab, head_dim=HEAD_DIM, form="v41", start="values"
        )
        self.models = {"none": decoder_model(shape, len(self.tokenizer))}

    def rows(self) -> int:
        """What the hash of both layers needs."""
        completed = self.config.completed(compressed_vocab=1000, pad_id=0).hash_config
        return max(NgramHasher(completed, layer).rows_total for layer in self.config.layers)

    def attach(self, tables: dict[str, EngramTable]) -> None:
        weights: dict[str, torch.Tensor] | None = None
        for name, table in tables.items():
            plain = self.models["none"]
            model = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
            engrams = attach(model, self.config, self.tokenizer, tables=dict.fromkeys(self.config.layers, table))
            if weights is None:
                weights = engrams.engrams.state_dict()
                for key, weight in weights.items():  # as after training: a value projection that says something
                    if key.endswith("wkv.weight"):
                        weight.normal_(std=weight.shape[1] ** -0.5)
            engrams.engrams.load_state_dict(weights)
            engrams.to(torch.bfloat16).requires_grad_(False)
            self.models[name] = model


class Decoding:
    """A batch of requests in one variant, a token a step; sampled tokens never visit the host."""

    def __init__(self, model: Any, batch: int, *, static: bool) -> None:
        self.model, self.batch, self.static = model, batch, static
        self.cache_argument = decoder_of(model).cache_argument
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=device())
        self.place = torch.zeros((1, 1), dtype=torch.int64, device=device())
        self.logits = torch.zeros((batch, model.config.vocab_size), dtype=torch.bfloat16, device=device())
        self.begin()

    def begin(self) -> None:
        """Read the prompts, which are the same in every variant; the first token is drawn by the first step."""
        if not self.static:
            self.cache: Any = DynamicCache(config=self.model.config)
        elif not hasattr(self, "cache"):
            self.cache = StaticCache(config=self.model.config, max_cache_len=CONTEXT)
        else:
            self.cache.reset()
        generator = torch.Generator().manual_seed(self.batch)
        prompt = torch.randint(1, self.model.config.vocab_size - 2, (self.batch, PROMPT), generator=generator).to(device())
        self.model(prompt[:, :-1], logits_to_keep=1, **{self.cache_argument: self.cache})
        self.token.copy_(prompt[:, -1:])
        self.place.fill_(PROMPT - 1)

    def rewind(self) -> None:
        """Back to the end of the prompts, of a static cache, without reading them again."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT - 1)
        self.place.fill_(PROMPT - 1)

    def step(self) -> None:
        self.logits.copy_(self.model(self.token, position_ids=self.place, **{self.cache_argument: self.cache}).logits[:, -1])
        probability = torch.softmax(self.logits, dim=-1, dtype=torch.float32)
        self.token.copy_((probability / torch.empty_like(probability).exponential_()).argmax(dim=-1, keepdim=True))
        self.place.add_(1)


def check(steps: dict[str, Any], made: dict[str, Decoding]) -> None:
    """Rows from the host and rows on the device make the same tokens; no Engram makes others."""
    said: dict[str, list[torch.Tensor]] = {}
    for name, decoding in made.items():
        decoding.begin()
        torch.manual_seed(3)
        said[name] = []
        for _ in range(6):
            steps[name]()
            said[name] += [decoding.logits.clone(), decoding.token.clone()]
        need(bool(decoding.logits.isfinite().all()), f"{name}: logits are not finite")
    same = all(torch.equal(one, other) for one, other in zip(said["host"], said["device"], strict=True))
    need(same, "rows from the host and rows on the device make different logits or tokens")
    need(not torch.equal(said["host"][0], said["none"][0]), "Engram layers do not move the logits")
    need(made["host"].batch < 4 or len(said["host"][-1].unique()) > 1, "all requests sample the same token")


def graphs(variants: Variants, batch: int, *, rounds: int, count: int) -> dict[str, float]:
    """Milliseconds of a step as a CUDA graph."""
    made = {name: Decoding(model, batch, static=True) for name, model in variants.models.items()}
    steps = {name: captured(decoding.step) for name, decoding in made.items()}
    check(steps, made)

    taken: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, decoding in made.items():
            decoding.rewind()
            taken[name].append(step_ms(steps[name], count))
        if not number:
            taken = {name: [] for name in made}  # the first round warms
    return {name: statistics.median(values) for name, values in taken.items()}


def eager(variants: Variants, batch: int, *, count: int) -> dict[str, float]:
    """Milliseconds of a step as it is launched, its end waited for."""
    made = {name: Decoding(model, batch, static=False) for name, model in variants.models.items()}
    check({name: decoding.step for name, decoding in made.items()}, made)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for number in range(count):
        # Whoever follows another finds the machine as that one left it: they change places.
        for name in list(made)[number % 3 :] + list(made)[: number % 3]:
            synchronize()
            began = time.perf_counter()
            made[name].step()
            synchronize()
            taken[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(values[5:]) for name, values in taken.items()}


def measure(variants: Variants, batch: int, *, quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"batch": batch}
    ways = {
        "graph": lambda: graphs(variants, batch, rounds=1 if quick else ROUNDS, count=2 if quick else STEPS),
        "eager": lambda: eager(variants, batch, count=10 if quick else EAGER_STEPS),
    }
    for way, run in ways.items():
        ms = run()
        figures[way] = {
            "ms": ms,
            "tokens_per_s": {name: batch / value * 1e3 for name, value in ms.items()},
            "host_against_device": ms["host"] / ms["device"] - 1,
            "host_against_none": ms["host"] / ms["none"] - 1,
            "device_against_none": ms["device"] / ms["none"] - 1,
        }
        told = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
        say(f"  batch {batch}, {way}: {told}; host against device {figures[way]['host_against_device']:+.2%}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # keys, values and graphs of this way
    return figures


def lines_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    batch, lines = figures["batch"], []
    for way in ("graph", "eager"):
        found = figures[way]
        slow, rate = found["host_against_device"], found["tokens_per_s"]
        asked = batch >= LIMIT_FROM and way == "graph"
        compared = f"{rate['host']:,.0f} against {rate['device']:,.0f} tokens/s, {slow:+.2%}"
        target = f"<= {LIMIT:.0%} slower" if asked else ""
        label = f"decoding with transformers, {way}, batch {batch}"
        lines.append(row(f"{label}: rows in host memory against on the device", compared, target, slow <= LIMIT if asked else None))
        more = f"host {found['host_against_none']:+.2%}, device {found['device_against_none']:+.2%} of time"
        lines.append(row(f"{label}: no Engram layers", f"{rate['none']:,.0f} tokens/s; {more}"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, help="rows of the table, about; fewer than the published keep no figures")
    parser.add_argument("--dry", action="store_true", help="a model and a table of almost nothing")
    options = parser.parse_args()
    rows = 20_000 if options.dry else options.rows
    shape = TINY if options.dry else Shape()
    with torch.no_grad():
        variants = Variants(shape, vocab=HASH.vocab if rows is None else max(64, rows // HASH.columns))
        made = tables(variants.rows())
        variants.attach(made)
        figures = [measure(variants, batch, quick=options.dry) for batch in ((1, 4) if options.dry else BATCHES)]
    if rows is None and torch.cuda.is_available():
        about = {"shape": {name: getattr(shape, name) for name in shape.__dataclass_fields__}, "context": CONTEXT, "prompt": PROMPT}
        about["table_bytes"] = made["host"].storage.nbytes
        kept = {**about, "batches": figures}
        record("llm", "decode", figures=kept, rows=[line for one in figures for line in lines_of(one)], packages=("transformers",))


if __name__ == "__main__":
    main()
