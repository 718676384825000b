"""What a step of teaching costs, against one forward and backward of the bare denoiser to its text input.

    python benchmarks/training_step.py                          # benchmarks/results/training_step.json

The steps are `train`'s own, from one optimiser step to the next: drawing, caption states, rows through the quantiser, residual,
denoiser, loss, backward, clipping, optimiser, average; by the default recipe, and with rows at the encoder's output alone, which
adds the least to a step. After each of them the bare denoiser is timed on a batch of the same shape, so
that both see the same machine. Nothing is timed before a short run was found right: the base has its bits, no gradient is left on it,
the concept serves from its file what was trained, and lowers the denoiser's error on pictures and noise that are kept fixed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tables import RESULTS, ROOT, circumstances, keep

import tiny_engram
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import TrainConfig, train
from tiny_engram.training.costs import peak_memory
from tiny_engram.training.data import load_picture

SUBJECT = ROOT / "assets" / "examples" / "duck"
TRIGGER = "zed-quack"
CAPTION = f"a 3d {TRIGGER} on a white background"
LIMIT = 1.15  # of rows at the encoder's output alone
SPAN = {"mounts": ("span",), "attention_rank": 0, "feedforward_rank": 0, "collages": 0}
CHECK_STEPS, WARM_UP = 12, 3


def need(ok: bool, what: str) -> None:
    """Stop before anything is timed."""
    if not ok:
        raise SystemExit(f"check red, nothing timed: {what}")


def peak_bytes() -> int:
    """The most that this process has held: on its CUDA device if it used one, else in memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return peak_memory()


@torch.no_grad()
def error_with(pipe: Any, states: torch.Tensor) -> float:
    """Mean squared error of the denoiser's v-prediction at fixed pictures, timesteps and noise: states `[1, time, width]`."""
    pictures = [load_picture(path).resize((128, 128)) for path in sorted(SUBJECT.glob("*.png"))]
    pixels = torch.cat([pipe.image_processor.preprocess(picture) for picture in pictures]).repeat(4, 1, 1, 1).to(pipe.device)
    latents = pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(pipe.device)
    timesteps = torch.linspace(50, 950, len(latents)).long().to(pipe.device)
    noisy = pipe.scheduler.add_noise(latents, noise, timesteps)
    wanted = pipe.scheduler.get_velocity(latents, noise, timesteps)
    return (pipe.unet(noisy, timesteps, states.expand(len(latents), -1, -1)).sample - wanted).square().mean().item()


def check(pipe: Any, folder: Path, batch: int, **changes: Any) -> None:
    parameters = [p for part in (pipe.unet, pipe.vae, pipe.text_encoder) for p in part.parameters()]
    before = [p.detach().clone() for p in parameters]
    result = train(pipe, recipe(folder, CHECK_STEPS, batch, **changes), progress=False)
    need(all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)), "teaching moved the base's parameters")
    need(all(p.grad is None for p in parameters), "teaching left gradients on the base")
    adapter = tiny_engram.attach(pipe)
    plain = error_with(pipe, adapter.encode(CAPTION)[0])
    adapter.load_concept(result.concept, name="in memory")
    trained, _ = adapter.encode(CAPTION)
    wanted = error_with(pipe, trained)
    adapter.unload_concept()
    adapter.load_concept(result.path)
    served, _ = adapter.encode(CAPTION)
    reached = error_with(pipe, served)
    adapter.detach()
    need(torch.equal(trained, served) and wanted == reached, "the file does not serve what was trained")
    need(reached < plain, f"{CHECK_STEPS} steps do not lower the denoiser's error: {plain:.4f}, then {reached:.4f}")


def recipe(folder: Path, steps: int, batch: int, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {"train_data_dir": str(SUBJECT), "trigger": TRIGGER, "output_dir": str(folder), "report_to": "none"}
    # one thing drawn for each picture is enough to make collages of
    given |= {"max_train_steps": steps, "train_batch_size": batch, "collage_pictures": 1}
    return TrainConfig(**given | changes)


class Bare:
    """One forward and one backward of the denoiser to its text input."""

    def __init__(self, pipe: Any, batch: int) -> None:
        self.unet = pipe.unet
        size, width = pipe.unet.config.sample_size, pipe.text_encoder.config.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.noisy = torch.randn(batch, pipe.unet.config.in_channels, size, size, generator=generator)
        self.states = torch.randn(batch, pipe.tokenizer.model_max_length, width, generator=generator).requires_grad_()
        self.timesteps = torch.linspace(0, pipe.scheduler.config.num_train_timesteps - 1, batch).long()

    def __call__(self) -> None:
        predicted = self.unet(self.noisy, self.timesteps, self.states, return_dict=False)[0]
        predicted.square().mean().backward()
        self.states.grad = None


def measure(pipe: Any, folder: Path, batch: int, steps: int, **changes: Any) -> list[tuple[float, float]]:
    """(bare, step) seconds, pair by pair."""
    bare = Bare(pipe, batch)
    pairs: list[tuple[float, float]] = []
    last = time.perf_counter()

    def after(step: int, loss: float) -> None:
        nonlocal last
        now = time.perf_counter()
        bare()
        done = time.perf_counter()
        if step > WARM_UP:
            pairs.append((done - now, now - last))
        last = time.perf_counter()

    train(pipe, recipe(folder, steps + WARM_UP, batch, **changes), progress=False, on_step=after)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "training_step.json")
    args = parser.parse_args()
    pipe = load_pipeline(device="cpu")
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.requires_grad_(False).eval()
    Bare(pipe, args.batch)()
    peaks = [peak_bytes()]
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in {"span": SPAN, "default": {}}.items():
            check(pipe, Path(folder) / "check" / name, args.batch, **changes)
        timed = {"span": measure(pipe, Path(folder) / "span", args.batch, args.steps, **SPAN)}
        peaks.append(peak_bytes())
        timed["default"] = measure(pipe, Path(folder) / "default", args.batch, args.steps)
        peaks.append(peak_bytes())
    bare = statistics.median(bare for pairs in timed.values() for bare, _ in pairs)
    steps = {name: statistics.median(step for _, step in pairs) for name, pairs in timed.items()}
    ratios = {name: statistics.median(step / bare for bare, step in pairs) for name, pairs in timed.items()}
    within = {"target": f"<= {LIMIT}", "met": ratios["span"] <= LIMIT}
    table: list[dict[str, Any]] = [
        {"measure": "forward and backward of the bare denoiser to its text input", "figure": f"{bare:.3f} s"},
        {"measure": "step of teaching, encoder's output alone", "figure": f"{steps['span']:.3f} s"},
        {"measure": "the same over the bare denoiser", "figure": f"{ratios['span']:.3f}", **within},
        {"measure": "step of teaching, default recipe", "figure": f"{steps['default']:.3f} s"},
        {"measure": "the same over the bare denoiser", "figure": f"{ratios['default']:.3f}"},
        {"measure": "peak memory, bare denoiser", "figure": f"{peaks[0] / 2**20:,.0f} MiB"},
        {"measure": "peak memory, teaching, encoder's output alone", "figure": f"{peaks[1] / 2**20:,.0f} MiB"},
        {"measure": "peak memory, teaching, default recipe", "figure": f"{peaks[2] / 2**20:,.0f} MiB"},
    ]
    report = {
        **circumstances("torch", "diffusers", "transformers", depends_on=("kernels", "pipelines", "tiny_engram", "assets/bases")),
        "threads": torch.get_num_threads(),
        "note": f"Batch {args.batch} at 128x128 on the embedded base, float32; medians of {args.steps} pairs, timed in turn.",
        "table": [{"target": "", "met": None} | row for row in table],
        "figures": {"bare_seconds": bare, "step_seconds": steps, "ratio": ratios, "pairs": timed, "peak_bytes": peaks},
    }
    report["table"] = [{key: row[key] for key in ("measure", "figure", "target", "met")} for row in report["table"]]
    keep(report, args.out)
    print(*(f"{row['measure']}: {row['figure']} {row['target']}" for row in report["table"]), sep="\n")


if __name__ == "__main__":
    main()
