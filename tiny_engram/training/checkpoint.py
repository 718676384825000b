"""Checkpoints: `checkpoint-N` folders of safetensors and JSON, complete or absent. No pickle. May import torch and safetensors.

A folder is written under another name and renamed last, so that a killed run leaves no half checkpoint that "latest"
could find.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError

__all__ = ["CheckpointError", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

PREFIX = "checkpoint-"


class CheckpointError(TinyEngramError):
    """A checkpoint cannot be written, found or read."""


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, oldest first; other folders are not looked at."""
    found = []
    for path in output_dir.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if step.isdecimal() and (path / "state.json").is_file():
            found.append((int(step), path))
    return sorted(found)


def save_checkpoint(
    output_dir: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], concept: Concept, *, limit: int | None
) -> Path:
    """Write checkpoint-`step` with the finished concept of that step in it; delete the oldest beyond `limit`."""
    target = output_dir / f"{PREFIX}{step}"
    temporary = output_dir / f".{PREFIX}{step}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary / "state.safetensors")
        concept.save(temporary / "concept.safetensors")
        (temporary / "state.json").write_text(json.dumps(dict(state), indent=1))
        for file in temporary.iterdir():
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{target}: cannot write the checkpoint ({error}); free space or choose another --output_dir") from error
    if limit is not None:
        for _, old in list_checkpoints(output_dir)[:-limit]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def find_checkpoint(output_dir: Path, wanted: str) -> Path | None:
    """The folder that `--resume_from_checkpoint` means; None for "latest" where there is none yet."""
    if wanted == "latest":
        found = list_checkpoints(output_dir)
        return found[-1][1] if found else None
    path = Path(wanted) if Path(wanted).is_dir() else output_dir / wanted
    if not (path / "state.json").is_file():
        known = ", ".join(p.name for _, p in list_checkpoints(output_dir)) or "none"
        raise CheckpointError(f"{wanted!r} is no checkpoint; {output_dir} holds: {known}")
    return path


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, state) of a checkpoint folder."""
    try:
        state = json.loads((path / "state.json").read_text())
        return load_file(path / "state.safetensors"), state
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: cannot read the checkpoint ({reason}); resume from an older one, or start anew") from error
