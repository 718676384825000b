"""The comparison of methods of personalisation, in pieces that are never done twice.

    python -m benchmarks.personalization STAGE [--minutes 9] [--device cuda] [--out build/personalization]

Stages: base (what base and judges can do at all), sweep (every method at six learning rates), methods (every method at its
best), levers (variants of ours, --levers FILE), final (the table), costs, all (these in turn); merge (only --unpack,
adding up and --pack), report (tables, plots and sheets). See benchmarks/personalization/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# scripts of the recipe, which parts of the bench share
sys.path[:0] = [str(folder) for folder in (ROOT / "assets" / "recipe", ROOT / "benchmarks") if str(folder) not in sys.path]

from benchmarks.personalization import plan, selection  # noqa: E402
from benchmarks.personalization.bases import BASES, EMOJI_SD, BaseSpec  # noqa: E402
from benchmarks.personalization.pieces import Bench, estimate, run_piece, save_piece  # noqa: E402
from benchmarks.personalization.plan import Piece, PlanError, Settings  # noqa: E402
from benchmarks.personalization.store import PieceFile, load_results, merge, pack, save_results, unpack  # noqa: E402

RESULTS = EMOJI_SD.results_path
LEVERS = Path(__file__).with_name("levers.json")
REDUCED_STAGES = ("methods",)
TRIALS = ("steps", "main", "batch", "samples", "between", "pair", "choices", "drawn", "drawing_steps")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.personalization", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", nargs="?", default="all", choices=(*plan.STAGES, "all", "merge", "report"))
    parser.add_argument("--base", default=EMOJI_SD.name, choices=tuple(BASES), help="what is taught; default %(default)s")
    parser.add_argument("--minutes", type=float, help="begin no piece that would not end within so many minutes of the start")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, help="where pieces are kept (build/personalization, or -reduced; with another base its name behind it)"
    )
    parser.add_argument("--results", type=Path, help="the results file (that of the base in benchmarks/results; with --reduced in --out)")
    parser.add_argument("--only", nargs="+", default=(), metavar="METHOD", help="only these methods")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), metavar="SEED", help="of the final stage, each a piece of its own")
    parser.add_argument("--rate", nargs="+", default=(), metavar="METHOD=RATE", help="learning rates in place of the sweep's")
    parser.add_argument("--levers", type=Path, default=LEVERS, help='a JSON list of {"label", "options"}; default %(default)s')
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th piece, from the I-th: for several processes")
    parser.add_argument("--reduced", action="store_true", help="a few minutes on a CPU: three methods, two subjects, 120 steps")
    parser.add_argument("--again", action="store_true", help="do pieces anew though they are done")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="put pieces that were not yet in the results file into FILE")
    parser.add_argument("--unpack", type=Path, nargs="+", default=(), metavar="FILE", help="first take in packs from elsewhere")
    # for trials: pieces of other settings are other pieces
    for name in TRIALS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.spec = BASES[args.base]
    named = "personalization" + ("-reduced" if args.reduced else "") + (f"-{args.base}" if args.spec is not EMOJI_SD else "")
    args.out = args.out or ROOT / "build" / named
    args.results = args.results or (args.out / "results.json" if args.reduced else args.spec.results_path)
    try:
        args.share, args.shares = (int(part) for part in args.shard.split("/"))
        if not 1 <= args.share <= args.shares:
            raise ValueError
    except ValueError:
        parser.error(f"--shard {args.shard}: expected I/N with I from 1 to N, such as 2/4")
    try:
        rates = {method: float(rate) for method, rate in (given.split("=") for given in args.rate)}
        if not all(method in plan.RATES and 0 < rate < float("inf") for method, rate in rates.items()):
            raise ValueError
    except ValueError:
        parser.error(f"--rate {' '.join(args.rate)}: expected methods of the comparison and numbers above 0, such as ours=0.014")
    args.rate = rates
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """The full or the reduced settings, with what a trial changes."""
    settings = plan.REDUCED if args.reduced else plan.FULL
    changed = {name: getattr(args, name) for name in TRIALS if getattr(args, name) is not None}
    if "steps" in changed or "main" in changed:
        steps = changed.setdefault("steps", settings.steps)
        main = changed.setdefault("main", min(steps, settings.main))
        changed["checkpoints"] = tuple(sorted({main, *(at for at in settings.checkpoints if at <= steps)}))
    return replace(settings, **changed)


def rates_of(results: dict[str, Any], *, reduced: bool) -> dict[str, float]:
    """Chosen learning rates; the reduced form takes the published ones where none was chosen."""
    chosen = {method: found["rate"] for method, found in results.get("rates", {}).items()}
    if reduced and not chosen:
        chosen = {method: found["rate"] for method, found in load_results(RESULTS).get("rates", {}).items()}
    return plan.RATES | chosen if reduced else chosen


def lent(spec: BaseSpec) -> dict[str, Any]:
    """The results of the base whose learning rates stand in for those that were not chosen on this one; none for a base of its own."""
    return {} if spec.rates_of is None else load_results(BASES[spec.rates_of].results_path, spec.rates_of)


def pieces_of(stage: str, bench: Bench, args: argparse.Namespace, results: dict[str, Any]) -> list[Piece]:
    """The pieces of one stage. Raises PlanError where something must be done before."""
    settings, names = settings_of(args), bench.names
    other = lent(bench.spec)
    rates = rates_of(other, reduced=False) | rates_of(results, reduced=args.reduced) | args.rate
    if args.reduced:
        return plan.reduced(names, settings, rates, only=args.only)
    if stage == "base":
        return plan.base(names, settings)
    if stage == "sweep":
        return plan.sweep(names, settings, only=args.only)
    if stage == "methods":
        from benchmarks.personalization.methods.controls import DRAWN

        return plan.methods(names, settings, rates, only=args.only, drawn_controls=tuple(DRAWN))
    if stage == "levers":
        return plan.levers(names, settings, rates, _variants(args.levers))
    if stage == "final":
        best = results.get("best_lora") or other.get("best_lora")
        return plan.final(names, settings, rates, best, only=args.only, seeds=args.seeds)
    return plan.costs(names, settings, rates, only=args.only)


def _variants(path: Path) -> list[Any]:
    try:
        variants = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"--levers {path}: cannot be read ({error}); give a JSON list of label and options") from error
    if not isinstance(variants, list) or not all(isinstance(variant, dict) for variant in variants):
        raise PlanError(f"--levers {path}: expected a JSON list of objects with label and options")
    return variants


def summed_up(results: dict[str, Any], pieces: Sequence[PieceFile], bench: Bench) -> dict[str, Any]:
    """Results with these pieces merged in, the settings of the final table's (or the last) piece, and what follows from the sweep."""
    results = merge(results, [piece.read() for piece in pieces])
    swept = results["stages"].get("sweep", [])
    rates = selection.choose(swept, bench.names.development)
    splits = {"development": list(bench.names.development), "final": list(bench.names.final), "known": list(bench.names.known)}
    done = sorted(results["pieces"].values(), key=lambda piece: (piece["stage"] == "final", piece["finished"]))
    lender = bench.spec.rates_of
    rule = selection.RULE if lender is None else f"by a sweep on this base where there was one, else on the base {lender}: {selection.RULE}"
    results["settings"] = (done[-1]["settings"] if done else {}) | {"rule": rule, "subjects": splits}
    # a method that is being swept anew has no rate until that is done
    begun = {record["method"] for record in swept}
    earlier = {method: found for method, found in results.get("rates", {}).items() if method not in begun}
    return results | {"rates": earlier | rates, "best_lora": selection.best_lora(rates) or results.get("best_lora")}


class Clock:
    """Progress lines with the time since the start, and whether a piece still fits."""

    def __init__(self, minutes: float | None) -> None:
        self.began, self.limit = time.monotonic(), None if minutes is None else minutes * 60
        self.begun = 0

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, line: str) -> None:
        passed = int(self.seconds())
        print(f"[{passed // 60:2d}:{passed % 60:02d}] {line}", flush=True)

    def fits(self, seconds: float | None) -> bool:
        """The first piece of a call always does: an estimate may be wrong, and nothing would ever be done."""
        if self.limit is None:
            return True
        if self.begun == 0:
            return self.seconds() < self.limit
        return self.seconds() + (seconds or 0) < self.limit


def run_stage(stage: str, bench: Bench, args: argparse.Namespace, results: dict[str, Any], clock: Clock) -> list[str]:
    """Run what is not done yet; returns what is left, as titles."""
    pieces = pieces_of(stage, bench, args, results)[args.share - 1 :: args.shares]
    timed = dict(results["pieces"])
    for file in PieceFile.all(args.out):
        read = file.read()
        timed[file.key] = read["piece"] | {"seconds": read["seconds"], "work": read["work"]}
    left: list[str] = []
    for piece in pieces:
        if piece.key(bench.inputs) in timed and not args.again:
            continue
        needs = estimate(piece, timed)
        if left or not clock.fits(needs):
            left.append(piece.title())
            continue
        clock.begun += 1
        clock.say(f"{piece.title()} begins" + (f", about {needs:.0f} s" if needs else ""))
        began = time.monotonic()
        outcome = run_piece(bench, piece, lambda line: clock.say(f"  {line}"))
        seconds = time.monotonic() - began
        file = save_piece(bench, piece, outcome, seconds, args.out)
        timed[file.key] = piece.described() | {"seconds": seconds, "work": piece.work()}
        clock.say(f"{piece.title()} done in {seconds:.0f} s")
    return left


def run(args: argparse.Namespace) -> int:
    clock = Clock(args.minutes)
    args.out.mkdir(parents=True, exist_ok=True)
    results = load_results(args.results, args.base)
    listed = set(results["pieces"])
    bench = Bench(args.device, args.spec, tf32=settings_of(args).tf32)
    try:
        clock.say(f"{bench.circumstances['machine']}, commit {bench.circumstances['commit'][:12]}")
    except (OSError, subprocess.CalledProcessError) as error:
        # now, and not when the first piece is done
        raise PlanError("there is no git repository here: name the commit in the environment's TINY_ENGRAM_COMMIT") from error
    for file in unpack(args.unpack, args.out):
        clock.say(f"unpacked {file.key}")
    stages = REDUCED_STAGES if args.reduced and args.stage == "all" else plan.STAGES if args.stage == "all" else (args.stage,)
    left: list[str] = []
    merging = args.shares == 1
    results = summed_up(results, PieceFile.all(args.out), bench) if merging else results
    for stage in [s for s in stages if s in plan.STAGES]:
        if left:
            left.append(f"stage {stage}")
            continue
        left += run_stage(stage, bench, args, results, clock)
        if merging:
            results = summed_up(results, PieceFile.all(args.out), bench)
            save_results(args.results, results)
    if merging and args.stage == "merge":
        save_results(args.results, results)
    if args.pack:
        new = [file for file in PieceFile.all(args.out) if file.key not in listed]
        for path in pack(new, args.pack):
            clock.say(f"packed {path.name}, {path.stat().st_size / 2**20:.1f} MiB")
    clock.say(f"left: {len(left)}: " + "; ".join(left) if left else "nothing is left")
    if args.stage == "report" or args.stage == "all" and not args.reduced and not left:
        from benchmarks.personalization import report

        if args.spec is EMOJI_SD:
            report.main(results=args.results, pictures=args.out)
        else:
            report.main(second=args.results)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        return run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
