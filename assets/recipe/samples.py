"""Draws assets/bases/emoji-sd/samples.png: twelve prompts, two seeds each, with the prompts beneath, for the model card.

    python assets/recipe/samples.py

The prompts are fixed and the seeds are 0 and 1: nothing is picked by hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageDraw, ImageFont

BASE = Path(__file__).resolve().parents[1] / "bases" / "emoji-sd"
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
    pipe = StableDiffusionPipeline.from_pretrained(BASE, dtype=torch.float32)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    rows = []
    for seed in SEEDS:
        generators = [torch.Generator("cpu").manual_seed(seed) for _ in PROMPTS]
        images, _ = pipe(
            list(PROMPTS), num_inference_steps=25, guidance_scale=4.0, generator=generators, output_type="np", return_dict=False
        )
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
    Image.fromarray(np.where(coarse == 254, 255, coarse).astype(np.uint8)).save(BASE / "samples.png", optimize=True)
    print(f"{(BASE / 'samples.png').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
