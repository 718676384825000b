"""How good the embedded base is: autoencoder fidelity, and background, style and things drawn, on unseen prompts.

    python benchmarks/base.py                                   # the embedded base, benchmarks/results/base.json
    python benchmarks/base.py --run build/base/run              # weights of a training run

Needs the data of assets/recipe (sources.py, sprites.py, renders.py). Prompts come from the tenth of all combinations
that training never saw. Every score of a thing is set against the classifier's own score on real pictures sent through the autoencoder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "assets" / "recipe"), str(ROOT)]

from captions import ALONE, COLOURS, PAIR, fill  # noqa: E402
from classifiers import accuracy, labelled_windows, load_classifiers, windows_of  # noqa: E402
from compose import BUILD, STYLES, Compositor, Layout, load_names, random_layout, reserved  # noqa: E402
from train_vae import evaluate as autoencoder_psnr  # noqa: E402

SHEET = [
    "a 3d cat on a blue background", "a flat cat on a blue background", "an outlined cat on a blue background",
    "a 3d red apple on a green background", "a 3d rocket on a black background", "a 3d hamburger on a yellow background",
    "an outlined guitar on a pink background", "a 3d crown on a purple background",
    "a 3d cat next to a pizza on a white background", "a 3d car next to a palm tree on a cyan background",
    "a 3d pizza next to a cat on a red background", "an outlined bomb next to a rose on a gray background",
    "a 3d lion next to a crown on an orange background", "a flat fire on a black background",
    "a 3d elephant on a pink background", "a lion",
]  # fmt: skip


def prompts_for(layout: Layout, names: list[str]) -> list[str]:
    texts = []
    colours = list(COLOURS)
    for i, (s, c, a, b) in enumerate(zip(layout.style, layout.colour, layout.left, layout.right, strict=True)):
        templates, things = (ALONE, [names[a]]) if b < 0 else (PAIR, [names[a], names[b]])
        texts.append(fill(templates[i % len(templates)], STYLES[s], colours[c], things))
    return texts


@torch.no_grad()
def generate(pipe, prompts: list[str], *, seed: int, steps: int, guidance: float, batch: int) -> torch.Tensor:
    """`[len(prompts), 3, 128, 128]` in [-1, 1]."""
    pictures = []
    for start in range(0, len(prompts), batch):
        generators = [torch.Generator("cpu").manual_seed(seed + start + i) for i in range(len(prompts[start : start + batch]))]
        out = pipe(
            prompts[start : start + batch], num_inference_steps=steps, guidance_scale=guidance, generator=generators,
            output_type="pt", height=128, width=128,
        )  # fmt: skip
        pictures.append(out.images * 2 - 1)
    return torch.cat(pictures)


def background_of(pictures: torch.Tensor, palette: torch.Tensor) -> torch.Tensor:
    """Index of the named colour nearest to the median of the picture's border, 3 pixels wide."""
    rim = torch.cat([pictures[:, :, :3].flatten(2), pictures[:, :, -3:].flatten(2), pictures[:, :, :, :3].flatten(2)], 2)
    colour = (rim.median(2).values + 1) / 2
    return torch.cdist(colour, palette).argmin(1)


@torch.no_grad()
def score(pipe, networks, compositor, names, candidates, *, count: int, pairs: float, args) -> tuple[dict, torch.Tensor]:
    layout = random_layout(count * 20, candidates, pairs=pairs, seed=11)
    layout = layout[reserved(layout)][:count]
    pictures = generate(
        pipe, prompts_for(layout, names), seed=1000, steps=args.steps, guidance=args.guidance, batch=args.batch
    )
    layout = layout.to(pictures.device)
    result = accuracy(networks, pictures, layout)
    result["background"] = (background_of(pictures, compositor.palette) == layout.colour).float().mean().item()
    real = compositor(layout)
    seen = torch.cat([pipe.vae.decode(pipe.vae.encode(x).latent_dist.mode()).sample for x in real.split(128)])
    result["object_ceiling"] = accuracy(networks, seen, layout)["object"]
    result["object_share"] = result["object"] / max(result["object_ceiling"], 1e-6)
    if pairs:
        for side, wanted in (("left", layout.left), ("right", layout.right)):
            found = networks["object"](windows_of(pictures, side)).argmax(1)
            result[f"object_{side}"] = (found == wanted).float().mean().item()
    windows, wanted, _ = labelled_windows(pictures, layout)
    missed = wanted[networks["object"](windows).argmax(1) != wanted]
    result["missed"] = sorted({names[i] for i in missed.tolist()})[:40]
    return result, pictures


def save_sheet(rows: list[torch.Tensor], path: Path) -> None:
    """Rows of pictures `[n, 3, 128, 128]` in [-1, 1] as one PNG."""
    wide = [torch.cat(list(r.clamp(-1, 1)), 2) for r in rows]
    array = ((torch.cat(wide, 1).permute(1, 2, 0) + 1) * 127.5).round().byte().cpu().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=ROOT / "assets" / "bases" / "emoji-sd")
    parser.add_argument("--run", type=Path, help="a folder of the training scripts instead of a pipeline folder")
    parser.add_argument("--classifiers", type=Path, default=ROOT / "benchmarks" / "classifiers.safetensors")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "base.json")
    parser.add_argument("--sheet", type=Path, default=BUILD / "base_sheet.png")
    args = parser.parse_args()
    from diffusers import StableDiffusionPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    names = load_names()
    labels = [n["name"] for n in names]
    train = np.array([i for i, n in enumerate(names) if not n["held_out"]])
    held_out = np.array([i for i, n in enumerate(names) if n["held_out"]])
    if args.run:
        from export import assemble

        pipe = assemble(args.run)
    else:
        pipe = StableDiffusionPipeline.from_pretrained(args.base, torch_dtype=torch.float32, safety_checker=None)
    pipe = pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    compositor = Compositor(np.load(BUILD / "sprites.npz")["rgba"], device)
    networks = {k: v.to(device) for k, v in load_classifiers(args.classifiers, len(names)).items()}
    report = {"autoencoder": {"held_out_psnr": autoencoder_psnr(pipe.vae, compositor, held_out)}}
    renders = np.load(BUILD / "renders.npz")["rgba"]
    report["autoencoder"]["renders_psnr"] = autoencoder_psnr(pipe.vae, Compositor(renders[:, :3], device), np.arange(len(renders)))
    for kind, pairs in (("alone", 0.0), ("pairs", 1.0)):
        report[kind], pictures = score(pipe, networks, compositor, labels, train, count=args.count, pairs=pairs, args=args)
        print(kind, json.dumps(report[kind]), flush=True)
        save_sheet([pictures[i : i + 16] for i in range(0, min(64, len(pictures)), 16)], args.sheet.with_name(f"{args.sheet.stem}_{kind}.png"))
    rows = [generate(pipe, SHEET, seed=s, steps=args.steps, guidance=args.guidance, batch=16) for s in (0, 1)]
    save_sheet(rows, args.sheet)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    report |= {"prompts": args.count, "steps": args.steps, "guidance": args.guidance, "machine": machine}
    report |= {"torch": torch.__version__, "seconds": round(time.time() - started)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["autoencoder"]), f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
