"""What the adapter costs: match + lookup against the number of concepts, its share of a generation, memory, loading.

    python benchmarks/lookup.py                                 # benchmarks/results/lookup.json, some minutes on two cores

Nothing is timed before it was found right with that many concepts loaded: matches equal a plain search on ids and a regular
expression on text, rows read equal the rows given, trigger-free conditioning equals the base's bit for bit. Shares compare
seconds of one and the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tables import RESULTS, ROOT, circumstances, keep

import tiny_engram
from tiny_engram.boundaries import FREE
from tiny_engram.concept import Concept
from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.store import ConceptStore

BASE = ROOT / "assets" / "bases" / "emoji-sd"
COUNTS = (1, 100, 1000, 10_000)
BATCH, TIME = 4, 77
SHARE_AT = 1000
FREE_PROMPTS = ["a 3d cat on a blue background", "a flat rocket on a black background", "an outlined guitar", "a lion and a pizza"]
PLACES = ["{}", "a 3d {} on a blue background", "({}), red", "the {}'s shadow, 4k"]
NEAR = ["{}s", "x{}", "{}9", "{}_2", "{}ish"]
GENERATION = {"num_inference_steps": 25, "guidance_scale": 4.0, "height": 128, "width": 128, "output_type": "pt"}


def need(ok: bool, what: str) -> None:
    """Stop before anything is timed."""
    if not ok:
        raise SystemExit(f"check red, nothing timed: {what}")


def made_up_words(count: int) -> list[str]:
    """Distinct words of four syllables, the same in every run."""
    dice = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(dice.choice("bdfgklmnprstvz") + dice.choice("aeiou") for _ in range(4))] = None
    return list(words)


def random_concept(adapter: EngramAdapter, trigger: str, seed: int) -> Concept:
    concept = adapter.new_concept(trigger)
    old = concept.mount_rows("clip_l")
    rows = torch.randn(old.payload.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
    return concept.with_rows("clip_l", rows, old.gain, old.bias)


def status_bytes(field: str) -> int:
    """VmRSS (memory held now) or VmHWM (the most held so far) of this process, in bytes."""
    gc.collect()
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def tokenise(pipe: Any, prompts: Sequence[str]) -> torch.Tensor:
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=TIME, truncation=True, return_tensors="pt").input_ids


# -- checks --------------------------------------------------------------------------------------------------------------------


def plain_search(store: ConceptStore, ids: np.ndarray) -> list[tuple[int, int, str]]:
    """Leftmost, longest, standing alone, never overlapping: by dictionary, token after token."""
    index = store.index
    known = {entry.variant.ids: entry.name for entry in index.entries}
    longest = max(map(len, known))

    def alone(row: list[int], start: int, stop: int) -> bool:
        padded = [-1, *row, -1]
        left, right = np.array([padded[start], padded[stop]]), np.array([padded[start + 1], padded[stop + 1]])
        before = index.edges.between(left[:1], right[:1], trigger_on_left=False)
        after = index.edges.between(left[1:], right[1:], trigger_on_left=True)
        return before[0] == FREE and after[0] == FREE

    found: list[tuple[int, int, str]] = []
    for b, row in enumerate(ids.tolist()):
        start = 0
        while start < len(row):
            stops = range(min(start + longest, len(row)), start, -1)
            stop = next((s for s in stops if tuple(row[start:s]) in known and alone(row, start, s)), None)
            if stop is not None:
                found.append((b, start, known[tuple(row[start:stop])]))
            start = start + 1 if stop is None else stop
    return found


def check_matches(store: ConceptStore, ids: torch.Tensor, prompts: Sequence[str] | None) -> None:
    found = store.index.match(ids)
    names = [store.index.entries[e].name for e in found.entry.tolist()]
    ours = list(zip(found.batch.tolist(), found.start.tolist(), names, strict=True))
    need(ours == plain_search(store, ids.numpy()), "the match differs from a plain search on ids")
    if prompts is not None:
        known = {entry.name for entry in store.index.entries}
        wanted = [(b, word) for b, text in enumerate(prompts) for word in re.findall(r"(?<!\w)\w+(?!\w)", text.lower()) if word in known]
        need([(b, name) for b, _, name in ours] == wanted, "the match differs from a regular expression on the text")


def check_rows(adapter: EngramAdapter, ids: torch.Tensor) -> None:
    for fired in adapter.mounts["clip_l"].store.plan(ids):
        stored = [adapter.concept(name).mount_rows("clip_l") for name in fired.names]
        places = list(zip(stored, fired.spans.offset.tolist(), fired.spans.length.tolist(), strict=True))
        need(torch.equal(fired.rows, torch.cat([m.rows()[o : o + n] for m, o, n in places])), "rows read differ from rows stored")
        need(torch.equal(fired.gain, torch.cat([m.gain[o : o + n] for m, o, n in places])), "gains read differ from gains stored")


class Bits:
    """What the base alone makes of trigger-free prompts (near misses included), to be compared with later."""

    def __init__(self, pipe: Any, words: Sequence[str]) -> None:
        near = [place.format(form.format(words[k])) for k, place in enumerate(PLACES) for form in NEAR]
        self.batches = [FREE_PROMPTS, *(near[k : k + BATCH] for k in range(0, len(near), BATCH))]
        self.states = [self._encode(pipe, batch) for batch in self.batches]
        self.picture = self._draw(pipe)

    @staticmethod
    def _encode(pipe: Any, prompts: list[str]) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(pipe.encode_prompt(prompts, "cpu", 1, True, [""] * len(prompts)))

    @staticmethod
    def _draw(pipe: Any) -> torch.Tensor:
        return pipe(FREE_PROMPTS[0], generator=torch.Generator().manual_seed(0), **{**GENERATION, "num_inference_steps": 2}).images

    def check(self, pipe: Any, word: str) -> None:
        for batch, states in zip(self.batches, self.states, strict=True):
            need(torch.equal(states, self._encode(pipe, batch)), f"trigger-free conditioning of {batch} is not the base's")
        need(torch.equal(self.picture, self._draw(pipe)), "a trigger-free picture is not the base's")
        firing = self._encode(pipe, [PLACES[1].format(word)] * BATCH)
        need(not torch.equal(self._encode(pipe, [PLACES[1].format("cat")] * BATCH), firing), "a concept does not fire")


# -- figures -------------------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], repeats: int = 300) -> float:
    """Median of `repeats` calls."""
    taken = []
    for k in range(repeats + 20):
        begin = time.perf_counter()
        call()
        if k >= 20:
            taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


def batches(pipe: Any, store: ConceptStore, words: Sequence[str]) -> dict[str, tuple[torch.Tensor, list[str] | None]]:
    """Kind -> (ids `[4, 77]`, the prompts, or None where ids were drawn)."""
    count = len(words)
    store.index.match(tokenise(pipe, FREE_PROMPTS))
    starts = sorted({entry.variant.ids[0] for entry in store.index.entries})
    dice = np.random.default_rng(0)
    worst = torch.from_numpy(dice.choice(starts, (BATCH, TIME)))
    while len(store.index.match(worst)):
        worst = torch.from_numpy(dice.choice(starts, (BATCH, TIME)))
    firing = [place.format(words[k * count // BATCH]) for k, place in enumerate(PLACES)]
    # Cut so that no trigger crosses the window's edge, where text and ids may differ.
    dense = [" ".join(words[(k * 20 + j) % count] for j in range(12)) for k in range(BATCH)]
    texts: dict[str, list[str]] = {"no trigger": FREE_PROMPTS, "one trigger a prompt": firing, "twelve triggers a prompt": dense}
    made = {kind: (tokenise(pipe, prompts), prompts) for kind, prompts in texts.items()}
    return {**made, "no trigger, every token could start one": (worst, None)}


def shares(pipe: Any, adapter: EngramAdapter, prompts: dict[str, str], repeats: int) -> dict[str, dict[str, float]]:
    """The adapter's seconds as a share of whole generations, taken in turn; medians over `repeats`."""
    runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in prompts}
    for k in range(repeats + 1):
        for kind, prompt in prompts.items():
            before, begin = adapter.seconds, time.perf_counter()
            pipe(prompt, generator=torch.Generator().manual_seed(k), **GENERATION)
            taken = time.perf_counter() - begin
            if k:
                runs[kind].append((adapter.seconds - before, taken))
    return {
        kind: {
            "percent": 100 * statistics.median(own / whole for own, whole in pairs),
            "milliseconds": 1e3 * statistics.median(own for own, _ in pairs),
            "generation_seconds": statistics.median(whole for _, whole in pairs),
        }
        for kind, pairs in runs.items()
    }


def measure(counts: Sequence[int], repeats: int) -> dict[str, Any]:
    words = made_up_words(max(50, *counts))
    pipe = StableDiffusionPipeline.from_pretrained(BASE, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    bits = Bits(pipe, words)
    pipe(FREE_PROMPTS[0], **GENERATION)
    figures: dict[str, Any] = {"lookup_ms": {}, "memory": {"peak_bytes_base": status_bytes("VmHWM")}, "load_seconds_per_concept": {}}
    begin = time.perf_counter()
    adapter = tiny_engram.attach(pipe)
    figures["attach_seconds"] = time.perf_counter() - begin
    store = adapter.mounts["clip_l"].store

    with tempfile.TemporaryDirectory() as folder:
        paths = [random_concept(adapter, word, k).save(Path(folder) / f"{k}.safetensors") for k, word in enumerate(words[:50])]
        begin = time.perf_counter()
        for path in paths:
            Concept.load(path)
        figures["read_file_seconds"] = (time.perf_counter() - begin) / len(paths)
        figures["file_bytes"] = statistics.median(path.stat().st_size for path in paths)

    held = status_bytes("VmRSS")
    loaded = 0
    for count in counts:
        seconds = 0.0
        for k in range(loaded, count):
            concept = random_concept(adapter, words[k], k)
            begin = time.perf_counter()
            adapter.load_concept(concept)
            seconds += time.perf_counter() - begin
        figures["load_seconds_per_concept"][str(count)] = seconds / (count - loaded)
        loaded = count
        store.index.match(tokenise(pipe, FREE_PROMPTS))
        figures["memory"][str(count)] = {"held_bytes": status_bytes("VmRSS") - held, "table_bytes": store.row_bytes}

        bits.check(pipe, words[0])
        kinds = batches(pipe, store, words[:count])
        for ids, prompts in kinds.values():
            check_matches(store, ids, prompts)
            check_rows(adapter, ids)
        figures["lookup_ms"][str(count)] = {
            kind: {"match": milliseconds(partial(store.index.match, ids)), "match_and_lookup": milliseconds(partial(store.plan, ids))}
            for kind, (ids, _) in kinds.items()
        }
        print(count, json.dumps(figures["lookup_ms"][str(count)]), flush=True)
        if count == SHARE_AT:
            three = f"a 3d {words[0]} next to a {words[1]} on a blue background, {words[2]}"
            prompts = {"no trigger": FREE_PROMPTS[0], "one trigger": PLACES[1].format(words[0]), "three triggers": three}
            figures["share"] = shares(pipe, adapter, prompts, repeats)
            print(json.dumps(figures["share"]), flush=True)
        pipe(PLACES[1].format(words[0]), **GENERATION)
        figures["memory"][str(count)]["peak_bytes"] = status_bytes("VmHWM")
    return figures


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The table: every figure with its target, if it has one."""
    rows: list[dict[str, Any]] = []

    def row(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
        rows.append({"measure": what, "figure": figure, "target": target, "met": met})

    lookup = figures["lookup_ms"]
    for count, kinds in lookup.items():
        for kind, values in kinds.items():
            value = values["match_and_lookup"]
            target = ("<= 2 ms", value <= 2.0) if int(count) == SHARE_AT else ("", None)
            row(f"match + lookup, {int(count):,} concepts, {kind}", f"{value:.3f} ms", *target)
    low, high = "100", str(max(map(int, lookup)))
    if low in lookup and high != low:
        limit = math.log(int(high)) / math.log(int(low))
        for kind in lookup[low]:
            factor = lookup[high][kind]["match_and_lookup"] / lookup[low][kind]["match_and_lookup"]
            target = f"<= {limit:.2f}, as the logarithm"
            row(f"time at {int(high):,} concepts over time at {low}, {kind}", f"{factor:.2f}", target, factor <= limit)
    for kind, values in figures.get("share", {}).items():
        limit = 0.5 if kind == "no trigger" else 2.0
        share = f"{values['percent']:.3f} % of {values['generation_seconds']:.2f} s"
        row(f"adapter's share of a generation, {SHARE_AT:,} concepts, {kind}", share, f"<= {limit:g} %", values["percent"] <= limit)
    memory = figures["memory"]
    row("peak memory, base alone", f"{memory['peak_bytes_base'] / 2**20:,.0f} MiB")
    for count, values in memory.items():
        if count in lookup and int(count) >= SHARE_AT:
            row(f"peak memory, {int(count):,} concepts", f"{values['peak_bytes'] / 2**20:,.0f} MiB")
            row(f"memory held by {int(count):,} concepts", f"{values['held_bytes'] / 2**20:,.1f} MiB")
            row(f"table rows of {int(count):,} concepts", f"{values['table_bytes'] / 2**20:,.2f} MiB")
    row("attach, probe included", f"{figures['attach_seconds']:.2f} s")
    for count, seconds in figures["load_seconds_per_concept"].items():
        if int(count) >= SHARE_AT:
            row(f"load one concept, up to {int(count):,}", f"{1e3 * seconds:.1f} ms")
    row("read one concept file", f"{1e3 * figures['read_file_seconds']:.2f} ms, {figures['file_bytes']:,.0f} bytes")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="concepts loaded, ascending")
    parser.add_argument("--repeats", type=int, default=7, help="generations per kind of prompt")
    parser.add_argument("--out", type=Path, default=RESULTS / "lookup.json")
    args = parser.parse_args()
    figures = measure(sorted(args.counts), args.repeats)
    report = {
        **circumstances("torch", "diffusers", "transformers", "numpy", depends_on=("kernels", "pipelines", "tiny_engram", "assets/bases")),
        "threads": torch.get_num_threads(),
        "setting": f"batch {BATCH} x {TIME} tokens; 25 steps, guidance 4, 128x128, on the embedded base",
        "note": f"Batch {BATCH} x {TIME} tokens; a generation is 25 steps with guidance 4 at 128x128 on the embedded base. Medians.",
        "table": rows_of(figures),
        "figures": figures,
    }
    keep(report, args.out)
    print(*(f"{r['measure']}: {r['figure']} {r['target']} {'' if r['met'] is None else r['met']}" for r in report["table"]), sep="\n")


if __name__ == "__main__":
    main()
