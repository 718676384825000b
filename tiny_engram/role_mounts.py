"""The mounts of one encoder role on a pipeline: what the family says of it, put together, and what a config asks for.

May import all that the adapter may.
"""

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tiny_engram.boundaries import EdgeTables, backend_of, special_ids
from tiny_engram.config import POOLED, SPAN, ConceptConfig
from tiny_engram.context_plan import ContextLayout, Reading
from tiny_engram.contexts import ContextMounts
from tiny_engram.deep_mounts import encoder_layers
from tiny_engram.encoded_positions import EncodedPositions
from tiny_engram.errors import TinyEngramError
from tiny_engram.fast_tokenizers import fast_tokenizer
from tiny_engram.hooks import MountError
from tiny_engram.mount_names import GROUPS, choose_maps, choose_mounts, context_name, every_mount, find_mounts
from tiny_engram.mounts import EncoderMounts
from tiny_engram.place_hooks import PlaceHooks
from tiny_engram.store import ConceptStore
from tiny_engram.templates import PromptTemplates
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import without_added_tokens

__all__ = ["asked_of", "maps_at", "mounts_at", "tokenizer_of", "vocabulary_of", "width_of"]

# Vocabularies that are kept: a pipeline has up to three tokenizers, and an app changes between a few pipelines.
KEPT = 8
_kept: dict[bytes, tuple[EdgeTables, CompressedTokenizer]] = {}
# by the tokenizer: to what is inside, older releases of tokenizers make no weak references
_seen: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[Any, ...], bytes]] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> tuple[EdgeTables, CompressedTokenizer]:
    """The tables of a fast tokenizer's vocabulary, made once for all tokenizers of the same content: half a second for CLIP's.

    Nobody writes to them. Tokens added to the tokenizer later are another content.
    """
    backend, pad = backend_of(tokenizer), tokenizer.pad_token_id
    state = pad, len(tokenizer), tuple(tokenizer.all_special_ids)
    seen = _seen.get(tokenizer)
    if seen is not None and seen[0] is backend and seen[1] == state and seen[2] in _kept:
        return _kept[seen[2]]  # the object that was asked for before, as it was: its description takes longer to write than all else
    # Before its tokens it says how the last call truncated and padded, which changes from call to call and says nothing of them.
    content = backend.to_str().split('"added_tokens"', 1)[-1]
    about = f"{sorted(special_ids(tokenizer))} {backend.padding if pad is None else pad} {content}"
    key = hashlib.sha256(about.encode()).digest()
    found = _kept.pop(key, None)
    if found is None:
        compressed = CompressedTokenizer(without_added_tokens(tokenizer), pad_id=pad)
        found = EdgeTables.of(tokenizer), compressed
    _kept[key] = found  # last: the one that was not asked for longest goes first
    _seen[tokenizer] = backend, state, key
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


def mounts_at(pipe: Any, family: Any, spec: Any, *, owner: Any, hooks: PlaceHooks) -> tuple[EncoderMounts, ContextMounts]:
    """What is hooked at one of the family's encoders, and its context mounts, with an empty store; no hook is registered yet.

    Args:
        spec: the `EncoderSpec`, whose encoder the pipeline has.
        owner: who the hooks belong to.
        hooks: of the pipeline's denoisers, for all roles.

    Raises:
        TinyEngramError: no fast tokenizer.
        MountError: attentions of a block that read different widths.
    """
    encoder, tokenizer = getattr(pipe, spec.encoder), tokenizer_of(pipe, spec)
    edges, compressed = vocabulary_of(tokenizer)
    width = width_of(encoder)
    attentions = _attentions_of(pipe, family, spec)
    first = next(iter(attentions.values()), ())
    readings = _readings(first)
    columns = None if family.projected or not first else _own_columns(pipe, family, spec.role, readings)
    layers = 0 if "deep" in family.refuses else len(encoder_layers(encoder))
    mounts = every_mount(tuple(readings), dict.fromkeys(attention.block for attention in first), layers=layers, pooled=spec.pooled)
    widths = _widths(mounts, first, readings) if family.projected else {}
    store = ConceptStore(edges, compressed, width=width, mounts=mounts, maps=maps_at(first), widths=widths)
    scheduler = pipe.scheduler
    norm = norm_of(encoder, spec.final_norm) if spec.final_norm else None
    special = special_ids(tokenizer)
    mount = EncoderMounts(
        encoder,
        store,
        role=spec.role,
        tokenizer=_own_tokenizer(pipe, spec),
        owner=owner,
        final_norm=norm,
        reads=spec.reads,
        pooled=spec.pooled,
        lower_case=spec.lower_case,
        templates=PromptTemplates(special, compressed.pad_id if not special else min(special)),
    )
    if family.projected:
        mount.encoded = EncodedPositions()
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

    def scheduled(timestep: float) -> float:
        return timestep if family.per_timestep is None else family.per_timestep(timestep, training_timesteps())

    parts = {each.encoder: weakref.ref(part) for each in family.encoders if (part := getattr(pipe, each.encoder, None)) is not None}

    def consumed(embeds: Mapping[str, Any]) -> Any:
        # Once the pipeline is gone, others may use its parts; what is read of a pipeline here is how wide they are.
        now = present() or SimpleNamespace(**{name: part() for name, part in parts.items()})
        return family.states(now, embeds)[spec.role]

    layout = ContextLayout(
        mounts,
        [attention.block for attention in first],
        training_timesteps=training_timesteps,
        readings=readings if family.projected else None,
        offset=spec.offset,
        columns=columns,
    )
    contexts = ContextMounts(
        mount,
        layout,
        places={name: family.contexts(denoiser, spec.role) for name, denoiser in family.present(pipe).items() if name in attentions},
        attentions=attentions,
        hooks=hooks,
        consumed=consumed,
        scheduled=scheduled,
        owner=owner,
    )
    return mount, contexts


def _attentions_of(pipe: Any, family: Any, spec: Any) -> dict[str, Sequence[Any]]:
    """The attentions that read the role's states, by the attribute of their denoiser: none where the family has no context mounts."""
    if family.attentions is None or spec.pooled or "context" in family.refuses:
        return {}
    return {name: family.attentions(denoiser, spec.role) for name, denoiser in family.present(pipe).items()}


def _readings(attentions: Sequence[Any]) -> dict[str, Reading]:
    """How text stands in what each place reads."""
    found: dict[str, Reading] = {}
    for i, attention in enumerate(attentions):
        for kind, attribute in (("key", attention.key), ("value", attention.value)):
            projection = getattr(attention.module, attribute)
            width = getattr(projection, "in_features", None) or projection.weight.shape[-1]
            found[f"context.{i}.{kind}"] = Reading(width, attention.offset, attention.tail)
    return found


def _own_columns(pipe: Any, family: Any, role: str, readings: Mapping[str, Reading]) -> tuple[int, int] | None:
    """(first, end) of the role's own states in the width of what the denoiser is given; None where all of it is."""
    (width,) = {reading.width for reading in readings.values()}
    numbered = torch.arange(width)[None, None]
    own = family.states(pipe, {"prompt_embeds": numbered})[role].flatten().tolist()
    return None if len(own) == width else (own[0], own[-1] + 1)


def _widths(mounts: Sequence[str], attentions: Sequence[Any], readings: Mapping[str, Reading]) -> dict[str, int]:
    """Width of what each context mount adds to, where the denoiser projects the states first.

    Raises:
        MountError: attentions of a block that read different widths: they could not share rows.
    """
    found: dict[str, int] = {}
    for mount in mounts:
        name = context_name(mount)
        if name is None:
            continue
        numbers = [i for i, attention in enumerate(attentions) if attention.block == name.where] if name.shared else [int(name.where)]
        widths = {readings[f"context.{i}.{name.kind}"].width for i in numbers}
        if len(widths) > 1:
            raise MountError(f"attentions of block {name.where} read widths {sorted(widths)}, expected one; they need blocks of their own")
        found[mount] = widths.pop()
    return found


def tokenizer_of(pipe: Any, spec: Any) -> Any:
    """The tokenizer of one of the family's encoders, a slow one as its fast twin: that of a processor, where the pipeline has one.

    Raises:
        TinyEngramError: there is none, or it is a slow one without a twin.
    """
    return fast_tokenizer(_own_tokenizer(pipe, spec))


def _own_tokenizer(pipe: Any, spec: Any) -> Any:
    found = getattr(pipe, spec.tokenizer, None)
    tokenizer = getattr(found, "tokenizer", found)
    if not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
        raise TinyEngramError(
            f"{spec.tokenizer} of {type(pipe).__name__} is {type(tokenizer).__name__}, expected a tokenizer of transformers, which tells "
            "where words lie; load the pipeline with one"
        )
    return tokenizer


def norm_of(encoder: Any, path: str) -> Any:
    """The module at a path inside an encoder, or inside the part of it that runs the layers: transformers moves that up and down.

    Raises:
        TinyEngramError: there is none, or several.
    """
    found = [module for name, module in encoder.named_modules() if name == path or name.endswith(f".{path}")]
    if len(found) != 1:
        raise TinyEngramError(
            f"{type(encoder).__name__} has {len(found)} modules {path!r}, expected one, which norms its last state; "
            "name it in the family's EncoderSpec(final_norm=...)"
        )
    return found[0]


def width_of(encoder: Any) -> int:
    """Width of a text encoder's states: of one of pictures and text, those of the text. Raises TinyEngramError if it does not say."""
    config: Any = getattr(encoder, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(config, "hidden_size", None)
    if width is None:
        raise TinyEngramError(
            f"{type(encoder).__name__} has no hidden_size in its config, expected a text encoder of transformers; "
            "does EncoderSpec(encoder=...) name the right attribute?"
        )
    return int(width)


def asked_of(
    config: ConceptConfig, mounts: Mapping[str, EncoderMounts], refuses: Mapping[str, str] | None = None
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, tuple[int, int]]]]:
    """What a config asks for, by role: names of mounts, and (rank, channels) of maps by name. A role may have nothing of it, as long as
    another has.

    refuses: mode -> why the family does not have it.

    Raises:
        TinyEngramError: no ConceptConfig; mounts or maps that the pipeline does not have; nothing at an encoder whose states are read.
    """
    if not isinstance(config, ConceptConfig):
        raise TinyEngramError(f"config is {str(config)[:60]!r}, expected a ConceptConfig such as ConceptConfig(mounts=('span',))")
    for mode, why in (refuses or {}).items():
        if any(one == mode or one.startswith(f"{mode}.") or mode == "context" and one in GROUPS for one in config.mounts):
            raise TinyEngramError(f"mounts {list(config.mounts)} ask for {mode!r}, which this pipeline does not have: {why}")
    groups = {"share": config.share, "bands": config.bands}
    chosen: dict[str, tuple[str, ...]] = dict.fromkeys(mounts, ())
    for one in config.mounts:
        found = {role: find_mounts(one, mount.store.mounts, **groups) for role, mount in mounts.items()}
        if not any(found.values()):
            role = next(iter(mounts))
            choose_mounts((one,), mounts[role].store.mounts, role=role, **groups)  # says what there is
        chosen = {role: (*chosen[role], *found[role]) for role in mounts}
    ordered = {role: tuple(m for m in mount.store.mounts if m in set(chosen[role])) for role, mount in mounts.items()}
    ranks = {"attention": config.attention_rank, "feedforward": config.feedforward_rank}
    able = {role: mount for role, mount in mounts.items() if mount.store.maps} or dict(list(mounts.items())[:1])
    maps = {role: choose_maps(mount.store.maps, role=role, **ranks) if role in able else {} for role, mount in mounts.items()}
    if bare := [role for role, mount in mounts.items() if not ordered[role] and not maps[role] and POOLED not in mount.store.mounts]:
        raise TinyEngramError(
            f"mounts {list(config.mounts)} ask for nothing at {', '.join(bare)}, expected rows or maps at every encoder whose states are "
            f"read; ask for {list(dict.fromkeys((SPAN, *config.mounts)))}"
        )
    return ordered, maps
