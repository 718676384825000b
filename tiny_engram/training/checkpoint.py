"""Checkpoints of a concept's run: those of tiny_engram.checkpoints, with the finished concept of that step in them.

May import torch, concept, checkpoints and files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import write_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.files import write_atomically

__all__ = ["CONFIG", "save_checkpoint"]

CONFIG = "config.yaml"


def save_checkpoint(
    output_dir: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    concept: Concept,
    told: str,
    *,
    limit: int | None,
) -> Path:
    """Write checkpoint-`step` with the finished concept of that step in it, and config.yaml, whose text is `told`; delete the oldest
    others beyond `limit`."""

    def finished(folder: Path) -> None:
        concept.save(folder / "concept.safetensors")
        write_atomically(folder / CONFIG, told.encode())

    return write_checkpoint(output_dir, step, tensors, state, finished, limit=limit)
