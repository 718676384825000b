"""Pictures beside the taught ones: what they show and say, and how a batch is shared between them and what is taught."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.personalization import plan
from benchmarks.personalization.methods import EXTRA, METHODS
from benchmarks.personalization.pieces import Bench
from benchmarks.personalization.plan import FULL, PlanError
from benchmarks.personalization.priors import Extra, Priors, allowed_names, collage, half_masks
from benchmarks.personalization.prompts import COMPANIONS
from benchmarks.personalization.runs import Run, Shares
from benchmarks.personalization.subjects import load_subjects, taught_pictures
from benchmarks.personalization.teach import _kinds, teach
from tiny_engram.training import objective

from captions import COLOURS, STYLES  # isort: skip

COUNT = len(COLOURS)


@pytest.fixture(scope="module")
def bench(base):
    """The bench itself, on the base that all tests share; one step of drawing will do, nobody looks at the pictures."""
    made = Bench("cpu")
    before, base.subjects = base.subjects, made.subjects
    made.base = base
    yield made
    base.subjects = before


@pytest.fixture(scope="module")
def given(bench, run):
    """What a run of ours on the octopus with both options is taught."""
    adapters = METHODS["ours"](bench.base, [run("ours", "octopus", collage=2, prior=2)])
    settings = replace(FULL, drawn=COUNT, drawing_steps=1)
    taught = bench.taught_to(adapters, settings)
    again = bench.taught_to(adapters, settings)
    assert all(again[0].extras[name] is extra for name, extra in taught[0].extras.items()), "drawn once for all runs"
    return adapters, taught[0]


def test_names_are_none_that_the_comparison_asks_for():
    names = allowed_names()
    asked = {*COMPANIONS, *(name for s in load_subjects() for name in (s.name, s.class_word))}
    assert len(set(names)) == len(names) > 300 and not asked & set(names)
    assert "coffee cup" in asked and not any("mug" in name.split() or "cup" in name.split() for name in names)


def test_prior_pictures_serve_both_sides(given):
    prior = given[1].extras["prior"]
    assert len(prior.captions) == len(prior.means) == len(prior.masks) == 2 * COUNT
    first, second = ([caption for (caption,) in half] for half in (prior.captions[:COUNT], prior.captions[COUNT:]))
    assert torch.equal(prior.means[:COUNT], prior.means[COUNT:]) and torch.equal(prior.stds[:COUNT], prior.stds[COUNT:])
    for left, right, at in zip(first, second, range(COUNT), strict=True):
        assert left.count("{0}") == right.count("{0}") == 1 and left != right
        # what the sentence says of sides is what the mask says: the loss is where the trigger is not
        if " left of " in left:
            assert left.index("{0}") < left.index(" left of ") and right.index("{0}") > right.index(" left of ")
        if " right of " in left:
            assert left.index("{0}") > left.index(" right of ") and right.index("{0}") < right.index(" right of ")
        assert not prior.masks[at, ..., :9].any() and not prior.masks[COUNT + at, ..., 7:].any()
    torch.testing.assert_close(prior.masks.mean((1, 2, 3)), torch.ones(2 * COUNT))
    for words in (STYLES, tuple(COLOURS), ("left of", "right of", "next to", "beside", " and ")):
        said = [sum(word in caption for caption in first) for word in words]
        assert min(said) >= COUNT // len(words) and sum(said) >= COUNT


def test_halves_leave_the_middle_out():
    left, right = half_masks(16, 16)
    assert left[0, 3].count_nonzero() == 7 and torch.equal(left.flip(-1), right)
    assert left.mean() == pytest.approx(1) and not (left * right).any()


def test_collages_put_a_taught_picture_beside_a_thing(given):
    taught, extra = given[1], given[1].extras["collage"]
    assert len(extra.captions) == len(extra.means) == 2 * len(taught.means) and extra.masks is None
    colours = [picture.colour for picture in taught_pictures(taught.subject)]
    for i, (caption,) in enumerate(extra.captions):
        assert caption.count("{0}") == 1 and "3d" in caption and colours[i // 2] in caption
    assert extra.means.flatten(1).std(0).mean() > 0.1


def test_a_collage_does_not_depend_on_what_else_was_drawn(bench, given):
    octopus, duck = (bench.subjects[name] for name in ("octopus", "duck"))
    later = Priors(bench.base, count=COUNT, steps=1, guidance=FULL.guidance)
    later.collages([duck])
    mine, wanted = later.collages([duck, octopus])["octopus"], given[1].extras["collage"]
    assert mine.captions == wanted.captions
    # batches of other sizes round otherwise
    torch.testing.assert_close(mine.means, wanted.means, rtol=0, atol=0.05)
    assert (mine.means - later.collages([duck])["duck"].means).abs().mean() > 0.1


def test_a_collage_has_two_halves_and_no_edges():
    one, two = np.full((128, 128, 3), 100, np.uint8), np.full((128, 128, 3), 104, np.uint8)
    one[32:96, 32:96], two[40:90, 40:90] = (250, 0, 0), (0, 0, 250)
    for order in (1, -1):
        made = collage((one, two)[::order], np.random.default_rng(3)).astype(int)
        ground = made[0, 0]
        assert (ground == (100, 104)[order < 0]).all()
        left, right = made[64, 34], made[64, 94]
        assert (left == (250, 0, 0)).all() if order > 0 else (np.abs(left - (0, 0, 250)) < 5).all()
        assert np.abs(right - ((0, 0, 250) if order > 0 else (250, 0, 0))).max() < 5
        # nothing but the two squares differs from the ground
        assert (made != ground).any(-1).sum() == 32 * 32 + 25 * 25


@pytest.mark.parametrize(("counts", "samples"), [((2,), 8), ((1, 2), 8), ((1, 1), 4), ((1,), 1), ((3,), 2), ((2,), 16)])
def test_every_kind_sees_all_timesteps(counts, samples):
    kinds = _kinds(counts, 64, samples)
    for kind, count in enumerate(counts, 1):
        assert ((kinds == kind).reshape(-1, 8).sum(1) == count).all(), "of every eight"
        assert ((kinds == kind).sum(0) == 8 * count).all()
    if samples == 8:
        assert (kinds > 0).sum(1).tolist() == [sum(counts)] * 64


def by_hand(base, data, seed: int, step: int, shown: list) -> torch.Tensor:
    """The loss of a batch of an untrained run; `shown` holds the source of each sample, and its weights or None."""
    total = torch.zeros(())
    for i, (source, masks) in enumerate(shown):
        drawn = objective.draw(seed, step, i, len(shown))
        k = int(drawn.picture * len(source.captions))
        caption = source.captions[k][int(drawn.caption * len(source.captions[k]))].replace("{0}", data.subject.trigger)
        noise = objective.noise_for(drawn, (2, *base.latent_shape))
        at = torch.tensor([int(drawn.timestep * 1000)])
        latents = source.means[k : k + 1] + source.stds[k : k + 1] * noise[1:]
        noisy = objective.add_noise(base.scheduler, latents, noise[:1], at)
        predicted = base.denoiser(noisy, at, base.encode(base.tokenize([caption])[0])).sample
        error = (predicted - objective.target_of(base.scheduler, latents, noise[:1], at))[0].square()
        if masks is not None:
            # the mean over the places that count, each alike
            error = error[:, masks[k, 0] > 0]
        total = total + error.mean() * objective.loss_weights(base.scheduler, at, 5.0)[0]
    return total / len(shown)


@torch.no_grad()
def test_losses_are_taken_where_they_count(base, bench, given):
    adapters, taught = given
    with torch.enable_grad():
        losses = teach(base, METHODS["ours"](base, adapters.runs), [taught], steps=1, batch_size=8)
    prior, beside = taught.extras["prior"], taught.extras["collage"]
    plain = (taught, None)
    shown = [(prior, prior.masks), plain, (prior, prior.masks), plain, (beside, None), plain, (beside, None), plain]
    torch.testing.assert_close(losses[0, 0], by_hand(base, taught, 0, 0, shown), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["ours", "lora-unet-r8"])
def test_without_the_options_nothing_changes(bench, given, run, method):
    plain, other = ([data] for data in (bench.taught("octopus"), given[1]))
    one, two = (
        teach(bench.base, METHODS[method](bench.base, [run(method, "octopus")]), data, steps=1, batch_size=2) for data in (plain, other)
    )
    assert torch.equal(one, two)
    mixed = METHODS[method](bench.base, [run(method, "octopus", prior=4)])
    three = teach(bench.base, mixed, other, steps=1, batch_size=2)
    assert abs(three[0, 0] - one[0, 0]) > 1e-4


def test_shares_that_make_no_sense(bench, given):
    for bad in ({"prior": -1}, {"collage": 1.5}, {"prior": True}, {"prior": 4, "collage": 4}):
        with pytest.raises(ValueError, match="expected (how many of 8|at most 7)"):
            Shares(**bad)
    assert Shares(prior=2, collage=1).asked == {"prior": 2, "collage": 1} and Shares().asked == {}
    runs = [Run(method="lora-unet-r8", subject="octopus", seed=0, learning_rate=1e-4, options=o) for o in ((), (("prior", 2),))]
    with pytest.raises(ValueError, match="may not differ in prior and collage"):
        METHODS["lora-unet-r8"](bench.base, runs)
    with pytest.raises(ValueError, match="ours on octopus has the option collage, prior; give `taught` those extras"):
        teach(bench.base, given[0], [bench.taught("octopus")], steps=1)


def test_levers_name_the_options_for_any_method():
    names = plan.Subjects(**{split: tuple(s.name for s in load_subjects(split)) for split in ("development", "final", "known")})
    variants = [
        {"label": "fair", "method": "lora-unet-r8", "options": {"collage": 2}, "factors": [1]},
        {"label": "cross", "method": "lora-cross-r8", "options": {}, "factors": [1]},
    ]
    fair, cross = plan.levers(names, FULL, {}, variants)
    assert fair.runs[0].options == (("collage", 2),) and cross.method in EXTRA and fair.key("") != cross.key("")
    assert not set(EXTRA) & {piece.method for piece in plan.sweep(names, FULL)}
    with pytest.raises(PlanError, match="lora-unet-r8 has no option rho; expected prior or collage"):
        plan.levers(names, FULL, {}, [{"label": "a", "method": "lora-unet-r8", "options": {"rho": 1.0}, "factors": [1]}])


def test_a_lora_on_the_text_side_alone(base, run):
    adapters = EXTRA["lora-cross-r8"](base, [run("lora-cross-r8")])
    adapted = {name.removesuffix(".lora_A.weight").removeprefix("unet.") for name in adapters.values(0) if "lora_A" in name}
    modules = dict(base.denoiser.named_modules())
    assert {modules[name] for name in adapted} == {p for _, m in base.cross_attentions for p in (m.to_k, m.to_v)}


def test_extra_pictures_may_come_with_captions_of_several_ways(base, bench, run):
    data = bench.taught("octopus")
    extra = Extra(data.means[:2], data.stds[:2], [["a {0}", "one {0}"], ["two {0}", "three {0}"]])
    adapters = METHODS["ours"](base, [run("ours", "octopus", seed=5, prior=4)])
    losses = teach(base, adapters, [replace(data, extras={"prior": extra})], steps=1, batch_size=2)
    with torch.no_grad():
        wanted = by_hand(base, data, 5, 0, [(extra, None), (data, None)])
    torch.testing.assert_close(losses[0, 0], wanted, rtol=1e-4, atol=1e-6)
