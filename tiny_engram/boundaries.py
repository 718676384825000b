"""What token ids tell about the edges of words, for any fast tokenizer, as tables over the vocabulary.

An encoder sees ids, not text. This module decides, from two neighbouring ids alone, whether a trigger that ends (or starts)
between them stands alone there, as a regular expression's `\\b` would decide it on the text. Imports numpy only, and
reads a tokenizer through its public interface.

Three kinds of vocabulary are told apart by their marks: CLIP's BPE marks where a word ends (`</w>`), sentencepiece marks where
a word starts (U+2581), byte-level BPE marks the leading space (U+0120). CLIP's rule splits text between letters, single digits
and punctuation before it merges, and writes `</w>` after each piece: `vortex-99` and `vortex-9 9` have the same ids.
"""

import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FREE", "CUT", "UNTOLD", "FUSED", "REASONS", "EdgeTables", "backend_of", "special_ids"]

FREE, CUT, UNTOLD, FUSED = 0, 1, 2, 3
REASONS = {
    CUT: "cut by a word boundary",
    UNTOLD: "ids cannot tell it from a longer word (as 'vortex-99' from 'vortex-9 9')",
    FUSED: "does not stand alone beside that punctuation",
}

WORD_END, WORD_START, SPACE_BYTE = "</w>", "\u2581", "\u0120"
PIECE = "##"  # WordPiece: what goes on a word
NONE, LETTER, DIGIT, UNDERSCORE, PUNCTUATION = 0, 1, 2, 3, 4
# Words of one or two letters that stand beside a number often enough ("vortex-9 on a table") to be taken as words, not as a
# suffix ("vortex-9s", "vortex-9th", "vortex-9x").
_SHORT = "an as at be by do he if in is it me my no of on or so to up us we"
SHORT_WORDS = frozenset(_SHORT.split())


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a Hugging Face fast tokenizer, or the object itself if it is one."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of begin, end, padding, unknown and other special tokens."""
    added = backend_of(tokenizer).get_added_tokens_decoder()
    found = {int(i) for i, token in added.items() if token.special}
    return found | {int(i) for i in getattr(tokenizer, "all_special_ids", ())}


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, which CLIP uses too: stand-in -> byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(rest)}


@lru_cache(maxsize=65_536)
def class_of_char(char: str) -> int:
    """LETTER, DIGIT, UNDERSCORE, PUNCTUATION, or NONE for white space; an undecodable piece of a character counts as a letter."""
    if char == "_":
        return UNDERSCORE
    if char == "\ufffd":
        return LETTER
    if char.isspace():
        return NONE
    major = unicodedata.category(char)[0]
    return {"L": LETTER, "N": DIGIT}.get(major, PUNCTUATION)


def text_of_token(token: str, byte_level: bool, word_pieces: bool = False) -> str:
    """The characters a token stands for, U+FFFD where its bytes hold only a part of one."""
    if word_pieces:
        return token.removeprefix(PIECE)
    token = token.removesuffix(WORD_END) if byte_level else token.replace(WORD_START, " ")
    if not byte_level:
        return token
    table = byte_of_char()
    if any(char not in table for char in token):
        return token
    return bytes(table[char] for char in token).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class EdgeTables:
    """Tables over the vocabulary, each `[vocab + 1]`; the last entry stands for "no token" (edge of the text, unknown id).

    `joins_next` (CLIP) and `joins_previous` (other kinds) say that no space can stand between a token and its neighbour;
    `first` and `last` hold the classes of a token's outer characters; `outer` is true for special tokens and the edges of the
    text; `fragment_before` and `fragment_after` for tokens too short to be taken as a word of their own beside a digit.
    """

    joins_next: NDArray[np.bool_]
    joins_previous: NDArray[np.bool_]
    first: NDArray[np.uint8]
    last: NDArray[np.uint8]
    outer: NDArray[np.bool_]
    fragment_before: NDArray[np.bool_]
    fragment_after: NDArray[np.bool_]
    marks_ends: bool

    @classmethod
    def of(cls, tokenizer: Any) -> "EdgeTables":
        """Build the tables of a fast tokenizer (one pass over the vocabulary)."""
        backend = backend_of(tokenizer)
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        size = max(vocab.values()) + 1
        added = {int(i): token for i, token in backend.get_added_tokens_decoder().items()}
        special = special_ids(tokenizer)
        ends = sum(token.endswith(WORD_END) for token in vocab)
        starts = sum(token.startswith(WORD_START) for token in vocab)
        spaces = sum(token.startswith(SPACE_BYTE) for token in vocab)
        word_pieces = sum(token.startswith(PIECE) for token in vocab) > max(ends, starts, spaces)
        marks_ends = ends > max(starts, spaces)
        mark = WORD_START if starts >= spaces else SPACE_BYTE
        byte_level = marks_ends or mark == SPACE_BYTE

        joins_next = np.zeros(size + 1, dtype=bool)
        joins_previous = np.zeros(size + 1, dtype=bool)
        first = np.zeros(size + 1, dtype=np.uint8)
        last = np.zeros(size + 1, dtype=np.uint8)
        outer = np.ones(size + 1, dtype=bool)
        before = np.zeros(size + 1, dtype=bool)
        after = np.zeros(size + 1, dtype=bool)
        for token, i in vocab.items():
            if i in special:
                continue
            outer[i] = False
            text = token if i in added else text_of_token(token, byte_level, word_pieces)
            if marks_ends:
                joins_next[i] = i not in added and not token.endswith(WORD_END)
            elif word_pieces:
                joins_previous[i] = token.startswith(PIECE)
            else:
                joins_previous[i] = not token.startswith(mark) and not text[:1].isspace()
            first[i] = class_of_char(text.lstrip()[0]) if text.strip() else NONE
            last[i] = class_of_char(text[-1]) if text else NONE
            short = not joins_next[i] and len(text) <= 2 and text.lower() not in SHORT_WORDS
            before[i] = short and text.lower() not in ("a", "i")
            after[i] = short
        return cls(joins_next, joins_previous, first, last, outer, before, after, marks_ends)

    def clip_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids outside the vocabulary become the last entry, which stands for the edge of the text."""
        end = len(self.outer) - 1
        return np.where((ids < 0) | (ids > end), end, ids)

    def between(self, left: NDArray[np.int64], right: NDArray[np.int64], *, trigger_on_left: bool) -> NDArray[np.uint8]:
        """May a trigger end (`trigger_on_left`) or start between these neighbours? FREE, CUT or UNTOLD, elementwise."""
        left, right = self.clip_ids(left), self.clip_ids(right)
        a, b = self.last[left], self.first[right]
        joined = self.joins_next[left] if self.marks_ends else self.joins_previous[right]
        word_a, word_b = (a >= LETTER) & (a <= UNDERSCORE), (b >= LETTER) & (b <= UNDERSCORE)
        both_words = word_a & word_b
        code = np.zeros(np.shape(left), dtype=np.uint8)
        if self.marks_ends:
            neighbour, other = (b, right) if trigger_on_left else (a, left)
            own = a if trigger_on_left else b
            sign_beside = (neighbour == DIGIT) | (neighbour == UNDERSCORE)
            fragment = (self.fragment_after if trigger_on_left else self.fragment_before)[other]
            suffix_beside = ((own == DIGIT) | (own == UNDERSCORE)) & fragment
            code[both_words & (sign_beside | suffix_beside)] = UNTOLD
            # A run is of one class, so one piece of punctuation makes it a run of punctuation (or emoji): where the ids are the
            # trigger's, its own signs did not fuse with the others.
            code[joined & (a != PUNCTUATION) & (b != PUNCTUATION)] = CUT
        else:
            code[joined & both_words] = CUT
        code[self.outer[left] | self.outer[right]] = FREE
        return code
