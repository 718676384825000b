"""What is asked of the engine, with bounds, and what it gives back. Imports errors, numpy and Pillow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tiny_engram.explanation import Explanation
from tiny_engram.studio.errors import StudioError

__all__ = ["GenerateRequest", "GenerateResult", "checked_text", "difference_of"]

MOST_TEXT = 2_000
STEPS, GUIDANCE, SEED = (1, 150), (0.0, 30.0), (0, 2**32 - 1)
STRENGTH, SIDE = (-4.0, 4.0), (64, 2_048)
MOST_CONCEPTS = 32
_VISIBLE = 8  # of 255: a smaller difference of two pictures is not seen


def checked_text(what: str, text: object) -> str:
    """A text of at most 2,000 characters. Raises StudioError."""
    if not isinstance(text, str):
        raise StudioError(f"{what} is {str(text)[:40]!r}, expected text")
    if len(text) > MOST_TEXT:
        raise StudioError(f"{what} has {len(text):,} characters, expected at most {MOST_TEXT:,}; shorten it")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise StudioError(f"{what} holds characters that no text has (a zero byte or half a symbol); delete them")
    return text


def checked_number(what: str, value: object, bounds: tuple[float, float], *, whole: bool = False) -> float:
    """A number within bounds, both included; whole numbers may come as 25.0. Raises StudioError."""
    low, high = bounds
    kind = "a whole number" if whole else "a number"
    number = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        number = math.nan if isinstance(value, int) and abs(value) > 2**53 else float(value)
    if not low <= number <= high or (whole and not number.is_integer()):
        raise StudioError(f"{what} is {str(value)[:40]}, expected {kind} from {low:g} to {high:.10g}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to draw. Raises StudioError when it is made with a value out of bounds.

    Attributes:
        prompt, negative_prompt: at most 2,000 characters each.
        seed: 0 to 2**32 - 1, of a generator on the CPU.
        steps: 1 to 150.
        guidance: 0 to 30; 1 and less draw without guidance, which leaves the negative prompt unread.
        strengths: ids of the library's concepts that act, at most 32, and how strongly (-4 to 4). No others act.
        compare: draw the base's picture from the same seed too.
        width, height: pixels; None takes what the base was made for.
    """

    prompt: str
    negative_prompt: str = ""
    seed: int = 0
    steps: int = 25
    guidance: float = 4.0
    strengths: Mapping[str, float] = field(default_factory=dict)
    compare: bool = False
    width: int | None = None
    height: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("prompt", checked_text("prompt", self.prompt))
        put("negative_prompt", checked_text("negative prompt", self.negative_prompt or ""))
        put("seed", int(checked_number("seed", self.seed, SEED, whole=True)))
        put("steps", int(checked_number("steps", self.steps, STEPS, whole=True)))
        put("guidance", checked_number("guidance", self.guidance, GUIDANCE))
        put("compare", bool(self.compare))
        if not isinstance(self.strengths, Mapping) or not all(isinstance(id, str) for id in self.strengths):
            raise StudioError(f"strengths is {str(self.strengths)[:40]!r}, expected a strength for each concept's id")
        if len(self.strengths) > MOST_CONCEPTS:
            raise StudioError(f"{len(self.strengths)} concepts at once, expected at most {MOST_CONCEPTS}; switch some off")
        put("strengths", {id: checked_number("strength", value, STRENGTH) for id, value in self.strengths.items()})
        for side in ("width", "height"):
            value = getattr(self, side)
            if value is not None:
                put(side, int(checked_number(side, value, SIDE, whole=True)))


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was drawn.

    Attributes:
        picture: RGB.
        plain: the base's picture from the same seed, with `compare`; else None. The same as `picture` where nothing fired.
        difference: how far apart the two are at each pixel, RGB, dark to bright; None without `compare`.
        changed: share of the pixels that differ visibly, 0 to 1; None without `compare`.
        explanation: what fired and what did not; names are ids of the library.
        settings: all that draws the picture again, JSON types.
        seconds: wall time on the engine's thread.
    """

    picture: Image.Image
    plain: Image.Image | None
    difference: Image.Image | None
    changed: float | None
    explanation: Explanation
    settings: dict[str, Any]
    seconds: float


# Dark to bright, readable in print and for the colour-blind: five points of the "inferno" map.
_HEAT = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], dtype=np.float32)


def difference_of(one: Image.Image, other: Image.Image) -> tuple[Image.Image, float]:
    """A picture of where two of one size differ, and the share of pixels that do visibly.

    The largest difference of the three channels, brightest at half the range: equal pixels are nearly black.
    """
    a, b = (np.asarray(picture.convert("RGB"), dtype=np.int16) for picture in (one, other))
    if a.shape != b.shape:
        raise StudioError(f"pictures of {one.width}x{one.height} and {other.width}x{other.height} cannot be compared; expected one size")
    distance = np.abs(a - b).max(axis=2)
    at = np.minimum(distance / 127.5, 1.0) * (len(_HEAT) - 1)
    low = np.minimum(at.astype(int), len(_HEAT) - 2)
    share = (at - low)[..., None]
    heat = _HEAT[low] * (1 - share) + _HEAT[low + 1] * share
    return Image.fromarray(heat.round().astype(np.uint8)), float((distance > _VISIBLE).mean())
