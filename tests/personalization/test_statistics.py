"""Bootstrap intervals against theory and against a plain loop, paired differences, pairs, and crossings."""

import math

import numpy as np
import pytest

from benchmarks.personalization.statistics import (
    RESAMPLES,
    at_step,
    draw_counts,
    estimate,
    first_crossing,
    pair_estimate,
    subject_means,
)

NAMES = tuple(f"subject-{i:02d}" for i in range(15))


def test_draws_are_seeded_whole_and_follow_the_names():
    counts = draw_counts(NAMES)
    assert counts.shape == (RESAMPLES, 15) and (counts.sum(1) == 15).all()
    assert abs(counts.mean() - 1) < 1e-12 and abs(counts.var() - 14 / 15) < 0.02  # a multinomial's variance
    draw_counts.cache_clear()
    assert np.array_equal(draw_counts(NAMES), counts)
    assert not np.array_equal(draw_counts(NAMES, seed=1), counts)
    assert not np.array_equal(draw_counts(tuple(n + "x" for n in NAMES)), counts)


def test_the_interval_is_that_of_a_plain_bootstrap():
    values = np.random.default_rng(3).normal(0.7, 0.1, 15)
    got = estimate(dict(zip(NAMES, values, strict=True)))
    rng = np.random.default_rng(5)
    plain = rng.choice(values, (4000, 15)).mean(1)
    low, high = np.percentile(plain, [2.5, 97.5])
    assert got.value == pytest.approx(values.mean())
    assert got.low == pytest.approx(low, abs=0.005) and got.high == pytest.approx(high, abs=0.005)
    # For this many draws the width is close to 2 * 1.96 standard errors.
    assert got.high - got.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(15), rel=0.06)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        got = estimate({f"{i}": v for i, v in enumerate(rng.normal(0, 1, 30))})
        hits += got.low <= 0 <= got.high
    assert 176 <= hits <= 199  # 190 expected, somewhat fewer for percentile intervals of 30 values


def test_runs_and_contexts_are_averaged_before_subjects():
    records = [
        {"subject": "a", "seed": 0, "context": "taught", "effnet_best": 1.0},
        {"subject": "a", "seed": 1, "context": "taught", "effnet_best": 0.0},
        {"subject": "a", "seed": 1, "context": "bare", "effnet_best": 0.5, "colour": None},
        {"subject": "b", "seed": 0, "context": "taught", "effnet_best": 0.1, "colour": 1.0},
    ]
    assert subject_means(records, "effnet_best") == {"a": 0.5, "b": 0.1}
    assert subject_means(records, "colour") == {"b": 1.0}
    assert estimate(subject_means(records, "effnet_best")).value == pytest.approx(0.3)


def test_a_paired_difference_forgets_what_both_share():
    rng = np.random.default_rng(1)
    hard = rng.normal(0.5, 0.3, 15)
    ours = estimate(dict(zip(NAMES, hard + 0.02, strict=True)))
    theirs = estimate(dict(zip(NAMES, hard, strict=True)))
    apart = ours - theirs
    assert apart.value == pytest.approx(0.02) and apart.low == pytest.approx(0.02) and apart.high == pytest.approx(0.02)
    assert ours.high - ours.low > 0.1
    ratio = estimate(dict(zip(NAMES, hard * 0.9, strict=True))) / theirs
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    with pytest.raises(ValueError, match="'subject-14' are on one|subject-14.*finish that stage"):
        _ = ours - estimate(dict(zip(NAMES[:14], hard, strict=False)))


def test_pairs_are_drawn_over_subjects():
    values = {(a, b): float((i + j) % 3 == 0) for i, a in enumerate(NAMES) for j, b in enumerate(NAMES) if i < j}
    got = pair_estimate(values)
    assert got.value == pytest.approx(np.mean(list(values.values())))
    table = np.full((15, 15), np.nan)  # a subject drawn twice makes no pair with itself
    for (a, b), value in values.items():
        i, j = NAMES.index(a), NAMES.index(b)
        table[i, j] = table[j, i] = value
    chosen = np.random.default_rng(2).integers(15, size=(3000, 15))
    first, second = np.triu_indices(15, 1)
    plain = np.nanmean(table[chosen[:, first], chosen[:, second]], axis=1)
    assert got.low == pytest.approx(np.percentile(plain, 2.5), abs=0.012)
    assert got.high == pytest.approx(np.percentile(plain, 97.5), abs=0.012)
    # The order within a pair does not matter, seeds of a pair are averaged.
    assert pair_estimate({(b, a): v for (a, b), v in values.items()}).low == got.low
    # One bad subject spoils 14 pairs at once: the interval must be wider than that of 105 independent pairs.
    spoiled = pair_estimate({pair: float(NAMES[0] not in pair and NAMES[1] not in pair) for pair in values})
    independent = 2 * 1.96 * math.sqrt(spoiled.value * (1 - spoiled.value) / 105)
    assert spoiled.high - spoiled.low > 1.3 * independent
    with pytest.raises(ValueError, match="with itself"):
        pair_estimate({("a", "a"): 1.0})


def test_two_subjects_leave_resamples_without_a_pair():
    got = pair_estimate({("a", "b"): 1.0})
    assert np.isnan(got.draws).any() and (got.low, got.high) == (1.0, 1.0)


def test_nothing_measured_is_said():
    with pytest.raises(ValueError, match="run that stage"):
        estimate({})
    with pytest.raises(ValueError, match="run that stage"):
        pair_estimate({})


def test_crossings():
    steps = [25, 50, 100, 200]
    assert first_crossing(steps, [0.1, 0.3, 0.5, 0.9], 0.4) == 75
    assert first_crossing(steps, [0.1, 0.3, 0.5, 0.9], 0.05) == 25
    assert first_crossing(steps, [0.1, 0.3, 0.5, 0.9], 0.9) == 200
    assert first_crossing(steps, [0.1, 0.3, 0.5, 0.9], 0.91) is None
    assert first_crossing(steps, [0.1, 0.6, 0.2, 0.9], 0.6) == 50  # the first time counts, whatever comes after
    assert at_step(steps, [0.1, 0.3, 0.5, 0.9], 150) == pytest.approx(0.7)
    assert at_step(steps, [0.1, 0.3, 0.5, 0.9], 500) == 0.9
    for bad in ([], [25, 25, 50, 60], [25, 50]):
        with pytest.raises(ValueError, match="rising steps"):
            first_crossing(bad, [0.1, 0.2, 0.3, 0.4], 0.2)
