"""What the denoiser is given moves where the trigger stands, and only there; and the denoiser reads it."""

from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.pipelines.conformance.cases import (
    AT_ENCODER,
    PLAIN,
    PROMPT,
    TEMPLATE_WORDS,
    TRIGGER,
    each_mode,
    each_pipeline,
    family_named,
    has_several_prompts,
    has_template,
    settings,
)
from tests.pipelines.conformance.reading import embeds_of, heard, moved, same, states_of, texts_at
from tests.pipelines.stream_cases import reads
from tests.pipelines.tiny.base import picture
from tiny_engram.pipelines.families import family_of

PROMPTS = {
    "vortex cat on a table": 1,
    "a photo of a vortex cat on a table": 1,
    "a table, (vortex cat), and a tree.": 1,
    "one vortex cat beside another vortex cat": 2,
    "a photo of a VORTEX CAT on a table": 1,
    "Vortex cat": 1,
}


def compared(subject: Any, prompt: str) -> dict[str, tuple[list[str], torch.Tensor, torch.Tensor]]:
    """By role: what the moved tokens say, and the states without and with the concept."""
    family, pipe, twin = subject.family, subject.pipe, subject.twin
    with heard(family, twin) as ids:
        plain = states_of(family, twin, embeds_of(family, twin, prompt))
    now = states_of(family, pipe, embeds_of(family, pipe, prompt))
    found = {}
    for role, states in plain.items():
        said = []
        if states.dim() == 2:
            tokenizer = subject.adapter.mounts[role].tokenizer
            said = texts_at(family, role, tokenizer, ids[role][0], states, moved(states, now[role]))
        found[role] = said, states, now[role]
    return found


@each_pipeline()
def test_the_class_is_recognised(subject):
    assert family_of(subject.pipe) is family_named(subject.tiny) is subject.adapter.family
    assert set(subject.adapter.mounts) | set(subject.adapter.absent) == {spec.role for spec in subject.family.encoders}


@each_mode(modes=AT_ENCODER)
def test_states_move_at_the_trigger_and_only_there(subject, mode):
    name = subject.load(mode)
    for prompt, count in PROMPTS.items():
        for role, (said, plain, now) in compared(subject, prompt).items():
            fired = [span for at in subject.adapter.explain(prompt).prompts if at.role == role for span in at.fired]
            assert [span.name for span in fired] == [name] * count * (role in subject.adapter.concept(name).roles)
            if plain.dim() == 1:
                assert torch.equal(plain, now) == (mode == "span"), (role, prompt)
            elif mode != "deep":
                assert said == [TRIGGER] * count, (role, prompt)
            else:
                assert moved(plain, now)
        # masks, and vectors that no concept has rows for
        twin, pipe = (embeds_of(subject.family, p, prompt) for p in (subject.twin, subject.pipe))
        for kept in twin.keys() - {"prompt_embeds", "prompt_embeds_2"}:
            assert same(twin[kept], pipe[kept]) or kept == "pooled_prompt_embeds" and mode != "span", kept


@each_mode(modes=("context",))
def test_only_what_the_denoiser_projects_moves(subject, mode):
    name = subject.load(mode)
    spans = {at.role: {span.end - span.start for span in at.fired} for at in subject.adapter.explain(PROMPT).prompts if any(at.fired)}
    assert spans.keys() == subject.adapter.concept(name).roles.keys()
    twin, ours = (embeds_of(subject.family, pipe, PROMPT) for pipe in (subject.twin, subject.pipe))
    assert same(twin, ours)
    for prompt in (PROMPT, PLAIN):
        with reads(subject.adapter) as seen:
            picture(subject.tiny, subject.pipe, prompt, **settings(subject.tiny))
        assert seen
        for calls in seen.values():
            found = [moved(was, now) for before, after in calls for was, now in zip(before, after, strict=True)]
            places = [places for places in found if places]
            assert bool(places) == (prompt == PROMPT)
            for each in places:  # runs of positions, each as long as the trigger is in a role that is read here
                breaks = [k for k, (one, other) in enumerate(pairwise(each), 1) if other != one + 1]
                lengths = {end - start for start, end in pairwise([0, *breaks, len(each)])}
                assert lengths <= set().union(*spans.values()), (each, spans)


@each_mode(modes=("deep",))
def test_a_mount_inside_moves_the_span_and_says_that_it_is_not_local(subject, mode):
    subject.load(mode)
    for prompt, count in PROMPTS.items():
        for role, (_, plain, now) in compared(subject, prompt).items():
            if plain.dim() == 1:
                continue
            # where the same trigger moves states of the mode "span"
            subject.adapter.unload_concept()
            subject.load("span")
            at = moved(plain, compared(subject, prompt)[role][2])
            subject.adapter.unload_concept()
            subject.load(mode)
            here = moved(plain, now)
            assert set(at) <= set(here) and len(at) >= count
            if type(getattr(subject.pipe, subject.specs[role].encoder)).__name__.startswith(("CLIP", "Gemma", "Qwen", "Mistral", "Llama")):
                assert here[0] == at[0], "a causal encoder moved what stands in front of the trigger"
    warned = subject.adapter.register(TRIGGER + " two", config=subject.adapter.concept(TRIGGER).config).warnings
    assert any("move other positions too" in line for line in warned)


@each_mode()
def test_the_picture_follows_each_role(subject, mode):
    roles = subject.concept(mode).roles
    drawn = []
    for role in roles:
        subject.load(mode, roles=[role])
        plain, ours = subject.draw(PROMPT)
        assert ours.isfinite().all() and not torch.equal(plain, ours), role
        drawn.append(ours)
        subject.adapter.unload_concept()
    assert all(not torch.equal(one, other) for k, one in enumerate(drawn) for other in drawn[:k])


@each_pipeline(has_several_prompts)
def test_a_trigger_in_one_of_several_prompts_reaches_its_role_alone(subject):
    subject.load(subject.everywhere)
    for key in subject.tiny.prompt_keys:
        texts = {name: [PROMPT if name == key else PLAIN] for name in ("prompt", "prompt_2", "prompt_3") if takes_it(subject, name)}
        plain, ours = (states_of(subject.family, pipe, encoded(subject, pipe, texts)) for pipe in (subject.twin, subject.pipe))
        reached = {role for role in plain if not torch.equal(plain[role], ours[role])}
        expected = {role for role, spec in subject.specs.items() if spec.tokenizer == key.replace("prompt", "tokenizer")}
        if subject.tiny.family == "hunyuan-video":
            # upstream: prompt_2 is ignored, the second encoder is given the first prompt
            expected = {"llm", "clip_l"} if key == "prompt" else set()
        assert reached == expected, key


def takes_it(subject: Any, name: str) -> bool:
    return name in signature(type(subject.pipe).encode_prompt).parameters


@torch.no_grad()
def encoded(subject: Any, pipe: Any, texts: dict[str, list[str]]) -> dict[str, Any]:
    more = {"do_classifier_free_guidance": False} if takes_it(subject, "do_classifier_free_guidance") else {}
    return dict(zip(subject.family.returns, pipe.encode_prompt(**texts, **more), strict=True))


@each_pipeline(has_template)
def test_a_trigger_in_the_pipeline_s_own_template_does_not_fire_there(subject):
    for trigger in TEMPLATE_WORDS[subject.tiny.family]:
        for mode in ("span", "deep"):
            subject.load(mode, trigger)
            plain, ours = (embeds_of(subject.family, pipe, "two green trees") for pipe in (subject.twin, subject.pipe))
            assert same(plain, ours), (trigger, mode)
            if mode == "span":
                for prompt in (f"a photo of one {trigger} on a table", f"{trigger} on a table"):
                    for role, (said, plain, _) in compared(subject, prompt).items():
                        assert plain.dim() == 1 or said == [trigger], (role, prompt)
            subject.adapter.unload_concept()


LONG = "tree "


@each_pipeline()
def test_a_trigger_behind_the_window_does_not_fire_and_is_explained(subject):
    subject.load(subject.everywhere)
    prompt = LONG * 1200 + TRIGGER
    plain, ours = (embeds_of(subject.family, pipe, prompt) for pipe in (subject.twin, subject.pipe))
    assert same(plain, ours)
    explained = subject.adapter.explain(prompt)
    assert not explained.fired
    assert {at.role for at in explained.prompts if any("truncated" in seen.reason for seen in at.unfired)} == set(subject.specs)


@each_pipeline()
def test_half_a_trigger_at_the_window_s_edge_never_fires(subject, request):
    if subject.tiny.family == "qwen-image":
        why = "it encodes more than it reads and cuts states off behind the encoder, where a trigger that has fired whole may be cut too"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    subject.load()
    for role, spec in subject.specs.items():
        if spec.pooled:
            continue
        tokenizer = subject.adapter.mounts[role].tokenizer
        short = len(tokenizer(spec.text(subject.pipe, LONG * 2)).input_ids)
        step = len(tokenizer(spec.text(subject.pipe, LONG * 3)).input_ids) - short
        window = spec.window(subject.pipe) if spec.window is not None else tokenizer.model_max_length
        edge = (window - short) // step + 2
        outcomes = set()
        for count in range(edge - 5, edge + 3):
            said, *_ = compared(subject, LONG * count + TRIGGER)[role]
            explained = subject.adapter.explain(LONG * count + TRIGGER)
            fired = [span for at in explained.prompts if at.role == role for span in at.fired]
            assert said in ([], [TRIGGER]) and len(said) == len(fired), (role, count, said)
            outcomes.add(len(said))
        assert outcomes == {0, 1}, role
