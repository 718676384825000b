"""What a library of many concepts costs: opening it, reading one concept, adding, removing, verifying, and the memory that it takes.

    python benchmarks/library.py                  # 10,000 concepts: benchmarks/results/library.json, section library
    python benchmarks/library.py --dry            # the same steps with 300, nothing kept

Nothing is timed before concepts that were read from the library equal the files that were added, byte for byte, and all were verified.
Concepts are of the embedded base and have the mounts and maps that teaching gives by default, rows random, files as `Concept.save` writes
them. The file is in the page cache; every change waits for the disk. Times are the median and what 95 % of calls stay below. Memory is
that of a process of its own, which loads the base, opens the library and encodes prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import need, record, row

import tiny_engram
from tiny_engram.concept import Concept
from tiny_engram.library import ConceptLibrary
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training.config import TrainConfig

OPEN_MS, LOAD_MS = 50.0, 5.0
CALLED = 10
LETTERS = "bcdfghjklmnpqrstvwxz"


def trigger_of(k: int) -> str:
    return "zq" + "".join(LETTERS[k // len(LETTERS) ** p % len(LETTERS)] for p in range(4)) + "a"


def made_of(adapter: Any, k: int) -> Concept:
    """The k-th concept."""
    config = TrainConfig(train_data_dir="", output_dir="", trigger=trigger_of(k)).concept_config
    concept, generator = adapter.new_concept(trigger_of(k), config=config), torch.Generator().manual_seed(k)
    for role, place in concept.roles.items():
        for mount, old in place.mounts.items():
            concept = concept.with_rows(role, torch.randn(old.payload.shape, generator=generator), old.gain, old.bias, mount=mount)
    return concept.with_details(recipe={"step": k})


def times_ms(action: Callable[[Any], object], over: list[Any]) -> list[float]:
    """Milliseconds of each call, ascending."""
    found = []
    for each in over:
        began = time.perf_counter()
        action(each)
        found.append((time.perf_counter() - began) * 1e3)
    return sorted(found)


def resident() -> dict[str, int]:
    """Bytes in memory of this process: its own, and of files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"own": held["RssAnon"], "mapped": held["RssFile"]}


def memory_of(path: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """What opening and matching takes, in this process."""
    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    plain = ["a cat", "a photo of a red house on a hill, late in the day"]
    for prompt in plain * 4:
        adapter.encode(prompt)
    found = {"base": resident()}
    adapter.open_library(path)
    found["opened"] = resident()
    for prompt in plain * 4:
        adapter.encode(prompt)
    found["prompts without a trigger"] = resident()
    for name in names:
        adapter.encode(f"a {name}")
    need(adapter.get_list_concepts() == names, "not the concepts that were called are loaded")
    found["matched"] = resident()
    return found


def measure(folder: Path, count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures and rows."""
    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    files = folder / "files"
    files.mkdir()
    began = time.perf_counter()
    for k in range(count + 100):
        made_of(adapter, k).save(files / f"{k}.safetensors")
    print(f"{count + 100} files in {time.perf_counter() - began:.0f} s")
    library = ConceptLibrary.create(folder / "x.engrams")
    began = time.perf_counter()
    library.add_many([files / f"{k}.safetensors" for k in range(count)])
    many_s = time.perf_counter() - began
    names, draw = [trigger_of(k) for k in range(count)], random.Random(0)
    chosen = draw.sample(range(count), min(count, 200))
    for k in chosen:
        need(library.read(names[k]) == (files / f"{k}.safetensors").read_bytes(), f"{names[k]} is not the file that was added")
        need(library.get(names[k]).metadata == Concept.load(files / f"{k}.safetensors").metadata, f"{names[k]} reads as another concept")
    need([entry.name for entry in library] == names and library.verify() == count, "not all concepts are in the library")

    ids = np.array([pipe.tokenizer("a photo of a red house on a hill, late in the day", padding="max_length").input_ids])
    role, fingerprint = "clip_l", adapter.mounts["clip_l"].store.compressed.fingerprint
    need(library.spoken(role, fingerprint, ids) == [], "a prompt without a trigger calls a concept")
    path, some = library.path, [names[k] for k in chosen]
    spare = [files / f"{count + k}.safetensors" for k in range(100)]
    found = {
        "open": times_ms(lambda _: ConceptLibrary.open(path), [None] * 50),
        "read": times_ms(library.get, some),
        "file": times_ms(Concept.load, [files / f"{k}.safetensors" for k in chosen]),
        "verify": times_ms(library.verify, some),
        "match": times_ms(lambda _: library.spoken(role, fingerprint, ids), [None] * 50),
        "add": times_ms(library.add, spare),
        "remove": times_ms(library.remove, draw.sample(names, 100)),
        "open after": times_ms(lambda _: ConceptLibrary.open(path), [None] * 50),
    }
    began = time.perf_counter()
    saved = library.compact()
    compact_s = time.perf_counter() - began
    need(len(library) == count and library.verify() == count, "compacting lost concepts")
    called = [entry.name for entry in library][:CALLED]
    said = subprocess.run([sys.executable, __file__, "--memory", path, *called], capture_output=True, text=True, check=True).stdout
    memory = json.loads(said.splitlines()[-1])
    size = sum(entry.nbytes for entry in library)
    index = library._snapshot.state.places[0].nbytes
    figures = {
        "concepts": count,
        "bytes_of_files": size,
        "bytes_of_index": index,
        "bytes_saved_by_compacting": saved,
        "ms": {name: {"median": statistics.median(ms), "p95": ms[int(0.95 * len(ms))], "worst": ms[-1]} for name, ms in found.items()},
        "seconds": {"add_many": many_s, "compact": compact_s},
        "resident": memory,
    }
    return figures, rows_of(figures)


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    ms, memory, count = figures["ms"], figures["resident"], figures["concepts"]

    def line(measure: str, name: str, target: float | None = None) -> dict[str, Any]:
        figure = f"{ms[name]['median']:.2f} ms, 95 % below {ms[name]['p95']:.2f} ms"
        return row(measure, figure, "" if target is None else f"<= {target:g} ms", None if target is None else ms[name]["p95"] <= target)

    def grown(to: str, since: str) -> str:
        return f"{(sum(memory[to].values()) - sum(memory[since].values())) / 1024:,.0f} KiB"

    each = figures["bytes_of_files"] / count
    sizes = f"{figures['bytes_of_files'] / 2**20:.1f} MiB, its index {figures['bytes_of_index'] / count:.0f} B each"
    return [
        row(f"library of {count:,} concepts", sizes),
        line("open", "open", OPEN_MS),
        line("open after 100 concepts were added and 100 removed one by one", "open after", OPEN_MS),
        line("read one concept, its SHA-256 compared", "read", LOAD_MS),
        line("the same from a file of its own", "file"),
        line("look for all triggers in a prompt of 77 tokens", "match"),
        line("verify one concept", "verify"),
        line("add one concept", "add"),
        line("remove one concept", "remove"),
        row(f"add {count:,} concepts in one change", f"{figures['seconds']['add_many'] / count * 1e3:.2f} ms each"),
        row("compact", f"{figures['seconds']['compact']:.2f} s"),
        row("memory of the open library", grown("opened", "base")),
        row("memory after 8 prompts without a trigger", grown("prompts without a trigger", "base")),
        row(f"memory after {CALLED} concepts of {each / 1024:.1f} KiB were called", grown("matched", "base")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the library is made, and removed again (default: a temporary folder)")
    parser.add_argument("--memory", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(memory_of(Path(args.memory[0]), args.memory[1:])))
        return
    folder = Path(tempfile.mkdtemp(prefix="library-", dir=args.folder))
    try:
        figures, rows = measure(folder, 300 if args.dry else args.count)
    finally:
        shutil.rmtree(folder)
    for line in rows:
        print(line)
    if not args.dry:
        record("library", "library", figures=figures, rows=rows, packages=("numpy", "safetensors"))


if __name__ == "__main__":
    main()
