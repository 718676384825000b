"""The bases that the comparison runs on, as data. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["BASES", "EMOJI_PIXART", "EMOJI_SD", "BaseSpec"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """What the bench must know of a pipeline.

    Attributes:
        name: of its folder in assets/bases.
        denoiser: the pipeline's attribute.
        role: what concepts call its text encoder.
        layers: where the encoder's layers are, a dotted path in it.
        adapted: part of the pipeline ("denoiser", "text_encoder") -> how the names of the modules end that LoRA adapts.
        causal: does the encoder read from left to right alone?
        masked: are the encoder and the denoiser told where the text ends, and the pipeline given that mask beside the states?
        length: tokens of a prompt; None for the tokenizer's own.
        stand_in: a word of one token that no caption of the base holds: where a method replaces the whole trigger by its own vectors.
        projection: the denoiser's module whose output its cross-attentions read; None where they read the states themselves.
        drawing: what the pipeline's call is given beside what all are.
        results: the file of its results in benchmarks/results.
        rates_of: name of the base whose learning rates are taken where none was chosen on this one.
    """

    name: str
    denoiser: str
    role: str
    layers: str
    adapted: Mapping[str, tuple[str, ...]]
    causal: bool
    masked: bool
    length: int | None
    stand_in: str
    projection: str | None
    drawing: Mapping[str, Any] = field(default_factory=dict)
    results: str
    rates_of: str | None = None

    @property
    def folder(self) -> Path:
        return ROOT / "assets" / "bases" / self.name

    @property
    def results_path(self) -> Path:
        return ROOT / "benchmarks" / "results" / self.results


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")

EMOJI_SD = BaseSpec(
    name="emoji-sd",
    denoiser="unet",
    role="clip_l",
    layers="encoder.layers",
    adapted={"denoiser": _ATTENTION, "text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj")},
    causal=True,
    masked=False,
    length=None,
    stand_in="sks",
    projection=None,
    results="personalization.json",
)
EMOJI_PIXART = BaseSpec(
    name="emoji-pixart",
    denoiser="transformer",
    role="t5",
    layers="encoder.block",
    adapted={"denoiser": _ATTENTION, "text_encoder": tuple(f"SelfAttention.{name}" for name in "qkvo")},
    causal=False,
    masked=True,
    # the longest prompt of the comparison has some 40; the pipeline's own 300 would be masked to the same, at several times the work
    length=64,
    stand_in="pentru",
    projection="caption_projection",
    # beside prompt embeds it takes no text, not even the empty one that is its default
    drawing={"use_resolution_binning": False, "negative_prompt": None},
    results="personalization-dit.json",
    rates_of="emoji-sd",
)
BASES: dict[str, BaseSpec] = {spec.name: spec for spec in (EMOJI_SD, EMOJI_PIXART)}
