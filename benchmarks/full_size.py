"""One layer of DeepSeek V4.1-Flash's Engram table in its real dimensions in host memory: 384,006,168 rows of 264 B, 94.42 GiB.

    python benchmarks/full_size.py                   # an H200 host with 128 GiB: some two minutes
    python benchmarks/full_size.py --layers 2        # both layers, 188.83 GiB: a host with 256 GiB
    python benchmarks/full_size.py --then-overlap    # benchmarks/overlap.py after it, on the same filled table
    python benchmarks/full_size.py --rows 200000     # a small table, also without a GPU; keeps no figures

The table is filled by a rule (tiny_engram/table/fill_rule.py), so that every row read can be checked, bit for bit, without a
second copy. What is looked up: the n-grams of random tokens by the published hash, and the rows where tables break first (both
ends, offsets around 2^31 and 2^32). Nothing is timed before the rows are right by every path.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_stack import HASH, HEAD_DIM
from gpu import device_us, need, record, row

from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule, ids_to_check
from tiny_engram.table.host_gather import HostGather
from tiny_engram.table.storage import RowStorage

LAYERS = HASH.layer_ids
COUNTS = (768, 6144, 262_144)  # rows of a layer at batch 32 and 256 in decoding, and of a prefill of 10,922 tokens
CHECKED_TOKENS = 1 << 16  # 1.57 M rows a layer
DRY_TOKENS = 64
ID_SETS = 12  # so many different sets of ids are read in turn: no cache holds the rows of the last read


def say(text: str) -> None:
    print(text, flush=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class FilledLayer:
    """One layer's table in host memory, every row by the rule.

    Attributes:
        storage, table: the rows, and lookups over them.
        rule: what they must be.
        hasher: ids of this layer; tables of less than its rows take them modulo their own size.
        seconds: of allocating (taking, touching, registering) and of filling.
    """

    def __init__(self, layer_id: int, rows: int | None = None):
        self.hasher = NgramHasher(HASH, layer_id)
        self.rows = self.hasher.rows_total if rows is None else min(rows, self.hasher.rows_total)
        self.rule = FillRule(HEAD_DIM, seed=layer_id)
        started = time.perf_counter()
        last = [started]

        def progress(done: int, total: int) -> None:
            if time.perf_counter() - last[0] > 5:
                last[0] = time.perf_counter()
                say(f"  touched {done / 2**30:.1f} of {total / 2**30:.1f} GiB after {last[0] - started:.1f} s")

        self.storage = RowStorage.allocate(self.rows, HEAD_DIM, home="pinned", progress=progress)
        allocated = time.perf_counter()
        self.rule.fill(self.storage, device=device())
        synchronize()
        self.seconds = {"allocate": allocated - started, "fill": time.perf_counter() - allocated}
        home, notes = self.storage.home, self.storage.report().notes
        need(home == "pinned" or not torch.cuda.is_available(), f"the table is {home}, not pinned: {'; '.join(notes)}")
        self.table = EngramTable.over(self.storage)
        self._gather = HostGather(self.storage, device())
        say(
            f"layer {layer_id}: {self.rows:,} rows, {self.storage.nbytes / 2**30:.2f} GiB; allocated, touched and registered in "
            f"{self.seconds['allocate']:.1f} s, filled in {self.seconds['fill']:.1f} s\n{self.storage.report()}"
        )

    def ids(self, tokens: int, seed: int) -> torch.Tensor:
        """Row ids int64 ``[1, tokens, 24]`` of random canonical tokens, hashed where the device is."""
        generator = torch.Generator().manual_seed(seed)
        canonical = torch.randint(0, HASH.compressed_vocab, (1, tokens), generator=generator).to(device())
        row_ids = self.hasher.rows(canonical)
        return row_ids if self.rows == self.hasher.rows_total else row_ids % self.rows

    def zero_copy(self, row_ids: torch.Tensor) -> torch.Tensor:
        return row_gather(self.storage.payload, self.storage.scale, row_ids, bounds="ignore", dtype=torch.bfloat16)

    def planned(self, row_ids: torch.Tensor) -> torch.Tensor:
        return self.table.lookup(row_ids, bounds="ignore", dtype=torch.bfloat16)

    def cpu_gather(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Ids to the host, records gathered there and copied over in chunks."""
        out = torch.empty((row_ids.numel(), HEAD_DIM), dtype=torch.bfloat16, device=row_ids.device)
        self._gather.read(row_ids.clamp(min=0).cpu(), out, absent=row_ids < 0)
        return out

    def check(self, tokens: int) -> int:
        """Every path against the rule; the number of rows compared."""
        hashed = self.ids(tokens, seed=self.rows).reshape(-1)
        if self.rows == self.hasher.rows_total:
            need(int(hashed.max()) < self.rows and int(hashed.min()) >= 0, "the hash gives ids outside its table")
            need(int(hashed.max()) > self.rows - self.rows // 20, "the hash never reaches the table's last column")
        edges = ids_to_check(self.rows, self.storage.row_bytes).to(hashed.device)
        ids = torch.cat((edges, hashed, edges.new_tensor([-1])))
        paths: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "zero-copy": self.zero_copy,
            "the planner": self.planned,
            "the CPU": self.cpu_gather,
        }
        for name, path in paths.items():
            for part in ids.split(COUNTS[-1]):
                need(same_bits(path(part), self.rule.values(part, torch.bfloat16)), f"rows read by {name} are not the rule's")
        exact = self.table.lookup(ids[:4096])
        need(same_bits(exact, self.rule.values(ids[:4096])), "float32 rows of EngramTable.lookup are not the rule's")
        synchronize()
        say(f"  {ids.numel():,} rows right by {', '.join(paths)}; {edges.numel()} of them at the edges")
        return ids.numel()


def wall_us(action: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds until the rows are there, the host's part included."""
    taken = []
    for _ in range(repeats + 3):
        synchronize()
        started = time.perf_counter()
        action()
        synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[3:]) * 1e6


def time_lookups(layer: FilledLayer, count: int) -> dict[str, Any]:
    """One count of rows by zero-copy, by the CPU and as EngramTable.lookup chooses."""
    on_device = torch.cuda.is_available()
    tokens = -(-count // HASH.columns)
    turn = itertools.cycle([layer.ids(tokens, seed).reshape(-1)[:count].contiguous() for seed in range(ID_SETS)])
    repeats = 30 if on_device else 3
    figures: dict[str, Any] = {"rows": count}
    if on_device:
        figures["zero_copy_device_us"] = device_us(lambda: layer.zero_copy(next(turn)))
    for name, path in {"zero_copy": layer.zero_copy, "cpu_gather": layer.cpu_gather, "lookup": layer.planned}.items():
        figures[f"{name}_us"] = wall_us(lambda path=path: path(next(turn)), repeats)
    figures["lookup_gb_s"] = count * layer.storage.row_bytes / figures["lookup_us"] / 1e3
    say("  " + ", ".join(f"{name} {value:,.1f}" for name, value in figures.items()))
    return figures


def run(layer_ids: tuple[int, ...], rows: int | None) -> list[FilledLayer]:
    """Fill, check, time and keep the figures; the filled layers."""
    layers, figures, lines = [], [], []
    small = rows is not None
    for layer_id in layer_ids:
        layer = FilledLayer(layer_id, rows)
        checked = layer.check(DRY_TOKENS if small else CHECKED_TOKENS)
        times = [time_lookups(layer, count) for count in (COUNTS if torch.cuda.is_available() else COUNTS[:1])]
        report = layer.storage.report()
        layers.append(layer)
        kept = {"layer": layer_id, "rows": layer.rows, "seconds": layer.seconds, "checked": checked}
        figures.append({**kept, "lookups": times, "report": report.to_dict()})
        size = f"{layer.rows:,} rows, {layer.storage.nbytes / 2**30:.2f} GiB in host memory"
        lines.append(row(f"layer {layer_id}, {size}: rows right", f"all of {checked:,} read by three paths", "every row", True))
        lines.append(row(f"layer {layer_id}: allocate + fill", f"{layer.seconds['allocate']:.1f} s + {layer.seconds['fill']:.1f} s"))
        for one in times:
            figure = f"{one['lookup_us']:.0f} us, {one['lookup_gb_s']:.1f} GB/s"
            figure += f" (zero-copy {one['zero_copy_us']:.0f} us, CPU gather {one['cpu_gather_us']:.0f} us)"
            lines.append(row(f"layer {layer_id}: lookup of {one['rows']:,} rows", figure))
    if len(layers) > 1:
        total = sum(layer.rows for layer in layers)
        total_bytes = sum(layer.storage.nbytes for layer in layers)
        say(f"{total:,} rows, {total_bytes / 2**30:.2f} GiB, {total * HEAD_DIM / 1e9:.1f} G parameters")
        lines.append(row("both layers in one host's memory", f"{total_bytes / 2**30:.2f} GiB, {total * HEAD_DIM / 1e9:.1f} G parameters"))
    if not small and torch.cuda.is_available():
        record("table", "full_size" if len(layers) == 1 else "full_size_two_layers", figures={"layers": figures}, rows=lines)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rows", type=int, help="rows of each table; less than all of them keeps no figures")
    parser.add_argument("--then-overlap", action="store_true", help="measure benchmarks/overlap.py on the table of layer 1")
    options = parser.parse_args()
    layers = run(LAYERS[: options.layers], options.rows)
    if options.then_overlap:
        import overlap

        overlap.run(layers[0], small=options.rows is not None)


if __name__ == "__main__":
    main()
