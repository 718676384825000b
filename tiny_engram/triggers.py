"""From a trigger's text to the token sequences it takes in running text, for one tokenizer.

A trigger is tokenised inside whole strings (at the start, after a space, a quote or a bracket, before punctuation, in other
cases), never alone, since BPE and sentencepiece treat those places differently. Tokens that straddle the trigger's edge mean that
it does not stand alone there: such places are kept for the report. May import errors, tokenizer and boundaries.
"""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tiny_engram.boundaries import DIGIT, PUNCTUATION, UNDERSCORE, WORD_END, WORD_START, backend_of, class_of_char, special_ids
from tiny_engram.errors import TinyEngramError
from tiny_engram.tokenizer import CompressedTokenizer

__all__ = [
    "CompiledTrigger",
    "RowGroup",
    "TriggerError",
    "Variant",
    "compile_trigger",
    "encode_with_offsets",
    "text_window",
    "without_added_tokens",
]

BEFORE = ("", "x ", 'x "', "x '", "x (", "x [", "x,", "x \u201c", "x \u2018")
AFTER = ("", " x", ".", ",", "!", "?", ";", ":", "'", '"', "'s", ")", "]", "\u201d", "\u2019s")
# Ids below this in CLIP's vocabulary come from its most frequent merges.
FREQUENT_CLIP_IDS = 30_000
_ORDINARY = """
a an and are art as at background big black blue bright cat city color colour cute dark day dog drawing face fire flower food for from
girl gold good green hand head high home house image in is it landscape large life light line little look love man moon mountain movie
music new next night no not of old on one or orange painting paper person photo picture pink portrait purple red river room round sea
shape sketch sky small snow state style sun the thing this to toy tree two up water white with woman wood word work world yellow young
"""
COMMON_WORDS = frozenset(_ORDINARY.split())


class TriggerError(TinyEngramError):
    """A trigger that cannot be registered: the message gives its text, what is wrong and the way out."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Token sequences that share rows: one spelling, its canonical ids, and where its positions start among the concept's rows."""

    text: str
    canonical: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One raw id sequence that the trigger takes, the spelling that gave it, and the index of the group whose rows it reads."""

    ids: tuple[int, ...]
    text: str
    group: int


@dataclass(frozen=True, slots=True)
class CompiledTrigger:
    """A trigger as one tokenizer sees it.

    `variants` hold raw ids, `groups` the rows they read; `positions` counts all span positions that own rows (sum of the
    groups' lengths). `fused` lists example strings in which the trigger does not stand alone; `warnings` are one-line texts.
    """

    text: str
    aliases: tuple[str, ...]
    variants: tuple[Variant, ...]
    groups: tuple[RowGroup, ...]
    fused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def positions(self) -> int:
        return sum(len(group.canonical) for group in self.groups)

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.text, *self.aliases)


def encode_with_offsets(tokenizer: Any, texts: Sequence[str], *, special: bool = False) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Token ids and character offsets of each text, not truncated, not padded.

    `tokenizer` is a Hugging Face fast tokenizer or a `tokenizers.Tokenizer` (one without truncation and padding set).
    """
    if hasattr(tokenizer, "backend_tokenizer"):
        out = tokenizer(list(texts), add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        return list(zip(out["input_ids"], out["offset_mapping"], strict=True))
    return [(e.ids, e.offsets) for e in tokenizer.encode_batch(list(texts), add_special_tokens=special)]


def without_added_tokens(tokenizer: Any) -> Tokenizer:
    """The backend without tokens that a user added (textual inversion): what identifies the base, and numbers canonical ids.

    Only ids above the model's own vocabulary count as added by a user.
    """
    backend = backend_of(tokenizer)
    own = backend.get_vocab_size(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    strangers = {token.content for i, token in added.items() if i >= own and not token.special}
    if not strangers:
        return backend
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in strangers]
    return Tokenizer.from_str(json.dumps(described))


def tokens_in(
    text: str, start: int, end: int, ids: Sequence[int], offsets: Sequence[tuple[int, int]], bare_mark: int | None
) -> tuple[int, int] | None:
    """The token range `[first, last)` that covers exactly characters `[start, end)`, or None if a token straddles an edge."""
    inside: list[int] = []
    for k, (low, high) in enumerate(offsets):
        while low < high and text[low].isspace():
            low += 1
        while high > low and text[high - 1].isspace():
            high -= 1
        if low == high and inside and offsets[k][0] < offsets[k][1] < end:
            inside.append(k)  # a space between two words that is a token of its own, as some have it in front of a digit
            continue
        if low == high or high <= start or low >= end:
            continue
        if ids[k] == bare_mark and not inside:
            continue
        if low < start or high > end:
            return None
        inside.append(k)
    if not inside or inside[-1] - inside[0] + 1 != len(inside):
        return None
    return inside[0], inside[-1] + 1


def case_forms(text: str) -> tuple[str, ...]:
    """The text as typed, lower, UPPER, Title and Sentence case, where the case can be undone."""
    forms = (text, text.lower(), text.upper(), text.title(), text.capitalize())
    return tuple(dict.fromkeys(f for f in forms if f.lower() == text.lower()))


def clean_spelling(text: object, what: str) -> str:
    """The spelling without outer white space, inner runs collapsed; refuses what no prompt could hold."""
    if not isinstance(text, str):
        raise TriggerError(f"{what} is {text!r}, expected text; give the words that will stand in prompts")
    clean = " ".join(text.split())
    if not clean:
        raise TriggerError(f"{what} {text!r} is empty; expected at least one letter or digit, such as 'sks' or 'my_dog'")
    ordinary = [c for c in clean if unicodedata.category(c)[0] not in "PZC" and not (c.isascii() and not c.isalnum())]
    if not ordinary:
        raise TriggerError(f"{what} {text!r} is all punctuation; expected at least one letter or digit, such as 'sks' or 'my_dog'")
    return clean


def text_window(tokenizer: Any) -> int | None:
    """How many tokens of a prompt an encoder reads, begin and end tokens apart; None if the tokenizer sets no limit."""
    limit = getattr(tokenizer, "model_max_length", None)
    if not isinstance(limit, int) or limit > 1_000_000:
        return None
    return limit - tokenizer.num_special_tokens_to_add(pair=False)


def sequences_of(spelling: str, tokenizer: Any, *, lower_case: bool = False) -> tuple[dict[tuple[int, ...], str], list[str]]:
    """Distinct raw id sequences of one spelling (-> the case form that gave it), and the strings where it does not stand alone.

    lower_case: the tokenizer is given nothing else, so that it need not be known in other cases.
    """
    backend = backend_of(tokenizer)
    bare_mark = backend.token_to_id(WORD_START)
    contexts = [(before, " x") for before in BEFORE] + [("x ", after) for after in AFTER if after != " x"]
    forms = (spelling.lower(),) if lower_case else case_forms(spelling)
    places = [(before + form + after, len(before), len(form), form) for form in forms for before, after in contexts]
    found: dict[tuple[int, ...], str] = {}
    fused: list[str] = []
    for (text, start, length, form), (ids, offsets) in zip(places, encode_with_offsets(tokenizer, [p[0] for p in places]), strict=True):
        span = tokens_in(text, start, start + length, ids, offsets, bare_mark)
        if span is None:
            fused.append(text)
        else:
            found.setdefault(tuple(ids[span[0] : span[1]]), form)
    return found, fused


def ordinary_words(text: str, tokenizer: Any) -> bool:
    """Is every word of the text one that ordinary prompts hold (a short built-in list, and CLIP's most frequent tokens)?"""
    words = text.lower().replace("-", " ").replace("_", " ").split()
    vocab = backend_of(tokenizer)

    def ordinary(word: str) -> bool:
        rank = vocab.token_to_id(word + WORD_END)
        return word in COMMON_WORDS or (word.isalpha() and rank is not None and 512 <= rank < FREQUENT_CLIP_IDS)

    return bool(words) and all(ordinary(word) for word in words)


def spelling_warnings(spelling: str, tokenizer: Any) -> list[str]:
    """One line for each reason why this spelling will fire too often or too rarely."""
    warnings: list[str] = []
    if ordinary_words(spelling, tokenizer):
        warnings.append(
            f"{spelling!r} is made of ordinary words and will fire in prompts that mean the usual thing; a made-up word is safer"
        )
    edges = {class_of_char(spelling[0]), class_of_char(spelling[-1])}
    if edges & {DIGIT, UNDERSCORE}:
        warnings.append(
            f"{spelling!r} has a digit or underscore at an edge: beside another digit or a lone letter it will not fire, "
            "since token ids cannot tell 'x-99' from 'x-9 9'; letters at both edges are safer"
        )
    if PUNCTUATION in edges:
        warnings.append(
            f"{spelling!r} has punctuation at an edge: beside other punctuation it may fuse into one token and not fire; "
            "letters at both edges are safer"
        )
    return warnings


def compile_trigger(
    text: str,
    tokenizer: Any,
    aliases: Sequence[str] = (),
    *,
    compressed: CompressedTokenizer | None = None,
    lower_case: bool = False,
) -> CompiledTrigger:
    """Find the raw id sequences that a trigger and its aliases take in running text.

    Args:
        text: the trigger as written in prompts.
        tokenizer: a Hugging Face fast tokenizer or a `tokenizers.Tokenizer`.
        aliases: further spellings (plural, accent, another dash) that belong to the same concept and own rows of their own where
            their canonical ids differ.
        compressed: the tokenizer's compressed form, if at hand (building it reads the whole vocabulary).
        lower_case: does the pipeline write all prompts in lower case?

    Raises:
        TriggerError: empty, all punctuation, unknown to the tokenizer, longer than the text window, nowhere a word of its own.
    """
    if isinstance(aliases, str):
        raise TriggerError(f"aliases is the text {aliases!r}, expected a list of spellings; write [{aliases!r}]")
    compressed = compressed or CompressedTokenizer(tokenizer)
    spellings = [clean_spelling(text, "trigger")]
    spellings += [clean for clean in (clean_spelling(alias, "alias") for alias in aliases) if clean not in spellings]
    unknown = getattr(tokenizer, "unk_token_id", None)
    special = special_ids(tokenizer)
    window = text_window(tokenizer)

    variants: dict[tuple[int, ...], Variant] = {}
    groups: dict[tuple[int, ...], RowGroup] = {}
    fused: list[str] = []
    warnings: list[str] = []
    for spelling in spellings:
        found, straddled = sequences_of(spelling, tokenizer, lower_case=lower_case)
        if not found:
            raise TriggerError(
                f"trigger {spelling!r} fuses with its neighbours in every place; expected a word that stands alone, such as 'sks'"
            )
        for ids, form in found.items():
            if all(i in special for i in ids):
                raise TriggerError(f"trigger {spelling!r} is unknown to the tokenizer (only unknown or special tokens); use other letters")
            # written out, such a token has the very id that ends or pads every prompt
            held = next((token for token in getattr(tokenizer, "all_special_tokens", ()) if token in spelling), None)
            if held is not None:
                raise TriggerError(f"trigger {spelling!r} holds the tokenizer's special token {held!r}, expected words; leave it out")
            if unknown in ids or any(i in special for i in ids):
                warnings.append(
                    f"{spelling!r} holds characters that the tokenizer does not know; other unknown characters will fire it too"
                )
            if window is not None and len(ids) > window:
                raise TriggerError(
                    f"trigger {spelling!r} takes {len(ids)} tokens, expected at most {window} (the text window); use a shorter trigger"
                )
            if ids in variants:
                continue
            canonical = tuple(int(c) for c in np.asarray(compressed.compress(list(ids))).reshape(-1))
            group = groups.get(canonical)
            if group is None:
                group = groups[canonical] = RowGroup(form, canonical, sum(len(g) for g in groups))
            variants[ids] = Variant(ids, form, list(groups).index(canonical))
        fused += straddled
        warnings += spelling_warnings(spelling, tokenizer)
    if fused:
        places = ", ".join(map(repr, fused[:4])) + (" ..." if len(fused) > 4 else "")
        warnings.append(f"the trigger does not stand alone in {places}: it will not fire there")
    return CompiledTrigger(
        text=spellings[0],
        aliases=tuple(spellings[1:]),
        variants=tuple(variants.values()),
        groups=tuple(groups.values()),
        fused=tuple(fused),
        warnings=tuple(dict.fromkeys(warnings)),
    )
