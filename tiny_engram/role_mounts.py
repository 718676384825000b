"""The mounts of one encoder role on a pipeline: what the family says of it, put together, and what a config asks for.

May import all that the adapter may.
"""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiny_engram.boundaries import EdgeTables, backend_of, special_ids
from tiny_engram.config import ConceptConfig
from tiny_engram.contexts import ContextMounts
from tiny_engram.hooks import MountError
from tiny_engram.mount_names import choose_maps, choose_mounts, every_mount
from tiny_engram.mounts import EncoderMounts
from tiny_engram.store import ConceptStore
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import without_added_tokens

__all__ = ["asked_of", "maps_at", "mounts_at", "vocabulary_of"]

# Vocabularies that are kept: a pipeline has up to three tokenizers, and an app changes between a few pipelines.
KEPT = 8
_kept: dict[bytes, tuple[EdgeTables, CompressedTokenizer]] = {}


def vocabulary_of(tokenizer: Any) -> tuple[EdgeTables, CompressedTokenizer]:
    """The tables of a fast tokenizer's vocabulary, made once for all tokenizers of the same content: half a second for CLIP's.

    Nobody writes to them. Tokens added to the tokenizer later are another content.
    """
    backend, pad = backend_of(tokenizer), tokenizer.pad_token_id
    # Before its tokens it says how the last call truncated and padded, which changes from call to call and says nothing of them.
    content = backend.to_str().split('"added_tokens"', 1)[-1]
    about = f"{sorted(special_ids(tokenizer))} {backend.padding if pad is None else pad} {content}"
    key = hashlib.sha256(about.encode()).digest()
    found = _kept.pop(key, None)
    if found is None:
        compressed = CompressedTokenizer(without_added_tokens(tokenizer), pad_id=pad)
        found = EdgeTables.of(tokenizer), compressed
    _kept[key] = found  # last: the one that was not asked for longest goes first
    for old in list(_kept)[:-KEPT]:
        _kept.pop(old, None)
    return found


def maps_at(attentions: Sequence[Any]) -> dict[str, int]:
    """The maps that a denoiser with these `Attention`s can have: name -> channels."""
    found: dict[str, int] = {}
    for i, attention in enumerate(attentions):
        if attention.channels is not None:
            found[f"attention.{i}"] = attention.channels
            if attention.feedforward is not None:
                found[f"feedforward.{i}"] = attention.channels
    return found


def mounts_at(pipe: Any, family: Any, spec: Any, *, denoiser: Callable[[], Any], owner: Any) -> tuple[EncoderMounts, ContextMounts]:
    """The span mount and the context mounts of one of the family's encoders, with an empty store; no hook is registered yet.

    Args:
        spec: the `EncoderSpec`, whose encoder the pipeline has.
        denoiser: gives the denoiser that the pipeline has at any later time.
        owner: who the hooks belong to.
    """
    encoder, tokenizer = getattr(pipe, spec.encoder), getattr(pipe, spec.tokenizer)
    edges, compressed = vocabulary_of(tokenizer)
    width, net = encoder.config.hidden_size, getattr(pipe, family.denoiser)
    attentions, places = family.attentions(net, spec.role), family.contexts(net, spec.role)
    if any(getattr(getattr(module, attribute), "in_features", width) != width for module, attribute in places.values()):
        attentions, places = (), {}  # the denoiser projects the states before its attentions read them
    mounts = every_mount(tuple(places), dict.fromkeys(attention.block for attention in attentions))
    store = ConceptStore(edges, compressed, width=width, mounts=mounts, maps=maps_at(attentions))
    scheduler = pipe.scheduler
    norm = encoder.get_submodule(spec.final_norm) if spec.final_norm else None
    mount = EncoderMounts(encoder, store, role=spec.role, tokenizer=tokenizer, owner=owner, final_norm=norm, reads=spec.reads)
    present = weakref.ref(pipe)

    def training_timesteps() -> int:
        # A pipeline that lent its parts to another and is gone had the scheduler that its models were trained with.
        now = getattr(present(), "scheduler", scheduler)
        number = getattr(getattr(now, "config", None), "num_train_timesteps", None)
        if not isinstance(number, int | float) or number < 1:
            raise MountError(
                f"{type(now).__name__} says num_train_timesteps {number!r}, expected how many its model was trained with, so the band of a "
                "concept's rows is unknown; use another scheduler, or disable_concepts()"
            )
        return int(number)

    contexts = ContextMounts(places, mount, attentions=attentions, denoiser=denoiser, training_timesteps=training_timesteps, owner=owner)
    return mount, contexts


def asked_of(
    config: ConceptConfig, mounts: Mapping[str, EncoderMounts]
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, tuple[int, int]]]]:
    """What a config asks for, by role: names of mounts, and (rank, channels) of maps by name.

    Raises:
        TinyEngramError: mounts or maps that the pipeline does not have.
    """
    ranks = {"attention": config.attention_rank, "feedforward": config.feedforward_rank}
    chosen = {
        role: choose_mounts(config.mounts, mount.store.mounts, role=role, share=config.share, bands=config.bands)
        for role, mount in mounts.items()
    }
    return chosen, {role: choose_maps(mount.store.maps, role=role, **ranks) for role, mount in mounts.items()}
