"""Vocabularies are read once for tokenizers of the same content, and anew when the content is another."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tiny_engram
from tiny_engram import role_mounts
from tiny_engram.boundaries import EdgeTables
from tiny_engram.role_mounts import vocabulary_of


@pytest.fixture
def kept(monkeypatch):
    """Nothing kept before; what is kept by the test is forgotten after it."""
    monkeypatch.setattr(role_mounts, "_kept", {})
    return role_mounts._kept


def small(*words: str, pad: str = "<p>") -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(("<p>", "<q>", *words))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<p>")), pad_token=pad, unk_token="<p>")


def test_equal_tokenizers_share_their_tables(kept):
    one, other = small("cat", "Cat"), small("cat", "Cat")
    assert vocabulary_of(one) is vocabulary_of(other) and len(kept) == 1
    one(["cat", "cat cat"], padding="max_length", max_length=7, truncation=True)
    assert one.backend_tokenizer.to_str() != other.backend_tokenizer.to_str() and vocabulary_of(one) is vocabulary_of(other)
    edges, compressed = vocabulary_of(one)
    assert compressed.canonical.tolist() == [0, 1, 2, 2] and compressed.pad_id == 0
    for field in EdgeTables.__dataclass_fields__:
        assert np.array_equal(getattr(edges, field), getattr(EdgeTables.of(other), field))


def test_another_content_has_tables_of_its_own(kept):
    plain = small("cat")
    before = vocabulary_of(plain)
    assert vocabulary_of(small("dog"))[1].fingerprint != before[1].fingerprint
    assert vocabulary_of(small("cat", pad="<q>"))[1].pad_id == 1
    plain.add_tokens(["toy"])
    edges, compressed = vocabulary_of(plain)
    assert len(edges.outer) == len(before[0].outer) + 1 and compressed.fingerprint == before[1].fingerprint
    assert vocabulary_of(small("cat")) is before and len(kept) == 4


def test_the_one_not_asked_for_longest_goes_first(kept, monkeypatch):
    monkeypatch.setattr(role_mounts, "KEPT", 2)
    first = vocabulary_of(small("a"))
    vocabulary_of(small("b"))
    assert vocabulary_of(small("a")) is first
    vocabulary_of(small("c"))
    assert len(kept) == 2 and vocabulary_of(small("a")) is first


def test_pipelines_share_tables_and_nothing_else(tiny, adapter):
    other = tiny_engram.attach(pipe := tiny.build())
    ours, theirs = adapter.mounts["clip_l"].store, other.mounts["clip_l"].store
    assert ours is not theirs and ours.compressed is theirs.compressed and ours.index is not theirs.index
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    alone = tiny.picture(pipe, "a zqx bolo")
    other.detach()
    assert torch.equal(tiny.picture(pipe, "a zqx bolo"), alone)
