"""Does a mount reach the tensor that the pipeline consumes? Asked at attach with a throw-away concept.

May import the layers below adapter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tiny_engram.concept import Concept
from tiny_engram.config import INPUT, POOLED, SPAN
from tiny_engram.hooks import MountError
from tiny_engram.mounts import EncoderMounts
from tiny_engram.store import Plan
from tiny_engram.triggers import CompiledTrigger, compile_trigger

__all__ = ["probe", "prove"]

MOST_ON_CPU = 1_000_000_000
# The second has nothing in common with the first, so that what both begin and end with is the pipeline's own.
WORD, PROMPT, OTHER = "cat", "a photo of a cat on a table", "two green trees"


def probe(pipe: Any, family: Any, mounts: Mapping[str, EncoderMounts]) -> None:
    """Encode two prompts without and with a concept on the word "cat" of the first, and compare what the denoiser would get.

    Encoders that are huge, or whose weights are elsewhere, are not run here: `prove` looks at their first prompts.

    Each role is probed alone, then all of them at their token embeddings. Learns the templates that the pipeline puts around prompts.
    Leaves no trace else: stores, call counts, modes and random state are as before.

    Raises:
        MountError: the consumed states do not move at the span, or move elsewhere; names the roles.
    """

    shorter = {} if family.probe_length is None else {"max_sequence_length": family.probe_length}
    if any(_costly(mount.module) for mount in mounts.values()):
        with _aside(mounts), _learning_templates(mounts, stop=True):
            family.embeds(pipe, [PROMPT, OTHER], **shorter)
        for mount in mounts.values():
            mount.proof = None if POOLED in mount.store.mounts else []
        return

    def states(negative: list[str] | None = None) -> dict[str, Any]:
        embeds = family.embeds(pipe, [PROMPT, OTHER], negative, **shorter)
        return {role: each[0] for role, each in family.states(pipe, embeds).items() if role in mounts}

    compiled = {role: compile_trigger(WORD, mount.tokenizer, compressed=mount.store.compressed) for role, mount in mounts.items()}
    dead: list[str] = []
    with _aside(mounts), torch.no_grad():
        # negative prompts may have another template than prompts
        with _learning_templates(mounts):
            plain = {role: each.clone() for role, each in states([PROMPT, OTHER]).items()}
        for role, mount in mounts.items():
            at = POOLED if POOLED in mount.store.mounts else SPAN
            with _probing(mount, compiled[role], at) as fired:
                moved = states()[role]
            dead += _differs(role, plain[role], moved, fired, at, mount.templates.longest)
        inputs = {role: _probing(mount, compiled[role], INPUT) for role, mount in mounts.items() if INPUT in mount.store.mounts}
        fired = {role: one.__enter__() for role, one in inputs.items()}
        moved = states()
        for role, one in inputs.items():
            one.__exit__(None, None, None)
            dead += _differs(role, plain[role], moved[role], fired[role], INPUT, mounts[role].templates.longest)
    if dead:
        raise MountError(
            f"what {type(pipe).__name__} consumes does not follow the concepts at: {'; '.join(dead)}; "
            "is an encoder wrapped, compiled or replaced? attach to the plain pipeline first"
        )


def _costly(encoder: torch.nn.Module) -> bool:
    """Would a few prompts through this encoder take long, as billions of values on a CPU do, or weights that are fetched for each call?"""
    parameters = list(encoder.parameters())
    on_cpu = sum(p.numel() for p in parameters if p.device.type == "cpu")
    return on_cpu > MOST_ON_CPU or any(p.device.type == "meta" for p in parameters)


def prove(mount: EncoderMounts, states: Any) -> None:
    """For an encoder that was not probed, at the denoiser: are states that fired among those `[batch, time, width]` (or a list of `[time,
    width]`) that it is given? Seen once, it is known; two calls in vain are an error, since one may be for the negative prompt alone.

    Raises:
        MountError: they are not.
    """
    if not mount.proof:
        return
    rows = [row for row in states if isinstance(row, torch.Tensor)]
    for row in rows:
        own = row.detach()[..., -mount.store.width :]
        if any(bool((own == one.to(own)).all(-1).any()) for one in mount.proof):
            mount.proof = None
            return
    mount.unseen += 1
    if mount.unseen > 1:
        mount.unseen = 0
        raise MountError(
            f"what the denoiser is given does not hold the concepts of role {mount.role!r}, although they fired in its encoder; "
            "is the encoder wrapped or replaced, or does the pipeline read something else of it? describe its family (docs/pipelines.md)"
        )


@contextmanager
def _aside(mounts: Mapping[str, EncoderMounts]) -> Iterator[None]:
    """Inside, encoders are in evaluation mode and no concept is loaded; then all is as before."""
    kept = {role: (m.store, m.module.training, m.calls, m.prompts, m.seconds, m.on_fire, m.on_ids) for role, m in mounts.items()}
    try:
        for m in mounts.values():
            m.store, m.on_fire = m.store.empty(), None
            m.module.eval()
        yield
    finally:
        for role, m in mounts.items():
            m.store, training, m.calls, m.prompts, m.seconds, m.on_fire, m.on_ids = kept[role]
            m.module.train(training)


class _Heard(Exception):
    """Enough was heard: the encoder need not run."""


@contextmanager
def _learning_templates(mounts: Mapping[str, EncoderMounts], *, stop: bool = False) -> Iterator[None]:
    """What pipelines put around the two prompts that are encoded inside, one behind the other; with `stop`, no encoder runs, and what
    the first one would be given is all that is learnt."""
    heard: dict[str, list[list[int]]] = {role: [] for role in mounts}

    def note(role: str, ids: torch.Tensor) -> None:
        heard[role].extend(ids.reshape(-1, ids.shape[-1]).tolist())
        if stop:
            raise _Heard

    for role, mount in mounts.items():
        mount.on_ids = partial(note, role)
    try:
        yield
    except _Heard:
        pass
    finally:
        for mount in mounts.values():
            mount.on_ids = None
    for role, rows in heard.items():
        for one, other in zip(rows[::2], rows[1::2], strict=False):
            mounts[role].templates.learn(one, other)


@contextmanager
def _probing(mount: EncoderMounts, compiled: CompiledTrigger, at: str) -> Iterator[list[tuple[int, int]]]:
    """Inside, a concept on the word has rows at one mount; gives (start, length) of each span that fired."""
    fired: list[tuple[int, int]] = []

    def note(role: str, plan: Plan) -> None:
        fired.extend((start, length) for _, _, start, length in plan.places)

    empty = mount.store
    mount.store, mount.on_fire = empty.empty(), note
    try:
        role = mount.role
        concept = Concept.new({role: compiled}, widths={role: empty.width}, fingerprints={role: ""}, mounts={role: (at,)})
        zero = concept.mount_rows(role, at)
        pattern = torch.cos(torch.arange(zero.payload.numel(), dtype=torch.float32) * 0.7).reshape(zero.payload.shape)
        rows = concept.with_rows(role, pattern, zero.gain, zero.bias, mount=at).mount_rows(role, at)
        mount.store.add("probe", compiled, {at: rows}, concept.config)
        yield fired
    finally:
        mount.store, mount.on_fire = empty, None


def _differs(role: str, plain: torch.Tensor, moved: torch.Tensor, fired: list[tuple[int, int]], at: str, cut: int) -> list[str]:
    """What is wrong at one mount, in words: states `[time, width]`, or a pooled vector `[width]`, without and with the concept.

    cut: how many positions in front of a prompt a pipeline may cut off: those of a template.
    """
    where = role if at in (SPAN, POOLED) else f"{role} {at}"
    if plain.dim() == 1:
        return [] if fired and bool((plain != moved).any()) else [f"{where} (the pooled vector is the same)"]
    changed = torch.nonzero((plain != moved).any(-1)).flatten().tolist()
    if len(fired) != 1:
        return [f"{where} (changed positions {changed}; the word {WORD!r} of {PROMPT!r} was found {len(fired)} times)"]
    start, length = fired[0]
    if changed and changed == list(range(changed[0], changed[0] + length)) and start - cut <= changed[0] <= start:
        return []
    return [f"{where} (changed positions {changed}, expected {list(range(start, start + length))})"]
