"""The prompts of the bench: what each context asks, what is new in it, and who stands where."""

import re
from collections import Counter

import numpy as np
import pytest
from captions import ALONE, COLOURS, PAIR, STYLES

from benchmarks.personalization.prompts import COMPANIONS, CONTEXTS, Prompt, pair_prompts, prompts_for
from benchmarks.personalization.subjects import known_names, load_subjects, taught_pictures

EVERY = load_subjects()


def first_is_left(text: str) -> bool:
    """Sentences of two things name the left one first, unless they say "right of"."""
    return " right of " not in text


def swallowed(sprites: np.ndarray) -> dict[str, float]:
    """For each colour the share of the pixels that a background of it would hide."""
    seen = sprites[sprites[..., 3] > 128][:, :3].astype(np.float32)
    return {name: float((np.linalg.norm(seen - np.array(rgb, np.float32), axis=1) < 80).mean()) for name, rgb in COLOURS.items()}


def colours_in(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text) if word in COLOURS]


def styles_in(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text) if word in STYLES]


@pytest.mark.parametrize("subject", EVERY, ids=lambda s: s.name)
def test_nine_contexts(subject):
    prompts = prompts_for(subject)
    assert tuple(p.context for p in prompts) == CONTEXTS and len(CONTEXTS) == 9
    taught = [picture.colour for picture in taught_pictures(subject)]
    by = {p.context: p for p in prompts}
    for p in prompts:
        assert p.text.count("{0}") == 1 and p.subjects == 1 and "{1}" not in p.text
        # what the fields say is what the text says, and nothing else
        assert colours_in(p.text) == ([p.colour] if p.colour else []) and styles_in(p.text) == ([p.style] if p.style else [])
        assert (p.companion is not None) == (p.side != "whole")
    assert by["taught"].colour in taught and by["taught"].style == "3d"
    assert by["taught"].text in {caption for picture in taught_pictures(subject) for caption in picture.captions}
    new = [by[f"background-{i}"].colour for i in (1, 2, 3)]
    assert len(set(new)) == 3 and not set(new) & set(taught) and all(by[f"background-{i}"].style == "3d" for i in (1, 2, 3))
    for style in ("flat", "outlined"):
        assert by[f"style-{style}"].style == style and by[f"style-{style}"].colour in taught
    assert by["bare"] == Prompt("bare", "a {0}", None, None, None, "whole", 1)


@pytest.mark.parametrize("subject", EVERY, ids=lambda s: s.name)
def test_company(subject):
    by = {p.context: p for p in prompts_for(subject)}
    for side in ("left", "right"):
        p = by[side]
        assert p.side == side and p.style == "3d" and p.colour in [picture.colour for picture in taught_pictures(subject)]
        assert p.companion in known_names() and p.companion != subject.name
        subject_first = p.text.index("{0}") < p.text.index(p.companion)
        assert (first_is_left(p.text) == subject_first) == (side == "left")
    assert by["left"].companion != by["right"].companion


def test_companions_and_sentences_take_turns():
    final = [p for s in load_subjects("final") for p in prompts_for(s)]
    companions = Counter(p.companion for p in final if p.companion)
    assert set(companions) == set(COMPANIONS) and max(companions.values()) - min(companions.values()) <= 1
    assert len({p.text for p in final if p.context == "taught"}) > 10
    # every sentence form of the base's language occurs
    for templates, contexts in ((ALONE, CONTEXTS[:6]), (PAIR, CONTEXTS[6:8])):
        forms = Counter(re.sub("|".join([*COLOURS, *STYLES, *COMPANIONS]), "_", p.text) for p in final if p.context in contexts)
        assert len(forms) >= len(templates)


@pytest.mark.parametrize("subject", EVERY, ids=lambda s: s.name)
def test_backgrounds_are_clear(subject):
    """On the drawing that the context shows, few pixels have nearly the colour asked for behind it."""
    views = {"3d": list(subject.given)} | {style: [i] for i, style in enumerate(subject.styles) if style != "3d"}
    hidden = {style: swallowed(subject.sprites[chosen]) for style, chosen in views.items()}
    for p in prompts_for(subject)[:-1]:
        assert p.colour and hidden.get(p.style or "", hidden["3d"])[p.colour] < 0.2, p


@pytest.mark.parametrize("split", ["final", "known"])
def test_pairs(split):
    subjects = load_subjects(split)
    pairs = pair_prompts(subjects)
    hidden = [swallowed(subject.sprites[list(subject.given)]) for subject in subjects]
    assert len(pairs) == 105 == len({frozenset(places) for _, places in pairs})
    assert Counter(left for _, (left, _) in pairs) == dict.fromkeys(range(15), 7)
    for p, (left, right) in pairs:
        assert p.context == "pair" and p.subjects == 2 and p.style == "3d" and p.companion is None and p.side == "whole"
        assert p.text.count("{0}") == p.text.count("{1}") == 1 and colours_in(p.text) == [p.colour] and styles_in(p.text) == ["3d"]
        assert first_is_left(p.text) == (p.text.index("{0}") < p.text.index("{1}"))
        assert p.colour and max(hidden[left][p.colour], hidden[right][p.colour]) < 0.1
    assert len({p.colour for p, _ in pairs}) >= 10
    assert set(Counter(re.sub("|".join([*COLOURS, "an?"]), "_", p.text) for p, _ in pairs).values()) <= set(range(10, 30))


def test_pairs_of_few_subjects():
    subjects = load_subjects("development")
    assert len(pair_prompts(subjects)) == 10 and pair_prompts(subjects[:1]) == ()
    assert len(pair_prompts(subjects[:2])) == 1


def test_every_trigger_stands_whole_in_every_prompt(base):
    """Four tokens, the same ones, wherever it is put."""
    tokenizer = base.tokenizer
    for subject in load_subjects("final", "development"):
        trigger = tokenizer(f" {subject.trigger} ", add_special_tokens=False).input_ids
        assert len(trigger) == 4
        captions = [caption for picture in taught_pictures(subject) for caption in picture.captions]
        for text in [p.text for p in prompts_for(subject)] + captions:
            ids = tokenizer(text.replace("{0}", subject.trigger)).input_ids
            assert sum(ids[i : i + 4] == trigger for i in range(len(ids))) == 1
