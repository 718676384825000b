"""One call of a denoiser: which of its arguments are text states, and its timestep. Imports torch and nothing of diffusers."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

__all__ = ["DenoiserCall", "read_call", "tensors_in"]


@lru_cache(maxsize=32)
def _parameters(kind: type) -> tuple[str, ...]:
    """Names of what the `forward` of a class takes, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class DenoiserCall:
    """What one call of a denoiser was given.

    Attributes:
        denoiser: attribute of the pipeline under which it is found.
        timestep: as it was given: a number, a tensor `[]`, `[1]`, `[batch]` or `[batch, places]`, or None.
        embeds: text states by the names that `encode_prompt` returns them under, as the family says.
    """

    denoiser: str
    timestep: Any
    embeds: Mapping[str, Any]


def read_call(family: Any, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DenoiserCall:
    """The call with these arguments of a denoiser (attribute `name`) of the family."""
    given = dict(zip(_parameters(type(getattr(module, "_orig_mod", module))), args, strict=False)) | dict(kwargs)
    wanted = family.given or {"encoder_hidden_states": "prompt_embeds"}
    embeds = {embed: given[parameter] for parameter, embed in wanted.items() if given.get(parameter) is not None}
    return DenoiserCall(name, given.get(family.timestep), embeds)


def tensors_in(embeds: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """All tensors of a call's embeds, those in lists and tuples too, in order."""
    found: list[torch.Tensor] = []
    for value in embeds.values():
        parts = value if isinstance(value, list | tuple) else (value,)
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    return tuple(found)
