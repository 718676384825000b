"""Row gather and n-gram hash on a GPU: checked, then timed, and kept in benchmarks/results/kernels.json, section "gather".

    PYTHONPATH=. python3 benchmarks/gather.py              # half a minute; 16 GiB on the device, 16 GiB of registered memory
    PYTHONPATH=. python3 benchmarks/gather.py --tune       # sweeps launch configurations; keeps nothing
    PYTHONPATH=. python3 benchmarks/gather.py --sanitize   # one small checked run of each kernel, for compute-sanitizer
    PYTHONPATH=. python3 benchmarks/gather.py --dry        # tiny sizes, also without a GPU; keeps nothing

What the gather is held against is the fastest plain gather of 256-byte rows that a sweep finds here: it copies the payload's
bytes, no scales and no conversion. Each is measured by the bytes that it must read and write, with other row ids and a cold
cache at every repeat.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
from gpu import copy_rate, device_us, need, record, row

from tiny_engram.config import HashConfig
from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.block_quant import dequantize_blocks
from tiny_engram.kernels.ngram_hash import fused as hash_kernel
from tiny_engram.kernels.row_gather import fused as gather_kernel
from tiny_engram.kernels.row_gather import row_gather
from tiny_engram.table.host_memory import HostBlock

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WIDTH, RECORD = 256, 264
DEVICE_COUNTS = (1_024, 16_384, 262_144, 4_194_304)
HOST_COUNTS = (1_024, 16_384, 65_536, 262_144)
LAYOUTS = ("record", "split")
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# DeepSeek V4.1-Flash: 24 columns per token in each of two layers.
HASH = HashConfig(max_ngram=4, heads=8, vocab=16_000_000, seed=0, pad_id=2, compressed_vocab=99_092, layer_ids=(1, 14))
Rows = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _plain_kernel(table, row_ids, out, count, WORD_TYPE: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    asked = (position < count)[:, None]
    ids = tl.load(row_ids + position, mask=position < count, other=0)
    place = tl.arange(0, WORDS)[None, :]
    source = tl.cast(table, tl.pointer_type(WORD_TYPE))  # pyright: ignore[reportArgumentType]
    target = tl.cast(out, tl.pointer_type(WORD_TYPE))  # pyright: ignore[reportArgumentType]
    words = tl.load(source + ids[:, None] * WORDS + place, mask=asked, other=0)
    tl.store(target + position[:, None] * WORDS + place, words, mask=asked)


def plain_gather(table: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor, word: int, rows: int, warps: int) -> None:
    """Rows of 256 bytes, copied."""
    count = row_ids.numel()
    words = WIDTH // word
    word_type = gather_kernel.WORD_TYPES[word]
    _plain_kernel[(-(-count // rows),)](table, row_ids, out, count, word_type, words, rows, num_warps=warps)  # pyright: ignore[reportCallIssue]


def laid_out(memory: torch.Tensor, layout: str) -> Rows:
    """The same random bytes taken as one array of records, or as two arrays."""
    rows = memory.numel() // RECORD
    if layout == "record":
        records = memory[: rows * RECORD].view(rows, RECORD)
        return records[:, :WIDTH].view(torch.float8_e4m3fn), records[:, WIDTH:]
    payload, scale = memory[: rows * WIDTH], memory[rows * WIDTH : rows * RECORD]
    return payload.view(rows, WIDTH).view(torch.float8_e4m3fn), scale.view(rows, RECORD - WIDTH)


class Clock:
    """Microseconds of an action on cold caches; without a GPU, of one call, so that a dry run passes the same lines."""

    def __init__(self) -> None:
        # Long enough to hide the time that the calls take to enqueue.
        self.flush = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) if CUDA else None

    def __call__(self, action: Callable[[], object], repeats: int = 30) -> float:
        if CUDA:
            return device_us(action, repeats=repeats, flush=self.flush)
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start) * 1e6


def turns(rows: int, count: int) -> Callable[[], torch.Tensor]:
    """Every call gives other random row ids; made in advance."""
    sets = itertools.cycle([torch.randint(0, rows, (count,), device=DEVICE) for _ in range(3 if count > 100_000 else 16)])
    return lambda: next(sets)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for what a NaN carries."""
    # Triton's interpreter casts float32 subnormals to bfloat16 wrongly; a device does not.
    if not CUDA and a.dtype == torch.bfloat16:
        a, b = (torch.where(x.abs() < 2.0**-126, 0, x) for x in (a, b))
    nan = a.isnan()
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(nan, b.isnan()) and bool(((a.view(bits) == b.view(bits)) | nan).all())


def check_gather(rows: Rows, what: str) -> None:
    """The rows at both ends, at 2^31 and 2^32 bytes and at random places, against the op that dequantises, on the CPU."""
    payload, scale = rows
    total = payload.shape[0]
    edges = [i for i in (0, 1, total - 1, (1 << 31) // RECORD + 1, (1 << 32) // RECORD + 1, (1 << 31) // WIDTH) if i < total]
    ids = torch.cat((torch.tensor(edges), torch.randint(0, total, (300,))))
    read = [(payload[i].view(torch.uint8).cpu(), scale[i].cpu()) for i in ids.tolist()]
    expected = dequantize_blocks(torch.stack([p for p, _ in read]).view(torch.float8_e4m3fn), torch.stack([s for _, s in read]))
    asked = torch.cat((ids, torch.tensor([-1, total])))
    for name, dtype in TYPES.items():
        violations = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        out = row_gather(payload, scale, asked.to(DEVICE), bounds="warn", violations=violations, dtype=dtype).cpu()
        need(same(out[: len(ids)], expected.to(dtype)), f"{what}: rows differ from the reference, {name}")
        need(not bool(out[len(ids) :].any()), f"{what}: absent rows are not zeros, {name}")
        need(violations.tolist() == [1, total], f"{what}: violations are {violations.tolist()}, expected {[1, total]}")


def check_hash(hashers: list[NgramHasher], ids: torch.Tensor) -> None:
    for hasher in hashers:
        out = hasher.rows(ids)
        with implementation("reference"):
            need(torch.equal(out, hasher.rows(ids)), f"hash of layer {hasher.layer_id} differs from the reference")


def moved(count: int, dtype: torch.dtype) -> int:
    """Bytes that a gather of so many rows must read (ids, payload, scales) and write."""
    return count * (8 + RECORD + WIDTH * dtype.itemsize)


def best_plain(table: torch.Tensor, count: int, clock: Clock, small: bool) -> tuple[float, str]:
    """Microseconds and configuration of the fastest plain gather."""
    rows, out = table.shape[0], torch.empty(count, WIDTH, dtype=torch.uint8, device=DEVICE)
    draw, found = turns(rows, count), []
    ids = draw()
    plain_gather(table, ids, out, 8, 8, 4)
    need(torch.equal(out, table.view(torch.uint8).index_select(0, ids)), "the plain gather copies other bytes")
    for word, tile, warps in itertools.product((4, 8), (4, 8, 16, 32), (4,)) if not small else ((4, 8, 4),):
        us = clock(lambda word=word, tile=tile, warps=warps: plain_gather(table, draw(), out, word, tile, warps))
        found.append((us, f"int{8 * word} words, {tile} rows a program"))
    return min(found)


def time_gather(rows: Rows, count: int, dtype: torch.dtype, clock: Clock) -> float:
    """Microseconds of the public call into given memory, bounds counted."""
    payload, scale = rows
    draw = turns(payload.shape[0], count)
    out = torch.empty(count, WIDTH, dtype=dtype, device=DEVICE)
    violations = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    us = clock(lambda: row_gather(payload, scale, draw(), bounds="warn", violations=violations, out=out))
    need(violations.tolist() == [0, 0], "ids inside the table were counted as violations")
    return us


def better_layout(times: dict[str, dict[str, float]]) -> tuple[str, float]:
    """The layout with the smaller geometric mean over the same cases, and how many times longer the other takes."""
    ratio = math.exp(sum(math.log(times["split"][case] / times["record"][case]) for case in times["record"]) / len(times["record"]))
    return ("record", ratio) if ratio >= 1 else ("split", 1 / ratio)


def measure_device(memory: torch.Tensor, counts: tuple[int, ...], clock: Clock, small: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tables = {layout: laid_out(memory, layout) for layout in LAYOUTS}
    for layout, rows in tables.items():
        check_gather(rows, f"device table, {layout}")
    plain = {count: best_plain(tables["split"][0], count, clock, small) for count in counts}
    times: dict[str, dict[str, float]] = {layout: {} for layout in LAYOUTS}
    figures: dict[str, Any] = {"plain_us": {}, "plain_configuration": {}, "us": times, "share_of_plain": {layout: {} for layout in LAYOUTS}}
    for count, (plain_us, how) in plain.items():
        figures["plain_us"][count], figures["plain_configuration"][count] = plain_us, how
        print(f"plain, {count:,} rows: {plain_us:.1f} us, {count * (8 + 2 * WIDTH) / plain_us / 1e6:.2f} TB/s ({how})")
        for layout, (name, dtype) in itertools.product(LAYOUTS, TYPES.items()):
            case = f"{count} rows, {name}"
            us = times[layout][case] = time_gather(tables[layout], count, dtype, clock)
            share = (moved(count, dtype) / us) / (count * (8 + 2 * WIDTH) / plain_us)
            figures["share_of_plain"][layout][case] = share
            rate = moved(count, dtype) / us / 1e6
            print(f"  {layout:6} {name:8} {count:9,} rows: {us:8.1f} us, {rate:.2f} TB/s, {share:.0%} of the plain gather")
    layout, ratio = figures["layout"], figures["other_layout_times"] = better_layout(times)
    print(f"device: layout {layout!r} wins, the other takes {ratio:.3f} times as long (geometric mean)")
    lines = []
    for count, (name, dtype) in itertools.product(counts, TYPES.items()):
        case = f"{count} rows, {name}"
        us, share = times[layout][case], figures["share_of_plain"][layout][case]
        figure = f"{us:.0f} us, {moved(count, dtype) / us / 1e6:.2f} TB/s, {share:.0%}"
        lines.append(
            row(f"gather to {name} from a 16 GiB device table, {count:,} rows", figure, ">= 85 % of the best plain gather", share >= 0.85)
        )
    lines.append(row("gather from the device: the other layout against " + layout, f"{ratio:.3f} times as long"))
    return figures, lines


def measure_host(memory: torch.Tensor, counts: tuple[int, ...], clock: Clock) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tables = {layout: laid_out(memory, layout) for layout in LAYOUTS}
    for layout, rows in tables.items():
        check_gather(rows, f"pinned table, {layout}")
    times: dict[str, dict[str, float]] = {layout: {} for layout in LAYOUTS}
    for count, layout in itertools.product(counts, LAYOUTS):
        us = times[layout][f"{count} rows"] = time_gather(tables[layout], count, torch.bfloat16, clock)
        print(f"pinned {layout:6} {count:9,} rows: {us:8.1f} us, {1e3 * us / count:.1f} ns a row, {count * RECORD / us / 1e3:.1f} GB/s")
    layout, ratio = better_layout(times)
    print(f"pinned: layout {layout!r} wins, the other takes {ratio:.3f} times as long (geometric mean)")
    gib = memory.numel() / 2**30
    lines = []
    for count in counts:
        us = times[layout][f"{count} rows"]
        asked = ("<= 35 us", us <= 35) if count == 1024 else ("", None)
        figure = f"{us:.0f} us, {1e3 * us / count:.0f} ns a row, {count * RECORD / us / 1e3:.1f} GB/s"
        lines.append(row(f"zero-copy gather from a {gib:.0f} GiB pinned table, {count:,} rows", figure, *asked))
    lines.append(row("zero-copy gather: the other layout against " + layout, f"{ratio:.3f} times as long"))
    return {"GiB": gib, "us": times, "layout": layout, "other_layout_times": ratio}, lines


def measure_hash(tokens: int, clock: Clock) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    hashers = [NgramHasher(HASH, layer) for layer in HASH.layer_ids]
    ids = torch.randint(0, HASH.compressed_vocab, (1, tokens), device=DEVICE)
    check_hash(hashers, ids)
    us = clock(lambda: [hasher.rows(ids) for hasher in hashers])
    nbytes = len(hashers) * tokens * 8 * (1 + HASH.columns)
    rate = nbytes / us * 1e6
    ceiling = copy_rate() if CUDA else rate
    share = rate / ceiling
    figure = f"{us:.0f} us, {rate / 1e12:.2f} TB/s, {share:.0%}"
    print(f"hash of {tokens:,} tokens x {len(hashers)} layers: {figure} of the copy rate ({ceiling / 1e12:.2f} TB/s)")
    line = row(f"hash of {tokens:,} tokens x 2 layers", figure, ">= 50 % of the copy rate of its own bytes", share >= 0.5)
    return {"tokens": tokens, "us": us, "bytes": nbytes, "copy_bytes_per_s": ceiling, "share": share}, [line]


def tune(memory: torch.Tensor, pinned: torch.Tensor, clock: Clock) -> None:
    """Microseconds of the kernels by their launch configuration, the fastest first."""

    def show(what: str, found: list[tuple[float, str]]) -> None:
        print(what)
        for us, how in sorted(found)[:6]:
            print(f"  {us:9.1f} us  {how}")

    def gather_by(rows: Rows, count: int, dtype: torch.dtype, **how: Any) -> float:
        payload, scale = rows
        draw, out = turns(payload.shape[0], count), torch.empty(count, WIDTH, dtype=dtype, device=DEVICE)
        counter = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        action = lambda: gather_kernel.launch(payload, scale, draw(), 0, payload.shape[0], out, counter, **how)  # noqa: E731
        return clock(action, repeats=10)

    rows = laid_out(memory, "record")
    for count, (name, dtype) in itertools.product((16_384, 262_144, 4_194_304), TYPES.items()):
        found = []
        for float8, tile, warps in itertools.product((False, True), (1024, 2048, 4096, 8192), (1, 2, 4)):
            us = gather_by(rows, count, dtype, float8=float8, tile=tile, warps=warps)
            found.append((us, f"{'float8 unit' if float8 else 'integer work'}, tile {tile}, warps {warps}"))
        show(f"device, {count:,} rows, {name}:", found)
    rows = laid_out(pinned, "record")
    for count in (1_024, 16_384, 65_536):
        found = []
        for tile, programs in itertools.product((2048, 4096, 8192), (16, 32, 64, 128, 256, 1 << 20)):
            us = gather_by(rows, count, torch.bfloat16, tile=tile, programs=programs)
            found.append((us, f"tile {tile}, at most {programs} programs"))
        show(f"pinned, {count:,} rows, bfloat16:", found)
    hasher = NgramHasher(HASH, HASH.layer_ids[0])
    ids = torch.randint(0, HASH.compressed_vocab, (1, 1 << 20), device=DEVICE)
    out = torch.empty(1, 1 << 20, HASH.columns, dtype=torch.int64, device=DEVICE)
    constants = hasher.multipliers.to(DEVICE), hasher.primes.to(DEVICE)
    found = []
    for tile, programs, warps in itertools.product((1024, 2048, 4096), (512, 1024, 2048, 8192), (4, 8)):

        def action(tile: int = tile, programs: int = programs, warps: int = warps) -> None:
            hash_kernel.launch(ids, *constants, HASH.pad_id, None, None, None, None, out, tile=tile, programs=programs, warps=warps)

        found.append((clock(action, repeats=10), f"tile {tile}, at most {programs} programs, warps {warps}"))
    show("hash, 1,048,576 tokens, one layer:", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--tune", action="store_true", help="sweep launch configurations; keeps nothing")
    modes.add_argument("--sanitize", action="store_true", help="one small checked run of each kernel; keeps nothing")
    modes.add_argument("--dry", action="store_true", help="tiny sizes, with or without a GPU; keeps nothing")
    args = parser.parse_args()
    small = args.dry or args.sanitize
    need(CUDA or args.dry, "there is no CUDA device: --dry runs without one")
    torch.manual_seed(0)
    memory = torch.randint(0, 256, ((1000 if small else (16 << 30) // RECORD) * RECORD,), dtype=torch.uint8, device=DEVICE)
    # As tables are held: huge pages, registered.
    pinned = HostBlock.allocate(memory.numel()).tensor
    pinned.copy_(memory)
    with implementation("triton"):
        if args.sanitize:
            for name, held in (("device", memory), ("pinned", pinned)):
                for layout in LAYOUTS:
                    check_gather(laid_out(held, layout), f"{name} table, {layout}")
            ids = torch.randint(0, HASH.compressed_vocab, (3, 700), device=DEVICE)
            check_hash([NgramHasher(HASH, layer) for layer in HASH.layer_ids], ids)
            print("gather and hash: right")
            return
        clock = Clock()
        if args.tune:
            tune(memory, pinned, clock)
            return
        device_figures, lines = measure_device(memory, (5, 40) if small else DEVICE_COUNTS, clock, small)
        host_figures, more = measure_host(pinned, (5, 40) if small else HOST_COUNTS, clock)
        hash_figures, last = measure_hash(300 if small else 1 << 20, clock)
    if args.dry:
        print("dry run: nothing kept")
        return
    figures = {"device": device_figures, "pinned": host_figures, "hash": hash_figures}
    record("kernels", "gather", figures=figures, rows=[*lines, *more, *last])
    missed = [line["measure"] for line in (*lines, *more, *last) if line["met"] is False]
    print("all targets met" if not missed else "targets missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
