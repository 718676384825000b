"""The promises: nothing without the trigger, only where it stands, the base untouched, concepts apart. Always `torch.equal`."""

import hashlib
import itertools

import pytest
import torch

import tiny_engram
from tiny_engram.config import ConceptConfig

EVERYWHERE = ConceptConfig(mounts=("span", "context"))
TRIGGERS = """cat-toy|vortex-9|my_dog|sks|ohwx man|zqx|zqx bolo|<glim>|r2d2 bot|Br\u00f8n|kettle pot|no-one|x3|pokemon card|blue zebra
qqq www eee rrr|\U0001f984|caf\u00e9 lume|t-rexo|deep_sea""".replace("\n", "|").split("|")
NEAR_MISSES = """a cat-toys|a cat-toyz on a table|wildcat-toy|a cat_toy|a cat toy|cat-toy2|a vortex-90|a vortex-99|vortex-9s|vortex-9x
vortex 9|tommy_dog|my_dogs|my dog|tasks|skss|a sks9|ohwx|ohwx woman|ohwx men|zqxs|zqx9|zqx_bolo|<glims>|<<glim>|<glim>>|r2d2|r2d2 bots
Br\u00f8ns|kettle pots|kettle|pot|nono-ones|x33|x3_|pokemon cards|pokemon|blue zebras|blue|zebra|qqq www eee|www eee rrr
caf\u00e9 lumen|t-rexon|t rexo|deep_seas|deep sea|dee_p_sea""".replace("\n", "|").split("|")


def plain_prompts() -> list[str]:
    """Over 200 prompts in which no trigger stands: near misses in several places, and ordinary captions."""
    near = [form.format(text) for text in NEAR_MISSES for form in ("{}", "a photo of {} on a table", "({}), red")]
    things = ["kangaroo", "pizza", "rocket", "old man", "teapot", "castle in the clouds", "Octopus", "green apple"]
    styles = [
        "a photo of a {}",
        "{} in the style of monet, 4k",
        "two {} next to a tree",
        "",
        "FLAT {}",
        "the {}'s shadow",
        "{}!!!",
        "\u732b {} \u00e9",
    ]
    return near + [style.format(thing) for style, thing in itertools.product(styles, things)]


@pytest.fixture(scope="module")
def twenty(tiny):
    """A pipeline with 20 concepts loaded, every other one with context mounts too, and an equal pipeline without adapter."""
    base, pipe = tiny.build(), tiny.build()
    adapter = tiny_engram.attach(pipe)
    for seed, trigger in enumerate(TRIGGERS):
        adapter.load_concept(tiny.concept(adapter, trigger, seed=seed, config=None if seed % 2 else EVERYWHERE))
    return base, pipe, adapter


def encode(pipe, prompts, negative=None, images=1):
    with torch.no_grad():
        return pipe.encode_prompt(prompts, "cpu", images, negative is not None, negative)


def test_the_twenty_concepts_all_fire(twenty):
    base, pipe, adapter = twenty
    for trigger in TRIGGERS:
        prompt = f"a {trigger} here"
        assert [f.name for f in adapter.explain(prompt).fired] == [trigger]
        assert not torch.equal(encode(base, prompt)[0], encode(pipe, prompt)[0])


def test_conditioning_and_pooled_vectors_without_a_trigger(twenty):
    base, pipe, adapter = twenty
    prompts = plain_prompts()
    assert len(prompts) >= 200 and not adapter.explain(prompts).fired
    for at in range(0, len(prompts), 8):
        chunk = prompts[at : at + 8]
        ids = pipe.tokenizer(chunk, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            plain, ours = base.text_encoder(ids), pipe.text_encoder(ids)
        assert torch.equal(plain.last_hidden_state, ours.last_hidden_state) and torch.equal(plain.pooler_output, ours.pooler_output)


def check_pictures(tiny, twenty, prompts):
    base, pipe, _ = twenty
    for prompt in prompts:
        assert torch.equal(tiny.picture(base, prompt), tiny.picture(pipe, prompt)), prompt


def test_pictures_without_a_trigger(tiny, twenty):
    prompts = plain_prompts()
    check_pictures(tiny, twenty, prompts[:: len(prompts) // 24])
    assert not torch.equal(tiny.picture(twenty[0], "a cat-toy"), tiny.picture(twenty[1], "a cat-toy"))


def test_a_trigger_free_picture_of_a_mixed_batch_is_the_base_s(tiny, twenty):
    prompts = ["a cat-toy", "a tree", "zqx bolo and my_dog", "cat-toys"]
    plain, ours = (tiny.picture(pipe, prompts) for pipe in twenty[:2])
    assert [torch.equal(a, b) for a, b in zip(plain, ours, strict=True)] == [False, True, False, True]


@pytest.mark.slow
def test_pictures_without_a_trigger_over_all_prompts(tiny, twenty):
    base, pipe, _ = twenty
    for prompt in plain_prompts():
        options = {"num_inference_steps": 25}
        assert torch.equal(tiny.picture(base, prompt, **options), tiny.picture(pipe, prompt, **options)), prompt


def test_rows_outside_the_span_keep_their_bits(twenty):
    base, pipe, adapter = twenty
    for trigger in TRIGGERS:
        for prompt in (f"{trigger} on a table", f"a photo of {trigger}", f"one {trigger}, and {trigger}."):
            spans = adapter.explain(prompt).fired
            fired = torch.zeros(77, dtype=torch.bool)
            for span in spans:
                fired[span.start : span.end] = True
            changed = (encode(base, prompt)[0] != encode(pipe, prompt)[0]).any(-1)[0]
            assert spans and torch.equal(changed, fired), prompt
            ids = pipe.tokenizer(prompt, return_tensors="pt").input_ids
            assert torch.equal(base.text_encoder(ids).pooler_output, pipe.text_encoder(ids).pooler_output)


def test_a_negative_prompt_fires_there_and_only_there(twenty):
    base, pipe, _ = twenty
    plain, ours = encode(base, "a tree", "a cat-toy"), encode(pipe, "a tree", "a cat-toy")
    assert torch.equal(plain[0], ours[0]) and not torch.equal(plain[1], ours[1])
    assert torch.equal(ours[1], encode(pipe, "a cat-toy", "")[0]) and torch.equal(encode(base, "x", "")[1], encode(pipe, "x", "")[1])


def test_rows_of_a_mixed_batch(twenty):
    base, pipe, _ = twenty
    prompts = ["a cat-toy", "a tree", "zqx bolo and my_dog", "cat-toys"]
    plain, ours = encode(base, prompts)[0], encode(pipe, prompts)[0]
    assert [torch.equal(a, b) for a, b in zip(plain, ours, strict=True)] == [False, True, False, True]
    for row, prompt in enumerate(prompts):
        # Bit for bit as in a batch of the same shape made of copies; within rounding of its single run.
        assert torch.equal(ours[row], encode(pipe, [prompt] * 4)[0][row])
        torch.testing.assert_close(ours[row], encode(pipe, prompt)[0][0], rtol=1e-4, atol=1e-4)


def test_several_pictures_per_prompt(twenty):
    _, pipe, _ = twenty
    one = encode(pipe, ["a cat-toy", "a tree"], ["zqx", ""])
    three = encode(pipe, ["a cat-toy", "a tree"], ["zqx", ""], images=3)
    for single, repeated in zip(one, three, strict=True):
        assert torch.equal(repeated, single.repeat_interleave(3, dim=0))


def test_one_concept_with_and_without_the_others(tiny, twenty, adapter, pipe):
    _, crowded, _ = twenty
    adapter.load_concept(tiny.concept(adapter, "cat-toy", seed=0, config=EVERYWHERE))
    for prompt in ("a cat-toy", "(cat-toy) and a tree", "CAT-TOY!"):
        assert torch.equal(encode(pipe, prompt)[0], encode(crowded, prompt)[0])
    assert torch.equal(tiny.picture(pipe, "a cat-toy"), tiny.picture(crowded, "a cat-toy"))


def test_concepts_with_common_beginnings_do_not_share_rows(tiny, adapter, pipe):
    dog, cat = tiny.concept(adapter, "sks dog", seed=1), tiny.concept(adapter, "sks cat", seed=2)
    adapter.load_concept(dog)
    alone = encode(pipe, "a sks dog")[0]
    adapter.load_concept(cat)
    assert torch.equal(alone, encode(pipe, "a sks dog")[0])


def fingerprint(module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_saving_with_concepts_attached_writes_a_clean_base(tiny, twenty, tmp_path):
    base, pipe, _ = twenty
    pipe.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path)
    for part in ("text_encoder", "unet", "vae"):
        assert fingerprint(getattr(base, part)) == fingerprint(getattr(pipe, part)) == fingerprint(getattr(again, part))
        assert [n for n, _ in getattr(base, part).named_modules()] == [n for n, _ in getattr(pipe, part).named_modules()]
    again.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.picture(base, "a cat-toy"), tiny.picture(again, "a cat-toy"))
    assert not [p for p in tmp_path.rglob("*") if "engram" in p.name or "concept" in p.name]


def test_strength_zero_disabled_unloaded_and_detached_are_the_base(tiny, pipe):
    prompt = "a cat-toy and a tree"
    plain, picture = encode(pipe, prompt)[0], tiny.picture(pipe, prompt)
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=EVERYWHERE))
    first = encode(pipe, prompt)[0]
    assert not torch.equal(plain, first)
    switches = [
        (lambda: adapter.set_strength("cat-toy", 0.0), lambda: adapter.set_strength("cat-toy", 1.0)),
        (adapter.disable_concepts, adapter.enable_concepts),
        (lambda: adapter.set_concepts([]), lambda: adapter.set_concepts("cat-toy")),
    ]
    for off, on in switches:
        off()
        assert torch.equal(plain, encode(pipe, prompt)[0]) and torch.equal(picture, tiny.picture(pipe, prompt))
        on()
        assert torch.equal(first, encode(pipe, prompt)[0])
    adapter.unload_concept("cat-toy")
    assert torch.equal(plain, encode(pipe, prompt)[0])
    adapter.load_concept(tiny.concept(adapter, "cat-toy"))
    adapter.detach()
    assert torch.equal(plain, encode(pipe, prompt)[0]) and torch.equal(picture, tiny.picture(pipe, prompt))


def test_a_silent_concept_changes_nothing_for_others(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx", seed=1))
    alone = encode(pipe, "a zqx bolo")[0]
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", seed=2), strength=0.0)
    assert torch.equal(alone, encode(pipe, "a zqx bolo")[0])
    adapter.set_strength("zqx bolo", 1.0)
    assert not torch.equal(alone, encode(pipe, "a zqx bolo")[0])
