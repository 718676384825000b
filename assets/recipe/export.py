"""Assembles a base's pipeline folder from what the training scripts left: fp16 weights, loadable with plain from_pretrained.

    python assets/recipe/export.py                      # build/base/run -> assets/bases/emoji-sd
    python assets/recipe/export.py --base emoji-pixart  # build/base/run-pixart -> assets/bases/emoji-pixart
    python assets/recipe/export.py --to DIR

What the scripts measured while training goes beside the weights, as metrics.json. An autoencoder that is kept with another
base is linked to, not copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_model

from bases import BASES, Base, add_base


def assemble(base: Base, run: Path) -> DiffusionPipeline:
    """The pipeline with the weights of a training run, rounded to fp16 as they are shipped, held in fp32."""
    text_encoder, denoiser = base.build()
    parts = {"text_encoder": text_encoder, base.denoiser: denoiser}
    for name, module in parts.items():
        load_model(module, run / f"{name}.safetensors")
    parts["vae"] = base.vae(run)
    for module in parts.values():
        module.half().float().eval()
    return base.pipeline(**parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_base(parser)
    parser.add_argument("--run", type=Path, help="default: the base's own run folder")
    parser.add_argument("--to", type=Path, help="default: the base's folder under assets/bases")
    args = parser.parse_args()
    base = BASES[args.base]
    run, target = args.run or base.run, args.to or base.folder
    pipe = assemble(base, run)
    pipe.to(dtype=torch.float16)
    tokenizer, kept, vae = target / "tokenizer", target / "tokenizer.kept", target / "vae"
    if tokenizer.exists():
        shutil.move(tokenizer, kept)
    if vae.is_symlink():
        vae.unlink()
    pipe.save_pretrained(target)
    # transformers loads a model in the dtype its config names: the file is fp16, the pipeline that plain from_pretrained makes is fp32
    config = target / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
    if kept.exists():
        # the files of the tokenizer's source stay as they came
        shutil.rmtree(tokenizer)
        shutil.move(kept, tokenizer)
    if base.vae_of and (target.parent / base.vae_of / "vae").exists():
        shutil.rmtree(vae)
        vae.symlink_to(Path("..", base.vae_of, "vae"), target_is_directory=True)
    metrics = {part: json.loads((run / f"{part}.json").read_text()) for part in ("vae", "denoiser") if (run / f"{part}.json").exists()}
    (target / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
