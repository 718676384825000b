"""What the promises are tried on: every tiny pipeline, the family that it belongs to, its modes, and facts about its class."""

from collections.abc import Callable, Collection, Iterable
from inspect import signature
from typing import Any

import diffusers
import pytest

from tests.pipelines.tiny.base import TinyPipeline
from tests.pipelines.tiny.every import DEFAULT, EVERY
from tiny_engram.config import ConceptConfig
from tiny_engram.pipelines.families import FAMILIES
from tiny_engram.pipelines.family import Family

# Tiny pipelines are named in short.
NAMES = {"stable-diffusion-2": "stable-diffusion-1", "flux": "flux-1", "hunyuandit": "hunyuan-dit", "ltx": "ltx-video"}
# Mounts that a concept has in each mode; one that is added here is tried by every check over modes. A pooled vector is beside states of
# another encoder, which a concept always has rows for.
MODES = {
    "span": ("span",),
    "input": ("input",),
    "deep": ("deep",),
    "pooled": ("span", "pooled"),
    "context": ("context",),
}
AT_ENCODER = tuple(mode for mode in MODES if mode != "context")  # what moves what the denoiser is given
TRIGGER = "vortex cat"
PROMPT, PLAIN = "a photo of a vortex cat on a table", "a photo of a green dog on a table"


def family_named(tiny: TinyPipeline) -> Family:
    """The family that a tiny pipeline must be recognised as."""
    name = NAMES.get(tiny.family, tiny.family)
    return next(family for family in FAMILIES if family.name == name)


def class_of(tiny: TinyPipeline) -> Any:
    """The class whose `encode_prompt` and `__call__` a tiny pipeline has."""
    return getattr(diffusers, family_named(tiny).pipelines[0])


def _is_there(tiny: TinyPipeline) -> bool:
    """Older releases of diffusers lack some classes, or cannot import them beside newer releases of transformers."""
    try:
        return hasattr(diffusers, family_named(tiny).pipelines[0])
    except RuntimeError:
        return False


THERE = tuple(tiny for tiny in EVERY if _is_there(tiny))


def takes(tiny: TinyPipeline, name: str) -> bool:
    """Has `pipe(...)` this parameter?"""
    return name in signature(class_of(tiny).__call__).parameters


def has_mode(tiny: TinyPipeline, mode: str) -> bool:
    """Does a concept have rows of its own kind in this mode, and does the family offer it?"""
    family = family_named(tiny)
    if mode == "context":
        return family.attentions is not None
    return mode not in family.refuses and (mode != "pooled" or any(spec.pooled for spec in family.encoders))


def config_of(mode: str) -> ConceptConfig:
    return ConceptConfig(mounts=MODES[mode])


def settings(tiny: TinyPipeline) -> dict[str, Any]:
    """Arguments of a call that reads prompts as a plain one does, with guidance by a negative prompt on."""
    length = signature(class_of(tiny).__call__).parameters["max_sequence_length"].default if "max_sequence_length" in tiny.call else None
    scale = {"true_cfg_scale": 3.0} if takes(tiny, "true_cfg_scale") else {}
    return scale if length is None else {**scale, "max_sequence_length": length}


def has_negative(tiny: TinyPipeline) -> bool:
    return takes(tiny, "negative_prompt")


def has_several_prompts(tiny: TinyPipeline) -> bool:
    return len(tiny.prompt_keys) > 1


def has_template(tiny: TinyPipeline) -> bool:
    return tiny.family in TEMPLATE_WORDS


def has_textual_inversion(tiny: TinyPipeline) -> bool:
    return hasattr(class_of(tiny), "load_textual_inversion")


def has_lora(tiny: TinyPipeline) -> bool:
    return hasattr(class_of(tiny), "load_lora_weights")


# Words that stand in what these pipelines put around a prompt.
TEMPLATE_WORDS = {
    "sana": ("prompt", "user"),
    "lumina-2": ("images", "assistant"),
    "qwen-image": ("assistant", "image"),
    "z-image": ("assistant", "user"),
    "flux-2-klein": ("assistant", "user"),
    "flux-2": ("image", "you"),
    "hunyuan-video": ("video", "user"),
}


def _param(tiny: TinyPipeline, *values: Any, id: str | None = None, default: Collection[str] = DEFAULT) -> Any:
    marks = () if tiny.name in default else (pytest.mark.families,)
    return pytest.param(tiny, *values, marks=marks, id=id or tiny.name)


def each_pipeline(when: Callable[[TinyPipeline], bool] = lambda tiny: True, default: Collection[str] = DEFAULT) -> Any:
    """Over every tiny pipeline, or those that something is true of: the fixture `tiny_case`. All but `default` are marked `families`."""
    return pytest.mark.parametrize("tiny_case", [_param(t, default=default) for t in THERE if when(t)], indirect=True)


def each_mode(when: Callable[[TinyPipeline], bool] = lambda tiny: True, modes: Iterable[str] = tuple(MODES)) -> Any:
    """The same, and each mode that the family offers."""
    chosen = [(t, mode) for t in THERE if when(t) for mode in modes if has_mode(t, mode)]
    return pytest.mark.parametrize(
        ("tiny_case", "mode"),
        [_param(tiny, mode, id=f"{tiny.name}-{mode}") for tiny, mode in chosen],
        indirect=["tiny_case"],
    )


def teachable(tiny: TinyPipeline) -> bool:
    """Can concepts be taught on it? FLUX.1 Kontext's pipeline edits a picture."""
    return family_named(tiny).predicts is not None and tiny.name != "flux:kontext"
