"""Texts packed into one row, told apart by their positions: each is what it is by itself, as in transformers."""

import pytest
import torch

from tiny_engram.llm.packing import packed_texts

LENGTHS = ((7, 1, 2, 9), (3, 12, 4))  # of the texts of two rows, some shorter than an n-gram


@pytest.fixture
def batch(text):
    """Ids of both rows, and their positions."""
    return text(2, 19), torch.tensor([[t for length in row for t in range(length)] for row in LENGTHS])


def parts(values):
    return [part for row, lengths in zip(values, LENGTHS, strict=True) for part in row.split(lengths)]


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma3_text"))
@pytest.mark.parametrize("form, branches", (("paper", 2), ("v41", 1)))
def test_each_text_is_itself(build, attach, note, batch, kind, form, branches):
    (ids, places), model = batch, build(kind)
    noted = note(attach(model, form=form, branches=branches, max_ngram=4))
    with torch.no_grad():
        logits = model(ids, position_ids=places, use_cache=False).logits
        rows = {layer: noted_rows.flatten(0, 1) for layer, noted_rows in noted.taken().items()}
        for packed, part in zip(parts(logits), parts(ids), strict=True):
            alone = model(part[None], use_cache=False).logits[0]
            for layer, own in noted.taken().items():  # of n-grams, some text's in the pack
                assert bool((rows[layer][:, None] == own[0][None]).all(dim=2).any(dim=0).all())
            torch.testing.assert_close(packed, alone, rtol=0, atol=5e-5 * float(alone.abs().max()))
        # One text in each row, whatever its positions begin with, is no pack; a mask says itself what attends to what.
        expected = model(ids, use_cache=False).logits
        assert torch.equal(model(ids, position_ids=torch.arange(19).expand(2, -1), use_cache=False).logits, expected)
        masked = model(ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False).logits
        assert not torch.equal(masked[:, 7:], logits[:, 7:])


def test_gradients_are_those_of_each_text(build, attach, batch):
    (ids, places), model = batch, build()
    engrams = attach(model)

    def gradients(losses):
        engrams.zero_grad()
        torch.stack(losses).sum().backward()
        return {name: p.grad.to_dense().clone() for name, p in engrams.named_parameters()}

    weight = torch.randn(ids.numel(), model.config.vocab_size, generator=torch.Generator().manual_seed(3)).view(2, 19, -1)
    found = gradients([(model(ids, position_ids=places, use_cache=False).logits * weight).sum()])
    alone = zip(parts(ids), parts(weight), strict=True)
    expected = gradients([(model(part[None], use_cache=False).logits[0] * own).sum() for part, own in alone])
    for name, value in expected.items():
        assert float(value.abs().max()) > 0, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4 * float(value.abs().max()), msg=name)


def test_a_text_laid_out_and_back():
    ids = torch.arange(1, 11).view(2, 5)
    packed = packed_texts(torch.tensor([[0, 1, 0, 1, 2], [4, 5, 6, 7, 0]]), ids)
    assert packed is not None
    laid = packed.lay(ids, -1)
    assert laid.tolist() == [[1, 2, -1, -1], [3, 4, 5, -1], [6, 7, 8, 9], [10, -1, -1, -1]]
    assert torch.equal(packed.back(laid), ids) and packed.rows().tolist() == [0, 0, 1, 1]
    row, time = packed.tokens(torch.tensor([1, 3]), torch.tensor([2, 0]))
    assert (row.tolist(), time.tolist()) == ([0, 1], [4, 4])
    for whole in (torch.arange(5)[None], torch.arange(5)[None] + 3, torch.arange(5).expand(2, -1), None):
        assert packed_texts(whole, ids) is None
    assert packed_texts(torch.tensor([[0, 1, 0, 1, 2]]), ids).rows().tolist() == [0, 0, 1, 1]  # one for all rows
