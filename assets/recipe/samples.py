"""Draws a base's samples.png: twelve prompts, two seeds each, with the prompts beneath, for the model card.

    python assets/recipe/samples.py
    python assets/recipe/samples.py --base emoji-pixart

The prompts are fixed and the seeds are 0 and 1: nothing is picked by hand.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw, ImageFont

from bases import BASES, add_base

SEEDS = (0, 1)
PROMPTS = (
    "a 3d cat on a blue background", "a flat cat on a yellow background", "an outlined cat on a pink background",
    "a 3d rocket on a black background", "an outlined guitar on a green background", "a 3d hamburger on a purple background",
    "a 3d car next to a palm tree on a cyan background", "a flat pizza left of a crown on a red background",
    "an outlined bomb next to a rose on a gray background", "a 3d lion beside a cake, orange background",
    "a flat fire on a brown background", "a lion",
)  # fmt: skip
COLUMNS, SIDE, GAP, TEXT = 6, 128, 8, 44


def wrapped(text: str, font, width: int) -> str:
    """`text` broken into lines no wider than `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_base(parser)
    base = BASES[parser.parse_args().base]
    pipe = DiffusionPipeline.from_pretrained(base.folder, dtype=torch.float32)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    rows = []
    for seed in SEEDS:
        generators = [torch.Generator("cpu").manual_seed(seed) for _ in PROMPTS]
        images = pipe(
            list(PROMPTS), num_inference_steps=25, guidance_scale=4.0, generator=generators, output_type="np", **base.call
        ).images
        rows.append(np.rint(images * 255).astype(np.uint8))
    font = ImageFont.load_default(size=11)
    bands = -(-len(PROMPTS) // COLUMNS)
    height = bands * (len(SEEDS) * SIDE + TEXT)
    sheet = Image.new("RGB", (COLUMNS * (SIDE + GAP) + GAP, height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, prompt in enumerate(PROMPTS):
        left, top = GAP + i % COLUMNS * (SIDE + GAP), GAP + i // COLUMNS * (len(SEEDS) * SIDE + TEXT)
        for row, pictures in enumerate(rows):
            sheet.paste(Image.fromarray(pictures[i]), (left, top + row * SIDE))
        draw.multiline_text((left, top + len(SEEDS) * SIDE + 2), wrapped(prompt, font, SIDE), fill="black", font=font, spacing=1)
    # Seven bits a colour: a fifth less to keep in the repository, and no eye sees it.
    coarse = np.asarray(sheet) // 2 * 2
    path = base.folder / "samples.png"
    Image.fromarray(np.where(coarse == 254, 255, coarse).astype(np.uint8)).save(path, optimize=True)
    print(f"{path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
