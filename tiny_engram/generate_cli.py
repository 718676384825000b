"""The verb `generate` of the command line: pictures with concepts, their settings inside. May import everything; heavy parts when run."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable

__all__ = ["add_generate_options", "run_generate"]


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """All of the verb's own options."""
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--negative_prompt")
    parser.add_argument(
        "--schedule",
        action="append",
        default=[],
        metavar="[NAME=]SCHEDULE",
        help="how strength goes over the steps: 0..0.4 for the first 40 %% of them only; 0:1,0.5:0.2 for factors from shares of them on; "
        "linear,0:1,1:0 for a slope; of the concept NAME, or of all; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first picture; each further one takes the next")
    parser.add_argument("--num_images", type=int, default=1)
    parser.add_argument("--num_inference_steps", type=int, default=25)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=Path("picture.png"), help="a PNG; several pictures are numbered")


def _schedules(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Name, or "" for all concepts, and schedule of each --schedule."""
    if not args.schedule:
        return []
    from tiny_engram.schedules import Schedule

    if not args.concept:
        raise TinyEngramError(f"--schedule {args.schedule[0]!r}: there is no concept; give one with --concept FILE")
    parts = [item.rpartition("=") for item in args.schedule]
    return [(name, Schedule.parse(text)) for name, _, text in parts]


def run_generate(args: argparse.Namespace, load: Callable[[argparse.Namespace], tuple[Any, Any]]) -> int:
    """Draws; `load` gives the pipeline with the concepts, and its adapter."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from tiny_engram.training.validation import draw_pictures, save_picture

    for name in ("num_images", "num_inference_steps"):
        if getattr(args, name) < 1:
            raise TinyEngramError(f"--{name} is {getattr(args, name)}, expected at least 1")
    if args.output.suffix.lower() != ".png":
        raise TinyEngramError(f"--output {str(args.output)!r}: expected a file name ending in .png")
    schedules = _schedules(args)
    pipe, adapter = load(args)
    check_writable(args.output.parent)
    for name, schedule in schedules:
        for each in [name] if name else adapter.get_list_concepts():
            adapter.set_schedule(each, schedule)
    print(adapter.explain(args.prompt, args.negative_prompt), file=sys.stderr)
    calls: dict[str, Any] = {}
    if schedules:
        calls = adapter.step_callback([args.prompt], args.negative_prompt, steps=args.num_inference_steps).options
    for k in range(args.num_images):
        picture = draw_pictures(
            pipe,
            [args.prompt],
            [args.seed + k],
            steps=args.num_inference_steps,
            guidance=args.guidance_scale,
            negative_prompt=args.negative_prompt,
            **calls,
        )[0]
        path = args.output if args.num_images == 1 else args.output.with_stem(f"{args.output.stem}-{k}")
        settings = {"prompt": args.prompt, "negative_prompt": args.negative_prompt, "seed": args.seed + k, "concepts": args.concept}
        settings |= {"num_inference_steps": args.num_inference_steps, "guidance_scale": args.guidance_scale}
        settings |= {"schedules": args.schedule} if args.schedule else {}
        info = PngInfo()
        info.add_itxt("parameters", json.dumps(settings))
        print(save_picture(Image.fromarray(picture), path, pnginfo=info))
    return 0
