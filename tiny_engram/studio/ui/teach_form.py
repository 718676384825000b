"""The settings of teaching as a form: presets in words, and the fields that a user may change. Imports gradio and presets."""

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.presets import PRESETS, fields_of, time_in_words
from tiny_engram.studio.runner import Runner
from tiny_engram.studio.ui.teach_tray import unfilled

__all__ = ["FIELDS", "build_fields", "estimated", "options_of", "preset_choices", "values_of"]

PRECISIONS = [("32 bits, exact", "no"), ("bfloat16", "bf16"), ("float16", "fp16")]
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


def build_fields() -> list[Any]:
    """The components of FIELDS, in that order."""
    with gr.Row():
        steps = gr.Number(label="Steps", info="More of them come closer, and take longer.", precision=0, min_width=140)
        batch = gr.Number(label="Pictures a step", info="Fewer need less memory.", precision=0, min_width=140)
        collages = gr.Number(label="Collages", info="0 to 7 of eight samples show it beside a thing.", precision=0, min_width=140)
    with gr.Row():
        rate = gr.Number(label="Learning rate", info="Of rows.", step=0.001, min_width=140)
        gate_rate = gr.Number(label="Of gates", info="Learning rate of gates.", step=0.001, min_width=140)
        map_rate = gr.Number(label="Of maps", info="Learning rate of maps.", step=0.001, min_width=140)
    with gr.Row():
        seed = gr.Number(label="Seed", info="The same one gives the same concept.", precision=0, min_width=140)
        precision = gr.Dropdown(PRECISIONS, label="Mixed precision", info="Half types are for GPUs.", min_width=140)
        samples = gr.Number(label="Sample every", info="Steps between sample pictures; 0 draws none.", precision=0, min_width=140)
    prompts = gr.Textbox(label="Sample prompts", info="One a line; {trigger} stands for the trigger.", lines=1, max_lines=4)
    return [steps, batch, rate, gate_rate, map_rate, collages, seed, precision, samples, prompts]


def values_of(preset: str, options: Mapping[str, Any]) -> list[Any]:
    """What the components of FIELDS show for a preset and what was changed of it."""
    fields = fields_of(preset) | dict(options)
    values = [fields[name] for name in FIELDS[:-1]]
    return [*values, "\n".join(fields["validation_prompts"])]


def options_of(preset: str, values: Sequence[Any], trigger: str = "") -> dict[str, Any]:
    """TrainConfig's fields that differ from the preset's, from what the components of FIELDS hold; an empty one keeps the preset's."""
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
        return str(error)
