"""Does a mount reach the tensor that the pipeline consumes? Asked at attach with a throw-away concept.

May import the layers below adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tiny_engram.concept import Concept
from tiny_engram.config import INPUT, POOLED, SPAN
from tiny_engram.fired import Plan
from tiny_engram.hooks import MountError
from tiny_engram.mounts import EncoderMounts
from tiny_engram.triggers import compile_trigger

__all__ = ["probe", "prove"]

MOST_ON_CPU = 1_000_000_000
# The second has nothing in common with the first, so that what both begin and end with is the pipeline's own.
PROMPT, OTHER = "a photo of a cat on a table", "two green trees"
WORDS = (("cat", "green"), ("table", "trees"), ("photo", "two"))


def probe(pipe: Any, family: Any, mounts: Mapping[str, EncoderMounts]) -> None:
    """Encode two prompts without and with concepts on words of theirs, and compare what the denoiser would get.

    Encoders that are huge, or whose weights are elsewhere, are not run here: `prove` looks at their first prompts.

    Each role has words of its own, so that one encoding tells all of them apart. Learns the templates that the pipeline puts around
    prompts. Leaves no trace else: stores, call counts, modes and random state are as before.

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
        return {role: each for role, each in family.states(pipe, embeds).items() if role in mounts}

    dead: list[str] = []
    with _aside(mounts), torch.no_grad():
        # negative prompts may have another template than prompts
        with _learning_templates(mounts):
            plain = {role: [row.clone() for row in each] for role, each in states([PROMPT, OTHER]).items()}
        roles = list(mounts)
        for first in range(0, len(roles), len(WORDS)):
            probes = [_Probe(mounts[role], *words) for role, words in zip(roles[first:], WORDS, strict=False)]
            with ExitStack() as stack:
                for each in probes:
                    stack.enter_context(each.loaded())
                moved = states()
            dead += [wrong for each in probes for wrong in each.wrong(plain[each.role], moved[each.role])]
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


class _Probe:
    """A concept on a word of the first prompt with rows where the encoder's states are read, and one on a word of the second with rows at
    its token embeddings. Each role has words of its own: what moves tells whose concept moved it.
    """

    def __init__(self, mount: EncoderMounts, word: str, other: str) -> None:
        self.mount, self.role = mount, mount.role
        read = POOLED if POOLED in mount.store.mounts else SPAN
        self._words = {read: word} | ({INPUT: other} if INPUT in mount.store.mounts else {})
        self._fired: list[tuple[str, int, int, int]] = []

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, the concepts are all that the role has."""
        mount, empty = self.mount, self.mount.store
        mount.store, mount.on_fire = empty.empty(), self._note
        try:
            for at, word in self._words.items():
                compiled = compile_trigger(word, mount.tokenizer, compressed=empty.compressed)
                role = {self.role: compiled}
                concept = Concept.new(role, widths={self.role: empty.width}, fingerprints={self.role: ""}, mounts={self.role: (at,)})
                zero = concept.mount_rows(self.role, at)
                pattern = torch.cos(torch.arange(zero.payload.numel(), dtype=torch.float32) * 0.7).reshape(zero.payload.shape)
                rows = concept.with_rows(self.role, pattern, zero.gain, zero.bias, mount=at).mount_rows(self.role, at)
                mount.store.add(at, compiled, {at: rows}, concept.config)
            yield
        finally:
            mount.store, mount.on_fire = empty, None

    def _note(self, role: str, plan: Plan) -> None:
        self._fired.extend(plan.places)

    def wrong(self, plain: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]) -> list[str]:
        """What is wrong, in words: for each prompt states `[time, width]`, or a pooled vector `[width]`, without and with the concepts."""
        if min(len(plain), len(moved)) < 2:
            return [f"{self.role} (states of {min(len(plain), len(moved))} prompts, expected of 2)"]
        found = [self._differs(k, at, plain[k], moved[k]) for k, at in enumerate(self._words)]
        return [words for words in found if words]

    def _differs(self, prompt: int, at: str, plain: torch.Tensor, moved: torch.Tensor) -> str:
        where, word = self.role if at in (SPAN, POOLED) else f"{self.role} {at}", self._words[at]
        fired = [(start, length) for name, row, start, length in self._fired if name == at and row == prompt]
        if plain.dim() == 1:
            return "" if fired and bool((plain != moved).any()) else f"{where} (the pooled vector is the same)"
        changed = torch.nonzero((plain != moved).any(-1)).flatten().tolist()
        if len(fired) != 1:
            return f"{where} (changed positions {changed}; the word {word!r} of {(PROMPT, OTHER)[prompt]!r} was found {len(fired)} times)"
        start, length = fired[0]
        # A pipeline may cut off as many positions in front of a prompt as its template has.
        cut = self.mount.templates.longest
        if changed and changed == list(range(changed[0], changed[0] + length)) and start - cut <= changed[0] <= start:
            return ""
        return f"{where} (changed positions {changed}, expected {list(range(start, start + length))})"
