"""Pictures a second that one process teaches, and several, at a fixed batch for each, on as many devices.

    python benchmarks/training_processes.py [--device cuda] [--processes 1 2]     # benchmarks/results/training.json, "processes"

Every process is `train`'s own, as `accelerate launch` starts it; on a CPU each has one thread. Before anything is timed, the same global
batch in one process and in the most that are asked for has to give the same losses to one per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu import need, on_device, record, row
from training_step import SPAN, WARM_UP, recipe

from tiny_engram.launched import device_for, local_rank
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import train

CHECK_STEPS, WANTED = 6, 1.9
RECIPES = {"span": SPAN, "default": {"collages": 0}}


def work(folder: Path, name: str, steps: int, batch: int, device: str) -> None:
    """One process of a run; the first one leaves seconds and losses of its steps in times.json."""
    pipe = load_pipeline(device=device_for("cpu" if device == "cpu" else None))
    times: list[float] = []

    def after(step: int, loss: float) -> None:
        if pipe.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    result = train(pipe, recipe(folder, steps, batch, **RECIPES[name]), progress=False, on_step=after)
    if local_rank() == 0 and os.environ.get("RANK", "0") == "0":
        (folder / "times.json").write_text(json.dumps({"times": times, "losses": result.losses}))


def run(folder: Path, name: str, processes: int, steps: int, batch: int, device: str) -> tuple[list[float], list[float]]:
    """(seconds between steps, losses) of a run of so many processes."""
    folder.mkdir(parents=True)
    words = [__file__, "work", "--folder", str(folder), "--recipe", name, "--steps", str(steps), "--batch", str(batch), "--device", device]
    launch = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    environment = os.environ | ({"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} if device == "cpu" else {})
    done = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True)
    need(done.returncode == 0, f"{processes} processes: {done.stderr[-2000:]}")
    said = json.loads((folder / "times.json").read_text())
    return [b - a for a, b in zip(said["times"], said["times"][1:], strict=False)][WARM_UP:], said["losses"]


def measure(counts: list[int], steps: int, batch: int, device: str) -> None:
    figures: dict[str, dict[str, float]] = {}
    rows = []
    most = max(counts)
    with tempfile.TemporaryDirectory() as root:
        for name in RECIPES:
            if most > 1:
                _, alone = run(Path(root) / f"{name}-check-1", name, 1, CHECK_STEPS, batch * most, device)
                _, shared = run(Path(root) / f"{name}-check-{most}", name, most, CHECK_STEPS, batch, device)
                apart = max(abs(a - b) / abs(a) for a, b in zip(alone, shared, strict=True))
                need(apart <= 0.01, f"{name}: {most} processes and one lose the same global batch {apart:.1%} apart")
            rates = {}
            for count in counts:
                seconds, _ = run(Path(root) / f"{name}-{count}", name, count, steps + WARM_UP + 1, batch, device)
                rates[str(count)] = count * batch / statistics.median(seconds)
                rows.append(row(f"pictures a second, {name}, {count} process{'es' * (count > 1)}", f"{rates[str(count)]:.1f}"))
            if "1" in rates:
                for count in counts[1:]:
                    ratio, target = rates[str(count)] / rates["1"], WANTED / 2 * count
                    rows.append(row(f"{count} over 1, {name}", f"{ratio:.2f}", f">= {target:g}", ratio >= target))
            figures[name] = rates
    section = "processes" if device == "cpu" else f"processes, {device}"
    record(
        "training",
        section,
        figures={"pictures_per_second": figures, "batch": batch},
        rows=on_device(rows, device),
        packages=("diffusers", "accelerate"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("measure", "work"), default="measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="of each process")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", choices=tuple(RECIPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "work":
        work(args.folder, args.recipe, args.steps, args.batch, args.device)
    else:
        measure(args.processes, args.steps, args.batch, args.device)


if __name__ == "__main__":
    main()
