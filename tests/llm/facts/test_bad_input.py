"""What a person can get wrong: one line that names the value, what was expected and the way out."""

import pytest
import torch

from tiny_engram.errors import ConfigError, TinyEngramError, TokenizerError
from tiny_engram.llm import EngramConfig, EngramLayers, Fact, Facts, FactsConfig, TeachConfig, UnsupportedModelError, attach
from tiny_engram.llm.fact_checks import FactsRefused
from tiny_engram.llm.loading import check_device, load_causal_lm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trigger": " ", "answer": "a"}, "trigger ' ' is empty"),
        ({"trigger": "...", "answer": "a"}, "all punctuation"),
        ({"trigger": "Zorbia", "answer": ""}, "answer of 'Zorbia' is '', expected text"),
        ({"trigger": "Zorbia", "answer": 4}, "answer of 'Zorbia' is 4, expected text"),
        ({"trigger": "Zorbia", "answer": "a", "prompt": "The capital is"}, "does not hold the trigger 'Zorbia'"),
        ({"trigger": "Zorbia", "answer": "a", "aliases": "Zorb"}, r"aliases is the text 'Zorb', expected a list"),
        ({"trigger": "Zorbia", "answer": "a", "owner": ""}, "owner is '', expected a user's name"),
    ],
)
def test_facts(fields, message):
    with pytest.raises(TinyEngramError, match=message) as raised:
        Fact(**fields)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (FactsConfig, {"layers": ()}, r"FactsConfig.layers is \(\)"),
        (FactsConfig, {"layers": (3, 1)}, "ascending"),
        (FactsConfig, {"rho": 0}, "rho"),
        (FactsConfig, {"head_dim": 33}, "head_dim"),
        (TeachConfig, {"steps": 0}, "steps"),
        (TeachConfig, {"margin": -1}, "TeachConfig.margin is -1: expected 0 or more"),
        (TeachConfig, {"contexts": ()}, "TeachConfig.contexts is"),
        (TeachConfig, {"learning_rate": float("nan")}, "learning_rate"),
    ],
)
def test_configs(kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        kind(**fields)
    assert kind.from_dict(kind().to_dict()) == kind()


def test_attach_takes_either_config(model, tokenizer):
    facts = attach(model, FactsConfig(), tokenizer)
    assert isinstance(facts, Facts) and facts.config.layers == (1,)
    layers = attach(model, EngramConfig(layers=(1,)), tokenizer)
    assert isinstance(layers, EngramLayers)
    facts.detach()
    layers.detach()
    with pytest.raises(ConfigError, match="config is dict: expected an EngramConfig or a FactsConfig"):
        attach(model, {"layers": (1,)}, tokenizer)
    with pytest.raises(ConfigError, match=r"FactsConfig.layers is \(4,\): expected 0 to 3, of this model"):
        attach(model, FactsConfig(layers=(4,)), tokenizer)


def test_models_and_tokenizers(model, tokenizer):
    from transformers import CLIPTextConfig, CLIPTextModel

    class Slow:
        pad_token_id = 0

    with pytest.raises(UnsupportedModelError, match="clip_text_model"):
        attach(CLIPTextModel(CLIPTextConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)), FactsConfig(), tokenizer)
    with pytest.raises(TokenizerError, match="Slow has no Rust backend"):
        attach(model, FactsConfig(), Slow())


def test_spellings_that_cannot_be(facts, how):
    with pytest.raises(TinyEngramError, match="expected at most 64; use a shorter one"):
        facts.add(Fact("zq " * 80, "copy"), how=how)
    with pytest.raises(TinyEngramError, match="special token"):
        facts.add(Fact("the <|end|> word", "copy"), how=how)
    with pytest.raises(TinyEngramError, match="'the colour of Frumm' of 'Frumm' calls the fact 'the colour of Frumm' already"):
        facts.add(Fact("Frumm", "copy", aliases=("the colour of Frumm",)), how=how)
    with pytest.raises(TinyEngramError, match="calls the fact 'Brix' already"):
        facts.add([Fact("Brix", "copy"), Fact("brix", "owner")], how=how)
    assert len(facts) == 4


def test_unknown_names_are_told_with_the_known_ones(facts):
    with pytest.raises(TinyEngramError, match="no fact has the trigger 'Melk'; known: 'the capital of Zorbia', 'the colour of Frumm'"):
        facts.remove("Melk")
    with pytest.raises(TinyEngramError, match="no fact of 'ann' has the trigger 'Melk'; known: 'the dog of Tolland'$"):
        facts.remove("Melk", owner="ann")
    with pytest.raises(TinyEngramError, match="no fact of 'ann' has .* 'the capital of Zorbia', but there is everybody's; leave owner out"):
        facts.remove("the capital of Zorbia", owner="ann")
    with pytest.raises(TinyEngramError, match="'The dog of Tolland', but there is that of 'ann', that of 'bob'; give owner='ann'"):
        facts.edit("The dog of Tolland", answer="Rex")
    with pytest.raises(TinyEngramError, match="owners is the text 'ann'"):
        facts.reading_as("ann")
    with pytest.raises(TinyEngramError, match="expected answer, prompt, aliases or trigger"):
        facts.edit("the capital of Zorbia", colour="red")


def test_what_is_no_fact(facts):
    with pytest.raises(TinyEngramError, match=r"facts holds 'Zorbia', expected facts; write Fact\(trigger, answer\)"):
        facts.add("Zorbia")
    with pytest.raises(TinyEngramError, match="facts holds 'answer', expected facts"):
        facts.add([Fact("Zorbia", "answer"), "answer"])
    with pytest.raises(TinyEngramError, match="facts holds 3, expected facts"):
        facts.add(3)
    assert len(facts) == 4 and facts.add([]).added == ()


@pytest.mark.parametrize("prompt", ["", " \n", None, ["the capital"]])
def test_no_prompt(facts, prompt):
    with pytest.raises(TinyEngramError, match="prompt is .*, expected text, such as a trigger"):
        facts.ask(prompt)


@pytest.mark.parametrize("name", ["foo", "meta", "cuda:99", "", None])
def test_devices(name, tmp_path):
    with pytest.raises(TinyEngramError, match=r"^device '.*; expected cpu"):
        check_device(name)
    with pytest.raises(TinyEngramError, match=r"^device '.*; expected cpu"):
        load_causal_lm(tmp_path, device=name)
    assert check_device("cpu") == torch.device("cpu")


def test_models_that_are_not_there(tmp_path):
    for name in (tmp_path / "none", "./none", "deep/er/none"):
        with pytest.raises(TinyEngramError, match=r"none: no such folder; expected a transformers causal LM's"):
            load_causal_lm(name)


def test_all_facts_that_are_refused_are_named(facts, how):
    wanted = [Fact("zq " * 80, "copy"), Fact("Brix", "copy"), Fact("brix", "owner"), Fact("Frumm's colour", "form")]
    with pytest.raises(FactsRefused, match=r"expected at most 64.* \(2 more facts refused, see its .problems\)") as raised:
        facts.add(wanted, how=how)
    assert list(raised.value.problems) == [0, 2, 3] and len(facts) == 4
    assert "calls the fact 'Brix' already" in raised.value.problems[2]


def test_two_users_for_three_rows(facts, model, tokenizer, ann):
    inputs = tokenizer([ann.prompt] * 3, return_tensors="pt", padding=True)
    with facts.reading_as(["ann", "bob"]), pytest.raises(TinyEngramError, match="2 users for a batch of 3 rows"), torch.no_grad():
        model(**inputs)


def test_warnings_at_registration(facts, how):
    report = facts.add(
        [Fact("vortex-9", "copy"), Fact("the art", "text"), Fact("Quell", "owner")],
        how=how,
    )
    assert any("'vortex-9' fires inside 'vortex-99', too" in warning for warning in report.warnings)
    assert any("'the art' is made of ordinary words" in warning for warning in report.warnings)


def test_explain(facts):
    found = facts.explain("the capital of Zorbia, xthe capital of Zorbia and the dog of Tolland", owner="ann")
    assert [(each.fact.trigger, each.fact.owner, each.reason) for each in found] == [
        ("the capital of Zorbia", None, None),
        ("the capital of Zorbia", None, "cut by a word boundary"),
        ("the dog of Tolland", "ann", None),
        ("the dog of Tolland", "bob", "another user's"),
    ]
    assert facts.explain("Nothing here.") == () and facts.explain("") == ()
