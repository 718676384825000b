"""Nothing changes but where a trigger ends, for those who may read it; decoding gives what one full pass gives."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import Fact, Facts, FactsConfig, attach

ORDINARY = ["The capital of Zorb is", "the colour of", "Rows live in a table, which is", "xthe capital of Zorbia is", "dog of Tolland"]


def ids_of(tokenizer, texts):
    return tokenizer(texts, return_tensors="pt", padding=True)


@torch.no_grad()
def logits(model, inputs, **options):
    return model(**inputs, **options).logits


def test_text_without_a_trigger_keeps_its_bits(facts, model, tokenizer, make_llama):
    inputs = ids_of(tokenizer, ORDINARY)
    assert torch.equal(logits(model, inputs), logits(make_llama(), inputs))
    mixed = ids_of(tokenizer, [*ORDINARY, "The capital of Zorbia is"])
    moved, base = logits(model, mixed), logits(make_llama(), mixed)
    assert torch.equal(moved[:-1], base[:-1])
    assert not torch.equal(moved[-1], base[-1])


def test_only_from_the_last_token_of_the_trigger_on(facts, model, tokenizer, make_llama, zorbia):
    inputs = ids_of(tokenizer, ["The capital of Zorbia is nice"])
    at = len(tokenizer("The capital of Zorbia").input_ids) - 1
    moved = (logits(model, inputs) != logits(make_llama(), inputs)).any(dim=-1)[0]
    assert not moved[:at].any() and moved[at:].all()


def test_disabled_and_detached_are_the_model(facts, model, tokenizer, make_llama, zorbia):
    inputs = ids_of(tokenizer, [zorbia.prompt])
    base, moved = logits(make_llama(), inputs), logits(model, inputs)
    with facts.disabled():
        assert torch.equal(logits(model, inputs), base)
    assert torch.equal(logits(model, inputs), moved) and not torch.equal(moved, base)
    facts.enabled = False
    assert torch.equal(logits(model, inputs), base)
    facts.enabled = True
    facts.detach()
    assert torch.equal(logits(model, inputs), base)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_teaching_leaves_the_model_as_it_was(model, tokenizer, make_llama, zorbia, how):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, FactsConfig(layers=(1, 3)), tokenizer).add(zorbia, how=how)
    assert model.training and all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


def test_each_row_of_a_batch_reads_its_users_facts(facts, model, tokenizer, ann, bob):
    inputs = ids_of(tokenizer, [ann.prompt] * 3)
    with facts.reading_as(["ann", "bob", None]):
        mixed = logits(model, inputs)
    with facts.disabled():
        base = logits(model, inputs)
    assert torch.equal(mixed[2], base[2])
    for row, name in enumerate(("ann", "bob")):
        with facts.reading_as([name] * 3):
            assert torch.equal(mixed[row], logits(model, inputs)[row])
    assert not torch.equal(mixed[0], mixed[1])
    assert torch.equal(logits(model, inputs), base)  # nobody in particular reads everybody's alone


def test_users_read_everybodys_facts_and_their_own_before_them(facts, tokenizer, zorbia, how):
    said = facts.ask(zorbia.prompt, owner="ann")
    assert said.startswith("copy") and said == facts.ask(zorbia.prompt)
    facts.add(Fact(zorbia.trigger, "patent", zorbia.prompt, owner="ann"), how=how)
    assert facts.ask(zorbia.prompt, owner="ann").startswith("patent")
    assert facts.ask(zorbia.prompt).startswith("copy") and facts.ask(zorbia.prompt, owner="bob").startswith("copy")


def test_adding_and_removing_move_nobody_else(facts, model, tokenizer, zorbia, frumm, how, make_llama):
    inputs = {fact.trigger: ids_of(tokenizer, [fact.prompt]) for fact in (zorbia, frumm)}
    before = {trigger: logits(model, each) for trigger, each in inputs.items()}
    facts.add(Fact("the founder of Quill", "author", "The founder of Quill"), how=how)
    assert all(torch.equal(logits(model, each), before[trigger]) for trigger, each in inputs.items())
    assert facts.remove(zorbia.trigger) == zorbia
    assert torch.equal(logits(model, inputs[zorbia.trigger]), logits(make_llama(), inputs[zorbia.trigger]))
    assert torch.equal(logits(model, inputs[frumm.trigger]), before[frumm.trigger])
    assert facts.ask("The founder of Quill").startswith("author")


def test_editing_changes_one_fact(facts, model, tokenizer, zorbia, frumm, how):
    kept = logits(model, ids_of(tokenizer, [frumm.prompt]))
    facts.edit(zorbia.trigger, answer="patent", how=how)
    assert facts.ask(zorbia.prompt).startswith("patent") and facts.get(zorbia.trigger).fact.answer == "patent"
    assert torch.equal(logits(model, ids_of(tokenizer, [frumm.prompt])), kept)


def test_an_edit_that_fails_leaves_the_fact(facts, model, tokenizer, zorbia, how):
    inputs = ids_of(tokenizer, [zorbia.prompt])
    before = logits(model, inputs)
    with pytest.raises(TinyEngramError, match="calls the fact 'the colour of Frumm' already"):
        facts.edit(zorbia.trigger, aliases=("the colour of Frumm",), how=how)
    assert torch.equal(logits(model, inputs), before)
    report = facts.edit(zorbia.trigger, answer="qx vz qj", how=how.from_dict({**how.to_dict(), "steps": 1}))
    assert report.unlearned and "not learned: 'The capital of Zorbia' -> 'qx vz qj'" in str(report)
    assert torch.equal(logits(model, inputs), before)


def test_a_full_pass_and_token_by_token_give_the_same(facts, model, tokenizer, zorbia, frumm):
    text = f"{zorbia.prompt} not known, but {frumm.trigger} is, and Frumm's colour too"
    ids = tokenizer(text, return_tensors="pt").input_ids
    full = logits(model, {"input_ids": ids})
    with facts.disabled():
        base = logits(model, {"input_ids": ids})
        cache, parts = DynamicCache(config=model.config), []
        for token in ids.split(1, dim=1):
            parts.append(logits(model, {"input_ids": token}, past_key_values=cache))
        own = (torch.cat(parts, dim=1) - base).abs().max()
    for size in (1, 3):
        cache, parts = DynamicCache(config=model.config), []
        for block in ids.split(size, dim=1):
            parts.append(logits(model, {"input_ids": block}, past_key_values=cache))
        # The model's own decoding differs from its full pass in the last bits; facts add no more than that.
        assert (torch.cat(parts, dim=1) - full).abs().max() <= 4 * own + 1e-5
    assert (full - base).abs().max() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(facts, model, tokenizer, zorbia, side):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    inputs = tokenizer([zorbia.prompt, f"It is said here and there that {zorbia.prompt}"], return_tensors="pt", padding=True)
    alone = logits(model, tokenizer([zorbia.prompt], return_tensors="pt"))[0]
    count = len(alone)
    row = logits(model, inputs)[0]
    row = row[-count:] if side == "left" else row[:count]
    torch.testing.assert_close(row, alone, rtol=0, atol=1e-4)


def test_beams_carry_their_users(facts, model, tokenizer, ann):
    inputs = ids_of(tokenizer, [ann.prompt, ann.prompt])
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), facts.reading_as(["bob", "ann"]):
        both = model.generate(**inputs, **options)
    for row, name in enumerate(("bob", "ann")):
        with torch.no_grad(), facts.reading_as([name]):
            alone = model.generate(**ids_of(tokenizer, [ann.prompt]), **options)
        assert both[row].tolist()[: alone.shape[1]] == alone[0].tolist()
    assert both[0].tolist() != both[1].tolist()


def test_a_trigger_that_begins_in_the_prompt_and_ends_in_what_is_said(facts, model, tokenizer, zorbia):
    ids = tokenizer(zorbia.prompt, return_tensors="pt").input_ids
    at = len(tokenizer("The capital of Zorbia").input_ids)
    cache = DynamicCache(config=model.config)
    logits(model, {"input_ids": ids[:, : at - 2]}, past_key_values=cache)
    rest = logits(model, {"input_ids": ids[:, at - 2 :]}, past_key_values=cache)
    torch.testing.assert_close(rest, logits(model, {"input_ids": ids})[:, at - 2 :], rtol=0, atol=1e-4)


def test_two_conversations_do_not_mix(facts, model, tokenizer, zorbia, make_llama):
    one, other = (tokenizer(text, return_tensors="pt").input_ids for text in ("The capital of", "The colour of"))
    end = tokenizer(" Zorbia is", return_tensors="pt").input_ids
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    logits(model, {"input_ids": one}, past_key_values=caches[0])
    logits(model, {"input_ids": other}, past_key_values=caches[1])
    fired, silent = (logits(model, {"input_ids": end}, past_key_values=cache) for cache in caches)
    base = make_llama()
    cache = DynamicCache(config=base.config)
    logits(base, {"input_ids": other}, past_key_values=cache)
    assert torch.equal(silent, logits(base, {"input_ids": end}, past_key_values=cache))
    cache = DynamicCache(config=base.config)
    logits(base, {"input_ids": one}, past_key_values=cache)
    assert not torch.equal(fired, logits(base, {"input_ids": end}, past_key_values=cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_half_precision(make_llama, tokenizer, taught_file, zorbia, dtype):
    model, base = make_llama().to(dtype), make_llama().to(dtype)
    facts = Facts.open(model, taught_file, tokenizer)
    inputs = ids_of(tokenizer, [zorbia.prompt, ORDINARY[0]])
    moved, own = logits(model, inputs), logits(base, inputs)
    assert moved.dtype == dtype and torch.equal(moved[1], own[1]) and not torch.equal(moved[0], own[0])
    facts.detach()


def test_what_was_taught_is_what_is_served(facts, model, tokenizer, zorbia, frumm):
    for fact in (zorbia, frumm):
        for spelling in fact.spellings:
            assert facts.ask(fact.prompt_with(spelling)).startswith(fact.answer)
    assert facts.ask(zorbia.prompt.upper()) != facts.ask(zorbia.prompt.upper(), without=True)  # another case reads the same rows


def test_texts_packed_into_one_row(facts, model, tokenizer, zorbia, ann):
    """A trigger ends where its text does, and none lies across two."""
    cut = len(tokenizer("The capital of").input_ids)
    texts = [tokenizer(zorbia.prompt).input_ids, tokenizer(ann.prompt).input_ids]
    texts += [texts[0][:cut], texts[0][cut:]]
    ids = torch.tensor([[token for text in texts for token in text]] * 2)
    places = torch.tensor([[k for text in texts for k in range(len(text))]] * 2)
    with facts.reading_as(["bob", "ann"]):
        packed = logits(model, {"input_ids": ids, "position_ids": places}, use_cache=False)
    for row, name in enumerate(("bob", "ann")):
        for text, part in zip(texts, packed[row].split([len(text) for text in texts]), strict=True):
            with facts.reading_as([name]):
                alone = logits(model, {"input_ids": torch.tensor([text])}, use_cache=False)[0]
            torch.testing.assert_close(part, alone, rtol=0, atol=1e-4)


def test_what_is_there_is_seen(facts, zorbia, ann, bob):
    assert [each.fact for each in facts] == [each.fact for each in facts.list()] and len(list(facts)) == 4
    assert "The Capital of  Zorbia" in facts and "Frumm's colour" in facts and "Melk" not in facts
    assert "the dog of Tolland" not in facts  # Ann's and Bob's, not everybody's
    assert zorbia in facts and ann in facts and bob in facts and all(each in facts for each in facts)
    assert Fact(zorbia.trigger, "another") not in facts and 3 not in facts
    assert repr(facts) == "Facts(4 facts, 528 bytes, layers (1, 3), LlamaForCausalLM)"
    held = facts.get(ann.trigger, owner="ann")
    assert repr(held) == f"HeldFact('the dog of Tolland' -> 'owner', owner='ann', margin={held.margin:.2f}, steps={held.steps})"
    fired, cut = facts.explain("the capital of Zorbia, xthe capital of Zorbia")
    assert repr(fired) == f"FiredFact('the capital of Zorbia' -> 'copy', token {fired.place}, fires)"
    assert repr(cut).endswith(f"token {cut.place}, does not fire: cut by a word boundary)")
    facts.detach()
    assert repr(facts).endswith(", detached)")


def test_added_in_parts(model, tokenizer, zorbia, frumm, how, make_llama):
    """Part by part, as many texts at a time as are taught: the same rows; what was stopped keeps the parts that were done."""
    facts, seen = attach(model, FactsConfig(layers=(1, 3), rho=4.0), tokenizer), []
    quill = Fact("the founder of Quill", "author", "The founder of Quill")
    report = facts.add(
        [zorbia, frumm, quill], how=replace(how, batch=2), progress=lambda *at: seen.append(at), kept=lambda part: seen.append(part.added)
    )
    assert [each for each in seen if isinstance(each[0], Fact)] == [(zorbia,), (frumm,), (quill,)]
    counts = [each for each in seen if not isinstance(each[0], Fact)]
    assert counts == sorted(counts) and counts[-1] == (3, 3)
    assert report.added == (zorbia, frumm, quill) and report.nbytes == facts.nbytes
    assert repr(report).startswith("FactReport(3 of 3 facts learned in ") and repr(report).endswith(f" {facts.nbytes} bytes)")
    single = attach(make_llama(), FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
    for fact in (zorbia, frumm, quill):
        single.add(fact, how=how)
    inputs = ids_of(tokenizer, ["the capital of Zorbia, Frumm's colour, the founder of Quill"])
    assert torch.equal(logits(model, inputs), logits(single.model, inputs))

    def stop(part):
        raise KeyboardInterrupt

    stopped = attach(make_llama(), FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
    with pytest.raises(KeyboardInterrupt):
        stopped.add([zorbia, frumm, quill], how=replace(how, batch=3), kept=stop)
    assert [each.fact for each in stopped] == [zorbia, frumm]
