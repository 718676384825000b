"""What a table in host memory costs a decoder: a 4B-class stack, one CUDA graph a step, against the same rows on the device.

    python benchmarks/full_size.py --then-overlap        # on the 94.42 GiB table that was just filled; the figures to keep
    python benchmarks/overlap.py                         # fills that table itself
    python benchmarks/overlap.py --rows 4000000          # a smaller table: keeps no figures
    python benchmarks/overlap.py --dry                   # a few seconds on a CPU, without graphs: does it run?

Variants, timed in turn in one process:

    host      rows of both Engram layers in host memory (the second layer's ids modulo that table's rows), fetched on a side
              stream from the hash at the step's start until each layer's gate
    device    the same code over a table of 8 GiB in device memory, ids modulo its rows: as many rows, no bus
    none      no Engram layers
    late      as host, but every wait stands at the step's end and gates read the rows of the step before: wrong results, which
              part what waiting costs (host - late) from what running beside a fetch costs (late - device)

Tokens are sampled inside the graph, so ids never visit the host. Before anything is timed, host and device over small tables of
the same rows must give the same logits, bit for bit, step after step, and the rows that a step over the large table used must be the
rule's. Memory at batch 256: weights 8 GB, keys and values 38.7 GB, the table 8.6 GB on the device; 101.4 GB in host memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from decode_stack import HASH, HEAD_DIM, TINY, Decoder, Shape, Weights, random_cache
from full_size import FilledLayer, device, same_bits, say, synchronize
from gpu import captured, graph_us, need, record, row

from tiny_engram.hashing import NgramHasher
from tiny_engram.table import EngramTable
from tiny_engram.table.budget import Stack, exposed_us, predict
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.prefetch import Prefetcher
from tiny_engram.table.storage import RowStorage
from tiny_engram.table.tiers import DEFAULT_TIERS

BATCHES = (1, 32, 256)
ROUNDS, STEPS = 8, 25
DEVICE_ROWS = (8 << 30) // 264
CHECK_ROWS, CHECK_STEPS, CHECK_BATCH = 1 << 20, 6, 32
LIMIT, LIMIT_FROM = 0.01, 32
PUBLISHED = "1.9 % and 2.8 % (published, H800)"


def filled(rows: int, home: str, rule: FillRule) -> EngramTable:
    storage = RowStorage.allocate(rows, HEAD_DIM, home=home)  # pyright: ignore[reportArgumentType]
    rule.fill(storage, device=device())
    synchronize()
    return EngramTable.over(storage, bounds="ignore")


def prefetchers(table: EngramTable, batch: int) -> list[Prefetcher]:
    """One for each Engram layer."""
    return [Prefetcher(table, capacity=batch, columns=HASH.columns, device=device(), dtype=torch.bfloat16) for _ in HASH.layer_ids]


def decoder(weights: Weights, cache: torch.Tensor, table: EngramTable | None, *, late: bool = False) -> Decoder:
    if table is None:
        return Decoder(weights, cache, None)
    return Decoder(weights, cache, prefetchers(table, cache.shape[2]), len(table), "at the end" if late else "in time")


def check_small(weights: Weights, home: str) -> None:
    """Rows from the host and rows on the device make the same tokens; no Engram makes others."""
    rule = FillRule(HEAD_DIM, seed=7)
    batch = CHECK_BATCH if torch.cuda.is_available() else 4
    rows = CHECK_ROWS if torch.cuda.is_available() else 1000
    seen: dict[str, list[torch.Tensor]] = {}
    for name, table in {"host": filled(rows, home, rule), "device": filled(rows, on_device(), rule), "none": None}.items():
        made = decoder(weights, random_cache(weights.shape, batch, device()), table)
        step = captured(made.step)
        # Capturing took some steps: the cache and the state start again.
        made.cache.copy_(random_cache(weights.shape, batch, device()))
        made.reset()
        torch.manual_seed(3)
        seen[name] = []
        for _ in range(CHECK_STEPS):
            step()
            seen[name] += [made.logits.clone(), made.ids.clone()]
        need(bool(made.logits.isfinite().all()), f"{name}: logits are not finite")
    pairs = zip(seen["host"], seen["device"], strict=True)
    need(all(torch.equal(a, b) for a, b in pairs), "rows from the host and rows on the device make different logits or tokens")
    need(not torch.equal(seen["host"][0], seen["none"][0]), "Engram layers do not move the logits")
    need(len(seen["host"][-1].unique()) > 1, "all requests sample the same token")
    say(f"  host and device: the same bits over {CHECK_STEPS} steps of {batch} requests")


def check_rows(made: Decoder, rule: FillRule) -> None:
    """The rows that the last step used are the rule's for that step's ids."""
    assert made.rows is not None
    synchronize()
    for place, (fetch, row_ids) in enumerate(zip(made.rows, made.row_ids, strict=True)):
        need(same_bits(fetch.staging, rule.values(row_ids, torch.bfloat16)), f"the rows staged for Engram layer {place} are not the rule's")


def on_device() -> str:
    return "device" if torch.cuda.is_available() else "pageable"


def step_ms(step: Callable[[], None], steps: int) -> float:
    """Milliseconds of one step among `steps` that follow each other."""
    if not torch.cuda.is_available():
        started = perf_counter()
        for _ in range(steps):
            step()
        return (perf_counter() - started) / steps * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def interleaved(steps: dict[str, Callable[[], None]], rounds: int, count: int) -> dict[str, float]:
    """Median milliseconds of each variant's step, the variants in turn."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            taken[name].append(step_ms(step, count))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def parts_us(weights: Weights, cache: torch.Tensor, host: EngramTable, near: EngramTable) -> dict[str, float]:
    """Microseconds of the parts by themselves: each table's gather, and the blocks that it may hide behind."""
    batch = cache.shape[2]
    made = decoder(weights, cache, near)
    x = torch.randn((batch, weights.shape.hidden), device=device()).to(torch.bfloat16)
    sets = []
    for seed in range(20):
        made.reset()
        made.ids.copy_(torch.randint(0, weights.shape.vocab, (batch,), generator=torch.Generator().manual_seed(seed)))
        sets.append(made.hashed()[0])

    def gather(table: EngramTable) -> float:
        fetch = prefetchers(table, batch)[0]
        turn = [ids % len(table) for ids in sets]
        number = 0

        def once() -> None:
            nonlocal number
            fetch.start(turn[number % len(turn)])
            fetch.wait()
            number += 1

        return graph_us(once, calls=len(turn))

    first, second = weights.shape.engram_at
    plain = Decoder(weights, cache, None)
    return {
        "hash": graph_us(made.hashed, calls=4),
        "gather_host": gather(host),
        "gather_device": gather(near),
        "window_first": graph_us(partial(plain.blocks, x, 0, first), calls=4),
        "window_second": graph_us(partial(plain.blocks, x, 0, second), calls=2),
    }


def planned(shape: Shape, batch: int, parts: dict[str, float], times: dict[str, float]) -> dict[str, float]:
    """What the planner on paper says of this stack: by its own figures of the bus, and by the fetch that was measured."""
    stack = Stack(
        layers=shape.blocks,
        layer_us=parts["window_second"] / shape.engram_at[1],
        engram_layers=shape.engram_at,
        batch=batch,
        columns=HASH.columns,
        row_bytes=HEAD_DIM + HEAD_DIM // 32,
        rows=NgramHasher(HASH, HASH.layer_ids[0]).rows_total,
    )
    tier = next(tier for tier in DEFAULT_TIERS if tier.name == "dram zero-copy")
    step_us = times["device"] * 1e3
    exposed = {"slowdown": predict(stack, tier), "slowdown_by_measured_fetch": sum(exposed_us(stack, parts["gather_host"]))}
    return {"fetch_us": tier.fetch_us(stack.rows_per_layer, stack.row_bytes)} | {name: us / step_us for name, us in exposed.items()}


def measure_batch(weights: Weights, batch: int, host: EngramTable, near: EngramTable, rule: FillRule) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # keys and values of the batch before
    cache = random_cache(weights.shape, batch, device())
    variants = {
        "host": decoder(weights, cache, host),
        "device": decoder(weights, cache, near),
        "none": decoder(weights, cache, None),
        "late": decoder(weights, cache, host, late=True),
    }
    steps = {name: captured(made.step) for name, made in variants.items()}
    for made in variants.values():
        made.reset()
    quick = not torch.cuda.is_available()
    for name in ("host", "device"):
        steps[name]()
        check_rows(variants[name], rule)
    times = interleaved(steps, 1 if quick else ROUNDS, 2 if quick else STEPS)
    check_rows(variants["host"], rule)
    figures: dict[str, Any] = {"batch": batch, "ms": times, "tokens_per_s": {name: batch / ms * 1e3 for name, ms in times.items()}}
    figures["slowdown_against_device"] = times["host"] / times["device"] - 1
    figures["slowdown_against_none"] = times["host"] / times["none"] - 1
    figures["device_against_none"] = times["device"] / times["none"] - 1
    figures["waiting_us"] = (times["host"] - times["late"]) * 1e3
    figures["running_beside_us"] = (times["late"] - times["device"]) * 1e3
    if not quick:
        figures["parts_us"] = parts_us(weights, cache, host, near)
        figures["plan"] = planned(weights.shape, batch, figures["parts_us"], times)
    say(f"  batch {batch}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()))
    say(f"    host against device {figures['slowdown_against_device']:+.2%}, against none {figures['slowdown_against_none']:+.2%}")
    say(f"    waiting {figures['waiting_us']:+.1f} us, running beside a fetch {figures['running_beside_us']:+.1f} us a step")
    if not quick:
        say("    parts: " + ", ".join(f"{name} {value:.1f} us" for name, value in figures["parts_us"].items()))
        say("    on paper: " + ", ".join(f"{name} {value:.4g}" for name, value in figures["plan"].items()))
    return figures


def lines_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    batch, slow = figures["batch"], figures["slowdown_against_device"]
    rate = figures["tokens_per_s"]
    asked = batch >= LIMIT_FROM
    compared = f"{rate['host']:,.0f} against {rate['device']:,.0f} tokens/s, {slow:+.2%}"
    target = f"<= {LIMIT:.0%} slower; {PUBLISHED}" if asked else ""
    lines = [row(f"decoding, batch {batch}: rows in host memory against on the device", compared, target, slow <= LIMIT if asked else None)]
    against_none = f"{figures['slowdown_against_none']:+.2%} (rows on the device {figures['device_against_none']:+.2%})"
    lines.append(row(f"decoding, batch {batch}: against no Engram layers", against_none))
    parts = figures["parts_us"]
    gather = f"fetch {parts['gather_host']:.0f} us, windows {parts['window_first']:.0f} and {parts['window_second']:.0f} us"
    where = f"{gather}; waiting {figures['waiting_us']:+.0f}, beside a fetch {figures['running_beside_us']:+.0f} us a step"
    plan = figures["plan"]
    paper = f"fetch {plan['fetch_us']:.0f} us, {plan['slowdown']:+.2%}; with the measured fetch {plan['slowdown_by_measured_fetch']:+.2%}"
    lines.append(row(f"decoding, batch {batch}: where the time goes", where))
    return [*lines, row(f"decoding, batch {batch}: slowdown by the planner on paper", f"{paper}; measured {slow:+.2%}")]


def run(layer: FilledLayer, *, small: bool, batches: Sequence[int] = BATCHES, shape: Shape | None = None) -> list[dict[str, Any]]:
    """Check, time and keep the figures, with the rows of a table that is filled already."""
    chosen = shape or (Shape() if torch.cuda.is_available() else TINY)
    with torch.inference_mode():
        weights = Weights(chosen, device())
        check_small(weights, "pinned" if torch.cuda.is_available() else "pageable")
        near = filled(min(DEVICE_ROWS, len(layer.table)), on_device(), layer.rule)
        host = EngramTable.over(layer.storage, bounds="ignore")
        figures = [measure_batch(weights, batch, host, near, layer.rule) for batch in batches]
    if torch.cuda.is_available() and not small:
        about = {"shape": {name: getattr(chosen, name) for name in chosen.__dataclass_fields__}, "table_bytes": layer.storage.nbytes}
        record("table", "overlap", figures={**about, "batches": figures}, rows=[line for one in figures for line in lines_of(one)])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, help="rows of the table in host memory; less than all of them keeps no figures")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--dry", action="store_true", help="a stack and a table of almost nothing")
    options = parser.parse_args()
    rows = 20_000 if options.dry else options.rows
    layer = FilledLayer(HASH.layer_ids[0], rows)
    run(layer, small=rows is not None or options.batches != list(BATCHES), batches=options.batches, shape=TINY if options.dry else None)


if __name__ == "__main__":
    main()
