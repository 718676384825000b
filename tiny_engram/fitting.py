"""Does a concept fit a pipeline's encoder? Checked before anything is loaded. May import triggers, concept and mounts."""

from tiny_engram.concept import Concept, RoleRows
from tiny_engram.errors import TinyEngramError
from tiny_engram.mounts import SpanMount
from tiny_engram.triggers import CompiledTrigger, compile_trigger

__all__ = ["fit_trigger"]


def fit_trigger(name: str, concept: Concept, mount: SpanMount, trigger: str | None) -> CompiledTrigger:
    """The concept's token sequences at one encoder, in the order of its rows.

    The trigger's text is tokenised again and compared with what the file says. `trigger` puts another text in its place, which
    must take as many tokens.

    Raises:
        TinyEngramError: another width, another tokenizer, other sequences, a trigger of another length.
    """
    rows, store = concept.roles[mount.role], mount.store
    if rows.width != store.width:
        raise TinyEngramError(
            f"concept {name!r} has width {rows.width} at {mount.role}, expected {store.width}; load it into the base it was made for"
        )
    if rows.fingerprint != store.compressed.fingerprint:
        raise TinyEngramError(
            f"concept {name!r} was made with tokenizer {rows.fingerprint[:12]} at {mount.role}, "
            f"expected {store.compressed.fingerprint[:12]}; load it into the base it was made for"
        )
    if trigger is not None:
        return _renamed(name, rows, compile_trigger(trigger, mount.tokenizer, compressed=store.compressed))
    now = compile_trigger(concept.trigger, mount.tokenizer, concept.aliases, compressed=store.compressed)
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
