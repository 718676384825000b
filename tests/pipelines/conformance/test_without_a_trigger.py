"""Nothing without the trigger: embeds and pictures have the bits of a pipeline to which nothing was ever attached."""

import warnings
from contextlib import contextmanager

import pytest
import torch

import tiny_engram
from tests.pipelines.conformance.cases import PLAIN, PROMPT, TRIGGER, each_mode, each_pipeline, has_negative, settings
from tests.pipelines.conformance.reading import embeds_of, same
from tests.pipelines.tiny.base import picture
from tiny_engram.hooks import hooks_of

NEAR = ("a photo of two vortex cats", "a vortexcat", "a vortex-cat9", "supervortex cat", "a vortex", "cat vortex", "")


@each_mode()
def test_prompts_without_the_trigger_keep_every_bit(subject, mode):
    subject.load(mode)
    negative = ["ugly"] if has_negative(subject.tiny) else None
    for prompt in (PLAIN, *(NEAR if mode == "span" else NEAR[:2])):
        assert not subject.adapter.explain(prompt).fired, prompt
        twin, ours = (embeds_of(subject.family, pipe, prompt, negative) for pipe in (subject.twin, subject.pipe))
        assert same(twin, ours), prompt
    for prompt in (PLAIN, NEAR[0]):
        plain, ours = subject.draw(prompt)
        assert torch.equal(plain, ours), prompt


@each_mode()
def test_strength_0_switched_off_and_detached_are_the_base(subject, mode):
    adapter, name = subject.adapter, subject.load(mode)
    plain, first = subject.draw(PROMPT)
    assert not torch.equal(plain, first)

    def off_and_on(off, on) -> None:
        off()
        assert same(*(embeds_of(subject.family, pipe, PROMPT) for pipe in (subject.twin, subject.pipe)))
        assert torch.equal(picture(subject.tiny, subject.pipe, PROMPT), plain)
        on()
        assert torch.equal(picture(subject.tiny, subject.pipe, PROMPT), first)

    off_and_on(lambda: adapter.set_strength(name, 0.0), lambda: adapter.set_strength(name, 1.0))
    off_and_on(adapter.disable_concepts, adapter.enable_concepts)
    off_and_on(lambda: adapter.set_concepts([]), lambda: adapter.set_concepts(name))
    kept = adapter.concept(name)
    off_and_on(lambda: adapter.unload_concept(name), lambda: adapter.load_concept(kept))


@each_pipeline()
def test_detach_leaves_the_pipeline_as_it_was(own, subject):
    with attached(own) as adapter:
        adapter.load_concept(subject.concept(subject.everywhere))
        assert not torch.equal(picture(subject.tiny, subject.twin, PROMPT), picture(subject.tiny, own, PROMPT))
    assert not any(hooks_of(part) for part in own.components.values() if isinstance(part, torch.nn.Module))
    assert torch.equal(picture(subject.tiny, subject.twin, PROMPT), picture(subject.tiny, own, PROMPT))
    for name, part in own.components.items():
        if isinstance(part, torch.nn.Module):
            before = subject.twin.components[name]
            assert same(before.state_dict(), part.state_dict()) and [n for n, _ in before.named_modules()] == [
                n for n, _ in part.named_modules()
            ]


@contextmanager
def attached(pipe):
    adapter = tiny_engram.attach(pipe)
    try:
        yield adapter
    finally:
        adapter.detach()


@each_pipeline()
def test_embeds_draw_what_the_prompt_draws(subject):
    subject.load(subject.everywhere)
    negative = "ugly vortex cat" if has_negative(subject.tiny) else None
    more = {**settings(subject.tiny), **({} if negative is None else {"negative_prompt": negative})}
    drawn = picture(subject.tiny, subject.pipe, PROMPT, **more)
    embeds = subject.adapter.embeds(PROMPT, negative)
    instead = {"negative_prompt": None} if negative is not None and "negative_prompt_embeds" in embeds else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*prompt_embeds made elsewhere.*")
        again = picture(subject.tiny, subject.pipe, None, **settings(subject.tiny), **instead, **embeds)
    assert torch.equal(drawn, again)
    states, negatives = subject.adapter.encode(PROMPT, negative)
    assert same(states, embeds["prompt_embeds"]) and (negative is None or same(negatives, embeds["negative_prompt_embeds"]))


@each_pipeline()
def test_embeds_made_elsewhere_are_told(subject, request):
    if subject.tiny.family == "flux-2-klein":
        why = "beside embeds it encodes an empty negative prompt of its own accord, which counts as a prompt that was encoded"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    subject.load(subject.everywhere)
    negative = "" if has_negative(subject.tiny) else None
    embeds = embeds_of(subject.family, subject.twin, PROMPT, negative)
    instead = {"negative_prompt": None} if negative is not None else {}
    with pytest.warns(UserWarning, match=f"concepts \\['{TRIGGER}'\\] are active, but .*prompt_embeds made elsewhere do not hold them"):
        drawn = picture(subject.tiny, subject.pipe, None, **settings(subject.tiny), **instead, **embeds)
    assert torch.equal(drawn, picture(subject.tiny, subject.twin, None, **settings(subject.tiny), **instead, **embeds))
