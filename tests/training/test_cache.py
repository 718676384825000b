"""What the frozen base says about the data: caption states with their spans, latents of the pictures."""

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.training.cache import cache_captions, cache_latents
from tiny_engram.training.data import DataError, Example


def test_states_are_the_base_s_own_and_spans_stand_where_the_trigger_does(pipe, adapter):
    concept = adapter.new_concept("cat-toy", ["cat-toys"])
    texts = ["a cat-toy", "two cat-toys beside a cat-toy", "a cat-toy", "Cat-Toy"]
    cached = cache_captions(adapter, concept, texts, batch_size=2)
    assert cached.texts == tuple(dict.fromkeys(texts))
    for k, text in enumerate(cached.texts):
        torch.testing.assert_close(cached.states[k], pipe.encode_prompt(text, "cpu", 1, False)[0][0], rtol=1e-4, atol=1e-4)
    states, spans = cached.batch([1, 0])
    assert torch.equal(states, cached.states[[1, 0]])
    assert list(zip(spans.batch.tolist(), spans.start.tolist(), spans.length.tolist(), spans.offset.tolist(), strict=True)) == [
        (0, 2, 3, 3),
        (0, 7, 3, 0),
        (1, 2, 3, 0),
    ]


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
