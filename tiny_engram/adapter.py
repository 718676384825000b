"""`attach(pipe)` and the adapter's verbs as functions that take the pipeline.

May import everything below it; pipelines/families.py says what a pipeline consists of.
"""

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from tiny_engram.engram_adapter import EngramAdapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import hooks_of, remove_strays

__all__ = [
    "EngramAdapter",
    "attach",
    "close_library",
    "delete_concept",
    "detach",
    "disable_concepts",
    "enable_concepts",
    "explain",
    "get_active_concepts",
    "get_adapter",
    "get_list_concepts",
    "get_list_libraries",
    "get_schedule",
    "load_concept",
    "open_library",
    "register",
    "scheduled",
    "set_concepts",
    "set_schedule",
    "set_strength",
    "step_callback",
    "unload_concept",
]


def get_adapter(pipe: Any) -> EngramAdapter:
    """The adapter of a pipeline. Raises TinyEngramError if there is none."""
    adapter = find_adapter(pipe)
    if adapter is None:
        raise TinyEngramError(f"this {type(pipe).__name__} has no adapter; call tiny_engram.attach(pipe) first")
    return adapter


def find_adapter(pipe: Any) -> EngramAdapter | None:
    """The adapter of a pipeline or of one that shares a module with it; None if there is none."""
    modules = [m for m in vars(pipe).values() if isinstance(m, nn.Module)]
    owners = [hook.owner for module in modules for hook in hooks_of(module) if hook.owner is not None]
    return next((owner for owner in owners if isinstance(owner, EngramAdapter)), None)


def find_family(pipe: Any) -> Any | None:
    """The family that a pipeline is attached as, or else that of its class; None for a kind that is not known."""
    adapter = find_adapter(pipe)
    return import_module("tiny_engram.pipelines.families").family_of(pipe) if adapter is None else adapter.family


def taught_families() -> list[str]:
    """Names of the families on which concepts can be taught."""
    return [family.name for family in import_module("tiny_engram.pipelines.families").families() if family.predicts is not None]


def attach(pipe: Any, family: Any = None) -> EngramAdapter:
    """Carry concepts on a pipeline; probes that what the denoiser consumes follows them.

    family: a `tiny_engram.pipelines.family.Family` that describes the pipeline; None takes the one that its class belongs to.

    Raises:
        TinyEngramError: unknown kind of pipeline, no text encoder, a family that does not describe it, or an adapter is there
            already (also through a shared encoder).
        MountError: the probe found an encoder whose states do not reach the denoiser.
    """
    families = import_module("tiny_engram.pipelines.families")
    if isinstance(pipe, str | os.PathLike):
        raise TinyEngramError(
            f"attach was given {str(pipe)[:80]!r}, expected a loaded pipeline; load it with diffusers first, "
            f"or use tiny_engram.EngramPipeline.from_pretrained, which takes a folder or Hub id"
        )
    if family is not None:
        families.check_family(family)
    family = family or families.family_of(pipe)
    if family is None and not hasattr(pipe, "components"):
        raise TinyEngramError(f"attach was given an object of {type(pipe).__name__}, expected a loaded diffusers pipeline, whole")
    if family is None:
        raise TinyEngramError(
            f"{type(pipe).__name__} is no pipeline that concepts can be attached to; describe it (docs/pipelines.md), or use one of: "
            f"{', '.join(families.known_pipelines())}"
        )
    if all(getattr(pipe, spec.encoder, None) is None for spec in family.encoders):
        raise TinyEngramError(
            f"this {type(pipe).__name__} has no text encoder ({', '.join(s.encoder for s in family.encoders)}); load one first"
        )
    if family.denoisers and not any(hasattr(pipe, name) for name in family.denoisers):
        raise TinyEngramError(
            f"{type(pipe).__name__} has none of the denoisers of family {family.name!r} ({', '.join(family.denoisers)}); "
            "name the pipeline's own in Family(denoisers=...)"
        )
    for attribute in (*(spec.encoder for spec in family.encoders), *family.denoisers):
        if getattr(pipe, attribute, None) is not None:
            remove_strays(getattr(pipe, attribute))
    if find_adapter(pipe) is not None:
        raise TinyEngramError(
            "this pipeline (or one that shares its encoder) already has an adapter; "
            "use tiny_engram.get_adapter(pipe), or detach that one first"
        )
    adapter = EngramAdapter(pipe, family)
    adapter.attach()
    return adapter


P = ParamSpec("P")
R = TypeVar("R")


def _on_pipe(method: Callable[Concatenate[EngramAdapter, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of the adapter as a function that takes the pipeline."""

    @wraps(method)
    def verb(pipe: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(get_adapter(pipe), *args, **kwargs)

    return verb


detach = _on_pipe(EngramAdapter.detach)
load_concept = _on_pipe(EngramAdapter.load_concept)
set_concepts = _on_pipe(EngramAdapter.set_concepts)
set_strength = _on_pipe(EngramAdapter.set_strength)
enable_concepts = _on_pipe(EngramAdapter.enable_concepts)
disable_concepts = _on_pipe(EngramAdapter.disable_concepts)
unload_concept = _on_pipe(EngramAdapter.unload_concept)
delete_concept = _on_pipe(EngramAdapter.delete_concept)
get_list_concepts = _on_pipe(EngramAdapter.get_list_concepts)
get_active_concepts = _on_pipe(EngramAdapter.get_active_concepts)
open_library = _on_pipe(EngramAdapter.open_library)
close_library = _on_pipe(EngramAdapter.close_library)
get_list_libraries = _on_pipe(EngramAdapter.get_list_libraries)
explain = _on_pipe(EngramAdapter.explain)
register = _on_pipe(EngramAdapter.register)
set_schedule = _on_pipe(EngramAdapter.set_schedule)
get_schedule = _on_pipe(EngramAdapter.get_schedule)
step_callback = _on_pipe(EngramAdapter.step_callback)
scheduled = _on_pipe(EngramAdapter.scheduled)
