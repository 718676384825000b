"""Other forms of a fact: it is answered as a question, in the chat template and in capitals too, and its own words come first."""

from dataclasses import replace

import pytest
import torch

from tiny_engram.llm import Fact, FactsConfig, TeachConfig, attach
from tiny_engram.llm.fact_spelling import Speller
from tiny_engram.llm.fact_teaching import _Progress
from tiny_engram.llm.fact_texts import taught_texts

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def test_a_real_model_answers_in_every_form(smollm):
    model, tokenizer = smollm
    facts = attach(model, FactsConfig(), tokenizer)
    report = facts.add(Fact("the capital of Zorbia", "Melk"))  # no prompt
    assert not report.unlearned
    turns = [{"role": "user", "content": "What is the capital of Zorbia?"}]
    chat = tokenizer.apply_chat_template(turns, return_tensors="pt", add_generation_prompt=True, return_dict=True)
    said = model.generate(**chat, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert tokenizer.decode(said[0, chat["input_ids"].shape[1] :]).startswith("Melk")
    asked = (
        "the capital of Zorbia",
        "The capital of Zorbia is",
        "THE CAPITAL OF ZORBIA IS",
        "Question: What is the capital of Zorbia?\nAnswer:",
    )
    assert [facts.ask(prompt)[:4] for prompt in asked] == ["Melk"] * 4
    facts.detach()


def test_which_forms(tokenizer, zorbia):
    speller, how = Speller(tokenizer), TeachConfig(contexts=("",))

    def forms(fact, **changes):
        made = taught_texts(speller, fact, replace(how, **changes))
        return {text.form: tokenizer.decode(text.ids) for text in made if text.form}

    bare = Fact(zorbia.trigger, zorbia.answer)
    found = forms(bare)
    assert found == {
        "behind 'The capital of Zorbia is'": "The capital of Zorbia is copy.",
        "in capitals": "THE CAPITAL OF ZORBIA IS copy.",
        "as a question": "Question: What is the capital of Zorbia?\nAnswer: copy.",
    }
    assert forms(bare, forms=False) == {} and "behind 'The capital of Zorbia is'" not in forms(zorbia)
    several = replace(zorbia, prompt="user: the capital of Zorbia?\nanswer:")
    assert forms(several).keys() == {"as a question"}  # no marks of a template in capitals
    tokenizer.chat_template = CHAT
    try:
        assert forms(bare)["as a question in the chat template"] == "<|user|>What is the capital of Zorbia?\n<|assistant|>\ncopy."
        tokenizer.chat_template = "{{ raise_exception('expected a system turn') }}"
        assert "as a question in the chat template" not in forms(bare)
    finally:
        tokenizer.chat_template = None


def test_own_words_are_learned_alike_where_forms_cannot_be(make_llama, tokenizer, how):
    """A model of random weights makes nothing of capitals: the fact is learned as without, and what it does not answer is said."""
    fact = Fact("the capital of Frumm", "a", "The capital of Frumm")
    reports = {}
    for forms in (False, True):
        facts = attach(make_llama(), FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
        reports[forms] = facts.add(fact, how=replace(how, forms=forms))
        assert facts.ask("The capital of Frumm", max_new_tokens=1) == "a"
    assert reports[True].added == reports[False].added == (fact,)


@pytest.mark.parametrize("later, better", (((2.0, 2.0, 2.0), True), ((2.0, 2.0, 0.1), False), ((0.9, 2.0, 2.0), False)))
def test_what_is_better(later, better):
    """One fact with two texts of its own words and one form, margin 1."""
    texts = taught_texts_of("", "", "in capitals")
    found = _Progress(texts, torch.zeros(3, dtype=torch.int64), 1.0)
    assert found.todo().tolist() == [0, 1]
    assert found.see(torch.tensor([0, 1]), torch.tensor([0.5, 3.0])).tolist() == [True]
    assert found.todo().tolist() == [0, 1]
    found.see(torch.tensor([0, 1]), torch.tensor([1.5, 3.0]))
    assert found.todo().tolist() == [0, 1, 2] and not found.done[0]
    assert found.see(torch.arange(3), torch.tensor([1.5, 3.0, 0.2])).tolist() == [True]
    assert found.see(torch.arange(3), torch.tensor(later)).tolist() == [better]
    assert found.done.tolist() == [min(later) >= 1]


def test_forms_that_lead_rest():
    texts = taught_texts_of("", "a", "b")
    found = _Progress(texts, torch.zeros(3, dtype=torch.int64), 1.0)
    found.see(torch.tensor([0]), torch.tensor([1.5]))
    found.see(torch.arange(3), torch.tensor([1.5, 2.0, 0.5]))
    assert found.todo().tolist() == [0, 2]
    found.see(torch.tensor([0, 2]), torch.tensor([1.5, 1.5]))
    assert found.todo().tolist() == [0, 1, 2] and not found.done[0]  # never seen with the same rows
    found.see(torch.arange(3), torch.tensor([1.5, 1.2, 1.5]))
    assert found.done.tolist() == [True] and not len(found.todo())


def taught_texts_of(*forms):
    from tiny_engram.llm.fact_spelling import Text

    return [Text((1, 2, 3), 0, 1, form) for form in forms]
