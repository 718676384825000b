"""Runs with schedules on a small real pipeline, against loops that swap the embeddings by hand."""

import warnings
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, StableDiffusionImg2ImgPipeline
from diffusers.callbacks import SDCFGCutoffCallback

import tiny_engram
from tiny_engram.errors import TinyEngramError
from tiny_engram.schedules import Schedule

PROMPT, NEGATIVE, PLAIN = "a photo of a vortex cat on a table", "a blurred vortex cat", "two green trees"
# Steps of four, of which the first two have the concept.
HALF = [(0.0, 1.0), (0.5, 0.0)]
EVERYWHERE = tiny_engram.ConceptConfig(mounts=("input", "span", "context"), attention_rank=2, feedforward_rank=1)


@pytest.fixture
def loaded(adapter, tiny):
    """An adapter whose concept has rows at the encoder and at the denoiser, and maps."""
    adapter.load_concept(tiny.concept(adapter, "vortex cat", config=EVERYWHERE), "vortex")
    return adapter


def draw(pipe: Any, **options: Any) -> torch.Tensor:
    """Latents, from a fixed seed."""
    options = {"num_inference_steps": 4, "output_type": "latent", "generator": torch.Generator().manual_seed(0), **options}
    return pipe(**options).images


def embeds_at(adapter: Any, strength: float, prompt: Any = PROMPT, negative: Any = NEGATIVE) -> torch.Tensor:
    """[negative, positive] as the denoiser is given them."""
    adapter.set_strength("vortex", strength)
    positive, other = adapter.encode(prompt, negative)
    return torch.cat([other, positive])


@torch.no_grad()
def drawn_by_hand(pipe: Any, adapter: Any, strengths: list[float], guidance: float = 7.5) -> torch.Tensor:
    """The pipeline's loop, written out: each step at a strength of its own, at the encoder and at the denoiser."""
    states = {strength: embeds_at(adapter, strength) for strength in strengths}
    pipe.scheduler.set_timesteps(len(strengths))
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * pipe.scheduler.init_noise_sigma
    for timestep, strength in zip(pipe.scheduler.timesteps, strengths, strict=True):
        adapter.set_strength("vortex", strength)
        both = pipe.scheduler.scale_model_input(torch.cat([latents] * 2), timestep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # embeds are kept, and older than the change of strength
            plain, guided = pipe.unet(both, timestep, encoder_hidden_states=states[strength]).sample.chunk(2)
        latents = pipe.scheduler.step(plain + guidance * (guided - plain), timestep, latents).prev_sample
    adapter.set_strength("vortex", 1.0)
    return latents


def test_a_loop_by_hand_draws_the_same(pipe, loaded):
    run = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    assert torch.equal(draw(pipe, **run), drawn_by_hand(pipe, loaded, [1.0] * 4))
    loops = {
        (1.0, 1.0, 0.0, 0.0): HALF,
        (0.0, 1.0, 1.0, 0.0): Schedule.between(0.25, 0.75),
        (1.0, 0.5, 0.5, -0.5): [(0.0, 1.0), (0.2, 0.5), (0.7, -0.5)],
    }
    hands = {strengths: drawn_by_hand(pipe, loaded, list(strengths)) for strengths in loops}
    for strengths, points in loops.items():
        loaded.set_schedule("vortex", points)
        assert torch.equal(draw(pipe, **loaded.scheduled(**run)), hands[strengths])
    loaded.set_schedule("vortex", [(0.0, 1.0), (1.0, 0.0)], interpolation="linear")
    slope = draw(pipe, **loaded.scheduled(**run, num_inference_steps=4))
    loaded.set_schedule("vortex", None)
    assert loaded.get_schedule("vortex") is None
    assert torch.equal(slope, drawn_by_hand(pipe, loaded, [1.0, 0.75, 0.5, 0.25]))


def test_a_concept_at_the_denoiser_alone_needs_no_second_encoding(pipe, adapter, tiny):
    config = tiny_engram.ConceptConfig(mounts=("value",), share="block", bands=2)
    adapter.load_concept(tiny.concept(adapter, "vortex cat", config=config), "vortex")
    hand = drawn_by_hand(pipe, adapter, [1.0, 1.0, 0.0, 0.0])
    slope = drawn_by_hand(pipe, adapter, [1.0, 0.75, 0.5, 0.25])
    adapter.set_schedule("vortex", HALF)
    before = adapter.mounts["clip_l"].calls
    made = adapter.step_callback(PROMPT, NEGATIVE)
    assert adapter.mounts["clip_l"].calls - before == 2 and made.names == ()
    assert torch.equal(draw(pipe, prompt=PROMPT, negative_prompt=NEGATIVE, **made.options), hand)
    adapter.set_schedule("vortex", [(0.0, 1.0), (1.0, 0.0)], interpolation="linear")
    assert torch.equal(draw(pipe, **adapter.scheduled(PROMPT, NEGATIVE)), slope)


def test_prompts_are_encoded_once_for_each_strength(pipe, loaded, tiny):
    loaded.load_concept(tiny.concept(loaded, "zorbu", seed=1), "zorbu")
    loaded.set_schedule("vortex", [(0.0, 1.0), (0.3, 0.5), (0.5, 1.0), (0.8, 0.5)])
    loaded.set_schedule("zorbu", start=0.1)
    count = lambda prompt: (loaded.mounts["clip_l"].calls, loaded.step_callback(prompt), loaded.mounts["clip_l"].calls)  # noqa: E731
    assert [end - begin for begin, _, end in map(count, (PLAIN, PROMPT, "a zorbu", "a vortex cat and a zorbu"))] == [1, 2, 2, 3]
    made = loaded.scheduled(PROMPT)
    before = loaded.mounts["clip_l"].calls
    draw(pipe, **made)
    assert loaded.mounts["clip_l"].calls == before + 2  # the pipeline's own, without and with the prompt


def test_each_prompt_of_a_batch_follows_its_own_concepts(pipe, loaded, tiny):
    loaded.load_concept(tiny.concept(loaded, "zorbu", seed=1), "zorbu")
    prompts = [PROMPT, PLAIN, "a zorbu", "a vortex cat and a zorbu"]
    options = {"guidance_scale": 1.0, "num_images_per_prompt": 2}
    kept: dict[tuple[float, float], torch.Tensor] = {}
    for strengths in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0)):
        loaded.set_concepts(["vortex", "zorbu"], strengths)
        kept[strengths] = loaded.encode(prompts, num_images_per_prompt=2)[0]
    loaded.set_concepts(["vortex", "zorbu"], 1.0)
    loaded.set_schedule("vortex", end=0.5)
    loaded.set_schedule("zorbu", start=0.25)
    seen: list[torch.Tensor] = []
    handle = pipe.unet.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True)
    try:
        draw(pipe, **loaded.scheduled(prompts, **options))
    finally:
        handle.remove()
    for states, strengths in zip(seen, ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 1.0)), strict=True):
        assert torch.equal(states, kept[strengths])
    assert torch.equal(seen[0][2:4], seen[3][2:4]) and seen[2] is seen[3]


def test_guidance_may_be_off_or_end(pipe, loaded):
    for options in ({"guidance_scale": 1.0}, {"guidance_scale": 7.5}):
        loaded.set_schedule("vortex", None)
        hands = []
        for order in ((1.0, 0.0), (0.0, 1.0)):
            states = [embeds_at(loaded, strength) for strength in order]
            states = [both[1:] for both in states] if options["guidance_scale"] == 1.0 else states

            def swap(pipe, step, timestep, tensors, states=states, order=order):
                if step == 1:
                    loaded.set_strength("vortex", order[1])
                    tensors["prompt_embeds"] = states[1]
                return tensors

            loaded.set_strength("vortex", order[0])
            run = {"callback_on_step_end": swap, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hands.append(draw(pipe, prompt=PROMPT, negative_prompt=NEGATIVE, **run, **options))
        loaded.set_strength("vortex", 1.0)
        for schedule, hand in zip((Schedule.between(end=0.5), Schedule.between(0.5)), hands, strict=True):
            loaded.set_schedule("vortex", schedule)
            assert torch.equal(draw(pipe, **loaded.scheduled(PROMPT, NEGATIVE, **options)), hand)
    # A callback of diffusers' own, which cuts the negative half off in mid-run, is chained, and its tensors are asked for.
    cut = {"callback_on_step_end": SDCFGCutoffCallback(cutoff_step_index=1, cutoff_step_ratio=None)}
    made = loaded.scheduled(PROMPT, NEGATIVE, **cut)
    assert made["callback_on_step_end_tensor_inputs"] == ["prompt_embeds"]
    seen: list[torch.Tensor] = []
    handle = pipe.unet.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True)
    draw(pipe, **made)
    handle.remove()
    loaded.set_schedule("vortex", None)
    off, on = embeds_at(loaded, 0.0), embeds_at(loaded, 1.0)
    assert [len(states) for states in seen] == [2, 2, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(seen, (off, off, on[1:], on[1:]), strict=True))


def test_the_users_callback_is_called_first_and_answers(pipe, loaded):
    told: list[tuple[int, float, list[str]]] = []

    def mine(pipe, step, timestep, tensors):
        told.append((step, float(timestep), sorted(tensors)))
        return {"latents": tensors["latents"] * 0.5}

    asked = {"callback_on_step_end": mine, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    plain = draw(pipe, prompt=PLAIN, **asked)
    loaded.set_schedule("vortex", HALF)
    told.clear()
    assert torch.equal(draw(pipe, **loaded.scheduled(PLAIN, **asked)), plain)
    assert [step for step, *_ in told] == [0, 1, 2, 3] and told[0][2] == ["latents", "prompt_embeds"]


def test_a_run_that_is_broken_off_leaves_nothing_behind(pipe, loaded):
    loaded.set_schedule("vortex", HALF)
    whole = draw(pipe, **loaded.scheduled(PROMPT))
    embedded = loaded.encode(PROMPT)[0]

    def fail(pipe, step, timestep, tensors):
        if step == 2:
            raise KeyboardInterrupt
        return tensors

    def interrupt(pipe, step, timestep, tensors):
        pipe._interrupt = step == 2
        return tensors

    with pytest.raises(KeyboardInterrupt):
        draw(pipe, **loaded.scheduled(PROMPT, callback_on_step_end=fail))
    assert torch.equal(loaded.encode(PROMPT)[0], embedded)
    assert torch.equal(draw(pipe, **loaded.scheduled(PROMPT)), whole)
    kept = loaded.scheduled(PROMPT, callback_on_step_end=interrupt)
    first = draw(pipe, **kept)
    assert not torch.equal(first, whole)
    assert torch.equal(draw(pipe, **kept), first)
    # Broken off in its second half; then a run of others steps with embeddings that were kept, which calls no encoder.
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, **loaded.scheduled(PROMPT, callback_on_step_end=fail))
    made = loaded.step_callback(PROMPT, "")
    embeds = loaded.embeds(PROMPT, "")
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, **loaded.scheduled(PROMPT, callback_on_step_end=fail))
    assert torch.equal(draw(pipe, **embeds, **made.options), whole)


def test_shares_are_of_the_steps_that_are_run(pipe, loaded):
    loaded.set_schedule("vortex", HALF)
    made = loaded.scheduled(PROMPT)
    shares: list[float] = []
    handle = pipe.unet.register_forward_pre_hook(lambda *_: shares.append(loaded._loaded.strength_now("vortex")))
    try:
        for steps, expected in ((6, [1.0] * 3 + [0.0] * 3), (5, [1.0] * 3 + [0.0] * 2), (1, [1.0]), (2, [1.0, 0.0])):
            shares.clear()
            draw(pipe, **made, num_inference_steps=steps)
            assert shares == expected
        shares.clear()
        pipe.register_modules(scheduler=HeunDiscreteScheduler())  # two calls for each step but the last
        draw(pipe, **made, num_inference_steps=4)
        assert shares == [1.0] * 4 + [0.0] * 3
        shares.clear()
        draw(pipe, **made, timesteps=None, num_inference_steps=2)
        assert shares == [1.0] * 2 + [0.0]
        pipe.register_modules(scheduler=DDIMScheduler(clip_sample=False, steps_offset=1))
        image = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        image.set_progress_bar_config(disable=True)
        shares.clear()
        options = {"image": torch.rand(1, 3, 64, 64), "strength": 0.5, "num_inference_steps": 8, "output_type": "latent"}
        image(**made, **options)
        assert shares == [1.0] * 2 + [0.0] * 2
    finally:
        handle.remove()
        pipe.register_modules(scheduler=DDIMScheduler(clip_sample=False, steps_offset=1))


def test_timesteps_of_the_users_own(own_pipe, tiny):
    own_pipe.register_modules(scheduler=HeunDiscreteScheduler())
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "vortex cat"), "vortex")
    adapter.set_schedule("vortex", end=0.5)
    strengths: list[float] = []
    own_pipe.unet.register_forward_pre_hook(lambda *_: strengths.append(adapter._loaded.strength_now("vortex")))
    draw(own_pipe, **adapter.scheduled(PROMPT), timesteps=[900, 600, 300, 10])
    assert strengths == [1.0] * 4 + [0.0] * 3


def test_a_run_without_the_callback_is_told_once(pipe, loaded):
    first = draw(pipe, prompt=PROMPT)
    loaded.set_schedule("vortex", HALF)
    with pytest.warns(UserWarning, match=r"concepts \['vortex'\] have schedules, but this run does not call their step callback") as told:
        assert torch.equal(draw(pipe, prompt=PROMPT), first)
        draw(pipe, prompt=PROMPT)
    assert len(told) == 1
    loaded.set_schedule("vortex", end=0.25)
    with pytest.warns(UserWarning, match="does not call their step callback"):
        draw(pipe, prompt=PROMPT)
    loaded.set_schedule("vortex", [(0.0, 1.0), (0.5, 1.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(draw(pipe, prompt=PROMPT), first)


def test_what_was_changed_since_is_told(pipe, loaded, tiny):
    loaded.set_schedule("vortex", HALF)
    changes = (
        lambda: loaded.set_strength("vortex", 0.5),
        lambda: loaded.set_schedule("vortex", end=0.25),
        lambda: loaded.load_concept(tiny.concept(loaded, "zorbu"), "zorbu"),
        lambda: loaded.unload_concept("zorbu"),
        loaded.disable_concepts,
    )
    for change in changes:
        made = loaded.scheduled(PROMPT)
        change()
        with pytest.raises(TinyEngramError, match="were changed after this step callback was made; make another"):
            draw(pipe, **made)
    loaded.enable_concepts()
    with pytest.raises(TinyEngramError, match="reads no text states that adapter.step_callback encoded"):
        draw(pipe, prompt=PLAIN, **loaded.step_callback(PROMPT).options)
    for steps in (0, 2.0, True, "4"):
        with pytest.raises(TinyEngramError, match=f"steps is {steps}, expected a whole number of at least 1"):
            loaded.scheduled(PROMPT, steps=steps)
    whole = draw(pipe, **loaded.scheduled(PROMPT))
    assert torch.equal(draw(pipe, **loaded.scheduled(PROMPT)), whole)


@pytest.mark.parametrize("written", [False, True])
def test_text_states_that_the_users_callback_changes_in_mid_run_are_told(pipe, adapter, tiny, written):
    def other(pipe, step, timestep, tensors):
        if step == 2:
            states = tensors["prompt_embeds"]
            tensors["prompt_embeds"] = states.mul_(0.5) if written else states * 0.5
        assert step < 4
        return tensors

    adapter.load_concept(tiny.concept(adapter, "vortex cat"), "vortex")
    adapter.set_schedule("vortex", HALF)
    asked = {"callback_on_step_end": other, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    with pytest.raises(TinyEngramError, match="^the denoiser reads no text states that adapter.step_callback encoded"):
        draw(pipe, **adapter.scheduled(PROMPT, **asked))


def test_switches_and_explanations(pipe, loaded):
    loaded.set_schedule("vortex", start=0.5)
    assert tiny_engram.get_schedule(pipe, "vortex") == Schedule.between(0.5)
    explanation = loaded.explain(PROMPT)
    assert [(span.name, span.schedule) for span in explanation.fired] == [("vortex", "factor 0, from 50 % of the steps 1")]
    assert "strength 1 (factor 0, from 50 % of the steps 1)" in str(explanation)
    assert explanation.to_dict()["prompts"][0]["fired"][0]["schedule"] == "factor 0, from 50 % of the steps 1"
    assert loaded.get_active_concepts() == ["vortex"] and loaded.strength("vortex") == 1.0
    off = draw(pipe, prompt=PROMPT, num_inference_steps=1)  # the first step's factor is 0
    loaded.set_schedule("vortex", [(0.0, 0.0)])
    assert loaded.get_active_concepts() == [] and torch.equal(draw(pipe, prompt=PROMPT, num_inference_steps=1), off)
    assert [seen.reason for seen in loaded.explain(PROMPT).unfired] == ["its schedule is 0 in all steps (set_schedule)"]
    loaded.set_schedule("vortex", None)
    loaded.set_strength("vortex", 0.0)
    assert torch.equal(draw(pipe, prompt=PROMPT, num_inference_steps=1), off)
    assert loaded.explain(PROMPT).unfired[0].reason == "strength is 0"


def test_the_hooks_go_with_the_last_schedule(pipe, loaded):
    before = len(pipe.unet._forward_pre_hooks)
    loaded.set_schedule("vortex", HALF)
    assert len(pipe.unet._forward_pre_hooks) == before + 1
    loaded.set_schedule("vortex", [(0.0, 0.5)])
    assert len(pipe.unet._forward_pre_hooks) == before
    loaded.set_schedule("vortex", HALF)
    loaded.unload_concept("vortex")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(pipe, prompt=PROMPT)
    assert not any(hook.first for hook in pipe.unet._forward_pre_hooks.values())


def test_a_compiled_denoiser(own_pipe, tiny):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "vortex cat"), "vortex")
    adapter.set_schedule("vortex", HALF)
    plain = draw(own_pipe, **adapter.scheduled(PROMPT))
    adapter.set_schedule("vortex", None)
    denoiser = own_pipe.unet
    own_pipe.unet = torch.compile(denoiser, backend="eager")
    adapter.set_schedule("vortex", HALF)
    assert torch.equal(draw(own_pipe, **adapter.scheduled(PROMPT)), plain)
    # Compiled since, so that the hook is on what the pipeline does not call any more.
    made = adapter.scheduled(PROMPT)
    own_pipe.unet = torch.compile(denoiser, backend="eager")
    with pytest.raises(TinyEngramError, match="if the denoiser was replaced or compiled since"):
        draw(own_pipe, **made)
