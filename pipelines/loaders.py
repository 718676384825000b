"""Loading a base: the embedded one of a checkout, or any folder or hub id that diffusers reads. Imports diffusers when called."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError

__all__ = ["EMBEDDED_BASE", "EMBEDDED_BASES", "load_pipeline"]

_BASES = Path(__file__).resolve().parents[1] / "assets" / "bases"
# By the names that `load_pipeline` takes.
EMBEDDED_BASES = {name: _BASES / name for name in ("emoji-sd", "emoji-pixart")}
EMBEDDED_BASE = EMBEDDED_BASES["emoji-sd"]


@contextmanager
def _without_bars(*libraries: Any) -> Iterator[None]:
    """Bars of components that load in a second only flicker."""
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def load_pipeline(model: str | PathLike[str] | None = None, *, dtype: Any = "float32", device: Any = None, **options: Any) -> Any:
    """A diffusers pipeline, ready to run.

    Args:
        model: a folder, a Hub id, or the name of an embedded base, "emoji-sd" or "emoji-pixart", before which a folder of that name
            comes; None for "emoji-sd".
        dtype: float32, float16 or bfloat16, as torch's or by name.
        device: None is CUDA if there is one, unless a `device_map` is given.
        options: all go to diffusers' `from_pretrained`.

    Raises:
        TinyEngramError: no such model, dtype or device, or no embedded base beside this installation.
    """
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    embedded = EMBEDDED_BASE if model is None else None if Path(model).exists() else EMBEDDED_BASES.get(str(model))
    if embedded is not None:
        if not embedded.is_dir():
            raise TinyEngramError("this installation carries no embedded base (a checkout does); give one with --model FOLDER_OR_ID")
        model = embedded
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise TinyEngramError(f"dtype {dtype!r}, expected float32, float16 or bfloat16")
    placed = options.get("device_map") is not None
    if placed and device is not None:
        raise TinyEngramError(f"device {str(device)!r} and device_map {options['device_map']!r} are both given, expected one of them")
    try:
        with _without_bars(diffusers_logging, transformers_logging):
            pipe = DiffusionPipeline.from_pretrained(str(model), **{_dtype_option(DiffusionPipeline): getattr(torch, name)}, **options)
    except Exception as error:  # damaged folders make the loaders raise anything, SafetensorError and AttributeError included
        expected = f"expected a diffusers folder or hub id, or an embedded base ({', '.join(EMBEDDED_BASES)})"
        raise TinyEngramError(f"model {str(model)!r} cannot be loaded ({_reason(error)}); {expected}") from error
    if placed:
        return pipe
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return pipe.to(device)
    except (RuntimeError, AssertionError) as error:
        raise TinyEngramError(
            f"device {str(device)!r} cannot be used ({_reason(error)}); expected cpu, or cuda where there is a GPU"
        ) from error


def _reason(error: Exception) -> str:
    """An error of others in one line, which ends between two words."""
    return textwrap.shorten(str(error), 240, placeholder=" ...")


def _dtype_option(pipeline: Any) -> str:
    """What `from_pretrained` calls the dtype: "torch_dtype" where diffusers does not know the shorter name, and would ignore it."""
    return "dtype" if re.search(r"^\s+dtype \(", pipeline.from_pretrained.__doc__ or "", re.MULTILINE) else "torch_dtype"
