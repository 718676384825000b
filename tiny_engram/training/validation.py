"""Pictures drawn during training, from fixed seeds, with the very rows that would be saved. Imports no diffusers."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tiny_engram.adapter import find_family
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.data import Example, open_picture

__all__ = ["Validator", "draw_pictures", "native_size", "read_sheet_info", "save_picture", "thumbnail_of"]


def native_size(pipe: Any) -> int | None:
    """Side in pixels of the pictures that a base was made for; None if neither its denoiser nor its pipeline says."""
    family = find_family(pipe)
    side = None if family is None else getattr(getattr(pipe, family.denoiser).config, "sample_size", None)
    side = getattr(pipe, "default_sample_size", None) if side is None else side  # what pipelines of FLUX.1 and others draw at
    return side * pipe.vae_scale_factor if isinstance(side, int) else None


def save_picture(picture: Image.Image, path: Path, **options: Any) -> Path:
    """Write a PNG whole or not at all. Raises TinyEngramError (disk full, no permission, ...)."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", **options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise TinyEngramError(f"{path}: cannot write the picture ({error.strerror}); free space or choose another folder") from error


def draw_pictures(
    pipe: Any, prompts: list[str], seeds: list[int], *, steps: int, guidance: float, negative_prompt: str | None = None, **options: Any
) -> np.ndarray:
    """uint8 `[len(prompts), height, width, 3]`: picture i from prompt i and a CPU generator seeded with seeds[i].

    options: further arguments of `pipe(...)`, such as a step callback's.
    """
    size, family = native_size(pipe), find_family(pipe)
    given: dict[str, Any] = {} if family is None else dict(family.call)
    given |= {} if size is None else {"height": size, "width": size}
    # left out rather than None: some pipelines have a default of their own
    given |= {} if negative_prompt is None else {"negative_prompt": [negative_prompt] * len(prompts)}
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    disabled = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)
    try:
        images = pipe(
            prompts,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            output_type="np",
            **{**given, **options},
        ).images
    finally:
        pipe.set_progress_bar_config(**(disabled or {"disable": False}))
    return (images * 255).round().astype(np.uint8)


def thumbnail_of(example: Example, side: int = 64) -> str:
    """A training picture as a WebP data URI, for the concept file."""
    buffer = io.BytesIO()
    ImageOps.fit(open_picture(example.source, str(example.path)).picture, (side, side)).save(buffer, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


_SHEET = "tiny-engram-sheet"


def _sheet_info(prompts: Sequence[str], seeds: Sequence[int]) -> PngInfo:
    """What a sheet's PNG says of its columns and rows."""
    info = PngInfo()
    info.add_itxt(_SHEET, json.dumps([list(prompts), list(seeds)], ensure_ascii=False))
    return info


def read_sheet_info(image: Image.Image) -> tuple[list[str], list[int]] | None:
    """(prompts, seeds) of a sheet's columns and rows; None of a picture that does not say them."""
    try:
        prompts, seeds = json.loads(image.info[_SHEET])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return (prompts, seeds) if isinstance(prompts, list) and isinstance(seeds, list) else None


class Validator:
    """Draws `config.validation_prompts` with a concept loaded, and leaves the pipeline as it was."""

    def __init__(self, adapter: Any, config: TrainConfig, folder: Path) -> None:
        self.adapter, self.config, self.folder = adapter, config, folder

    def draw(self, concept: Concept, step: int, *, keep: bool = True) -> np.ndarray | None:
        """Writes step-N.png if it is kept, a column a prompt and a row a seed, and returns it (uint8 `[h, w, 3]`); None without prompts."""
        config = self.config
        prompts = config.prompts_with(concept.trigger)
        if not prompts:
            return None
        name = self.adapter.load_concept(concept, rename=True)
        try:
            rows = [
                draw_pictures(
                    self.adapter.pipe,
                    prompts,
                    [seed] * len(prompts),
                    steps=config.validation_inference_steps,
                    guidance=config.validation_guidance_scale,
                )
                for seed in config.validation_seeds
            ]
        finally:
            self.adapter.unload_concept(name)
        sheet = np.concatenate([np.concatenate(list(row), 1) for row in rows], 0)
        if keep:
            save_picture(Image.fromarray(sheet), self.folder / f"step-{step}.png", pnginfo=_sheet_info(prompts, config.validation_seeds))
        return sheet
