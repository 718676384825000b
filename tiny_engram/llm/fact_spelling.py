"""A fact as text, and as the token ids that call it, ask it and answer it.

Imports numpy, triggers, tokenizer, boundaries and errors.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiny_engram.boundaries import EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import clean_spelling, encode_with_offsets, ordinary_words, sequences_of, special_ids

__all__ = ["Fact", "FactError", "Spelled", "Speller", "Text", "owner_number"]

# What may stand behind a trigger within the same word; the first token of it decides whether ids can tell.
_ENDINGS = ("s", "9")
MOST_TOKENS = 64


class FactError(TinyEngramError):
    """A fact that cannot be registered: the message gives its text, what is wrong and the way out."""


def owner_number(name: str | None) -> int:
    """The number of a user, 62 bits of a digest of the name; 0 is nobody's, whose facts everybody reads.

    Raises:
        FactError: no text.
    """
    if name is None:
        return 0
    if not isinstance(name, str) or not name:
        raise FactError(f"owner is {name!r}, expected a user's name, or None for everybody's facts")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2 | 1


@dataclass(frozen=True, slots=True)
class Fact:
    """What is to be said where a trigger was read.

    Args:
        trigger: the words at whose last token the fact's rows are read, such as "the capital of Zorbia".
        answer: what goes on behind the prompt, such as "Melk".
        prompt: a text with the trigger in it, behind which the answer stands, on the same line or, where it ends in a line break, on the
            next; None is the trigger itself.
        aliases: other spellings or paraphrases of the trigger, which stand in the prompt in its place.
        owner: the user who alone reads it; None for everybody.
    """

    trigger: str
    answer: str
    prompt: str | None = None
    aliases: tuple[str, ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.aliases, str):
            raise FactError(f"aliases is the text {self.aliases!r}, expected a list of spellings; write [{self.aliases!r}]")
        trigger = clean_spelling(self.trigger, "trigger")
        aliases = dict.fromkeys(clean_spelling(alias, "alias") for alias in self.aliases)
        object.__setattr__(self, "trigger", trigger)
        object.__setattr__(self, "aliases", tuple(alias for alias in aliases if alias != trigger))
        for name in ("answer", "prompt"):
            value = getattr(self, name)
            if name == "prompt" and value is None:
                continue
            if not isinstance(value, str) or not value.strip():
                raise FactError(f"{name} of {trigger!r} is {value!r}, expected text")
            # A prompt's lines are what a chat template is made of.
            lines = [" ".join(line.split()) for line in value.split("\n")]
            object.__setattr__(self, name, "\n".join(lines) if name == "prompt" else " ".join(filter(None, lines)))
        if self.prompt is not None and self.trigger.lower() not in self.prompt.lower():
            raise FactError(
                f"prompt {self.prompt!r} does not hold the trigger {trigger!r}: expected a text with it, such as '{trigger} is'"
            )
        owner_number(self.owner)

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.trigger, *self.aliases)

    def prompt_with(self, spelling: str) -> str:
        """The prompt with another spelling of the trigger in it; a sentence that began with a capital letter does so still."""
        if self.prompt is None:
            return spelling
        if spelling == self.trigger:
            return self.prompt  # as it was written, in whatever case
        at = self.prompt.lower().rindex(self.trigger.lower())
        if at == 0 and self.prompt[0].isupper() and spelling[0].islower():
            spelling = spelling[0].upper() + spelling[1:]
        return self.prompt[:at] + spelling + self.prompt[at + len(self.trigger) :]


@dataclass(frozen=True, slots=True)
class Text:
    """One text that a fact is taught in or asked by.

    Attributes:
        ids: raw ids of the prompt and what is to stand behind it.
        fires: place of the trigger's last token.
        answer: where the answer begins; it takes all the rest.
        form: "" for a text in the fact's own words; else what it asks in ("as a question"), which is taught if it can be.
    """

    ids: tuple[int, ...]
    fires: int
    answer: int
    form: str = ""


@dataclass(frozen=True, slots=True)
class Spelled:
    """A fact in token ids.

    Attributes:
        keys: raw id sequences that call it, those of the trigger first.
        canonical: canonical ids of the first of them, which give the rows their address.
        warnings: one line each.
    """

    fact: Fact
    keys: tuple[tuple[int, ...], ...]
    canonical: tuple[int, ...]
    warnings: tuple[str, ...]


class Speller:
    """One tokenizer, as facts read it."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises TokenizerError for a tokenizer without a fast backend."""
        pad = getattr(tokenizer, "pad_token_id", None)
        self.compressed = CompressedTokenizer(tokenizer, pad_id=pad if pad is not None else getattr(tokenizer, "eos_token_id", None))
        self.tokenizer = tokenizer
        self.edges = EdgeTables.of(tokenizer)
        self._special = special_ids(tokenizer)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Raw ids, without the tokens that begin and end a text, or with them."""
        return self.tokenizer(text, add_special_tokens=special).input_ids

    def spell(self, fact: Fact) -> Spelled:
        """The token sequences that call a fact.

        Raises:
            FactError: a spelling that no text of this tokenizer can hold, or too long a one.
        """
        keys: dict[tuple[int, ...], None] = {}
        warnings: list[str] = []
        for spelling in fact.spellings:
            found, fused = sequences_of(spelling, self.tokenizer)
            # A sentence may begin with it, or it with a name: the first letter's case changes alone.
            found |= sequences_of(spelling[0].swapcase() + spelling[1:], self.tokenizer)[0]
            if not found:
                raise FactError(f"trigger {spelling!r} fuses with its neighbours in every place; expected words that stand alone")
            if any(len(ids) > MOST_TOKENS for ids in found):
                raise FactError(
                    f"trigger {spelling!r} takes {max(map(len, found))} tokens, expected at most {MOST_TOKENS}; use a shorter one"
                )
            if any(i in self._special for ids in found for i in ids):
                raise FactError(f"trigger {spelling!r} holds what the tokenizer does not know, or a special token of it; use other words")
            if ordinary_words(spelling, self.tokenizer):
                warnings.append(
                    f"{spelling!r} is made of ordinary words and will fire in texts that mean the usual thing; name what it is about"
                )
            if fused:
                warnings.append(f"{spelling!r} does not stand alone in {fused[0]!r}: it will not fire there")
            longer = self._longer(spelling, set(found))
            if longer:
                warnings.append(f"{spelling!r} fires inside {longer!r}, too: what comes behind its last token is not known yet there")
            keys.update(dict.fromkeys(found))
        first = next(iter(keys))
        canonical = tuple(int(c) for c in np.asarray(self.compressed.compress(list(first))).reshape(-1))
        return Spelled(fact, tuple(keys), canonical, tuple(dict.fromkeys(warnings)))

    def _longer(self, spelling: str, keys: set[tuple[int, ...]]) -> str | None:
        """A longer word whose tokens begin with the trigger's, if one is found."""
        words = [spelling + ending for ending in _ENDINGS if ending.isdigit() == spelling[-1].isdigit()]
        for word, (ids, _) in zip(words, encode_with_offsets(self.tokenizer, [f"x {word}" for word in words]), strict=True):
            # Behind the "x", and behind a space where that is a token of its own.
            places = [(start, start + len(key), key) for start in (1, 2) for key in keys]
            if any(tuple(ids[start:stop]) == key and stop < len(ids) for start, stop, key in places):
                return word.split()[-1]
        return None

    def texts(self, fact: Fact, *, contexts: Sequence[str] = ("",), end: str = ".") -> list[Text]:
        """The fact in every spelling and context, with what begins a text for this tokenizer.

        Raises:
            FactError: the answer's first letters fuse with the prompt's last, or the trigger's with what stands behind it.
        """
        made = []
        for spelling in fact.spellings:
            prompt = fact.prompt_with(spelling)
            for context in contexts:
                front = context if not context or context.endswith(" ") else context + " "
                made.append(self.text(front + prompt, spelling, fact.answer, end=end))
        return made

    def text(self, prompt: str, spelling: str, answer: str, *, end: str = ".", special: bool = True, form: str = "") -> Text:
        """A prompt, whose last `spelling` fires, and the answer behind it.

        Args:
            special: with the tokens that begin a text; a chat template brings its own.

        Raises:
            FactError: the answer's first letters fuse with the prompt's last, or the trigger's with what stands behind it.
        """
        at = prompt.lower().rindex(spelling.lower()) + len(spelling)
        # Behind a line that is done the answer begins the next one, as in chat templates.
        between = "" if prompt.endswith("\n") else " "
        whole = f"{prompt}{between}{answer}" + ("" if not end or answer[-1] in ".!?" else end)
        ((ids, offsets),) = encode_with_offsets(self.tokenizer, [whole], special=special)
        fires = [k for k, (low, high) in enumerate(offsets) if low < at <= high]
        behind = [k for k, (low, high) in enumerate(offsets) if high > len(prompt)]
        # A character may take several tokens, of which the last one ends it.
        if not fires or offsets[fires[-1]][1] != at or offsets[behind[0]][0] < len(prompt):
            raise FactError(
                f"in {whole!r} the trigger or the answer shares a token with its neighbour; expected them apart; change the prompt"
            )
        stop = len(ids)
        while stop > behind[0] + 1 and offsets[stop - 1][0] == offsets[stop - 1][1]:  # what ends a text for some tokenizers
            stop -= 1
        return Text(tuple(ids[:stop]), fires[-1], behind[0], form)
