"""What the product says of a base: its family, how a run's trigger is read there, and the blocks of its attentions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.personalization.runs import Run
from tiny_engram.pipelines.families import family_of
from tiny_engram.pipelines.family import Family
from tiny_engram.role_mounts import vocabulary_of
from tiny_engram.triggers import CompiledTrigger, compile_trigger

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["attention_blocks", "compiled_trigger"]


def _family(base: Base) -> Family:
    family = family_of(base.pipe)
    if family is None:
        raise ValueError(f"{type(base.pipe).__name__} is no pipeline that concepts can be attached to")
    return family


def compiled_trigger(base: Base, run: Run) -> CompiledTrigger:
    """A run's trigger as the product reads it."""
    spec = next(spec for spec in _family(base).encoders if spec.role == base.spec.role)
    compressed = vocabulary_of(base.tokenizer)[1]
    return compile_trigger(base.subject(run.subject).trigger, base.tokenizer, (), compressed=compressed, lower_case=spec.lower_case)


def attention_blocks(base: Base) -> list[str]:
    """The block that each cross-attention lies in, as the product calls it: down0 and so on."""
    family = _family(base)
    if family.attentions is None:
        raise ValueError(f"the family {family.name!r} does not say where its denoiser reads text")
    return [attention.block for attention in family.attentions(base.denoiser, base.spec.role)]
