"""Trigger text -> token sequences: places, cases, aliases, refusals, warnings; CLIP, byte-level and sentencepiece-like tokenizers."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPTokenizerFast  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones

from tiny_engram.boundaries import EdgeTables
from tiny_engram.errors import TinyEngramError
from tiny_engram.matching import TriggerIndex
from tiny_engram.tokenizer import CompressedTokenizer
from tiny_engram.triggers import TriggerError, compile_trigger, without_added_tokens

CORPUS = [
    "a photo of a cat toy on a table",
    "vortex 9 and sks dog",
    "cats, toys and (tables)",
    "Sks in Cat 99 vor tex",
    "x\" y' z! a? (b) [c]; d: e.",
] * 8


@pytest.fixture(scope="module")
def clip(repo_root):
    tokenizer = CLIPTokenizerFast.from_pretrained(repo_root / "assets/bases/emoji-sd/tokenizer")
    return SimpleNamespace(tokenizer=tokenizer, compressed=CompressedTokenizer(tokenizer))


def small_tokenizer(kind: str) -> Tokenizer:
    """A BPE trained on a few lines, with the marks of GPT-2 ("byte") or of sentencepiece ("metaspace")."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte" else [chr(c) for c in range(33, 127)]
    if kind == "byte":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<pad>", "<unk>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def compiled(clip, text, aliases=()):
    return compile_trigger(text, clip.tokenizer, aliases, compressed=clip.compressed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("  \t\n", "is empty"),
        ("?!...", "all punctuation"),
        ("<>", "all punctuation"),
        ("_", "all punctuation"),
        (None, "expected text"),
        (7, "expected text"),
        ("<|endoftext|>", "unknown to the tokenizer"),
        ("sks<|endoftext|>", "holds the tokenizer's special token"),
        (" ".join(["zebra"] * 76), "takes 76 tokens, expected at most 75"),
    ],
)
def test_refuses_in_one_line(clip, text, expected):
    with pytest.raises(TriggerError, match=expected) as caught:
        compiled(clip, text)
    assert "\n" not in str(caught.value) and isinstance(caught.value, TinyEngramError)


def test_the_longest_trigger_that_fits_is_taken(clip):
    assert compiled(clip, " ".join(["zebra"] * 75)).positions == 75


def test_bad_alias_and_alias_as_text_are_refused(clip):
    with pytest.raises(TriggerError, match="alias '!!' is all punctuation"):
        compiled(clip, "sks", ["!!"])
    with pytest.raises(TriggerError, match="expected a list"):
        compiled(clip, "sks", "sksen")


@pytest.mark.parametrize("text", ["sks", "cat-toy", "my_dog", "sks dog", "vortex-9", "caf\u00e9 zqx", "\u732b\u306e"])
def test_clip_gives_one_sequence_for_all_places_and_cases(clip, text):
    made = compiled(clip, text)
    assert len(made.variants) == len(made.groups) == 1
    inner = clip.tokenizer(f"a photo of {text} here").input_ids
    width = len(made.variants[0].ids)
    assert tuple(inner[4 : 4 + width]) == made.variants[0].ids
    assert made.groups[0].canonical == tuple(clip.compressed.compress(list(made.variants[0].ids)).tolist())


def test_spaces_are_collapsed_and_case_does_not_matter(clip):
    assert compiled(clip, "  SKS \n dog ").variants[0].ids == compiled(clip, "sks dog").variants[0].ids


def test_places_where_a_quote_eats_the_first_letter_are_reported(clip):
    # CLIP splits "'s" off before anything else.
    made = compiled(clip, "sks")
    assert any("'sks" in place for place in made.fused) and any("does not stand alone" in w for w in made.warnings)
    assert not any("'cat" in place for place in compiled(clip, "cat-toy").fused)


def test_aliases_own_rows_and_equal_ones_share(clip):
    made = compiled(clip, "cat-toy", ["cat-toys", "CAT-TOY", "cat \u2013 toy", "cat -toy"])
    assert [g.text for g in made.groups] == ["cat-toy", "cat-toys", "cat \u2013 toy"]
    assert [g.offset for g in made.groups] == [0, 3, 6] and made.positions == 9
    # Equal ids are the same trigger: "cat -toy" is "cat-toy" to CLIP.
    assert len(made.variants) == 3


def test_variants_with_equal_canonical_ids_share_rows(clip):
    # An accent is lost in canonical ids: other raw ids, the same rows.
    made = compiled(clip, "caf\u00e9", ["cafe"])
    assert len(made.variants) == 2 and len(made.groups) == 1 and {v.group for v in made.variants} == {0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat", "ordinary words"),
        ("red cat", "ordinary words"),
        ("vortex-9", "digit or underscore"),
        ("9zqx", "digit or underscore"),
        ("<zqx>", "punctuation"),
    ],
)
def test_warns_of_triggers_that_fire_too_often_or_too_rarely(clip, text, expected):
    assert any(expected in warning for warning in compiled(clip, text).warnings)


def test_does_not_warn_of_a_made_up_word(clip):
    assert not compiled(clip, "zqx bolo").warnings


@pytest.mark.parametrize("kind", ["byte", "metaspace"])
def test_tokenizers_that_mark_word_starts(kind):
    tokenizer = small_tokenizer(kind)
    compressed = CompressedTokenizer(tokenizer, pad_id=0)
    made = compile_trigger("cat", tokenizer, compressed=compressed)
    # At the start, after a space and after a bracket the first token differs, and so does the case.
    assert len(made.variants) > 2
    index = TriggerIndex(EdgeTables.of(tokenizer))
    index.add("cat", made)
    fires = ["cat", "a cat on", "Cat, toy", "(cat)", '"cat"', "CAT!", "cat cat"]
    silent = ["cats", "a cats toy", "acat", "cat9", "cat_toy", "scatter", "dog"]
    assert [len(index.match([tokenizer.encode(t).ids])) for t in fires] == [1, 1, 1, 1, 1, 1, 2]
    assert [len(index.match([tokenizer.encode(t).ids])) for t in silent] == [0] * len(silent)


def test_added_tokens_are_left_out_of_the_base(clip, repo_root):
    tokenizer = CLIPTokenizerFast.from_pretrained(repo_root / "assets/bases/emoji-sd/tokenizer")
    tokenizer.add_tokens("<zqx>")
    assert CompressedTokenizer(tokenizer).fingerprint != clip.compressed.fingerprint
    base = CompressedTokenizer(without_added_tokens(tokenizer), pad_id=tokenizer.pad_token_id)
    assert base.fingerprint == clip.compressed.fingerprint and base.pad_id == clip.compressed.pad_id
