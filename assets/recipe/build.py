"""Rebuilds the embedded bases from their sources: every stage in order, those that are finished left out.

    python assets/recipe/build.py              # go on where the last run stopped
    python assets/recipe/build.py --list       # say what is finished and what is not; run nothing

A stage is finished when its outputs are there and none of its inputs is newer, as in make. README.md beside this file says
what each stage takes. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE, DATA, RUN = Path("assets/recipe"), Path("build/base"), Path("build/base/run")
BASE, BENCHMARKS = Path("assets/bases/emoji-sd"), Path("benchmarks")
# The second base, whose autoencoder is the first one's.
DIT, DIT_RUN, OF_DIT = Path("assets/bases/emoji-pixart"), Path("build/base/run-pixart"), ("--base", "emoji-pixart")
VAE_WEIGHTS = BASE / "vae" / "diffusion_pytorch_model.safetensors"
DIT_WEIGHTS = DIT / "transformer" / "diffusion_pytorch_model.safetensors"
SPRITES = (DATA / "sprites.npz", DATA / "names.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One script. Paths are relative to the repository."""

    script: Path
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...]
    arguments: tuple[str, ...] = ()
    # What it writes serves the next stage alone, and may be deleted once that one is finished.
    passing: bool = False
    # Where it keeps unfinished work to resume from: worthless once an input has changed.
    state: Path | None = None


STAGES = (
    Stage(script=RECIPE / "sources.py", outputs=tuple(DATA / "sources" / n / "package.json" for n in ("fluent", "noto", "openmoji"))),
    Stage(script=RECIPE / "sprites.py", inputs=(RECIPE / "subjects.txt",), outputs=(*SPRITES, DATA / "extra.npz")),
    Stage(script=RECIPE / "renders.py", outputs=(DATA / "renders.npz",)),
    Stage(
        script=RECIPE / "fetch_tokenizers.py",
        outputs=(BASE / "tokenizer" / "vocab.json", BASE / "tokenizer" / "merges.txt", DIT / "tokenizer" / "tokenizer.json"),
    ),
    Stage(
        script=RECIPE / "train_vae.py",
        arguments=("--steps", "3118"),
        inputs=(*SPRITES, DATA / "extra.npz", DATA / "renders.npz"),
        outputs=(RUN / "vae.safetensors", RUN / "vae.json"),
    ),
    Stage(script=RECIPE / "bank.py", inputs=(*SPRITES, RUN / "vae.safetensors"), outputs=(RUN / "bank.pt",), passing=True),
    Stage(
        script=RECIPE / "train_denoiser.py",
        # In pieces: what a piece has learned is saved at its end, so an interruption costs ten minutes at most.
        arguments=("--steps", "10693", "--stop-after", "600"),
        inputs=(RUN / "vae.safetensors", RUN / "bank.pt"),
        state=RUN / "denoiser.pt",
        outputs=(RUN / "unet.safetensors", RUN / "text_encoder.safetensors", RUN / "denoiser.json"),
    ),
    Stage(
        script=RECIPE / "export.py",
        inputs=tuple(RUN / f"{part}.safetensors" for part in ("vae", "unet", "text_encoder")),
        outputs=(BASE / "model_index.json", BASE / "unet" / "diffusion_pytorch_model.safetensors", BASE / "metrics.json"),
    ),
    Stage(
        script=RECIPE / "classifiers.py",
        inputs=(*SPRITES, VAE_WEIGHTS),
        outputs=(BENCHMARKS / "classifiers.safetensors",),
    ),
    Stage(
        script=BENCHMARKS / "base.py",
        inputs=(BASE / "unet" / "diffusion_pytorch_model.safetensors", BENCHMARKS / "classifiers.safetensors"),
        outputs=(BENCHMARKS / "results" / "base.json",),
    ),
    Stage(script=RECIPE / "samples.py", inputs=(BASE / "unet" / "diffusion_pytorch_model.safetensors",), outputs=(BASE / "samples.png",)),
    Stage(
        script=BENCHMARKS / "tables.py",
        arguments=(str(BASE / "README.md"),),
        inputs=(BENCHMARKS / "results" / "base.json",),
        outputs=(BASE / "README.md",),
    ),
    Stage(
        script=RECIPE / "bank.py",
        arguments=(*OF_DIT, "--count", "800000"),
        inputs=(*SPRITES, VAE_WEIGHTS, DIT / "tokenizer" / "tokenizer.json"),
        outputs=(DIT_RUN / "bank.pt",),
        passing=True,
    ),
    Stage(
        script=RECIPE / "train_denoiser.py",
        arguments=(*OF_DIT, "--steps", "18855", "--stop-after", "600"),
        inputs=(DIT_RUN / "bank.pt",),
        state=DIT_RUN / "denoiser.pt",
        outputs=(DIT_RUN / "transformer.safetensors", DIT_RUN / "text_encoder.safetensors", DIT_RUN / "denoiser.json"),
    ),
    Stage(
        script=RECIPE / "export.py",
        arguments=OF_DIT,
        inputs=tuple(DIT_RUN / f"{part}.safetensors" for part in ("transformer", "text_encoder")),
        outputs=(DIT / "model_index.json", DIT_WEIGHTS, DIT / "metrics.json"),
    ),
    Stage(
        script=BENCHMARKS / "base.py",
        arguments=OF_DIT,
        inputs=(DIT_WEIGHTS, BENCHMARKS / "classifiers.safetensors", BENCHMARKS / "results" / "base.json"),
        outputs=(BENCHMARKS / "results" / "base-dit.json",),
    ),
    Stage(script=RECIPE / "samples.py", arguments=OF_DIT, inputs=(DIT_WEIGHTS,), outputs=(DIT / "samples.png",)),
    Stage(
        script=BENCHMARKS / "tables.py",
        arguments=(str(DIT / "README.md"),),
        inputs=(BENCHMARKS / "results" / "base-dit.json",),
        outputs=(DIT / "README.md",),
    ),
)


def halted(state: Path) -> bool:
    """Whether the training that keeps its unfinished work there has ended before its last step."""
    path = (ROOT / state).with_suffix(".json")
    metrics = json.loads(path.read_text()) if path.exists() else {"steps": 0, "of": 0}
    return metrics["steps"] < metrics["of"]


def newest_input(stage: Stage) -> float:
    """Modification time, 0 when no input is there: one that only passed through may be gone."""
    return max(((ROOT / path).stat().st_mtime for path in stage.inputs if (ROOT / path).exists()), default=0.0)


def finished(index: int) -> bool:
    """Whether the stage's outputs are whole, and no input is newer."""
    stage = STAGES[index]
    outputs = [ROOT / path for path in stage.outputs]
    if not all(path.exists() for path in outputs):
        return stage.passing and finished(index + 1)
    if stage.state and halted(stage.state):
        return False
    return newest_input(stage) <= min(path.stat().st_mtime for path in outputs)


def run(stage: Stage) -> None:
    if stage.state and (ROOT / stage.state).exists() and (ROOT / stage.state).stat().st_mtime < newest_input(stage):
        (ROOT / stage.state).unlink()
    command: Sequence[str] = [sys.executable, str(stage.script), *stage.arguments]
    print("$", "python", *command[1:], flush=True)
    started = time.time()
    subprocess.run(command, cwd=ROOT, check=True)
    # Unchanged outputs of a rerun (a table that stayed the same) would else look older than the inputs for ever.
    for path in stage.outputs:
        (ROOT / path).touch()
    print(f"{stage.script.name}: {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say which stages are finished")
    args = parser.parse_args()
    for index, stage in enumerate(STAGES):
        if args.list:
            print(f"{'finished' if finished(index) else 'to do':9}{' '.join((str(stage.script), *stage.arguments))}")
            continue
        while not finished(index):
            run(stage)


if __name__ == "__main__":
    main()
