"""Assembles the pipeline folder from what the training scripts left: fp16 weights, loadable with plain from_pretrained.

    python assets/recipe/export.py                      # build/base/run -> assets/bases/emoji-sd
    python assets/recipe/export.py --to DIR

What the scripts measured while training goes beside the weights, as metrics.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file
from transformers import CLIPTokenizer

from bank import TOKENIZER
from compose import BUILD
from models import build_scheduler, build_text_encoder, build_unet, build_vae


def assemble(run: Path = BUILD / "run", tokenizer: Path = TOKENIZER) -> StableDiffusionPipeline:
    """The pipeline with the weights of a training run, rounded to fp16 as they are shipped, held in fp32."""
    parts = {"vae": build_vae(), "text_encoder": build_text_encoder(), "unet": build_unet()}
    for name, module in parts.items():
        module.load_state_dict(load_file(run / f"{name}.safetensors"))
        module.half().float().eval()
    return StableDiffusionPipeline(
        **parts,
        tokenizer=CLIPTokenizer.from_pretrained(tokenizer),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=BUILD / "run")
    parser.add_argument("--to", type=Path, default=TOKENIZER.parent)
    args = parser.parse_args()
    pipe = assemble(args.run)
    pipe.to(dtype=torch.float16)
    tokenizer = args.to / "tokenizer"
    kept = args.to / "tokenizer.kept"
    if tokenizer.exists():
        shutil.move(tokenizer, kept)
    pipe.save_pretrained(args.to)
    # transformers loads a model in the dtype its config names: the file is fp16, the pipeline that plain from_pretrained makes is fp32
    config = args.to / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
    if kept.exists():
        # the files of the tokenizer's source stay as they came
        shutil.rmtree(tokenizer)
        shutil.move(kept, tokenizer)
    metrics = {part: json.loads((args.run / f"{part}.json").read_text()) for part in ("vae", "denoiser")}
    (args.to / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"written to {args.to}")


if __name__ == "__main__":
    main()
