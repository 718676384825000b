"""The settings of teaching as a form: presets in words, and the fields that a user may change. Imports gradio and presets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.presets import PRESETS, fields_of, time_in_words
from tiny_engram.studio.runner import Runner
from tiny_engram.studio.ui.teach_tray import unfilled

__all__ = ["FIELDS", "LABELS", "build_fields", "emptied", "estimated", "in_words", "options_of", "preset_choices", "values_of"]

PRECISIONS = [("32 bits", "no"), ("bfloat16", "bf16"), ("float16", "fp16")]
# TrainConfig's fields that the form has, in its order.
FIELDS = (
    "max_train_steps",
    "train_batch_size",
    "learning_rate",
    "gate_learning_rate",
    "map_learning_rate",
    "collages",
    "seed",
    "mixed_precision",
    "validation_steps",
    "validation_prompts",
)


# What the page calls them.
LABELS: dict[str, str] = dict(
    zip(
        FIELDS,
        (
            "Steps",
            "Pictures a step",
            "Learning rate of rows",
            "Learning rate of gates",
            "Learning rate of maps",
            "Collages",
            "Seed",
            "Mixed precision",
            "Sample every",
            "Sample prompts",
        ),
        strict=True,
    )
)


def build_fields() -> list[Any]:
    """The components of FIELDS, in that order."""

    def number(name: str, info: str, **options: Any) -> gr.Number:
        # no precision, which would round what was typed without a word
        return gr.Number(label=LABELS[name], info=info, min_width=140, **options)

    with gr.Row(elem_classes="tt-fields"):
        steps = number("max_train_steps", "More of them come closer, and take longer.")
        batch = number("train_batch_size", "Fewer need less memory.")
        collages = number("collages", "0 to 7 of eight samples show it beside a thing.")
    with gr.Row(elem_classes="tt-fields"):
        rate = number("learning_rate", "How far a step moves the rows.", step=0.001)
        gate_rate = number("gate_learning_rate", "How far it moves the gates.", step=0.001)
        map_rate = number("map_learning_rate", "How far it moves the maps.", step=0.001)
    with gr.Row(elem_classes="tt-fields"):
        seed = number("seed", "The same one gives the same concept.")
        precision = gr.Dropdown(PRECISIONS, label=LABELS["mixed_precision"], info="32 are exact; half types are for GPUs.", min_width=140)
        samples = number("validation_steps", "Steps between sample pictures; 0 draws none.")
    prompts = gr.Textbox(label=LABELS["validation_prompts"], info="One a line; {trigger} stands for the trigger.", lines=1, max_lines=4)
    return [steps, batch, rate, gate_rate, map_rate, collages, seed, precision, samples, prompts]


def values_of(preset: str, options: Mapping[str, Any]) -> list[Any]:
    """What the components of FIELDS show for a preset and what was changed of it."""
    fields = fields_of(preset) | dict(options)
    values = [fields[name] for name in FIELDS[:-1]]
    return [*values, "\n".join(fields["validation_prompts"])]


def options_of(preset: str, values: Sequence[Any], trigger: str = "") -> dict[str, Any]:
    """TrainConfig's fields that differ from the preset's, from what the components of FIELDS hold; an empty one is left out."""
    told = dict(zip(FIELDS, values, strict=True))
    told["validation_prompts"] = [unfilled(" ".join(line.split()), trigger) for line in str(told["validation_prompts"] or "").split("\n")]
    told["validation_prompts"] = [line for line in told["validation_prompts"] if line]
    preset_fields = fields_of(preset)
    found = {}
    for name, value in told.items():
        default = preset_fields[name]
        same = list(default) == value if isinstance(default, tuple) else default == value
        if value not in (None, "", []) and not same:
            found[name] = value
    return found


def emptied(values: Sequence[Any]) -> str:
    """What to say of a box in which nothing stands; empty where there is none."""
    told = dict(zip(FIELDS, values, strict=True))
    for name, value in told.items():
        if name == "validation_prompts" and not str(value or "").strip():
            if told["validation_steps"]:
                return f"{LABELS[name]} is empty; write one with {{trigger}} in it, or set {LABELS['validation_steps']} to 0"
        elif value in (None, ""):
            return f"{LABELS[name]} is empty; type a number, or choose the preset again, which fills it in"
    return ""


def in_words(error: StudioError) -> str:
    """What is wrong with the settings, with the page's names for them in place of TrainConfig's."""
    said = re.sub(rf"^({'|'.join(FIELDS)})\b", lambda found: LABELS[found[0]], str(error))
    return said.replace("pass --collages 0", f"set {LABELS['collages']} to 0")


def preset_choices(runner: Runner, pictures: int) -> list[tuple[str, str]]:
    """Presets for a gr.Radio: title, time and words on lines of their own."""
    choices = []
    for key, preset in PRESETS.items():
        about = runner.estimate(key, max(1, pictures))
        time = "time not known yet" if about.seconds is None else f"about {time_in_words(about.seconds)}"
        choices.append((f"{preset.title}\n{time}\n{preset.words}", key))
    return choices


def estimated(runner: Runner, preset: str, pictures: int, options: Mapping[str, Any]) -> str:
    """How long it takes, in a line; what is wrong with the settings, where something is."""
    try:
        return f"Takes {runner.estimate(preset, max(1, pictures), dict(options)).words}."
    except StudioError as error:
        return in_words(error)
