"""Real pictures of prompts: what a perfect generator would draw, made of the subjects' own drawings and views.

They show what the judges are worth, and, sent through the base's autoencoder, how much likeness is to be had at all.
Places and sizes follow the pictures that the base was trained on. Imports numpy, torch and parts of the bench.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.personalization.crops import SIZE, paste
from benchmarks.personalization.prompts import CONTEXTS, Prompt, pair_prompts, prompts_for
from benchmarks.personalization.subjects import Subject, load_subjects

from captions import COLOURS  # isort: skip

# The longer side as a share of 124 / 128 of the picture, and the two centres in a pair: assets/recipe/compose.py's.
ALONE, PAIRED = (0.66, 0.92), (0.40, 0.48)
CENTRES = (0.265, 0.735)
LONG_SIDE = 124


class Shown(NamedTuple):
    """A picture to be made: a prompt, its subjects, the view of each, and whether that is shown mirrored."""

    prompt: Prompt
    subjects: tuple[Subject, ...]
    views: tuple[int, ...]
    mirrored: tuple[bool, ...]


def can_show(subject: Subject, prompt: Prompt) -> bool:
    """An object cannot be shown in a style in which nobody has drawn it."""
    return prompt.style is None or prompt.style in subject.styles


def singles(subjects: Sequence[Subject], samples: int, seed: int, contexts: Collection[str] = CONTEXTS) -> list[Shown]:
    """Every prompt of every subject that can be shown, `samples` times: views and mirroring are drawn by `seed`."""
    rng = np.random.default_rng(seed)
    return [
        Shown(prompt, (subject,), *_looks(rng, (subject,), prompt))
        for subject in subjects
        for prompt in prompts_for(subject)
        if prompt.context in contexts and can_show(subject, prompt)
        for _ in range(samples)
    ]


def pairs(subjects: Sequence[Subject], seed: int) -> list[Shown]:
    """Every pair of subjects once."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt, (left, right) in pair_prompts(subjects):
        both = (subjects[left], subjects[right])
        found.append(Shown(prompt, both, *_looks(rng, both, prompt)))
    return found


def _looks(rng: np.random.Generator, subjects: tuple[Subject, ...], prompt: Prompt) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """A view in the prompt's style of each, and for emoji, whether it is mirrored."""
    views, mirrored = [], []
    for subject in subjects:
        style = prompt.style or subject.styles[subject.given[0]]
        views.append(int(rng.choice([view for view, of in enumerate(subject.styles) if of == style])))
        mirrored.append(subject.kind == "emoji" and bool(rng.random() < 0.5))
    return tuple(views), tuple(mirrored)


def compose(shown: Sequence[Shown], device: torch.device, seed: int) -> torch.Tensor:
    """float32 `[n, 3, 128, 128]` in 0..1, on `device`: subjects, and companions, at random places and sizes of their sides.

    A prompt without a colour is shown on the one of the subject's first prompt.
    """
    rng = np.random.default_rng(seed)
    known = {companion.name: companion for companion in load_subjects("known")}
    colours, layers = [], ([], [])
    for one in shown:
        prompt = one.prompt
        colours.append(COLOURS[prompt.colour or prompts_for(one.subjects[0])[0].colour or "white"])
        looks = [_drawing(*look) for look in zip(one.subjects, one.views, one.mirrored, strict=True)]
        if prompt.companion is not None:
            companion = known[prompt.companion]
            looks.insert(prompt.side == "left", _drawing(companion, companion.styles.index(prompt.style or companion.styles[0]), False))
        for number, layer in enumerate(layers):
            layer.append((looks[number], *_place(rng, number, len(looks))) if number < len(looks) else None)
    pictures = (torch.tensor(colours, device=device).float() / 255)[:, :, None, None].repeat(1, 1, SIZE, SIZE)
    for layer in layers:
        chosen = [i for i, part in enumerate(layer) if part is not None]
        if chosen:
            drawings, lengths, places = zip(*(layer[i] for i in chosen), strict=True)
            sprites = torch.from_numpy(np.stack(drawings)).to(device).permute(0, 3, 1, 2).float() / 255
            at = torch.tensor(places, device=device)
            pictures[chosen] = paste(sprites, pictures[chosen], torch.tensor(lengths, device=device), at)[0]
    return pictures


def _drawing(subject: Subject, view: int, mirrored: bool) -> np.ndarray:
    return subject.sprites[view][:, ::-1] if mirrored else subject.sprites[view]


def _place(rng: np.random.Generator, number: int, things: int) -> tuple[float, tuple[float, float]]:
    """Longer side in pixels, and the centre."""
    scale = rng.uniform(*(ALONE if things == 1 else PAIRED))
    room = (1 - scale) / 2
    jitter = rng.uniform(-1, 1, 2) * ((0.6 * room, 0.6 * room) if things == 1 else (0.02, 0.07))
    middle = 0.5 if things == 1 else CENTRES[number]
    return float(scale * LONG_SIDE), (float(middle + jitter[0]), float(0.5 + jitter[1]))
