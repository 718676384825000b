"""The mounts of one encoder role on a pipeline: what the family says of it, put together. May import all that the adapter may."""

from collections.abc import Callable
from typing import Any

from tiny_engram.boundaries import EdgeTables
from tiny_engram.config import SPAN
from tiny_engram.contexts import ContextMounts
from tiny_engram.mounts import SpanMount
from tiny_engram.store import ConceptStore
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import without_added_tokens

__all__ = ["mounts_at"]


def mounts_at(pipe: Any, family: Any, spec: Any, *, denoiser: Callable[[], Any], owner: Any) -> tuple[SpanMount, ContextMounts]:
    """The span mount and the context mounts of one of the family's encoders, with an empty store; no hook is registered yet.

    Args:
        spec: the `EncoderSpec`, whose encoder the pipeline has.
        denoiser: gives the denoiser that the pipeline has at any later time.
        owner: who the hooks belong to.
    """
    encoder, tokenizer = getattr(pipe, spec.encoder), getattr(pipe, spec.tokenizer)
    compressed = CompressedTokenizer(without_added_tokens(tokenizer), pad_id=tokenizer.pad_token_id)
    width = encoder.config.hidden_size
    places = family.contexts(getattr(pipe, family.denoiser), spec.role)
    if any(getattr(getattr(module, attribute), "in_features", width) != width for module, attribute in places.values()):
        places = {}  # the denoiser projects the states before its attentions read them
    store = ConceptStore(EdgeTables.of(tokenizer), compressed, width=width, mounts=(SPAN, *places))
    norm = encoder.get_submodule(spec.final_norm) if spec.final_norm else None
    mount = SpanMount(encoder, store, role=spec.role, tokenizer=tokenizer, owner=owner, final_norm=norm)
    return mount, ContextMounts(places, mount, denoiser=denoiser, owner=owner)
