"""Sizes that keep a picture's shape, and steps that show pictures of one size, drawn alike for any number of processes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

import tiny_engram
from tests.pipelines.tiny.t5 import pixart
from tests.ranks import run_ranks
from tiny_engram.errors import ConfigError
from tiny_engram.training import loop, objective, train, trainer
from tiny_engram.training.data import bucket_of, bucket_sizes, scan_for
from tiny_engram.training.data.buckets import MOST_ASPECT
from tiny_engram.training.prepared import least_step, prepare

SHAPES = {"0.png": (64, 64), "1.png": (128, 64), "2.png": (64, 128), "3.png": (130, 66)}


@pytest.fixture
def shapes(folder, picture):
    """The folder with pictures of three shapes: one square, two wide, one tall."""
    for seed, (name, size) in enumerate(SHAPES.items()):
        picture(*size, seed).save(folder / name)
    return folder


@pytest.fixture
def ready(pipe):
    """What a config makes ready on the session's pipeline."""

    def make(options):
        adapter = tiny_engram.attach(pipe)
        try:
            return prepare(pipe, adapter, trainer.untrained(adapter, options), options, scan_for(options).examples)
        finally:
            adapter.detach()

    return make


# -- sizes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resolution", "step"), [(64, 8), (64, 16), (100, 16), (128, 16), (512, 64), (1024, 64), (1024, 32), (8, 16)])
def test_sizes_are_whole_steps_of_about_one_area(resolution, step):
    sizes = bucket_sizes(resolution, step)
    square = max(1, round(resolution / step)) * step
    assert (square, square) in sizes and len(set(sizes)) == len(sizes)
    for width, height in sizes:
        assert width % step == height % step == 0 and (height, width) in sizes
        assert max(width, height) <= MOST_ASPECT * min(width, height)
        # half a step more or less on the longer side
        assert abs(width * height - resolution**2) <= max(step / 2 * min(width, height), abs(square**2 - resolution**2))


def test_sizes_of_stable_diffusion():
    assert {size for size in bucket_sizes(512, 64) if size[0] >= size[1]} == {(512, 512), (576, 448), (704, 384), (832, 320)}


def test_a_picture_takes_the_nearest_shape():
    sizes = bucket_sizes(512, 64)
    assert bucket_of((900, 900), sizes, step=64) == (512, 512) and bucket_of((4000, 3000), sizes, step=64) == (576, 448)
    assert bucket_of((3000, 4000), sizes, step=64) == (448, 576)
    for width, height in sizes:
        assert bucket_of((3 * width, 3 * height), sizes, step=64) == (width, height)
    widest, narrowest = sizes[-1], sizes[0]
    assert bucket_of((9000, 100), sizes, step=64) == widest and bucket_of((100, 9000), sizes, step=64) == narrowest


def test_a_small_picture_stays_small_where_it_must_not_grow():
    sizes = bucket_sizes(512, 64)
    assert bucket_of((200, 150), sizes, step=64) == (576, 448)
    assert bucket_of((200, 150), sizes, step=64, upscale=False) == (192, 128)
    assert bucket_of((30, 20), sizes, step=64, upscale=False) == (64, 64), "one step at least"
    assert bucket_of((1000, 1000), sizes, step=64, upscale=False) == (512, 512)
    assert bucket_of((9000, 100), sizes, step=64, upscale=False) == (sizes[-1][0], 64)


def test_the_least_step_is_the_base_s(pipe):
    for base, expected in ((pipe, 16), (pixart(), None)):
        adapter = tiny_engram.attach(base)
        step = least_step(base, adapter.family)
        adapter.detach()
        assert step == expected or (expected is None and step == base.vae_scale_factor * base.transformer.config.patch_size)


def test_steps_that_the_base_cannot_do_are_refused(pipe, config, shapes):
    with pytest.raises(ConfigError, match="bucket_steps is 24, expected a multiple of 16, .*pass --bucket_steps 16"):
        train(pipe, config(buckets=True, bucket_steps=24), progress=False)


@pytest.mark.parametrize("field", [{"bucket_steps": 16}, {"bucket_no_upscale": True}])
def test_what_says_nothing_without_buckets_is_refused(config, field):
    with pytest.raises(ConfigError, match=f"{next(iter(field))} is .*; pass --buckets"):
        config(**field)


# -- what a step shows -----------------------------------------------------------------------------------------------------------


def drawn(config, step: int, samples: int, others: int = 0) -> list[objective.Draw]:
    return [objective.draw(config.seed, step, i, samples, others=others) for i in range(samples)]


def test_pictures_keep_their_shape(ready, config, shapes):
    data = ready(config(buckets=True))
    assert [tuple(mean.shape) for mean in data.means] == [(4, 8, 8), (4, 6, 10), (4, 10, 6), (4, 6, 10)]
    assert {tuple(mean.shape) for mean in ready(config()).means} == {(4, 8, 8)}, "off unless asked for"


def test_a_step_shows_one_size_in_proportion_to_its_pictures(ready, config, shapes):
    (shapes / "metadata.csv").write_text("file_name,repeats\n0.png,4\n")
    options = config(buckets=True)
    data = ready(options)
    seen: Counter[int] = Counter()
    sizes: Counter[tuple[int, ...]] = Counter()
    for step in range(1400):
        shown = [data.picture(one) for one in drawn(options, step, 4)]
        (size,) = {tuple(data.means[k].shape) for k in shown}
        sizes[size] += 1
        seen.update(shown)
    # four of seven samples are of the square picture, two of the wide ones, one of the tall one
    assert [sizes[size] / 200 for size in ((4, 8, 8), (4, 6, 10), (4, 10, 6))] == pytest.approx([4, 2, 1], abs=0.35)
    assert [seen[k] / 800 for k in range(4)] == pytest.approx([4, 1, 1, 1], abs=0.35)


def test_repeats_without_buckets(ready, config, shapes):
    (shapes / "metadata.csv").write_text("file_name,repeats\n2.png,5\n")
    options = config()
    data = ready(options)
    seen = Counter(data.picture(one) for step in range(200) for one in drawn(options, step, 8))
    assert [seen[k] / 200 for k in range(4)] == pytest.approx([1, 1, 5, 1], abs=0.25)


def test_choices_of_a_plain_folder_stay_what_they_were(ready, config, shapes):
    options = config()
    data = ready(options)
    for one in drawn(options, 3, 64):
        assert data.picture(one) == int(one.picture * 4)


def test_collages_are_a_bucket_of_their_own(ready, recipe, shapes):
    options = recipe(buckets=True, collages=2, collage_pictures=1)
    data = ready(options)
    assert data.collages == 8 and data.taught == 4
    steps = [[data.picture(one) for one in drawn(options, step, 4)] for step in range(600)]
    collages = [shown for shown in steps if shown[0] >= 4]
    assert all({k >= 4 for k in shown} == {shown[0] >= 4} for shown in steps) and len(collages) / 600 == pytest.approx(2 / 8, abs=0.05)
    assert {k for shown in collages for k in shown} == set(range(4, 12)) and {k for shown in steps for k in shown} == set(range(12))


def test_no_share_rounds_up_to_a_picture_that_is_not_there(ready, recipe, shapes):
    data = ready(recipe(buckets=True, collages=7, collage_pictures=1))
    most = 1 - 2.0**-53
    last = replace(objective.draw(0, 0, 0, 1), picture=most, bucket=most)
    assert data.picture(last) == 3


@pytest.mark.parametrize("collages", [0, 2])
def test_a_run_in_buckets_is_resumed_to_the_bit(pipe, tiny, recipe, shapes, tmp_path, collages):
    def run(base, name: str, **changes):
        options = recipe(buckets=True, collages=collages, output_dir=str(tmp_path / name), **changes)
        return train(base, options, progress=False)

    sizes: list[tuple[int, ...]] = []
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: sizes.append(tuple(args[0].shape[2:])))
    try:
        whole = run(pipe, "whole", max_train_steps=6, seed=3)
    finally:
        handle.remove()
    taught = [size for size in sizes if size in {(8, 8), (6, 10), (10, 6)}]
    assert len(set(taught)) > 1
    run(pipe, "parts", max_train_steps=3, seed=3)
    parts = run(tiny.build(), "parts", max_train_steps=6, seed=3, resume_from_checkpoint="latest")
    assert parts.losses == whole.losses
    # validation draws at the base's own size
    assert Image.open(shapes / "1.png").size == (128, 64)


def test_pixart_is_taught_in_buckets(config, shapes):
    result = train(pixart(), config(buckets=True, resolution=64), progress=False)
    assert result.steps == 4 and len(set(result.losses)) == 4


# -- processes -------------------------------------------------------------------------------------------------------------------


def test_two_processes_show_what_one_does(pipe, saved_pipe, recipe, shapes, tmp_path, fresh_accelerate):
    (shapes / "metadata.csv").write_text("file_name,text,repeats\n0.png,a {trigger},2\n")
    told = {"buckets": True, "random_flip": True, "collages": 0, "max_train_steps": 3, "gradient_accumulation_steps": 2, "ema_decay": 0.0}
    two = recipe(**told, train_batch_size=1, output_dir=str(tmp_path / "two"))
    (tmp_path / "config.json").write_text(json.dumps(two.to_dict()))
    script = Path(__file__).with_name("two_processes.py")
    ended = run_ranks(script, lambda rank: (tmp_path, saved_pipe, rank), 2)
    assert [code for code, _ in ended] == [0, 0], ended
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    AcceleratorState._reset_state(reset_partial_state=True)
    shown: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        picture = loop.TrainingData.picture
        patch.setattr(loop.TrainingData, "picture", lambda self, draw: shown.append(picture(self, draw)) or shown[-1])
        one = train(pipe, recipe(**told, train_batch_size=2, output_dir=str(tmp_path / "one")), progress=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert [k for pair in zip(ranks[0]["pictures"], ranks[1]["pictures"], strict=True) for k in pair] == shown
    assert len(shown) == 12
    assert [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)] == pytest.approx(one.losses, rel=1e-4)
    assert torch.isfinite(torch.tensor(one.losses)).all()
