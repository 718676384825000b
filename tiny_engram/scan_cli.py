"""The command line of pictures: `tiny-engram scan FOLDER`, and what the options of `train` about pictures are for.

Imports cli_fields and TrainConfig, and what looks at pictures in the verb.
"""

import argparse
import dataclasses
import json
import typing
from typing import Any

from tiny_engram.cli_fields import add_fields, given_fields
from tiny_engram.training.config import TrainConfig

__all__ = ["DATA_HELP", "add_scan_options", "run_scan"]

DATA_HELP = {
    "recursive": "the pictures of the folders in it too",
    "folder_repeats": "pictures in a folder named as '10_words' are drawn ten times as often",
    "subject_type": "what is taught, which chooses the built-in captions: object, style, person, animal or scene",
    "caption_tag_dropout": "share of a caption's tags, which have commas between them, that a sample goes without; never the trigger's",
    "shuffle_tags": "the other tags of a caption in any order",
    "random_flip": "half of the samples mirrored; not for what has a left and a right, such as writing",
    "alpha_mask": "a transparent picture is taught where it is opaque (others: NAME.mask.png, masks/NAME.png or the column mask)",
    "unmasked_weight": "how much the loss counts outside of a picture's mask, 0 to 1",
    "buckets": "pictures keep their shape, in sizes of about --resolution squared pixels, instead of being cropped to squares",
    "bucket_steps": "sides of buckets are multiples of it, in pixels (default: the least that the base can)",
    "bucket_no_upscale": "pictures that are smaller than their bucket stay small",
    "cache_dir": "a folder that keeps the latents of pictures for the next run",
}
SCAN_HELP = {
    "trigger": "the phrase that the captions are asked for (default: they are not asked)",
    "aliases": "further spellings that do as well",
    "caption_template": "for pictures without a caption",
    "resolution": "in pixels, for buckets and to find pictures that are too small",
}
# What Stable Diffusion's buckets are multiples of; the base is not loaded here.
STEP = 64


def _fields() -> type:
    """TrainConfig's fields that speak of looking at pictures; none has to be given."""
    hints = typing.get_type_hints(TrainConfig)
    drawn = {"caption_tag_dropout", "shuffle_tags", "random_flip", "unmasked_weight", "cache_dir"}
    names = (DATA_HELP | SCAN_HELP).keys() - drawn
    made = []
    for field in dataclasses.fields(TrainConfig):
        if field.name in names:
            default = "" if field.default is dataclasses.MISSING else field.default
            made.append((field.name, hints[field.name], dataclasses.field(default=default)))
    return dataclasses.make_dataclass("ScanFields", made)


def add_scan_options(parser: argparse.ArgumentParser) -> None:
    """`scan` looks at everything that `train` would, and draws nothing."""
    parser.add_argument("folder", help="a folder of pictures, or a saved dataset of Hugging Face")
    parser.add_argument("--json", action="store_true")
    add_fields(parser, _fields(), DATA_HELP | SCAN_HELP | {"bucket_steps": f"sides of buckets are multiples of it, in pixels ({STEP})"})


def run_scan(args: argparse.Namespace) -> int:
    """Prints the report; 2 where pictures cannot be read, so that `train` would stop."""
    from tiny_engram.training.data import report, scan_for

    fields: dict[str, Any] = given_fields(args, _fields())
    asked = fields.pop("trigger", None)
    config = TrainConfig(train_data_dir=args.folder, skip_bad_pictures=True, trigger=asked or "{trigger}", **fields)
    scan = scan_for(config, spellings=None if asked else ())
    step = (config.bucket_steps or STEP) if config.buckets else None
    found = report(scan, config.resolution, bucket_step=step, upscale=not config.bucket_no_upscale)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return 2 if found.bad else 0
