"""explain(): what fires per encoder, what was seen but does not fire, and why."""

import json

import pytest


@pytest.fixture
def loaded(tiny, adapter):
    for seed, trigger in enumerate(["cat-toy", "vortex-9", "sks", "zqx bolo"]):
        adapter.load_concept(tiny.concept(adapter, trigger, seed=seed))
    return adapter


def reasons(adapter, prompt):
    return [(u.name, u.text, u.reason) for u in adapter.explain(prompt).unfired]


def test_fired_spans_have_names_places_texts_and_strengths(loaded):
    loaded.set_strength("sks", 0.5)
    found = loaded.explain("a Cat-Toy, (SKS) and cat-toy")
    assert [(f.name, f.start, f.end, f.text, f.strength) for f in found.fired] == [
        ("cat-toy", 2, 5, "Cat-Toy", 1.0), ("sks", 7, 8, "SKS", 0.5), ("cat-toy", 10, 13, "cat-toy", 1.0),
    ]  # fmt: skip
    assert found.unfired == () and found.prompts[0].tokens[0] == "<|startoftext|>" and found.prompts[0].role == "clip_l"


@pytest.mark.parametrize(
    ("prompt", "name", "text", "reason"),
    [
        ("two cat-toys", "cat-toy", "cat-toys", "cut by a word boundary"),
        ("a wildcat-toy", "cat-toy", "wildcat-toy", "cut by a word boundary"),
        ("a vortex-99", "vortex-9", "vortex-9", "ids cannot tell"),
        ("a vortex-9s", "vortex-9", "vortex-9", "ids cannot tell"),
        ("an 'sks' hat", "sks", "sks", "does not stand alone beside that punctuation"),
        ("tasks", "sks", "tasks", "cut by a word boundary"),
    ],
)
def test_seen_but_not_fired(loaded, prompt, name, text, reason):
    ((found_name, found_text, found_reason),) = reasons(loaded, prompt)
    assert (found_name, found_text) == (name, text) and reason in found_reason
    assert not loaded.explain(prompt).fired


def test_truncated_and_half_cut(loaded):
    assert "beyond the encoder's 77 tokens" in reasons(loaded, " ".join(["word"] * 80) + " cat-toy")[0][2]
    assert "cut in half by the encoder's 77 tokens" in reasons(loaded, " ".join(["word"] * 74) + " cat-toy")[0][2]
    exact = loaded.explain(" ".join(["word"] * 72) + " cat-toy")
    assert len(exact.fired) == 1 and not exact.unfired


def test_switched_off_concepts_say_how(loaded):
    loaded.set_strength("sks", 0.0)
    assert reasons(loaded, "a sks") == [("sks", "sks", "strength is 0")]
    loaded.set_concepts(["cat-toy"])
    assert "not among the active concepts" in reasons(loaded, "a zqx bolo")[0][2]
    loaded.disable_concepts()
    assert "all concepts are disabled" in reasons(loaded, "a cat-toy")[0][2]


def test_a_longer_trigger_covers_a_shorter_one(tiny, loaded):
    loaded.load_concept(tiny.concept(loaded, "bolo", seed=9))
    assert [f.name for f in loaded.explain("a zqx bolo").fired] == ["zqx bolo"]
    assert reasons(loaded, "a zqx bolo") == [("bolo", "bolo", "covered by the longer or earlier trigger of 'zqx bolo'")]


def test_negative_prompts_lists_json_and_text(loaded):
    found = loaded.explain(["a tree", "a sks"], "a cat-toy")
    assert [(p.negative, len(p.fired)) for p in found.prompts] == [(False, 0), (False, 1), (True, 1)]
    assert json.loads(json.dumps(found.to_dict()))["prompts"][2]["fired"][0]["name"] == "cat-toy"
    text = str(found)
    assert "no trigger" in text and "negative prompt 'a cat-toy'" in text and "fires: cat-toy at tokens 2..4" in text


def test_what_explain_says_is_what_the_encoder_does(loaded, pipe, tiny):
    base = tiny.build()
    prompts = [
        "cat-toy",
        "(cat-toy) sks!",
        "vortex-9 on a vortex-99",
        "'sks' sks",
        "",
        "\u732b sks",
        "a zqx   bolo\n\nsks",
        "sks" + " word" * 90,
    ]
    for prompt in prompts:
        fired = {t for f in loaded.explain(prompt).fired for t in range(f.start, f.end)}
        changed = (base.encode_prompt(prompt, "cpu", 1, False)[0] != pipe.encode_prompt(prompt, "cpu", 1, False)[0]).any(-1)[0]
        assert set(changed.nonzero().flatten().tolist()) == fired, prompt
