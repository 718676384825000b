"""Checkpoints of a concept's run: those of tiny_engram.checkpoints, with the finished concept of that step in them.

May import torch, concept and checkpoints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiny_engram.checkpoints import write_checkpoint
from tiny_engram.concept import Concept

__all__ = ["save_checkpoint"]


def save_checkpoint(
    output_dir: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], concept: Concept, *, limit: int | None
) -> Path:
    """Write checkpoint-`step` with the finished concept of that step in it; delete the oldest others beyond `limit`."""
    return write_checkpoint(output_dir, step, tensors, state, lambda folder: concept.save(folder / "concept.safetensors"), limit=limit)
