"""The command line of tables: `tiny-engram table inspect | verify | convert | plan`.

Imports errors, and what a verb needs of table in the verb.
"""

import argparse
import contextlib
import io
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny_engram.errors import TableError

__all__ = ["add_table_verbs", "run_table_verb"]

GIB = 2**30
_SIZES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _bytes(text: str) -> int:
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * _SIZES[unit])
    except (KeyError, ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 512M, or 10G") from error


def _row_range(text: str) -> tuple[int, int | None]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        rows = int(first or 0), int(last) if last else None
        if rows[0] < 0:
            raise ValueError
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of rows; write FIRST:LAST, the last not counted") from error
    if rows[1] is not None and rows[1] <= rows[0]:
        raise argparse.ArgumentTypeError(f"{text!r} holds no row; write FIRST:LAST, the last not counted")
    return rows


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are no layers; write 1,14") from error


def add_table_verbs(parser: argparse.ArgumentParser) -> None:
    """Adds inspect, verify, convert and plan below `table`."""
    verbs = parser.add_subparsers(dest="table_verb", required=True, metavar="VERB")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text)

    inspect = add("inspect", "what a table file holds, from its headers alone")
    verify = add("verify", "compare the rows of a table with its stored digests")
    verify.add_argument("--rows", type=_row_range, default=(0, None), metavar="FIRST:LAST", help="only these, widened to whole blocks")
    for verb in (inspect, verify):
        verb.add_argument("file", type=Path, help="a .safetensors file, its .index.json, a pool, or a DAX device")
        verb.add_argument("--prefix", help="of the tensor names, where a file holds several tables")
        verb.add_argument("--json", action="store_true")

    convert = add("convert", "write a table anew: single, sharded, or a pool in /dev/shm or on a DAX device")
    convert.add_argument("source", type=Path, metavar="SRC")
    convert.add_argument("target", type=Path, metavar="DST", help="of shards: NAME.safetensors, which becomes NAME.safetensors.index.json")
    shard_bytes = "bytes of rows per file, such as 5G; rounded down to blocks of 65,536 rows, at least one"
    convert.add_argument("--shard-bytes", type=_bytes, metavar="N", help=shard_bytes)
    convert.add_argument("--prefix", help="of SRC's tensor names, where it holds several tables")
    convert.add_argument("--new-prefix", metavar="P", help="of DST's tensor names (default: as in SRC)")
    convert.add_argument("--force", action="store_true", help="replace what is there")

    plan = add("plan", "which tier of memory hides behind which layers of a model, on paper")
    plan.add_argument("--layer-time-us", type=float, required=True, help="of one layer, at this batch")
    plan.add_argument("--layers", type=int, required=True)
    plan.add_argument("--engram-layers", type=_layers, default=(1, 14), metavar="K,...", help="counted from 0 (default: 1,14)")
    plan.add_argument("--batch", type=int, default=1)
    plan.add_argument("--tokens-per-step", type=float, default=1.0, help="of each sequence (default: 1, decoding)")
    plan.add_argument("--columns", type=int, default=24, help="rows per token and Engram layer (default: 24)")
    plan.add_argument("--row-bytes", type=int, default=264)
    plan.add_argument("--rows", type=int, default=384_006_168, help="of each Engram layer's table (default: V4.1-Flash's)")
    plan.add_argument("--unique-share", type=float, default=1.0, help="of the rows, left when duplicates are dropped (default: 1)")
    plan.add_argument("--start-us", type=float, default=0.0, help="from the step's begin until the fetch is under way (default: 0)")
    plan.add_argument("--tiers", type=Path, metavar="FILE.json", help="figures of tiers, or the cache of measured lookup costs")
    plan.add_argument("--zipf", type=float, metavar="S", help="exponent of the traffic, for a hot tier on the device")
    plan.add_argument("--hot-rows", type=int, metavar="K", help="rows of each table that it holds")
    plan.add_argument("--json", action="store_true")


class _Progress:
    """One line on stderr, where somebody watches."""

    def __init__(self, what: str, row_bytes: int):
        self._what, self._row_bytes = what, row_bytes
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and (now - self._said > 0.5 or done == total):
            self._said = now
            speed = done * self._row_bytes / max(now - self._began, 1e-9) / 1e9
            end = "\n" if done == total else ""
            print(f"\r{self._what} {done:,} of {total:,} rows, {speed:.2f} GB/s ", end=end, file=sys.stderr, flush=True)


def _described(path: Path, prefix: str | None) -> dict[str, Any]:
    from tiny_engram.table.table_file import TableFile

    with TableFile(path, prefix=prefix) as table:
        part = table.parts[0]
        return {
            "file": str(path),
            "prefix": table.prefix,
            "rows": table.rows,
            "head_dim": table.head_dim,
            "row_bytes": table.row_bytes,
            "bytes": table.nbytes,
            "dtypes": {"embed.weight": part.payload.dtype, "embed.scale": part.scale.dtype},
            "layout": "split",
            "digest": table.digest,
            "parts": [
                {
                    "first_row": p.first_row,
                    "rows": p.rows,
                    "file": p.payload_file.path.name,
                    "offset": p.payload.offset,
                    "scale_file": p.scale_file.path.name,
                    "scale_offset": p.scale.offset,
                }
                for p in table.parts
            ],
        }


def _inspect(args: argparse.Namespace) -> int:
    about = _described(args.file, args.prefix)
    if args.json:
        print(json.dumps(about, indent=1))
        return 0
    types = about["dtypes"]
    print(f"{about['file']}: {about['rows']:,} rows of {about['head_dim']} values, {about['bytes'] / GIB:,.2f} GiB")
    print(f"  {about['prefix']}embed.weight {types['embed.weight']}, {about['prefix']}embed.scale {types['embed.scale']}")
    print(f"  layout {about['layout']}, {about['row_bytes']} B a row")
    print(f"  digest {about['digest'] or 'not stored; `tiny-engram table convert` adds one'}")
    for part in about["parts"][:20] if len(about["parts"]) > 1 else []:
        print(f"  rows {part['first_row']:,} to {part['first_row'] + part['rows'] - 1:,} in {part['file']}")
    if len(about["parts"]) > 20:
        print(f"  and {len(about['parts']) - 20} parts more")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tiny_engram.table.table_file import TableFile

    first, last = args.rows
    with TableFile(args.file, prefix=args.prefix) as table:
        blocks = table.verify(first, None if last is None else last - first, progress=_Progress("verified", table.row_bytes))
        of = len(table.blocks or ())
        if args.json:
            print(json.dumps({"file": str(args.file), "digest": table.digest, "blocks_compared": blocks, "blocks": of}, indent=1))
        else:
            print(f"{args.file}: sound, {blocks} of {of} blocks compared, digest {table.digest}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from tiny_engram.table.mapped import write_pool
    from tiny_engram.table.table_file import INDEX_SUFFIX, TableFile
    from tiny_engram.table.table_writer import write_table

    try:
        device = stat.S_ISCHR(os.stat(args.target).st_mode)
    except OSError:
        device = False
    sharded = args.shard_bytes is not None
    if args.target.name.endswith(".json") and not sharded:
        raise TableError(f"{args.target}: the name of an index, expected --shard-bytes with it")
    if device and sharded:
        raise TableError(f"{args.target}: a device holds one file, expected no --shard-bytes")
    with TableFile(args.source, prefix=args.prefix) as table:
        prefix = table.prefix if args.new_prefix is None else args.new_prefix
        progress = _Progress("wrote", table.row_bytes)
        if sharded:
            digest = write_table(args.target, table, prefix=prefix, shard_bytes=args.shard_bytes, progress=progress, replace=args.force)
            stem = args.target.name.removesuffix(".index.json").removesuffix(".safetensors")
            written = args.target.with_name(stem + INDEX_SUFFIX)
        else:
            digest = write_pool(args.target, table, prefix=prefix, progress=progress, replace=args.force)
            written = args.target
        print(f"{written}: {table.rows:,} rows, {table.nbytes:,} bytes, digest {digest}")
    return 0


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB"


def _us(time_us: float) -> str:
    return f"{time_us:,.1f}" if time_us < 1000 else f"{time_us:,.0f}"


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Errors of the planner begin with the field's name: the user of the command knows the option."""
    fields = ("layers", "engram_layers", "batch", "columns", "row_bytes", "rows", "unique_share", "start_us", "hot_rows")
    options = {name: "--" + name.replace("_", "-") for name in fields}
    options |= {"layer_us": "--layer-time-us", "tokens_per_sequence": "--tokens-per-step", "s": "--zipf"}
    try:
        yield
    except TableError as error:
        name, _, rest = str(error).partition(" is ")
        if name not in options:
            raise
        raise TableError(f"{options[name]} is {rest}") from error


def _columns(rows: Sequence[Sequence[str]], form: str) -> list[str]:
    """Lines of a table, two blanks between its columns; ``form`` has "<" or ">" for each: on which side its words stand."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, form, widths, strict=True)).rstrip() for row in rows]


def _plan(args: argparse.Namespace) -> int:
    from tiny_engram.table.budget import HotTier, Stack, plan
    from tiny_engram.table.tiers import DEFAULT_TIERS, load_tiers

    if (args.zipf is None) != (args.hot_rows is None):
        raise TableError(f"--zipf is {args.zipf} and --hot-rows {args.hot_rows}: expected both, or neither")
    with _options_named():
        stack = Stack(
            layers=args.layers,
            layer_us=args.layer_time_us,
            engram_layers=args.engram_layers,
            batch=args.batch,
            columns=args.columns,
            row_bytes=args.row_bytes,
            rows=args.rows,
            tokens_per_sequence=args.tokens_per_step,
            unique_share=args.unique_share,
            start_us=args.start_us,
        )
        hot = None if args.zipf is None else HotTier(s=args.zipf, rows=args.hot_rows)
    tiers = DEFAULT_TIERS if args.tiers is None else load_tiers(args.tiers, args.row_bytes)
    with _options_named():
        found = plan(stack, tiers, hot)
    print(json.dumps(found, indent=1) if args.json else _shown(found))
    return 0


def _shown(found: dict[str, Any]) -> str:
    demand = found["demand"]
    inside = demand["gb_per_s_in_windows"]
    windows = ", ".join(f"{_us(window['us'])} us before layer {window['layer']}" for window in found["windows"])
    lines = [
        f"step {_us(found['step_us'])} us, {found['tokens_per_s']:,.0f} tokens/s where nothing is waited for",
        f"windows: {windows}",
        f"demand: {demand['rows_per_layer']:,.0f} rows per Engram layer, {demand['bytes_per_token']:,} B per token, "
        f"{demand['gb_per_s']:.3g} GB/s over a step" + (f", {inside:.3g} GB/s in the tightest window" if inside is not None else ""),
        f"tables: {_gib(found['table']['bytes_per_layer'])} per Engram layer, {_gib(found['table']['bytes'])} in all",
        "",
    ]
    cells = [("tier", "fetch us", "layers", "hides before", "exposed us", "slower", "table")]
    for tier in found["tiers"]:
        hides = ",".join(map(str, tier["hides_behind"])) or "none"
        room = {None: "", True: "fits", False: "does not fit"}[tier["fits"]]
        slower = f"{tier['slowdown']:.2%}" if math.isfinite(tier["slowdown"]) else "-"
        needed = str(tier["layers_needed"])
        cells.append((tier["tier"], _us(tier["fetch_us"]), needed, hides, _us(tier["exposed_us"]), slower, room))
    lines += _columns(cells, "<>><>><")
    if hot := found.get("hot"):
        lines += [
            "",
            f"hot tier: {hot['rows']:,} rows of each table on the device ({_gib(hot['device_bytes'])}), "
            f"hit rate {hot['hit_rate']:.1%} at Zipf {hot['s']:g}",
        ]
        cells = [("tier", "fetch us", "exposed us", "saved us")]
        cells += [(t["tier"], *(_us(t[key]) for key in ("fetch_us", "exposed_us", "saved_us"))) for t in hot["tiers"]]
        lines += _columns(cells, "<>>>")
    return "\n".join([*lines, "", *(f"{tier['tier']}: {tier['source']}" for tier in found["tiers"])])


_VERBS = {"inspect": _inspect, "verify": _verify, "convert": _convert, "plan": _plan}


def run_table_verb(args: argparse.Namespace) -> int:
    """Runs one of them; returns the exit code. Raises TableError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    return _VERBS[args.table_verb](args)
