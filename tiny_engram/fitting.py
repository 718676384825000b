"""Does a concept fit a pipeline's encoders, and can it take another spelling? May import triggers, concept,
context_plan, mount_names and mounts."""

import dataclasses
from collections.abc import Collection, Mapping

import torch

from tiny_engram.concept import Concept, RoleRows
from tiny_engram.context_plan import ContextLayout
from tiny_engram.errors import TinyEngramError
from tiny_engram.mount_names import mounts_in_words
from tiny_engram.mounts import EncoderMounts
from tiny_engram.triggers import CompiledTrigger, compile_trigger

__all__ = ["extend_concept", "fit_concept"]


def fit_concept(
    name: str,
    concept: Concept,
    mounts: Mapping[str, EncoderMounts],
    layouts: Mapping[str, ContextLayout],
    trigger: str | None = None,
    *,
    optional: Collection[str] = (),
) -> dict[str, CompiledTrigger]:
    """The concept's token sequences at every encoder that it has rows for, by role. `layouts` says, by role, what each place of the
    denoiser reads; at `optional` roles a concept may have nothing.

    Raises:
        TinyEngramError: another set of encoders, a sequence that a loaded concept has, two sets of rows that one place would read, or
            what `_fit_role` refuses.
    """
    missing, extra = set(mounts) - set(concept.roles) - set(optional), set(concept.roles) - set(mounts)
    if missing or extra:
        wrong = [f"no rows for {', '.join(sorted(missing))}"] if missing else []
        wrong += [f"rows for {', '.join(sorted(extra))}"] if extra else []
        raise TinyEngramError(
            f"concept {name!r} is for encoders {sorted(concept.roles)}, this pipeline has {sorted(mounts)}: it has {' and '.join(wrong)}; "
            "load it into the base it was made for"
        )
    mounts = {role: mount for role, mount in mounts.items() if role in concept.roles}
    compiled = {role: _fit_role(name, concept, mount, trigger) for role, mount in mounts.items()}
    for role in mounts:
        layout = layouts[role]
        clash = layout.clash(concept.roles[role].mounts)
        if clash is not None:
            place, one, other = clash
            raise TinyEngramError(
                f"concept {name!r} has rows at mounts {one!r} and {other!r} of {role}, which both add to what {place} reads; "
                "expected one of them; make the concept with either"
            )
    for role, mount in mounts.items():
        for owner, text in mount.store.index.conflicts(compiled[role]).items():
            raise TinyEngramError(
                f"trigger {text!r} of concept {name!r} is already registered by concept {owner!r}; "
                "unload that one, or load with trigger='another word'"
            )
    return compiled


def _fit_role(name: str, concept: Concept, mount: EncoderMounts, trigger: str | None) -> CompiledTrigger:
    """The concept's token sequences at one encoder, in the order of its rows.

    The trigger's text is tokenised again and compared with what the file says. `trigger` puts another text in its place, which
    must take as many tokens.

    Raises:
        TinyEngramError: another width, another tokenizer, mounts or maps that the pipeline has not, other sequences,
            a trigger of another length.
    """
    role = mount.role
    rows, store = concept.roles[role], mount.store
    if rows.width != store.width:
        raise TinyEngramError(
            f"concept {name!r} has width {rows.width} at {role}, expected {store.width}; load it into the base it was made for"
        )
    if rows.fingerprint != store.compressed.fingerprint:
        raise TinyEngramError(
            f"concept {name!r} was made with tokenizer {rows.fingerprint[:12]} at {role}, "
            f"expected {store.compressed.fingerprint[:12]}; load it into the base it was made for"
        )
    unknown = [m for m in rows.mounts if m not in store.mounts]
    if unknown:
        raise TinyEngramError(
            f"concept {name!r} has rows at mount {unknown[0]!r} of {role}, expected one of: {mounts_in_words(store.mounts)}; "
            "load it into the base it was made for"
        )
    for at in rows.mounts:
        if rows.width_at(at) != store.width_at(at):
            raise TinyEngramError(
                f"concept {name!r} has width {rows.width_at(at)} at mount {at!r} of {role}, expected {store.width_at(at)}; "
                "load it into the base it was made for"
            )
    for what, mapped in rows.maps.items():
        if store.maps.get(what) != mapped.channels:
            known = f"{store.maps[what]} channels there" if what in store.maps else f"one of: {', '.join(store.maps) or 'none'}"
            raise TinyEngramError(
                f"concept {name!r} has map {what!r} of {mapped.channels} channels at {role}, expected {known}; "
                "load it into the base it was made for"
            )
    about = {"compressed": store.compressed, "lower_case": mount.lower_case}
    if trigger is not None:
        return _renamed(name, rows, compile_trigger(trigger, mount.tokenizer, **about))
    now = compile_trigger(concept.trigger, mount.tokenizer, concept.aliases, **about)
    canonical = {v.ids: now.groups[v.group].canonical for v in now.variants}
    for variant in rows.variants:
        if canonical.get(variant.ids) != rows.groups[variant.group].canonical:
            raise TinyEngramError(
                f"concept {name!r}: the file says {variant.text!r} is {list(variant.ids)}, this tokenizer says "
                f"{[list(v.ids) for v in now.variants if v.text == variant.text]}; load it with the tokenizer version it was made with"
            )
    return CompiledTrigger(now.text, now.aliases, rows.variants, rows.groups, now.fused, now.warnings)


def _renamed(name: str, rows: RoleRows, compiled: CompiledTrigger) -> CompiledTrigger:
    """Another trigger on the rows of the concept's spellings."""
    lengths, expected = ([len(g.canonical) for g in groups] for groups in (compiled.groups, rows.groups))
    if lengths != expected:
        raise TinyEngramError(
            f"trigger {compiled.text!r} takes {lengths} tokens, expected {expected} as {rows.groups[0].text!r} of concept {name!r}; "
            "choose another word"
        )
    return compiled


def extend_concept(concept: Concept, alias: str, compiled: Mapping[str, CompiledTrigger]) -> Concept:
    """A copy of the concept with one more alias: position p of it reads what position p of the trigger reads (the last one beyond its end).

    `compiled` holds, per role, the trigger with all its aliases, the new one last.

    Raises:
        TinyEngramError: the concept has the spelling already, or its known spellings have other token ids here.
    """
    roles = dict(concept.roles)
    for role, place in concept.roles.items():
        now = compiled[role]
        count = len(place.groups)
        if now.groups[:count] != place.groups or now.variants[: len(place.variants)] != place.variants:
            raise TinyEngramError(
                f"concept {concept.name!r} has other token ids at {role} than this tokenizer gives; use the base it was made for"
            )
        if now.variants == place.variants:
            raise TinyEngramError(f"alias {alias!r} has the token ids of a spelling that {concept.name!r} has already; no alias is needed")
        last = len(place.groups[0].canonical) - 1
        extra = [min(p, last) for group in now.groups[count:] for p in range(len(group.canonical))]
        at = torch.tensor([*range(place.positions), *extra])
        mounts = {
            mount: dataclasses.replace(
                rows,
                payload=rows.payload.view(torch.uint8)[at].view(rows.payload.dtype),
                scale=rows.scale[at],
                gain=rows.gain[at],
                bias=rows.bias[at],
            )
            for mount, rows in place.mounts.items()
        }
        roles[role] = dataclasses.replace(place, groups=now.groups, variants=now.variants, mounts=mounts)
    aliases = next(iter(compiled.values())).aliases
    return dataclasses.replace(concept, aliases=aliases, roles=roles, untrained=(*concept.untrained, aliases[-1]))
