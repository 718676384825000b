"""Another set of aliases for a trained concept: which rows each spelling reads. May import concept, triggers and errors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tiny_engram.concept import Concept, RoleRows
from tiny_engram.studio.errors import StudioError
from tiny_engram.triggers import CompiledTrigger, RowGroup, clean_spelling

__all__ = ["renamed_alias", "without_alias"]


def without_alias(concept: Concept, alias: str, adapter: Any) -> Concept:
    """A copy that no longer fires on this alias. `adapter`: an EngramAdapter of the concept's base, which compiles.

    Raises StudioError: no such alias, or the concept is of another base.
    """
    _check_alias(concept, alias)
    kept = tuple(a for a in concept.aliases if a != alias)
    untrained = tuple(u for u in concept.untrained if u != alias)
    return _respelled(concept, kept, untrained, adapter, None)


def renamed_alias(concept: Concept, old: str, new: str, adapter: Any) -> Concept:
    """A copy with another spelling in place of an alias, marked untrained.

    It reads the alias's own rows where it takes as many tokens, else copies of the trigger's. Raises StudioError: no such alias, a
    spelling that the concept has already, or another base; TriggerError for a spelling that cannot fire.
    """
    _check_alias(concept, old)
    new = clean_spelling(new, "alias")
    if new in (concept.trigger, *concept.aliases):
        raise StudioError(f"{concept.name!r} has the spelling {new!r} already; choose another one")
    aliases = tuple(new if a == old else a for a in concept.aliases)
    untrained = tuple(u for u in concept.untrained if u != old)
    return _respelled(concept, aliases, (*untrained, new), adapter, old)


def _check_alias(concept: Concept, alias: str) -> None:
    if alias not in concept.aliases:
        known = ", ".join(map(repr, concept.aliases)) or "none"
        raise StudioError(f"{concept.name!r} has no alias {str(alias)[:80]!r}; its aliases: {known}")


def _respelled(concept: Concept, aliases: tuple[str, ...], untrained: tuple[str, ...], adapter: Any, old: str | None) -> Concept:
    before, after = adapter.compile(concept.trigger, concept.aliases), adapter.compile(concept.trigger, aliases)
    if set(before) != set(concept.roles):
        raise StudioError(
            f"{concept.name!r} is for encoders {sorted(concept.roles)}, this base has {sorted(before)}; "
            "open the Studio on the base it was made for"
        )
    for role, place in concept.roles.items():
        if (before[role].groups, before[role].variants) != (place.groups, place.variants):
            raise StudioError(
                f"{concept.name!r} is read as other tokens at {role} than this base reads; open the Studio on the base it was made for"
            )
    if old is not None:
        others = adapter.compile(concept.trigger, tuple(a for a in concept.aliases if a != old))
        if all({v.ids for v in others[role].variants} == {v.ids for v in after[role].variants} for role in concept.roles):
            raise StudioError(f"{untrained[-1]!r} has the token ids of a spelling that {concept.name!r} has already; no alias is needed")
    roles = {role: _reread(place, after[role], old) for role, place in concept.roles.items()}
    return dataclasses.replace(concept, aliases=aliases, untrained=untrained, roles=roles)


def _reread(place: RoleRows, now: CompiledTrigger, old: str | None) -> RoleRows:
    """The rows of each of the new groups: its own, else those of the alias that it replaces, else the trigger's."""
    at = torch.tensor([position for group in _sources(place, now, old) for position in group])
    mounts = {
        name: dataclasses.replace(
            rows,
            payload=rows.payload.view(torch.uint8)[at].view(rows.payload.dtype),  # torch indexes no float8 on some devices
            scale=rows.scale[at],
            gain=rows.gain[at],
            bias=rows.bias[at],
        )
        for name, rows in place.mounts.items()
    }
    return dataclasses.replace(place, groups=now.groups, variants=now.variants, mounts=mounts)


def _sources(place: RoleRows, now: CompiledTrigger, old: str | None) -> list[list[int]]:
    own: Mapping[tuple[int, ...], RowGroup] = {group.canonical: group for group in place.groups}
    kept = {group.canonical for group in now.groups}
    given_up = [g for g in place.groups if g.canonical not in kept and old is not None and g.text.lower() == old.lower()]
    fresh = [g for g in now.groups if g.canonical not in own]
    taken = {}
    if [len(g.canonical) for g in given_up] == [len(g.canonical) for g in fresh]:
        taken = {new.canonical: group for new, group in zip(fresh, given_up, strict=True)}
    last = len(place.groups[0].canonical) - 1
    sources = []
    for group in now.groups:
        source = own.get(group.canonical) or taken.get(group.canonical)
        count = len(group.canonical)
        sources.append([min(p, last) for p in range(count)] if source is None else [source.offset + p for p in range(count)])
    return sources
