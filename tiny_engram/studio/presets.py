"""Three ways to teach, in plain words, and how long each takes here. Imports TrainConfig, no torch."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.errors import StudioError
from tiny_engram.training.config import TrainConfig

__all__ = ["DEFAULT_PRESET", "PRESETS", "Estimate", "Measured", "Preset", "check_fields", "estimate", "fields_of"]

DEFAULT_PRESET = "balanced"

# What a job may not be told: folders and files are the job's own, and so are the texts that it has beside these fields.
_OWN = {"train_data_dir", "output_dir", "resume_from_checkpoint", "report_to", "skip_bad_pictures", "validation_data_dir"}
_OWN |= {"trigger", "aliases", "name", "class_word", "cache_dir"}
# A job's pictures are RGB and lie side by side in one folder, without masks.
_OWN |= {"recursive", "folder_repeats", "alpha_mask", "unmasked_weight"}
# Highest values: nobody may keep the one machine busy for a year, or ask for more memory than there is.
BOUNDS = {
    "max_train_steps": 20_000,
    "train_batch_size": 64,
    "gradient_accumulation_steps": 64,
    "collage_pictures": 32,
    "validation_inference_steps": 150,
    "validation_loss_samples": 256,
    "resolution": 2048,
    "attention_rank": 16,
    "feedforward_rank": 16,
    "checkpointing_steps": 1000,
    "checkpoints_total_limit": 20,
    "bucket_steps": 1024,
    "seed": 2**32 - 1,
    "validation_guidance_scale": 30,
}
_OR_NONE = {"resolution", "rho", "context_rho", "snr_gamma", "checkpoints_total_limit", "timestep_shift", "early_stop_patience"}
_OR_NONE |= {"bucket_steps"}
MOST_ITEMS, MOST_ITEM = 64, 200

# Of one sample in one step, and of one denoising step of one picture with guidance, as a share of it: the embedded base on one core.
SAMPLE_SECONDS, DRAWN_SHARE, START_SECONDS = 0.1, 2 / 3, 10.0


@dataclass(frozen=True, slots=True)
class Preset:
    """One way to teach: `fields` are TrainConfig's where they differ from its defaults."""

    key: str
    title: str
    words: str
    fields: dict[str, Any]


_KEPT = {"checkpoints_total_limit": 3, "validation_prompts": ("a {trigger}",)}
PRESETS = {
    preset.key: preset
    for preset in (
        Preset(
            "quick",
            "Quick",
            "A first look: the subject can be told, its details are not there yet, and it may crowd out what a prompt puts beside it.",
            {"max_train_steps": 100, "collages": 0, "checkpointing_steps": 20, "validation_steps": 25, **_KEPT},
        ),
        Preset(
            "balanced",
            "Balanced",
            "The recipe that all figures of the documentation speak of: a close likeness that also stands beside other things.",
            {"max_train_steps": 300, "checkpointing_steps": 25, "validation_steps": 50, **_KEPT},
        ),
        Preset(
            "best",
            "Best",
            "Twice the steps and more practice beside other things: a little closer where details matter, at more than twice the time.",
            {"max_train_steps": 600, "collages": 2, "checkpointing_steps": 25, "validation_steps": 100, **_KEPT},
        ),
    )
}


def fields_of(preset: str) -> dict[str, Any]:
    """All of TrainConfig's fields that a job has, with the preset's values. Raises StudioError for one that is not there."""
    if preset not in PRESETS:
        raise StudioError(f"preset {str(preset)[:40]!r}, expected one of {', '.join(PRESETS)}")
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig) if f.name not in _OWN}
    return defaults | PRESETS[preset].fields


def _expected(name: str, default: Any, value: Any) -> str | None:
    """What kind of value a field takes, where this is none; browsers and clients send anything."""
    if value is None:
        return None if name in _OR_NONE else "a value"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a word"
    if isinstance(default, tuple):
        return None if isinstance(value, list | tuple) else "a list"
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return None if number else "a number"


def check_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as JSON types, checked as TrainConfig does and within bounds. Raises StudioError naming the field."""
    known: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(TrainConfig) if f.name not in _OWN}
    for name, value in fields.items():
        if name not in known:
            raise StudioError(f"no setting {str(name)[:40]!r} of teaching; expected one of {', '.join(sorted(known))}")
        expected = _expected(name, known[name], value)
        if expected is not None:
            raise StudioError(f"{name} is {str(value)[:40]!r}, expected {expected}")
        most = BOUNDS.get(name)
        if most is not None and isinstance(value, int | float) and value > most:
            raise StudioError(f"{name} is {value:,}, expected at most {most:,}")
        if isinstance(value, list | tuple) and (len(value) > MOST_ITEMS or any(len(str(item)) > MOST_ITEM for item in value)):
            raise StudioError(f"{name} has too much in it, expected at most {MOST_ITEMS} entries of {MOST_ITEM} characters; shorten it")
    # browsers send whole numbers as floats, and lists where the config has tuples
    whole = {k for k, v in known.items() if isinstance(v, int) and not isinstance(v, bool)}
    whole |= {"resolution", "checkpoints_total_limit", "early_stop_patience", "bucket_steps"}
    taken: dict[str, Any] = {k: int(v) if k in whole and isinstance(v, float) and v.is_integer() else v for k, v in fields.items()}
    taken = {k: tuple(v) if isinstance(v, list) else v for k, v in taken.items()}
    for prompt in taken.get("validation_prompts", ()):
        if isinstance(prompt, str) and "{trigger}" not in prompt:
            raise StudioError(f"the sample prompt {prompt!r} does not hold {{trigger}}; write it where the subject is named")
    try:
        # a trigger is checked with the job's other texts
        made = TrainConfig(train_data_dir="pictures", trigger="{trigger}", **taken)
    except (TinyEngramError, TypeError, AttributeError) as error:
        raise StudioError(" ".join(str(error).split())) from error
    told = made.to_dict()
    return {name: told[name] for name in known}


@dataclass(frozen=True, slots=True)
class Measured:
    """What finished jobs say of this machine: seconds of one sample in one step, and how many jobs said so."""

    sample_seconds: float
    jobs: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a job will take: seconds (None where nothing can be said), whether this machine was measured, and both in words."""

    seconds: float | None
    measured: bool
    words: str


def measure(jobs: Iterable[tuple[dict[str, Any], float]]) -> Measured | None:
    """From (fields, seconds a step) of jobs with one model and as many threads: the median of a sample's seconds."""
    found = sorted(seconds / (f["train_batch_size"] * f["gradient_accumulation_steps"]) for f, seconds in jobs if seconds > 0)
    return Measured(found[len(found) // 2], len(found)) if found else None


def estimate(fields: dict[str, Any], pictures: int, measured: Measured | None, *, embedded: bool = True) -> Estimate:
    """Of a job with these fields. embedded: is it taught on the base that the estimate without measurements was made for?"""
    if measured is None and not embedded:
        return Estimate(None, False, "not known on this model until a first job has run")
    sample = SAMPLE_SECONDS if measured is None else measured.sample_seconds
    samples = fields["max_train_steps"] * fields["train_batch_size"] * fields["gradient_accumulation_steps"]
    drawn = pictures * fields["collage_pictures"] if fields["collages"] else 0
    if fields["validation_steps"]:
        each = len(fields["validation_prompts"]) * len(fields["validation_seeds"])
        drawn += fields["max_train_steps"] // fields["validation_steps"] * each
    seconds = START_SECONDS + sample * (samples + drawn * fields["validation_inference_steps"] * DRAWN_SHARE)
    told = "an estimate; measured once a job has finished here" if measured is None else "measured on this machine"
    return Estimate(seconds, measured is not None, f"about {time_in_words(seconds)} ({told})")


def time_in_words(seconds: float) -> str:
    """As a person would say it: "40 seconds", "4 minutes", "2 hours"."""
    if seconds < 55:
        count, unit = max(5, round(seconds / 5) * 5), "second"
    elif seconds < 90 * 60:
        count, unit = max(1, round(seconds / 60)), "minute"
    else:
        count, unit = round(seconds / 3600), "hour"
    return f"{count} {unit}" + ("" if count == 1 else "s")
