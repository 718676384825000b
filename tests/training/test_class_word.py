"""Rows that start at a class word: how near the trigger's states come to the word's, at each mount, in each spelling; what is refused.

That the numbers are the bench's is in tests/personalization/test_product.py.
"""

import pytest
import torch

from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept
from tiny_engram.training.class_word import CARRIERS, _pairs, place_of_word, start_at_word
from tiny_engram.training.reading import read_texts

ROLE = "clip_l"


def started(adapter, word="lamp", **options):
    config = ConceptConfig(**{"mounts": ("span",), "rho": 4.0, **options})
    concept = adapter.new_concept("cat-toy", ["zqx"], config=config)
    return concept, start_at_word(adapter, concept, ROLE, word)


@torch.no_grad()
def test_the_trigger_s_states_come_near_the_word_s(pipe, adapter):
    concept, found = started(adapter)
    start = found["span"]
    pairs = _pairs(adapter, concept, ROLE, "lamp")
    assert len(pairs.spans) == 2 * len(CARRIERS) and start.rows.shape == concept.mount_rows(ROLE).rows().shape
    states, words = (pipe.text_encoder(tokens.ids)[0] for tokens in (pairs.triggers, pairs.words))
    moved = apply_concept(states, pairs.spans, fake_quantize(start.rows), start.gain, start.bias, rho=4.0)
    batch, time, position = pairs.spans.flat()
    target = words[batch, pairs.there]
    left = (moved[batch, time] - target).norm(dim=1) / (states[batch, time] - target).norm(dim=1)
    # what is left is what one residual cannot say for all sentences
    assert position.unique().numel() == concept.roles[ROLE].positions and left.mean() < 0.6 and (left < 0.95).all()


@torch.no_grad()
def test_embeddings_reach_those_of_the_word(pipe, adapter):
    """They are equal in all sentences: nothing is left but the quantiser's rounding."""
    _, found = started(adapter, mounts=("input", "span"))
    assert list(found) == ["input", "span"]
    embed, start = pipe.text_encoder.get_input_embeddings(), found["input"]
    ids = pipe.tokenizer(["cat-toy", "lamp"], add_special_tokens=False).input_ids
    trigger, word = (embed(torch.tensor([x])) for x in ids)
    spans = Spans.of([(0, 0, len(ids[0]), 0)])
    moved = apply_concept(trigger, spans, fake_quantize(start.rows), start.gain, start.bias, rho=4.0)
    target = torch.stack([word[0, max(0, k - len(ids[0]) + len(ids[1]))] for k in range(len(ids[0]))])
    assert ((moved[0] - target).norm(dim=1) < 0.06 * (trigger[0] - target).norm(dim=1)).all()
    # The span's rows see states that the input's have moved, and have less to do.
    _, alone = started(adapter)
    assert found["span"].rows.norm() < 0.5 * alone["span"].rows.norm()


def test_a_gate_that_is_too_narrow_is_opened(adapter):
    for rho, opened in ((0.5, True), (50.0, False)):
        _, found = started(adapter, rho=rho)
        assert found["span"].bias.gt(0).any() == opened
        assert torch.equal(found["span"].gain, torch.ones_like(found["span"].gain))
        assert found["span"].rows.flatten(1).norm(dim=1).max() <= 1.0 + 1e-5


def test_tokens_are_paired_from_the_end(pipe, adapter):
    concept = adapter.new_concept("cat-toy")
    for word in ("lamp", "red lamp on a table"):
        pairs = _pairs(adapter, concept, ROLE, word)
        _, time, step = pairs.spans.flat()
        length = len(pipe.tokenizer(word, add_special_tokens=False).input_ids)
        size = int(pairs.spans.length[0])
        expected = pairs.spans.start.repeat_interleave(size) + (step - size + length).clamp(min=0)
        assert torch.equal(pairs.there, expected) and (pairs.there != time).any()


def test_a_word_is_found_where_its_characters_are(pipe, adapter):
    texts = [text.format("lamp") for text in CARRIERS]
    tokens = read_texts(adapter, ROLE, texts)
    (lamp,) = pipe.tokenizer("lamp", add_special_tokens=False).input_ids[-1:]
    for row, (text, carrier) in enumerate(zip(texts, CARRIERS, strict=True)):
        first, length = place_of_word(carrier, "lamp", tokens.characters[row]) or (-1, 0)
        assert int(tokens.ids[row, first + length - 1]) == lamp, text
    assert place_of_word("a {0}", "lamp" * 200, read_texts(adapter, ROLE, ["a " + "lamp" * 200]).characters[0]) is None


def test_what_cannot_start_is_refused(adapter):
    with pytest.raises(TinyEngramError, match="class_word 'lamp': it starts the rows at the mounts input and span of clip_l"):
        started(adapter, mounts=("value",))
    with pytest.raises(TinyEngramError, match="class_word ' ' is not read as tokens of its own by the tokenizer of clip_l"):
        started(adapter, " ")
    concept = adapter.new_concept("zqx9")
    with pytest.raises(TinyEngramError, match="class_word 'lamp .*' is not read as tokens of its own"):
        start_at_word(adapter, concept, ROLE, "lamp " * 90 + "lamp")
