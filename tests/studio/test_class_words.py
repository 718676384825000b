"""A class word is judged while it is typed, by the rules of teaching."""

import time

import pytest

from tiny_engram.studio.class_words import class_word_hint


@pytest.mark.parametrize("word", ["", "  ", None, "duck", "rubber duck", "Jellyfish", " mug "])
def test_nothing_is_said_of_a_word_that_the_base_knows(studio, word):
    assert class_word_hint(word, studio.book) == ""


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("zzzzqq", "does not know 'zzzzqq' as one word (it reads zzzz + q + q); a plain one"),
        ("\U0001f986", "does not know '\U0001f986' as one word; a plain one"),
        ("!!!", "does not know '!!!' as one word; a plain one"),
        ("<|endoftext|>", "as one word; a plain one"),
        ("x" * 1_000, "has 1,000 characters, expected a plain word of at most 60"),
    ],
)
def test_others_are_told_in_one_line(studio, word, line):
    began = time.perf_counter()
    said = class_word_hint(word, studio.book)
    assert line in said and "\n" not in said and len(said) < 200
    assert time.perf_counter() - began < 1
