import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_engram.errors import TokenizerError
from tiny_engram.tokenizer import CompressedTokenizer, canonical_numbers


def tokenizer_of(*tokens: str) -> Tokenizer:
    """A real tokenizers.Tokenizer whose ids are the given tokens, in order."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def same(*texts: str) -> bool:
    return len(set(canonical_numbers(list(texts), list(texts)))) == 1


def test_golden_token_map(golden):
    entry = golden["token_map"]
    assert canonical_numbers(entry["tokens"], entry["tokens"]) == entry["canonical"]
    # In Python's notation two of the golden tokens differ (composed and decomposed accent), in a vocabulary too.
    compressed = CompressedTokenizer(tokenizer_of(*entry["tokens"]), pad_id=0)
    assert compressed.canonical.tolist() == entry["canonical"]
    assert compressed.size == 7


def test_deepseek_vocabulary(deepseek_backend):
    compressed = CompressedTokenizer(deepseek_backend, expected_size=99092, pad_id=2)
    assert compressed.canonical.shape == (129280,) and compressed.canonical.dtype == torch.int64
    assert compressed.size == 99092 and compressed.pad_id == 2
    assert sorted(set(compressed.canonical.tolist())) == list(range(99092))


@pytest.mark.parametrize(
    "texts",
    [
        ("\u304c", "\u304b"),  # ga -> ka
        ("\u30d1", "\u30cf"),  # katakana pa -> ha
        ("\u2460", "1"),  # circled 1
        ("\u00a0", " ", "\u3000", "\t", "\r\n", "  "),  # NBSP, ideographic space
        ("\u00c5ngstr\u00f6m", "angstrom"),
        ("\ufb01", "FI"),  # ligature
        (" apple", "Apple", "apple "),
    ],
)
def test_unicode_that_becomes_one(texts):
    assert same(*texts)


@pytest.mark.parametrize(
    "texts",
    [
        ("\u200b", " "),  # a zero-width space stays
        ("a\u200bb", "ab"),
        ("\u00df", "ss"),  # lower-casing is no case folding
        ("cat", "cats"),
        (".", "!"),
    ],
)
def test_unicode_that_stays_apart(texts):
    assert not same(*texts)


def test_hangul_is_split_into_jamo():
    assert same("\ud55c", "\u1112\u1161\u11ab")


def test_torn_utf8_takes_the_vocabulary_string():
    assert canonical_numbers(["\ufffd", "\ufffd", "a"], ["\u00e4", "\u00e5", "a"]) == [0, 1, 2]


def test_text_that_normalises_to_nothing_is_its_own_key():
    # Combining accents are stripped to nothing, but are not each other.
    assert canonical_numbers(["\u0301", "\u0300", ""], ["x", "y", "z"]) == [0, 1, 2]


def test_byte_level_pieces_keep_their_own_ids():
    tokenizer = Tokenizer(models.BPE({"\u00e3": 0, "\u0123": 1, "a": 2, "A": 3}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert CompressedTokenizer(tokenizer, pad_id=0).canonical.tolist() == [0, 1, 2, 2]


def test_fast_tokenizer_and_backend_agree():
    backend = tokenizer_of("<pad>", "A", "a", "b")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    wrapped, raw = CompressedTokenizer(fast), CompressedTokenizer(backend, pad_id=0)
    assert wrapped.canonical.tolist() == raw.canonical.tolist() == [0, 1, 1, 2]
    assert wrapped.pad_id == 0 and wrapped.fingerprint == raw.fingerprint


def test_pad_id_is_canonical_and_comes_from_the_backend():
    backend = tokenizer_of("x", "A", "a", "pad")
    backend.enable_padding(pad_id=3, pad_token="pad")
    assert CompressedTokenizer(backend).pad_id == 2


def test_ids_without_a_token():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    assert CompressedTokenizer(backend, pad_id=0).canonical.tolist() == [0, 1, 1, 2]


def test_fingerprint_is_of_ids_and_tokens():
    prints = {CompressedTokenizer(tokenizer_of(*tokens), pad_id=0).fingerprint for tokens in [("a", "b"), ("b", "a"), ("a", "b", "c")]}
    assert len(prints) == 3 and all(len(text) == 64 for text in prints)


def test_compress():
    compressed = CompressedTokenizer(tokenizer_of("x", "A", "a"), pad_id=0)
    assert compressed.compress([[2, 0], [1, 1]]).tolist() == [[1, 0], [1, 1]]
    assert compressed.compress(torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0)
    for bad in (-1, 3):
        with pytest.raises(TokenizerError, match=r"expected 0\.\.2"):
            compressed.compress([bad])


def test_refusals():
    backend = tokenizer_of("x", "a")
    with pytest.raises(TokenizerError, match="2 canonical ids: expected 3"):
        CompressedTokenizer(backend, expected_size=3, pad_id=0)
    with pytest.raises(TokenizerError, match="pad token id is None"):
        CompressedTokenizer(backend)
    with pytest.raises(TokenizerError, match="no Rust backend"):
        CompressedTokenizer(object())
