"""What the frozen base says about the data: caption states with their spans, latents of the pictures."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import T5Config, T5EncoderModel

from tiny_engram.config import ConceptConfig
from tiny_engram.training.cache import _reads_onward, cache_captions, cache_latents
from tiny_engram.training.data import DataError, Example


def test_states_are_the_base_s_own_and_spans_stand_where_the_trigger_does(pipe, adapter):
    concept = adapter.new_concept("cat-toy", ["cat-toys"])
    texts = ["a cat-toy", "two cat-toys beside a cat-toy", "a cat-toy", "Cat-Toy"]
    cached = cache_captions(adapter, concept, texts, batch_size=2)
    assert cached.texts == tuple(dict.fromkeys(texts))
    for k, text in enumerate(cached.texts):
        torch.testing.assert_close(cached.states[k], pipe.encode_prompt(text, "cpu", 1, False)[0][0], rtol=1e-4, atol=1e-4)
    batch = cached.batch([1, 0])
    spans = batch.spans
    assert torch.equal(batch.states, cached.states[[1, 0]])
    assert batch.fired.tolist() == [
        [float(k in (*range(2, 5), *range(7, 10))) for k in range(77)],
        [float(k in range(2, 5)) for k in range(77)],
    ]
    assert list(zip(spans.batch.tolist(), spans.start.tolist(), spans.length.tolist(), spans.offset.tolist(), strict=True)) == [
        (0, 2, 3, 3),
        (0, 7, 3, 0),
        (1, 2, 3, 0),
    ]


def test_the_encoder_reads_again_no_more_than_what_rows_on_its_embeddings_reach(pipe, adapter):
    concept = adapter.new_concept("cat-toy", config=ConceptConfig(mounts=("input",)))
    cached = cache_captions(adapter, concept, ["a cat-toy by night", "here, a cat-toy and a cat-toy", "the cat-toy"])
    assert cached.onward
    batch, way = cached.batch([0, 2, 0]), torch.randn(128, requires_grad=True)
    assert batch.ids.tolist() == cached.ids[[0, 2], :5].tolist() and batch.row == (0, 1, 0)
    batch = cached.batch([1, 0, 1])
    assert batch.ids.shape == (2, 12)

    def move(embeddings: torch.Tensor, spans) -> torch.Tensor:
        where, time, _ = spans.flat()
        return embeddings.index_put((where, time), embeddings[where, time] + way)

    new = batch.read_again(move)
    where, time, _ = batch.spans.flat()
    left = torch.ones(new.shape[:2], dtype=torch.bool).index_put((where, time), torch.tensor(False))
    assert torch.equal(new[left], batch.states[left]) and torch.equal(new[0], new[2])
    whole = dataclasses.replace(cached, onward=False).batch([1, 0, 1])
    assert whole.ids.shape == (2, 77)
    torch.testing.assert_close(new, whole.read_again(move), rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(new[~left].square().sum(), way)
    assert gradient.ne(0).all() and not torch.equal(new[~left], batch.states[~left])


def test_an_encoder_that_reads_both_ways_is_told_from_one_that_does_not(pipe):
    config = T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    ids = torch.arange(12)[None]
    assert _reads_onward(pipe.text_encoder, ids) and not _reads_onward(T5EncoderModel(config).eval(), ids)


@pytest.mark.parametrize("text", ["a cat-toyish thing", "word " * 80 + "cat-toy", "a photo"])
def test_a_caption_in_which_the_trigger_does_not_fire_is_refused(adapter, text):
    concept = adapter.new_concept("cat-toy")
    with pytest.raises(DataError, match="the trigger 'cat-toy' does not fire in it .*shorten the caption or write the trigger as a word"):
        cache_captions(adapter, concept, ["a cat-toy", text])


def test_latents_are_those_of_the_cropped_picture(pipe, tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "p.png")
    means, stds = cache_latents(pipe, [Example(tmp_path / "p.png", ("a zqx",))] * 2, 64)
    pixels = torch.from_numpy(array[:, 16:80]).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        expected = pipe.vae.encode(pixels).latent_dist
    factor = pipe.vae.config.scaling_factor
    torch.testing.assert_close(means[0], expected.mean[0] * factor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stds[1], expected.std[0] * factor, rtol=1e-4, atol=1e-5)
    assert means.dtype == torch.float32 and means.shape == (2, 4, 8, 8) and not means.requires_grad
