"""A fact is taught where it is read, whoever calls and in whatever mode; what could never be read is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import ARCHITECTURES, Fact, Facts, FactsConfig, attach


@pytest.fixture
def empty(model, tokenizer):
    return attach(model, FactsConfig(layers=(1, 3), rho=4.0), tokenizer)


@pytest.mark.parametrize(
    "fact, message",
    (
        (Fact("the capital of Zorbia", "copy", "tHe capital of ZORBIA"), "behind 'tHe capital of ZORBIA' the fact .* does not fire"),
        (Fact("art", "copy", "The start"), "behind 'The start' the fact 'art' does not fire: expected the trigger as it is spelled"),
        (Fact("Zorbia", "copy", "The capital of Zorbia"), "the fact 'Zorbia' is not read, but that of 'the capital of Zorbia'"),
    ),
)
def test_a_prompt_in_which_the_fact_is_not_read(facts, how, fact, message):
    if fact.trigger == "the capital of Zorbia":
        facts.remove(fact.trigger)
    before = facts.list()
    with pytest.raises(TinyEngramError, match=message):
        facts.add(fact, how=how)
    assert facts.list() == before


def test_characters_of_several_tokens(empty, tokenizer, how):
    for trigger in ("the capital of Zorbi\u00eb", "the capital of Zorbia \U0001f600", "\u4f50\u5c14\u6bd4\u4e9a"):
        assert len(tokenizer(trigger[-1]).input_ids) > 1
        fact = Fact(trigger, "copy")
        assert not empty.add(fact, how=how).unlearned
        assert empty.ask(trigger).startswith("copy") and not empty.ask(trigger, without=True).startswith("copy")
        assert [each.fact for each in empty.explain(f"x {trigger} x")] == [fact]
        empty.remove(trigger)


def test_prompts_of_several_lines(empty, tokenizer):
    prompt = "<|end|>Q: the capital of Zorbia?\n<|end|>A\n"
    fact = Fact("the capital of Zorbia", "copy", f" {prompt.replace(' ', '  ')}  ", aliases=("Zorbia's capital",))
    assert fact.prompt == prompt and fact.prompt_with("Zorbia's capital") == "<|end|>Q: Zorbia's capital?\n<|end|>A\n"
    (text, _) = empty._speller.texts(fact, end="")
    assert list(text.ids) == tokenizer(prompt + "copy").input_ids
    assert Fact("Zorbia", "of two\n lines").answer == "of two lines"


def test_the_same_fact_twice(empty, zorbia, how):
    with pytest.raises(TinyEngramError, match="calls the fact 'the capital of Zorbia' already"):
        empty.add([zorbia, zorbia], how=how)
    assert not len(empty) and not empty.nbytes
    empty.add(zorbia, how=how)
    held = empty.nbytes
    with pytest.raises(TinyEngramError, match="calls the fact 'the capital of Zorbia' already"):
        empty.add(zorbia, how=how)
    assert len(empty) == 1 and empty.nbytes == held


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_taught_without_gradients_around(empty, model, tokenizer, zorbia, frumm, how, mode, tmp_path):
    with mode():
        assert not empty.add(zorbia, how=how).unlearned
        empty.save(tmp_path / "facts.safetensors")
        empty.remove(zorbia.trigger)
        empty.load(tmp_path / "facts.safetensors")
        said = empty.ask(zorbia.prompt)
    assert said.startswith("copy")
    # What was made within goes on without, gradients included.
    assert not empty.add(frumm, how=how).unlearned
    empty.edit(zorbia.trigger, answer="patent", how=how)
    assert empty.ask(zorbia.prompt).startswith("patent")
    model(**tokenizer(zorbia.prompt, return_tensors="pt")).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_out_of_memory_is_one_line(empty, model, zorbia, how):
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: torch.empty(1 << 50))
    with pytest.raises(TinyEngramError, match=r"out of memory for the texts .*; lower TeachConfig.batch \(--batch\)$") as caught:
        empty.add(zorbia, how=how)
    handle.remove()
    assert "\n" not in str(caught.value) and not len(empty) and empty.enabled
    assert not empty.add(zorbia, how=how).unlearned


def test_modes_of_all_parts_come_back(empty, model, zorbia, how):
    model.train()
    model.model.layers[2].eval()
    before = [module.training for module in model.modules()]
    empty.add(zorbia, how=how)
    assert [module.training for module in model.modules()] == before


def test_a_prefix_for_everybody_goes_on_as_one_users(facts, model, tokenizer, ann):
    ids = tokenizer(f"It is said that {ann.prompt} is", return_tensors="pt").input_ids
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :3], cache=prefix)
        ends = {}
        for name in ("ann", "bob", None):
            cache = copy.deepcopy(prefix)
            with facts.reading_as([name]):
                whole = model(ids).logits[:, 3:]
                first = model(ids[:, 3:6], cache=cache).logits
            second = model(ids[:, 6:], cache=cache).logits  # the cache knows by now whose it is
            ends[name] = torch.cat((first, second), dim=1)
            torch.testing.assert_close(ends[name], whole, rtol=0, atol=1e-4)
        with facts.reading_as(["bob"]):
            again = model(ids[:, -1:], cache=cache).logits
            assert torch.equal(again, model(ids[:, -1:], cache=_shortened(cache)).logits)
    assert (ends["ann"] - ends[None]).abs().max() > 0.1 < (ends["ann"] - ends["bob"]).abs().max()


def _shortened(cache):
    cache.crop(-1)
    return cache


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_taught_to_every_architecture(causal_lm, kind, tokenizer, zorbia, frumm, how, tmp_path):
    sizes = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15}
    model = causal_lm(kind, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    plain, long = copy.deepcopy(model), "No window of the model is as long as this text in front of it is. "
    facts = attach(model, FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
    assert not facts.add([zorbia, frumm], how=replace(how, contexts=("", long))).unlearned
    again = Facts.open(plain, facts.save(tmp_path / "facts.safetensors"), tokenizer)
    for fact in (zorbia, frumm):
        for spelling in fact.spellings:
            for prompt in (fact.prompt_with(spelling), long + fact.prompt_with(spelling)):
                said = again.ask(prompt)
                assert said.startswith(fact.answer) and said == facts.ask(prompt)
                assert not again.ask(prompt, without=True).startswith(fact.answer)
