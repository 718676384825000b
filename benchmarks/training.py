"""What training costs beside the field's own loops, on the embedded base.

    python benchmarks/training.py steps [--device cuda]         # benchmarks/results/training.json, section "steps" or "steps, cuda"
    python benchmarks/training.py manifest      # section "manifest": see many_concepts.py

A step of ours, with rows at the encoder's output alone and by the default recipe, one of textual inversion with latents that were made
before, and one of textual inversion and of DreamBooth with LoRA as diffusers' scripts do them: in turn, so that all see the same machine.
Before anything is timed each loop has to teach what it should and leave alone what it should not. Memory is that of a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_concepts
import torch
from gpu import need, on_device, record, row
from other_loops import DreamBoothLora, Loop, TextualInversion
from training_step import SPAN, SUBJECT, WARM_UP, check, peak_bytes, recipe

from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import train

BATCH, SIDE = 8, 128
OURS = {"span": SPAN, "default": {}}
CACHED, SHIPPED = 1.0, 0.8


def the_pipeline(device: str) -> Any:
    pipe = load_pipeline(device=device)
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.requires_grad_(False).eval()
    return pipe


def rivals(pipe: Any) -> dict[str, Loop]:
    pictures = sorted(SUBJECT.glob("*.png"))
    word, given = TextualInversion.word, {"batch": BATCH, "side": SIDE}
    return {
        "inversion, cached": TextualInversion(pipe, pictures, [f"a photo of a {word}"], cached=True, **given),
        "inversion": TextualInversion(pipe, pictures, [f"a photo of a {word}"], cached=False, **given),
        "lora": DreamBoothLora(pipe, pictures, ["a photo of a sks duck"], cached=False, **given),
    }


def check_rivals(pipe: Any, loops: dict[str, Loop]) -> None:
    """They lower their loss, and move nothing but what is theirs."""
    before = [p.detach().clone() for part in (pipe.unet, pipe.text_encoder, pipe.vae) for p in part.parameters()]

    def loss_of(loop: Loop) -> float:
        """Of a step on the same pictures, timesteps and noise."""
        loop.restart()
        torch.manual_seed(0)
        return loop()

    for name, loop in loops.items():
        for group in loop.optimizer.param_groups:
            group["lr"] = 10 * loop.rate  # a few steps shall show
        first, *_, last = (loss_of(loop) for _ in range(6))
        need(last < first, f"{name} does not lower its loss: {first:.4f}, then {last:.4f}")
        if isinstance(loop, TextualInversion):
            same = (loop.table == loop.original).all(1)
            need(bool(same[loop.others].all()) and not bool(same[loop.taught]), f"{name} moves other tokens than its own")
        for group in loop.optimizer.param_groups:
            group["lr"] = loop.rate
    after = [p for part in (pipe.unet, pipe.text_encoder, pipe.vae) for p in part.parameters()]
    need(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a loop moved the base")


def now() -> float:
    """Seconds, after all that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(action: Callable[[], object]) -> float:
    begin = now()
    action()
    return now() - begin


def timed(pipe: Any, loops: dict[str, Loop], folder: Path, steps: int) -> dict[str, list[dict[str, float]]]:
    """By our recipe: seconds of each loop's step, round by round."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, changes in OURS.items():
        rounds: list[dict[str, float]] = []
        last = now()

        def after(step: int, loss: float, rounds: list[dict[str, float]] = rounds) -> None:
            nonlocal last
            one = {"ours": now() - last} | {rival: seconds_of(loop) for rival, loop in loops.items()}
            if step > WARM_UP:
                rounds.append(one)
            last = now()

        train(pipe, recipe(folder / name, steps + WARM_UP, BATCH, **changes), progress=False, on_step=after)
        found[name] = rounds
    return found


def memory(name: str, device: str) -> int:
    """The most bytes of a process that runs one loop: three steps of a rival, or of ours; "base" loads the pipeline alone."""
    pipe = the_pipeline(device)
    if name in OURS:
        with tempfile.TemporaryDirectory() as folder:
            train(pipe, recipe(Path(folder), 3, BATCH, **OURS[name]), progress=False)
    elif name != "base":
        loop = rivals(pipe)[name]
        for _ in range(3):
            loop()
    return peak_bytes()


def steps(count: int, device: str) -> None:
    pipe = the_pipeline(device)
    loops = rivals(pipe)
    check_rivals(pipe, loops)
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in OURS.items():
            check(pipe, Path(folder) / "check" / name, BATCH, **changes)
        found = timed(pipe, loops, Path(folder), count)
    names = [*OURS, *loops]
    alone = [sys.executable, __file__, "--device", device, "memory"]
    # side by side: what one holds does not change with others beside it
    running = {name: subprocess.Popen([*alone, name], stdout=subprocess.PIPE, text=True) for name in ("base", *names)}
    peaks = {name: int(child.communicate()[0].split()[-1]) for name, child in running.items()}
    ratios = {
        ours: {rival: statistics.median(one["ours"] / one[rival] for one in rounds) for rival in loops} for ours, rounds in found.items()
    }
    limits = {"inversion, cached": CACHED, "inversion": SHIPPED, "lora": SHIPPED}
    words = {
        "span": "ours, rows at the encoder's output",
        "default": "ours, default recipe",
        "inversion, cached": "textual inversion, cached latents",
        "inversion": "textual inversion as diffusers' script",
        "lora": "DreamBooth LoRA as diffusers' script",
    }
    seconds = {ours: statistics.median(one["ours"] for one in rounds) for ours, rounds in found.items()}
    seconds |= {rival: statistics.median(one[rival] for rounds in found.values() for one in rounds) for rival in loops}
    rows = [row(f"step, {words[name]}", f"{seconds[name]:.3f} s") for name in names]
    for ours, others in ratios.items():
        for rival, ratio in others.items():
            limit = limits[rival] if ours == "span" else None
            target, met = ("", None) if limit is None else (f"<= {limit}", ratio <= limit)
            rows.append(row(f"{words[ours]} over {words[rival]}", f"{ratio:.3f}", target, met))
    rows += [row(f"peak memory, {words[name]}", f"{peaks[name] / 2**20:,.0f} MiB") for name in names]
    figures = {"rounds": found, "ratios": ratios, "seconds": seconds, "peak_bytes": peaks, "batch": BATCH, "side": SIDE}
    record(
        "training",
        "steps" if device == "cpu" else f"steps, {device}",
        figures=figures,
        rows=on_device(rows, device),
        packages=("diffusers", "transformers", "peft"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("steps", "memory", "manifest"))
    parser.add_argument("name", nargs="?", default="base")
    parser.add_argument("--steps", type=int, help="timed (default: 20; of manifest, as many as fit into --seconds, at most 300)")
    parser.add_argument("--device", default="cpu")
    of_manifest = parser.add_argument_group("manifest")
    of_manifest.add_argument("--concepts", type=int, default=100)
    of_manifest.add_argument("--singles", type=int, default=6, help="single runs that are timed")
    of_manifest.add_argument("--together", type=int, default=8, help="concepts of one batch")
    of_manifest.add_argument("--batch", type=int, default=BATCH)
    of_manifest.add_argument("--collages", type=int, default=0)
    of_manifest.add_argument("--seconds", type=float, default=240.0, help="that the whole stage may take")
    args = parser.parse_args()
    if args.what == "memory":
        print(memory(args.name, args.device))
    elif args.what == "manifest":
        many_concepts.manifest(args.concepts, args.singles, args.together, args.steps, args.batch, args.collages, args.device, args.seconds)
    else:
        steps(args.steps or 20, args.device)


if __name__ == "__main__":
    main()
