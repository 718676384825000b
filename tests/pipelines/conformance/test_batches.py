"""Several prompts at once: negative prompts, rows of a batch, several pictures of a prompt; each row has its own concepts."""

import inspect
from typing import Any

import torch

from tests.pipelines.conformance.cases import AT_ENCODER, PLAIN, PROMPT, TRIGGER, each_mode, each_pipeline, has_negative, settings
from tests.pipelines.conformance.reading import embeds_of, given, moved, negatives, same, states_of
from tests.pipelines.tiny.base import picture


def rows_of(value: Any) -> list[torch.Tensor]:
    return list(value)


def calls(subject: Any, pipe: Any, prompt: Any, **more: Any) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The rows of text that each denoiser call is given, and the picture."""
    with given(subject.family, list(subject.family.present(pipe).values())) as seen:
        drawn = picture(subject.tiny, pipe, prompt, **more)
    return [[row for value in call.values() for row in rows_of(value)] for call in seen], drawn


@each_mode(has_negative, AT_ENCODER)
def test_a_negative_prompt_fires_there_and_only_there(subject, mode):
    subject.load(mode)
    twin, ours = (embeds_of(subject.family, pipe, PLAIN, PROMPT) for pipe in (subject.twin, subject.pipe))
    negative = {name for name in twin if name.startswith("negative_")}
    assert all(same(twin[name], ours[name]) for name in twin.keys() - negative)
    positive = embeds_of(subject.family, subject.pipe, PROMPT)
    for role, states in states_of(subject.family, subject.twin, negatives(twin)).items():
        now = states_of(subject.family, subject.pipe, negatives(ours))[role]
        if states.dim() == 1:
            assert torch.equal(states, now) == (mode == "span")
            continue
        assert moved(states, now), role
        if subject.tiny.family not in ("sana", "lumina-2"):  # of these, negative prompts have no template
            assert torch.equal(now, states_of(subject.family, subject.pipe, positive)[role]), role


@each_pipeline(has_negative)
def test_each_side_of_guidance_gets_its_own_rows(subject):
    subject.load(subject.everywhere)
    drawn = []
    for prompt, negative in ((PROMPT, PLAIN), (PLAIN, PROMPT), (PROMPT, PROMPT)):
        more = {**settings(subject.tiny), "negative_prompt": negative}
        plain, base = calls(subject, subject.twin, prompt, **more)
        ours, picture_now = calls(subject, subject.pipe, prompt, **more)
        texts = embeds_of(subject.family, subject.twin, prompt, negative), embeds_of(subject.family, subject.pipe, prompt, negative)
        sides = [(named(subject, one), named(subject, negatives(one))) for one in texts]
        seen = set()
        for before, now in zip(plain, ours, strict=True):
            for one, other in zip(before, now, strict=True):
                side = next(k for k, rows in enumerate(sides[0]) if any(same(one, row) for row in rows))
                seen.add(side)
                fires = TRIGGER in (prompt, negative)[side]
                assert torch.equal(one, other) != fires and any(same(other, row) for row in sides[1][side])
        assert seen == ({0, 1} if not same(*sides[0]) else {0}) and not torch.equal(base, picture_now)
        drawn.append(picture_now)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[1], drawn[2])


def named(subject: Any, embeds: Any) -> list[torch.Tensor]:
    """Rows of what the denoiser is given, out of embeds."""
    names = (subject.family.given or {"encoder_hidden_states": "prompt_embeds"}).values()
    return [row for name in names for row in rows_of(embeds[name])]


def of_equal_length(subject: Any) -> str:
    """A prompt without the trigger whose states have the shape of the one with it: some pipelines pad to the longest of a batch."""
    shapes = [row.shape for row in rows_of(embeds_of(subject.family, subject.twin, PROMPT)["prompt_embeds"])]
    texts = (PLAIN.replace("green", word) for word in ("green", "turquoise", "iridescent", "vermilion", "aquamarine chartreuse"))
    return next(t for t in texts if [row.shape for row in rows_of(embeds_of(subject.family, subject.twin, t)["prompt_embeds"])] == shapes)


@each_mode(modes=AT_ENCODER)
def test_rows_of_a_mixed_batch(subject, mode):
    subject.load(mode)
    plain_text = of_equal_length(subject)
    batch = [plain_text, PROMPT, plain_text]
    base, mixed = (embeds_of(subject.family, pipe, batch) for pipe in (subject.twin, subject.pipe))
    copies = [embeds_of(subject.family, subject.pipe, [text] * 3) for text in batch]
    for row, text in enumerate(batch):
        plain, ours = states_of(subject.family, subject.twin, base, row), states_of(subject.family, subject.pipe, mixed, row)
        like = states_of(subject.family, subject.pipe, copies[row], row)
        alone = states_of(subject.family, subject.pipe, embeds_of(subject.family, subject.pipe, text))
        for role, states in ours.items():
            silent = TRIGGER not in text or states.dim() == 1 and mode == "span"
            assert torch.equal(states, plain[role]) == silent, (role, row)
            assert torch.equal(states, like[role]), (role, row)
            torch.testing.assert_close(states, alone[role], rtol=1e-4, atol=1e-4)


@each_pipeline()
def test_a_row_without_the_trigger_keeps_its_picture_in_a_mixed_batch(subject):
    subject.load(subject.everywhere)
    more = {"negative_prompt": ["ugly"] * 2, **settings(subject.tiny)} if has_negative(subject.tiny) else {}
    plain, ours = subject.draw([PLAIN, PROMPT], **more)
    assert len(ours) == 2 and [torch.equal(one, other) for one, other in zip(plain, ours, strict=True)] == [True, False]


def several(subject: Any) -> str | None:
    names = inspect.signature(type(subject.pipe).__call__).parameters
    return next((name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in names), None)


@each_pipeline()
def test_several_pictures_of_a_prompt_share_its_rows(subject):
    subject.load(subject.everywhere)
    one = embeds_of(subject.family, subject.pipe, [PLAIN, PROMPT])
    two = embeds_of(subject.family, subject.pipe, [PLAIN, PROMPT], images=2)
    per_prompt = {name: rows_of(value) for name, value in one.items() if "mask" not in name}
    name = several(subject)
    assert name is not None
    if subject.tiny.family == "cogvideox":
        return  # upstream: its call takes the number, and makes one video all the same
    many = len(rows_of(two["prompt_embeds"])) == 4  # Z-Image repeats them in its call
    for what, rows in per_prompt.items():
        assert same(rows_of(two[what]), [row for row in rows for _ in range(1 + many)]), what
    more = {name: 2, **settings(subject.tiny)}
    plain, ours = subject.draw(PROMPT, **more)
    assert len(ours) == 2 and not any(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    given_rows, _ = calls(subject, subject.pipe, PROMPT, **more)
    fired = named(subject, embeds_of(subject.family, subject.pipe, PROMPT))
    assert sum(same(row, fired[0]) for row in given_rows[0]) == 2
