"""Context mounts where two encoders' states lie side by side in the width of what all projections read: Stable Diffusion XL."""

from contextlib import ExitStack

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny import stable_diffusion
from tests.pipelines.tiny.base import picture
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.hooks import MountError
from tiny_engram.residual import apply_concept
from tiny_engram.training.cache import CaptionBatch
from tiny_engram.training.rows import ConceptRows

TRIGGER, PROMPT, PLAIN = "vortex cat", "a photo of a vortex cat on a table", "a photo of a cat on a table"
SIDES = ConceptConfig(mounts=("context",))
ALL = ConceptConfig(mounts=("input", "span", "context"), share="block", bands=2, attention_rank=1, feedforward_rank=1)
(XL,) = (entry for entry in stable_diffusion.PIPELINES if entry.family == "stable-diffusion-xl")
COLUMNS = {"clip_l": (0, stable_diffusion.CLIP_L), "clip_g": (stable_diffusion.CLIP_L, stable_diffusion.CLIP_L + stable_diffusion.CLIP_G)}


@pytest.fixture(scope="module")
def pipe():
    return XL.build()


@pytest.fixture
def adapter(pipe):
    adapter = tiny_engram.attach(pipe)
    yield adapter
    adapter.detach()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.unet.modules())


def ids_of(pipe, role: str, prompts):
    tokenizer = {"clip_l": pipe.tokenizer, "clip_g": pipe.tokenizer_2}[role]
    return tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def expected(adapter, concept, mount, states, prompts, strength=1.0):
    """Each role's rows in its own columns of `[batch, 77, width]`."""
    parts = []
    for role, columns in COLUMNS.items():
        rows = concept.mount_rows(role, mount)
        spans = adapter.spans(concept, ids_of(adapter.pipe, role, prompts), role)
        own = states[..., slice(*columns)]
        parts.append(apply_concept(own, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho, strength=strength))
    return torch.cat(parts, -1)


def test_each_role_adds_in_its_own_columns_at_the_trigger(pipe, adapter, tiny):
    concept = tiny.concept(adapter, TRIGGER, config=SIDES)
    assert {role: rows.width for role, rows in concept.roles.items()} == {r: b - a for r, (a, b) in COLUMNS.items()}
    adapter.load_concept(concept, strength=0.7)
    given = []
    handle = pipe.unet.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs["encoder_hidden_states"]), with_kwargs=True)
    with tiny.Reads(adapter) as seen:
        picture(XL, pipe, [PROMPT, PLAIN], negative_prompt=["a house", TRIGGER], num_inference_steps=3)
    handle.remove()
    prompts = ["a house", TRIGGER, PROMPT, PLAIN]
    assert len(seen) >= 4 and len(given[0]) == 4
    for name, reads in seen.items():
        assert torch.equal(reads[0], expected(adapter, concept, name, given[0], prompts, 0.7))
        assert reads[0] is reads[1] is reads[2]  # made once
        assert (reads[0] != given[0]).flatten(1).any(1).tolist() == [False, True, True, False]


def test_the_order_of_roles_and_of_loading_is_no_matter(pipe, adapter, tiny):
    first = tiny.concept(adapter, TRIGGER, config=ConceptConfig(mounts=("value",)), seed=1)
    second = tiny.concept(adapter, "blue dog", config=ConceptConfig(mounts=("context",), share="block"), seed=2)
    prompt = f"a {TRIGGER} and a blue dog"
    drawn = []
    for order in ((first, second), (second, first)):
        for concept in order:
            adapter.load_concept(concept)
        drawn.append(picture(XL, pipe, prompt))
        adapter.unload_concept()
    adapter.load_concept(first)
    assert torch.equal(*drawn) and not torch.equal(drawn[0], picture(XL, pipe, prompt))


def test_what_has_no_trigger_is_the_base(pipe, adapter, tiny, tmp_path):
    options = {"negative_prompt": "a house"}
    base = {prompt: picture(XL, pipe, prompt, **options) for prompt in (PROMPT, PLAIN)}
    without = picture(XL, pipe, PLAIN)  # no negative prompt: its states are zeros
    concept = tiny.concept(adapter, TRIGGER, config=ALL)
    assert set(concept.roles["clip_g"].maps) == set(concept.roles["clip_l"].maps) != set()
    adapter.load_concept(concept.save(tmp_path / "c.safetensors"))
    assert Concept.load(tmp_path / "c.safetensors").describe()["format"] == 2
    with tiny.Reads(adapter) as seen:
        assert torch.equal(picture(XL, pipe, PLAIN, **options), base[PLAIN])
    assert all(len({id(read) for read in reads}) == 1 for reads in seen.values())
    assert torch.equal(picture(XL, pipe, PLAIN), without)
    ours = picture(XL, pipe, PROMPT, **options)
    assert not torch.equal(ours, base[PROMPT]) and ours.isfinite().all()
    embeds = adapter.embeds(PROMPT, "a house")
    assert torch.equal(drawn_of(pipe, embeds), ours)
    adapter.disable_concepts()
    assert torch.equal(picture(XL, pipe, PROMPT, **options), base[PROMPT])


def drawn_of(pipe, embeds):
    return picture(XL, pipe, None, **{**dict.fromkeys(XL.prompt_keys[1:]), **embeds})


def test_embeds_that_nobody_encoded_are_told_and_clip_skip_is_followed(pipe, adapter, tiny):
    adapter.load_concept(tiny.concept(adapter, TRIGGER, config=SIDES))
    embeds = adapter.embeds(PROMPT, "a house")
    strange = {**embeds, "prompt_embeds": embeds["prompt_embeds"] * 1.001}
    with pytest.raises(MountError, match=r"row 1 of the \[2, 77, \d+\] text states .* no prompt that clip_l has encoded"):
        drawn_of(pipe, strange)
    other = {**embeds, "prompt_embeds": embeds["prompt_embeds"].clone()}
    other["prompt_embeds"][..., stable_diffusion.CLIP_L :] *= 1.001
    with pytest.raises(MountError, match="no prompt that clip_g has encoded"):
        drawn_of(pipe, other)
    skipped = picture(XL, pipe, PROMPT, clip_skip=1)
    adapter.disable_concepts()
    assert not torch.equal(skipped, picture(XL, pipe, PROMPT, clip_skip=1))


def test_rows_of_both_roles_are_given_at_once_and_take_gradients(pipe, adapter, tiny, tmp_path):
    """What is taught is what is served, bit for bit."""
    start = tiny.concept(adapter, TRIGGER, config=ConceptConfig(mounts=("value",), bands=2))
    embeds = adapter.embeds([PROMPT, PLAIN])
    states, pooled, modules = embeds["prompt_embeds"], embeds["pooled_prompt_embeds"], {}
    pipe.unet.requires_grad_(False)

    def call(given):
        conditions = {"text_embeds": pooled, "time_ids": torch.zeros(2, 6)}
        noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        return pipe.unet(noise, torch.tensor([900, 900]), given, added_cond_kwargs=conditions).sample

    with ExitStack() as held:
        for role, columns in COLUMNS.items():
            ids = ids_of(pipe, role, [PROMPT, PLAIN])
            spans = adapter.spans(start, ids, role)
            captions = CaptionBatch(states[..., slice(*columns)], spans, adapter.mounts[role].module, ids, spans, (0, 1))
            modules[role] = ConceptRows(start, role, adapter.contexts[role].layout)
            _, rows, _ = modules[role](captions, (900, 900), torch.float32)
            held.enter_context(adapter.contexts[role].held())
            held.enter_context(adapter.contexts[role].giving(states, rows))
        said = call(states)
    said[0].square().sum().backward()
    for role, module in modules.items():
        start = module.concept(start, role, dict(module.named_parameters()))
        used = [k for k, mount in enumerate(module.mounts) if mount.endswith(".2of2")]
        assert module.rows.grad[used].flatten(1).ne(0).any(1).all()
    adapter.load_concept(start)
    with torch.no_grad():
        served = call(adapter.embeds([PROMPT, PLAIN])["prompt_embeds"])
        adapter.disable_concepts()
        assert torch.equal(said, served) and not torch.equal(served[0], call(states)[0]) and torch.equal(served[1], call(states)[1])
