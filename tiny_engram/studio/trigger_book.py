"""Every trigger that the library holds, as each encoder sees it: what answers while a user types.

A drawing keeps the pipeline busy for seconds, and a tokenizer that two threads use at once fails. So the book has tokenizers of its own and
touches nothing else of the pipeline: what it says need not wait in the engine's queue. May import errors and the concept machinery.
"""

import copy
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tiny_engram.boundaries import EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.explanation import PromptExplanation, Unfired, explain_prompt
from tiny_engram.matching import TriggerIndex
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import CompiledTrigger, compile_trigger, encode_with_offsets

__all__ = ["TYPED", "Known", "TriggerBook", "Voice", "plain_text"]

TYPED = "typed"  # the id of a trigger that is in no library yet
IDLE, DRAFT = "not in use; press Use on its card in the Library", "a draft: nothing was taught yet"
SWITCHED_OFF = "strength is 0"
NOT_TAUGHT = "not taught yet; once it is, it fires here"


@dataclass(frozen=True, slots=True)
class Voice:
    """One encoder's vocabulary: a tokenizer of the book's own, and the tables made of it."""

    tokenizer: Any
    edges: EdgeTables
    compressed: CompressedTokenizer
    lower_case: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A concept or draft of the library, its trigger compiled by role."""

    id: str
    name: str
    trigger: str
    aliases: tuple[str, ...]
    draft: bool
    compiled: Mapping[str, CompiledTrigger]

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.trigger, *self.aliases)


def plain_text(text: str) -> str:
    """Lower case, white space collapsed: the form in which spellings are looked for in texts."""
    return " ".join(text.lower().split())


class TriggerBook:
    """The library's triggers, kept up to date with `library.version`. Thread-safe.

    Attributes:
        voices: role -> Voice.
    """

    def __init__(self, mounts: Mapping[str, Any], library: Any) -> None:
        self.voices: Mapping[str, Voice] = MappingProxyType(
            {
                role: Voice(copy.deepcopy(mount.tokenizer), mount.store.index.edges, mount.store.compressed, mount.lower_case)
                for role, mount in mounts.items()
            }
        )
        self._library = library
        self._lock = threading.RLock()
        self._version: object = None
        self._known: Mapping[str, Known] = MappingProxyType({})
        self._plain: dict[str, list[str]] = {}
        self._owners: dict[str, dict[tuple[int, ...], list[str]]] = {}
        self._lengths: dict[str, dict[int, set[int]]] = {}

    # -- what there is -------------------------------------------------------------------------------------------------------

    def compile(self, trigger: str, aliases: Sequence[str] = ()) -> dict[str, CompiledTrigger]:
        """As the adapter's. Raises TriggerError for one that cannot be registered."""
        with self._lock:
            return {
                role: compile_trigger(trigger, voice.tokenizer, aliases, compressed=voice.compressed, lower_case=voice.lower_case)
                for role, voice in self.voices.items()
            }

    def encode(self, role: str, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, begin and end included, and the characters of each; not truncated."""
        with self._lock:
            ((ids, offsets),) = encode_with_offsets(self.voices[role].tokenizer, [text], special=special)
            return ids, offsets

    def known(self) -> Mapping[str, Known]:
        """All concepts and drafts whose triggers this base can take, by id. The first call compiles them all (about 3 ms each)."""
        with self._lock:
            version = self._library.version
            if version != self._version:
                self._refresh()
                self._version = version
            return self._known

    def _refresh(self) -> None:
        """Read the library's cards; only triggers that are new are compiled."""
        found: dict[str, Known] = {}
        for card in self._cards():
            old = self._known.get(card.id)
            if old is not None and (old.trigger, old.aliases) == (card.trigger, card.aliases):
                compiled = old.compiled
            else:
                try:
                    compiled = self.compile(card.trigger, card.aliases)
                except TinyEngramError:
                    continue  # made for another base: nothing of it can fire here
            found[card.id] = Known(card.id, card.name, card.trigger, card.aliases, card.draft, compiled)
        self._known = MappingProxyType(found)
        self._plain, self._owners, self._lengths = {}, {role: {} for role in self.voices}, {role: {} for role in self.voices}
        for known in found.values():
            for spelling in known.spellings:
                self._plain.setdefault(plain_text(spelling), []).append(known.id)
            for role, compiled in known.compiled.items():
                for variant in compiled.variants:
                    self._owners[role].setdefault(variant.ids, []).append(known.id)
                    self._lengths[role].setdefault(variant.ids[0], set()).add(len(variant.ids))

    def _cards(self) -> list[Any]:
        """Concepts that can be read, and drafts."""
        return [card for card in self._library.cards() if card.error is None and card.trigger]

    # -- what stands in a text -----------------------------------------------------------------------------------------------

    def owners(self, compiled: Mapping[str, CompiledTrigger]) -> dict[str, str]:
        """Concepts and drafts that have one of these token sequences already: id -> the spelling in question."""
        with self._lock:
            self.known()
            return {
                owner: variant.text
                for role, trigger in compiled.items()
                for variant in trigger.variants
                for owner in self._owners[role].get(variant.ids, ())
            }

    def seen(self, text: str) -> list[str]:
        """Ids of all concepts and drafts that an explanation of this text could name: by token ids or by spelling, in any case."""
        with self._lock:
            known = self.known()
            plain = plain_text(text)
            found = {owner for spelling, owners in self._plain.items() if spelling in plain for owner in owners}
            for role in self.voices:
                ids, _ = self.encode(role, text)
                owners, lengths = self._owners[role], self._lengths[role]
                for start, first in enumerate(ids):
                    for length in lengths.get(first, ()):
                        found.update(owners.get(tuple(ids[start : start + length]), ()))
            return [each for each in known if each in found]

    def typed(self, trigger: str, aliases: Sequence[str] = ()) -> Known | None:
        """A trigger that somebody is typing, for `explain`; None for one that cannot be registered, or has the tokens of another."""
        try:
            compiled = self.compile(trigger, aliases)
        except TinyEngramError:
            return None
        first = next(iter(compiled.values()))
        known, same = self.known(), first.text.casefold()
        if any(not known[id].draft or known[id].trigger.casefold() != same for id in self.owners(compiled)):
            return None
        return Known(TYPED, first.text, first.text, first.aliases, True, compiled)

    def explain(
        self,
        prompt: str,
        negative_prompt: str | None,
        strengths: Mapping[str, float],
        *,
        loaded: Sequence[str] = (),
        typed: Known | None = None,
    ) -> tuple[PromptExplanation, ...]:
        """As the adapter's `explain` with these concepts at these strengths; names are ids of the library.

        Concepts and drafts outside `strengths` that stand in a text are listed as unfired; `loaded` ones differ in the reason. `typed`
        is listed as unfired too, in place of its own draft, and with its near misses.
        """
        with self._lock:
            known = self.known()
            hidden: set[str] = set()
            if typed is not None:
                hidden = {id for id, each in known.items() if each.draft and each.trigger.casefold() == typed.trigger.casefold()}
                known = {**known, typed.id: typed}
            found: list[PromptExplanation] = []
            for text, negative in [(prompt, False), *([(negative_prompt, True)] if negative_prompt else [])]:
                seen = [each for each in self.seen(text) if each not in hidden]
                seen += [] if typed is None else [typed.id]
                active = [each for each in seen if strengths.get(each, 0.0) != 0.0]
                off = [each for each in seen if each not in active]
                found += [self._explain(role, text, negative, active, off, strengths, known, loaded) for role in self.voices]
            return tuple(found)

    def _explain(
        self,
        role: str,
        text: str,
        negative: bool,
        active: Sequence[str],
        off: Sequence[str],
        strengths: Mapping[str, float],
        known: Mapping[str, Known],
        loaded: Sequence[str],
    ) -> PromptExplanation:
        voice = self.voices[role]
        index, taken = TriggerIndex(voice.edges), TriggerIndex(voice.edges)
        firing: dict[str, float] = {}
        silent: dict[str, tuple[CompiledTrigger, str]] = {}
        rivals: list[Unfired] = []
        for each in active:
            compiled = known[each].compiled[role]
            if taken_by := index.conflicts(compiled):
                rivals += self._taken(role, text, each, compiled, next(iter(taken_by)))
            else:
                index.add(each, compiled)
                taken.add(each, compiled)
                firing[each] = strengths[each]
        for each in off:
            compiled = known[each].compiled[role]
            # of several with one trigger, one is named: the one that fires, or the first
            if not taken.conflicts(compiled):
                taken.add(each, compiled)
                off_reason = NOT_TAUGHT if each == TYPED else DRAFT if known[each].draft else IDLE
                reason = SWITCHED_OFF if each in strengths or each in loaded else off_reason
                silent[each] = (compiled, reason)
        nothing = dict.fromkeys(firing, ())
        explained = explain_prompt(
            text,
            role=role,
            negative=negative,
            tokenizer=voice.tokenizer,
            index=index,
            strengths=firing,
            mounts=nothing,
            maps=nothing,
            silent=silent,
        )
        # of what is off only what would fire is worth a line: a library of a thousand has many near misses
        unfired = [u for u in explained.unfired if u.name not in silent or u.name == TYPED or u.reason == silent[u.name][1]]
        return dataclasses.replace(explained, unfired=tuple(sorted([*unfired, *rivals], key=lambda u: (u.start, u.name))))

    def _taken(self, role: str, text: str, id: str, compiled: CompiledTrigger, owner: str) -> list[Unfired]:
        """Where a concept would fire that cannot act beside `owner`, which has one of its spellings."""
        ids, offsets = self.encode(role, text)
        alone = TriggerIndex(self.voices[role].edges)
        alone.add(id, compiled)
        found = alone.match([ids])
        places = zip(found.start.tolist(), found.length.tolist(), strict=True)
        reason = f"its spelling is taken by {owner!r}; put one of the two away"
        return [Unfired(id, text[offsets[s][0] : offsets[s + n - 1][1]], s, reason) for s, n in places]
