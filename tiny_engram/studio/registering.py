"""What a trigger is worth, while it is typed: its tokens, where it fires and where not, what it collides with, and a better one.

May import errors, trigger_book, requests and the concept machinery. Nothing here waits for the pipeline.
"""

import random
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiny_engram.boundaries import REASONS, WORD_END, backend_of
from tiny_engram.errors import TinyEngramError
from tiny_engram.matching import TriggerIndex
from tiny_engram.registration import MOST_WORDS, NearMiss, close_spellings, near_miss
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.trigger_book import TriggerBook, plain_text
from tiny_engram.triggers import COMMON_WORDS, CompiledTrigger, text_window

if TYPE_CHECKING:
    from tiny_engram.studio.engine import Engine

__all__ = ["Chip", "Collision", "Place", "Registrar", "Report", "RoleTokens"]

MOST_TRIGGER = 120  # characters
MOST_ALIASES = 8
MANY_TOKENS = 8
MOST_CACHED = 256
# Sentences in which a trigger is tried, each "{}" once.
SENTENCES = (
    "a photo of {}",
    "{} on a table",
    "a {}, a red background",
    "the {}'s hat",
    '"{}" (close-up)',
    "a hat-{} in the snow",
)


@dataclass(frozen=True, slots=True)
class Chip:
    """One token: its text and id."""

    text: str
    id: int


@dataclass(frozen=True, slots=True)
class RoleTokens:
    """A trigger at one encoder: the tokens of each spelling (one entry per token sequence), and its text window (None: no limit)."""

    role: str
    spellings: tuple[tuple[str, tuple[Chip, ...]], ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A sentence with the trigger at characters `[start, end)`: does it fire there? `reason` is empty where it does."""

    text: str
    start: int
    end: int
    fires: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Collision:
    """A concept or draft that is in the way. `blocks`: it has the same tokens; else one trigger stands inside the other."""

    id: str
    name: str
    trigger: str
    draft: bool
    blocks: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What registering a trigger would mean.

    `problem` is one line where it cannot be registered (the rest is empty then), None otherwise; an empty trigger has neither problem nor
    anything else. `ready`: it can be registered, and nothing in the library has its tokens.
    """

    trigger: str
    aliases: tuple[str, ...]
    problem: str | None = None
    roles: tuple[RoleTokens, ...] = ()
    places: tuple[Place, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    collisions: tuple[Collision, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return bool(self.roles) and self.problem is None and not any(each.blocks for each in self.collisions)


class Registrar:
    """Reports and suggestions for one engine. Thread-safe."""

    def __init__(self, engine: "Engine") -> None:
        self._book: TriggerBook = engine.book
        self._library = engine.library
        self._cleaning = engine.cleaning
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[Any, ...], Report] = OrderedDict()
        self._words = {role: _whole_words(voice.tokenizer) for role, voice in self._book.voices.items()}
        self._listed = {role: "\n" + "\n".join(sorted(words | COMMON_WORDS)) + "\n" for role, words in self._words.items()}

    def report(self, trigger: str, aliases: Sequence[str] = (), *, own: str | None = None) -> Report:
        """What this trigger would mean; never raises for what a user may type.

        `own` is the id of the draft or concept that it belongs to, which does not collide with itself.
        """
        trigger, aliases = str(trigger or ""), tuple(str(alias) for alias in aliases if str(alias).strip())
        key = (trigger, aliases, own, self._library.version)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        made = self._report(trigger, aliases, own)
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > MOST_CACHED:
                self._cache.popitem(last=False)
        return made

    def check_alias(self, id: str, alias: str) -> tuple[str, ...]:
        """What speaks against one more spelling of a concept that the library has, in lines; what is taken is refused.

        Raises StudioError: a concept or draft other than `id` has its tokens, or it is too long. What cannot be a spelling at all the
        library refuses itself.
        """
        alias = " ".join(str(alias or "").split())
        _check_lengths(alias, (), called="alias")
        report = self.report(alias, own=id)
        taken = next((each for each in report.collisions if each.blocks), None)
        if taken is not None:
            kind = "draft" if taken.draft else "concept"
            raise StudioError(f"alias {alias!r} is taken: the {kind} {taken.name!r} {taken.reason}; choose another spelling")
        near = [f"{'draft' if each.draft else 'concept'} {each.name!r} {each.reason}" for each in report.collisions]
        return (*report.warnings, *near)

    def _report(self, trigger: str, aliases: tuple[str, ...], own: str | None) -> Report:
        if not trigger.strip():
            return Report("", aliases)
        try:
            _check_lengths(trigger, aliases)
            compiled = self._book.compile(trigger, aliases)
        except TinyEngramError as error:
            return Report(" ".join(trigger.split())[:MOST_TRIGGER], aliases[:MOST_ALIASES], " ".join(str(error).split()))
        first = next(iter(compiled.values()))
        return Report(
            first.text,
            first.aliases,
            None,
            tuple(self._tokens(role, each) for role, each in compiled.items()),
            tuple(self._place(sentence, compiled, first.text) for sentence in SENTENCES),
            tuple(self._near_misses(compiled)),
            tuple(self._collisions(compiled, first, own)),
            tuple(self._warnings(compiled, first)),
        )

    def _tokens(self, role: str, compiled: CompiledTrigger) -> RoleTokens:
        tokenizer = self._book.voices[role].tokenizer
        spellings = []
        for variant in compiled.variants:
            texts = tokenizer.convert_ids_to_tokens(list(variant.ids))
            spellings.append((variant.text, tuple(Chip(text, id) for text, id in zip(texts, variant.ids, strict=True))))
        return RoleTokens(role, tuple(spellings), text_window(tokenizer))

    # -- where it fires ------------------------------------------------------------------------------------------------------

    def _place(self, sentence: str, compiled: Mapping[str, CompiledTrigger], trigger: str) -> Place:
        start = sentence.index("{}")
        text = sentence.replace("{}", trigger)
        reasons = {role: self._why_not(role, each, text, start, start + len(trigger)) for role, each in compiled.items()}
        dead = {role: reason for role, reason in reasons.items() if reason}
        if not dead:
            return Place(text, start, start + len(trigger), True, "")
        where = "" if len(compiled) == 1 else f" (at {', '.join(dead)})"
        return Place(text, start, start + len(trigger), False, next(iter(dead.values())) + where)

    def _why_not(self, role: str, compiled: CompiledTrigger, text: str, low: int, high: int) -> str:
        """Empty if the trigger fires at these characters."""
        ids, offsets = self._book.encode(role, text)
        index = TriggerIndex(self._book.voices[role].edges)
        index.add("trigger", compiled)
        found = index.match([ids])
        spans = zip(found.start.tolist(), found.length.tolist(), strict=True)
        if any(low <= offsets[s + n - 1][1] and offsets[s][0] < high for s, n in spans):
            return ""
        blocked = index.near([ids])
        return REASONS[blocked[0].code] if blocked else "is read as other tokens there"

    def _near_misses(self, compiled: Mapping[str, CompiledTrigger]) -> list[NearMiss]:
        """Close spellings and words that hold the trigger, each really matched in a prompt; once, with the first encoder's reason."""
        found: dict[str, NearMiss] = {}
        for role, each in compiled.items():
            known = {spelling.lower() for spelling in each.spellings}
            index = TriggerIndex(self._book.voices[role].edges)
            index.add("trigger", each)
            for word in [*close_spellings(each.text), *self._words_around(role, each.text)]:
                if word.lower() in known or word in found:
                    continue
                ids, _ = self._book.encode(role, f"a photo of {word} on a table")
                found[word] = near_miss(word, ids, each, index)
        return list(found.values())

    def _words_around(self, role: str, trigger: str) -> list[str]:
        """Words of the vocabulary that hold the trigger, shortest first."""
        lowered = trigger.lower()
        if len(lowered) < 2 or lowered not in self._listed[role]:
            return []
        held = set(re.findall(rf"^[^\n]*{re.escape(lowered)}[^\n]*$", self._listed[role], re.MULTILINE))
        return sorted(held - {lowered, lowered + "s"}, key=lambda word: (len(word), word))[:MOST_WORDS]

    # -- what is in the way --------------------------------------------------------------------------------------------------

    def _collisions(self, compiled: Mapping[str, CompiledTrigger], first: CompiledTrigger, own: str | None) -> list[Collision]:
        known = self._book.known()
        found: dict[str, Collision] = {}
        for id, spelling in self._book.owners(compiled).items():
            each = known[id]
            found[id] = Collision(id, each.name, each.trigger, each.draft, True, f"has the tokens of {spelling!r} already")
        spellings = [f" {_words(spelling)} " for spelling in first.spellings]
        for id, each in known.items():
            for theirs in (f" {_words(spelling)} " for spelling in each.spellings):
                if id not in found and any(theirs in ours for ours in spellings):
                    reason = f"stands inside this one: where {first.text!r} is written, the longer one fires"
                    found[id] = Collision(id, each.name, each.trigger, each.draft, False, reason)
                elif id not in found and any(ours in theirs for ours in spellings):
                    reason = f"holds this one: where {each.trigger!r} is written, that one fires"
                    found[id] = Collision(id, each.name, each.trigger, each.draft, False, reason)
        return sorted((each for id, each in found.items() if id != own), key=lambda each: (not each.blocks, each.trigger))

    def _warnings(self, compiled: Mapping[str, CompiledTrigger], first: CompiledTrigger) -> list[str]:
        warnings = [warning for each in compiled.values() for warning in each.warnings]
        for role, each in compiled.items():
            longest = max(len(variant.ids) for variant in each.variants)
            window = text_window(self._book.voices[role].tokenizer)
            if longest > MANY_TOKENS:
                room = "" if window is None else f" of the {window} that fit in a prompt"
                warnings.append(f"{first.text!r} takes {longest} tokens{room}; a shorter one leaves more room and is easier to teach")
        for spelling in first.spellings:
            cleaned = self._cleaning(f"a photo of {spelling} on a table")
            if plain_text(spelling) not in plain_text(cleaned):
                warnings.append(f"{spelling!r} does not survive this pipeline's own cleaning of prompts ({cleaned!r} is left); use letters")
        return list(dict.fromkeys(warnings))

    # -- suggestions ---------------------------------------------------------------------------------------------------------

    def suggest(self, rng: random.Random | None = None) -> str:
        """A made-up word in two parts, pronounceable and rare: few tokens, no warning, nothing in the library with it or near it.

        Neither part is a word of the base's vocabulary. Raises StudioError if none was found, which takes a library of millions.
        """
        rng = rng or random.SystemRandom()
        taken = {part for each in self._book.known().values() for spelling in each.spellings for part in _words(spelling).split()}
        for _ in range(400):
            parts = [_made_up(rng), _made_up(rng)]
            if parts[0] == parts[1] or any(part in taken or self._is_word(part) for part in parts):
                continue
            candidate = "-".join(parts)
            try:
                compiled = self._book.compile(candidate)
            except TinyEngramError:
                continue
            few = all(len(variant.ids) <= 5 for each in compiled.values() for variant in each.variants)
            one = all(len(each.groups) == 1 for each in compiled.values())
            if few and one and not any(each.warnings for each in compiled.values()) and not self._book.owners(compiled):
                return candidate
        raise StudioError("no free trigger was found in 400 tries; type one of your own, such as two made-up words with a dash")

    def _is_word(self, part: str) -> bool:
        return any(part in words for words in self._words.values()) or part in COMMON_WORDS


def _words(text: str) -> str:
    """Lower case, everything that is no letter or digit taken for a space."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _whole_words(tokenizer: Any) -> set[str]:
    """Words in lower case that the vocabulary holds whole."""
    vocab = backend_of(tokenizer).get_vocab()
    marks = any(token.endswith(WORD_END) for token in vocab)
    whole = (token for token in vocab if not marks or token.endswith(WORD_END))
    words = (token.removesuffix(WORD_END).lstrip("\u2581\u0120").lower() for token in whole)
    return {word for word in words if len(word) > 1 and word.isascii() and word.isalpha()}


def _made_up(rng: random.Random) -> str:
    """Four or five letters: consonant, vowel, consonant, vowel and at times a consonant."""
    starts, middles, ends = "bdfgjklmnprstvwz", "bdfgklmnprtvxz", "bdfgklmnprtxz"
    word = rng.choice(starts) + rng.choice("aeiou") + rng.choice(middles) + rng.choice("aeiou")
    return word + rng.choice(ends) if rng.random() < 0.5 else word


def _check_lengths(trigger: str, aliases: Sequence[str], *, called: str = "trigger") -> None:
    """Before anything is computed. Raises StudioError."""
    for what, text in [(called, trigger), *(("alias", alias) for alias in aliases)]:
        if len(text) > MOST_TRIGGER:
            raise StudioError(f"{what} has {len(text)} characters, expected at most {MOST_TRIGGER}; a word or two is enough")
    if len(aliases) > MOST_ALIASES:
        raise StudioError(f"{len(aliases)} aliases, expected at most {MOST_ALIASES}; keep those that you will type")
