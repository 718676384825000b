"""Pictures against the pipeline's own call."""

import numpy as np
import pytest
import torch

from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.methods.method import Adapters

TEXTS = ["a 3d {0} on a red background", "a flat {0}, blue background", "{0}"]
WORDS = [("owl",), ("rugo-bin",), ("tomato",)]


def rows_of(base, runs=(-1, -1, -1), which=slice(None)):
    return base.rows(TEXTS[which], WORDS[which], torch.tensor(runs)[which, None])


def levels(one: np.ndarray, two: np.ndarray) -> int:
    """The largest difference of two pictures, in levels of 255."""
    return int(np.abs(one.astype(int) - two.astype(int)).max())


@pytest.fixture(scope="module")
def drawn(base):
    return draw(base, None, rows_of(base), [5, 6, 7], steps=2)


def test_the_base_is_drawn_as_the_pipeline_draws(base, drawn):
    prompts = [text.replace("{0}", word) for text, (word,) in zip(TEXTS, WORDS, strict=True)]
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)]
    images = base.pipe(prompts, num_inference_steps=2, guidance_scale=4.0, generator=generators, output_type="pil").images
    assert drawn.shape == (3, 128, 128, 3) and drawn.dtype == np.uint8
    assert np.array_equal(drawn, np.stack([np.asarray(image) for image in images]))


def test_a_picture_depends_on_its_own_seed_alone(base, drawn):
    alone = draw(base, None, rows_of(base, which=slice(1, 2)), [6], steps=2)
    assert levels(drawn[1:2], alone) <= 1
    split = draw(base, None, rows_of(base), [5, 9, 7], steps=2, batch=2)
    assert levels(drawn[[0, 2]], split[[0, 2]]) <= 1 and levels(drawn[1], split[1]) > 20


def test_hooks_get_the_unconditional_half_first(base):
    seen = []

    class Watching(Adapters):
        def states(self, base, rows):
            seen.append(rows)
            return rows.states

    draw(base, Watching(base, []), rows_of(base, (3, -1, 4)), [1, 2, 3], steps=1)
    (rows,) = seen
    assert rows.run.flatten().tolist() == [3, -1, 4] * 2
    assert [row for row, *_ in rows.spans] == [3, 5]
    empty = base.tokenize([""])[0]
    assert torch.equal(rows.ids[:3], empty.expand(3, -1)) and base.tokenizer.decode(rows.ids[5], skip_special_tokens=True) == "tomato"


def test_a_batch_holds_several_runs(base, drawn, run):
    adapters = METHODS["inversion-t"](base, [run("inversion-t", "disc"), run("inversion-t", "spot")])
    texts, words = ["a red {0}", "a red {0}", TEXTS[0]], [("rugo-bin",), ("vex-lumo",), WORDS[0]]
    rows = base.rows(texts, words, torch.tensor([[0], [1], [-1]]))
    mixed = draw(base, adapters, rows, [5, 5, 5], steps=2)
    alone = METHODS["inversion-t"](base, [run("inversion-t", "spot")])
    second = draw(base, alone, base.rows(texts[1:2], words[1:2], torch.tensor([[0]])), [5], steps=2)
    assert levels(mixed[1:2], second) <= 1 and levels(mixed[0], mixed[1]) > 20
    # no run: the base's own picture
    assert levels(mixed[2], drawn[0]) <= 1


def test_nothing_to_draw_is_nothing(base):
    none = rows_of(base).part(0, 0)
    assert draw(base, None, none, []).shape == (0, 128, 128, 3)


def test_mismatches_are_refused(base):
    with pytest.raises(ValueError, match="3 prompts, 1 seeds"):
        draw(base, None, rows_of(base), [1])
    with pytest.raises(ValueError, match="guidance 1, expected more than 1"):
        draw(base, None, rows_of(base), [1, 2, 3], guidance=1.0)
