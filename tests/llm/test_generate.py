"""`model.generate` in all its ways gives what full forwards give, and nothing about its call changes."""

import pytest
import torch
from transformers import DynamicCache

from tiny_engram.errors import TinyEngramError

pytestmark = pytest.mark.usefixtures("no_gradients")

NEW = 10


@pytest.fixture
def model(build, attach):
    model = build()
    attach(model)
    return model


def by_full_forwards(model, ids, new=NEW):
    """Greedy, each token from one forward over everything before it."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


def generated(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


@pytest.mark.parametrize("kind", ("llama", "mistral", "qwen3", "gemma2", "gemma3_text"))
def test_greedy_in_every_cache(build, attach, text, kind):
    model, ids = build(kind), text(2, 11)
    without = generated(model, ids)
    attach(model)
    expected = by_full_forwards(model, ids)
    assert not torch.equal(expected, without)
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}):
        assert torch.equal(generated(model, ids, **options), expected), options


def test_padded_prompts_of_unequal_length(model, text, tokenizer):
    prompts = [text(1, length, seed=length) for length in (12, 5, 9)]
    ids = torch.full((3, 12), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, 12 - prompt.shape[1] :], mask[row, 12 - prompt.shape[1] :] = prompt[0], 1
    for options in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}):
        found = generated(model, ids, attention_mask=mask, **options)
        for row, prompt in enumerate(prompts):
            assert torch.equal(found[row, 12:], by_full_forwards(model, prompt)[0, prompt.shape[1] :]), options


def best_of_beams(model, ids, beams, new):
    """Beam search without any cache: sequences ``[beams, T]`` of one prompt, their scores, and how often beams changed places."""
    kept, scores, swaps = ids, torch.zeros(1), 0
    for _ in range(new):
        chances = model(kept, use_cache=False).logits[:, -1].log_softmax(-1) + scores[:, None]
        scores, places = chances.flatten().topk(beams)
        swaps += int((places // chances.shape[1]).tolist() != list(range(beams)))
        kept = torch.cat((kept[places // chances.shape[1]], (places % chances.shape[1])[:, None]), dim=1)
    return kept, scores, swaps


@pytest.mark.parametrize("options", ({}, {"cache_implementation": "static"}, {"use_cache": False}))
def test_beam_search(model, text, options):
    ids = text(2, 8)
    found = generated(model, ids, num_beams=3, num_return_sequences=3, max_new_tokens=7, early_stopping=False, **options)
    for row in range(2):
        expected, scores, swaps = best_of_beams(model, ids[row : row + 1], 3, 7)
        assert swaps > 3
        assert float(scores.diff().abs().min()) > 1e-4  # no draw that rounding could decide
        assert torch.equal(found[3 * row : 3 * row + 3], expected)


def test_samples_of_one_prompt(model, text):
    ids = text(2, 8)
    found = {}
    for name, options in {"cached": {}, "whole": {"use_cache": False}}.items():
        torch.manual_seed(0)
        found[name] = generated(model, ids, do_sample=True, num_return_sequences=4, **options)
    assert torch.equal(found["cached"], found["whole"]) and len({tuple(row) for row in found["whole"].tolist()}) == 8


class Calls:
    """Lengths of the blocks that a model's decoder was called with."""

    def __init__(self, model):
        self.lengths = []
        model.model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        self.lengths.append(kwargs["input_ids"].shape[1])


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma3_text"))
def test_assisted_decoding_with_rejected_drafts(build, attach, text, kind):
    model, ids = build(kind), text(1, 9)
    attach(model)
    expected = by_full_forwards(model, ids, 16)
    other = build(kind, seed=5)  # drafts that are wrong
    attach(other, seed=6)
    # Nearly the same model, so that some drafts are right and some are not.
    near = build(kind)
    attach(near)
    near.lm_head.weight = torch.nn.Parameter(near.lm_head.weight + 0.15 * torch.randn(near.lm_head.weight.shape), requires_grad=False)
    accepted = []
    for assistant in (other, near):
        calls = Calls(model)
        assert torch.equal(generated(model, ids, assistant_model=assistant, max_new_tokens=16), expected)
        accepted.append(len(calls.lengths))
        assert max(calls.lengths[1:]) > 1
    assert accepted[1] < accepted[0] <= 16


@pytest.mark.parametrize("kind", ("llama", "gemma2"))
def test_drafts_from_the_prompt(build, attach, text, kind):
    model, ids = build(kind), text(1, 6).repeat(1, 3)
    attach(model)
    expected = by_full_forwards(model, ids, 14)
    calls = Calls(model)
    assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=4, max_new_tokens=14), expected)
    assert max(calls.lengths[1:]) > 1


def test_a_model_that_drafts_for_itself(build, attach, text):
    model, ids = build(), text(1, 9)
    attach(model, layers=(0, 3))  # drafts leave the last layer out
    expected = by_full_forwards(model, ids, 14)
    assert torch.equal(generated(model, ids, assistant_early_exit=2, max_new_tokens=14), expected)


def test_a_conversation_goes_on_in_its_cache(model, text):
    ids, more = text(1, 7), text(1, 4, seed=2)
    cache = DynamicCache(config=model.config)
    first = generated(model, ids, cache=cache)
    both = torch.cat((first, more), dim=1)
    assert torch.equal(generated(model, both, cache=cache), by_full_forwards(model, both))


def test_generating_goes_on_behind_embeddings(model, text):
    ids = text(2, 9)
    with pytest.raises(TinyEngramError, match="generate takes none: call the model so with all but the last token"):
        generated(model, None, inputs_embeds=model.get_input_embeddings()(ids))
    cache = DynamicCache(config=model.config)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, :8]), engram_ids=ids[:, :8], cache=cache)
    assert torch.equal(generated(model, ids, cache=cache), by_full_forwards(model, ids))
