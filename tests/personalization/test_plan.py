"""What each stage runs, and what it refuses."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.personalization import plan
from benchmarks.personalization.methods import METHODS, RATES
from benchmarks.personalization.plan import FULL, PlanError, Settings
from benchmarks.personalization.prompts import CONTEXTS
from benchmarks.personalization.subjects import load_subjects


@pytest.fixture(scope="module")
def names():
    return plan.Subjects(**{split: tuple(s.name for s in load_subjects(split)) for split in ("development", "final", "known")})


def test_sizes_that_were_asked_for(names):
    assert (len(names.development), len(names.final), len(names.known)) == (5, 15, 15)
    assert not set(names.development) & {*names.final, *names.known}
    for group in (names.development, names.final, names.known):
        gallery = names.gallery(group, FULL.choices)
        assert len(gallery) == len(set(gallery)) == 15 and set(group) <= set(gallery)
    assert not set(names.gallery(names.development, FULL.choices)) & set(names.final)


def test_sweep_tries_every_method_alike(names):
    pieces = plan.sweep(names, FULL)
    assert {p.method for p in pieces} == {m for m in METHODS if not plan.is_control(m)}
    for method in {p.method for p in pieces}:
        runs = [run for p in pieces if p.method == method for run in p.runs]
        assert len(runs) == len(set(runs)) == 5 * len(plan.RATE_FACTORS)
        assert {run.subject for run in runs} == set(names.development) and {run.seed for run in runs} == {0}
        factors = sorted({round(run.learning_rate / RATES[method], 4) for run in runs})
        assert factors == [0.1, 0.32, 1, 3.2, 10, 32]
    assert all(len(p.runs) == 1 and not p.pairs for p in pieces if not METHODS[p.method].stackable)


def test_final_teaches_fifteen_subjects_three_times(names):
    rates = dict.fromkeys(METHODS, 0.5)
    pieces = plan.final(names, FULL, rates, "lora-both-r8")
    assert [p.method for p in pieces] == ["inversion-t", "lora-unet-r8", "after-tiny-engram", "after-v-engram", "lora-both-r8", "ours"]
    for piece in pieces:
        assert len(set(piece.runs)) == 45 and piece.pairs and set(piece.draw_at) == set(FULL.checkpoints)
        assert {(run.subject, run.seed) for run in piece.runs} == set(itertools.product(names.final, range(3)))
    assert [p.method for p in plan.final(names, FULL, rates, "lora-unet-r8")].count("lora-unet-r8") == 1


def test_final_may_come_in_a_piece_a_seed(names):
    rates = dict.fromkeys(METHODS, 0.5)
    pieces = plan.final(names, FULL, rates, "lora-unet-r8", only=["ours", "inversion-t"], seeds=[1, 0])
    assert [(p.method, {run.seed for run in p.runs}) for p in pieces] == [
        ("ours", {1}),
        ("inversion-t", {1}),
        ("ours", {0}),
        ("inversion-t", {0}),
    ]
    assert all(len(p.runs) == 15 and p.pairs for p in pieces) and not pieces[0].cells() & pieces[2].cells()
    full = plan.final(names, FULL, rates, "lora-unet-r8", only=["full"])
    assert len(full) == 45 and all(len(p.runs) == 1 and not p.pairs for p in full)
    with pytest.raises(PlanError, match="seed 3 is not one of 0, 1, 2"):
        plan.final(names, FULL, rates, "lora-unet-r8", seeds=[3])


@pytest.mark.parametrize("stage", ["sweep", "methods", "levers"])
def test_final_and_known_subjects_are_refused_before_the_end(names, stage):
    rates = dict.fromkeys(METHODS, 0.5)
    for forbidden in (names.final[0], names.known[0], "nobody"):
        build = {
            "sweep": lambda teach: plan.sweep(names, FULL, teach=teach),
            "methods": lambda teach: plan.methods(names, FULL, rates, teach=teach),
            "levers": lambda teach: plan.levers(names, FULL, rates, [{"label": "a", "options": {}}], teach=teach),
        }[stage]
        assert build(names.development[:1])
        with pytest.raises(PlanError, match=f"{stage} may not teach '{forbidden}'"):
            build((names.development[0], forbidden))


def test_missing_rates_are_refused(names):
    rates = dict.fromkeys(METHODS, 0.5)
    without = {method: rate for method, rate in rates.items() if method != "inversion-t"}
    for build in (
        lambda: plan.final(names, FULL, without, "lora-unet-r8"),
        lambda: plan.methods(names, FULL, without),
        lambda: plan.costs(names, FULL, without),
    ):
        with pytest.raises(PlanError, match="no learning rate was chosen for inversion-t; run the stage sweep"):
            build()
    with pytest.raises(PlanError, match="the best LoRA is not known"):
        plan.final(names, FULL, rates, None)
    with pytest.raises(PlanError, match="'lora-unet-r9' is not known"):
        plan.methods(names, FULL, rates, only=["lora-unet-r9"])


def test_controls_are_taught_at_the_rate_of_ours(names):
    rates = {m: 0.5 for m in METHODS if not plan.is_control(m)} | {"ours": 0.125}
    pieces = {p.method: p for p in plan.methods(names, FULL, rates, drawn_controls=("ours-shuffled",))}
    controls = [m for m in METHODS if plan.is_control(m)]
    assert controls and set(pieces) == set(METHODS)
    assert all(run.learning_rate == 0.125 for m in controls for run in pieces[m].runs)
    assert pieces["ours"].controls == ("ours-shuffled",) and not pieces["inversion-t"].controls


def test_levers_name_options_and_rates(names):
    variants = [
        {"label": "wide", "options": {"rho": 5.0, "mounts": "key+value"}},
        {"label": "fast", "options": {}, "factors": [1, 10]},
        {"label": "given", "options": {}, "learning_rates": [0.25], "method": "inversion-t"},
    ]
    wide, fast, given = plan.levers(names, FULL, {"ours": 0.5}, variants)
    assert {run.options for run in wide.runs} == {(("mounts", "key+value"), ("rho", 5.0))} and len(wide.runs) == 5 and wide.pairs
    assert sorted({run.learning_rate for run in fast.runs}) == pytest.approx([RATES["ours"], 10 * RATES["ours"]])
    assert {(run.method, run.learning_rate) for run in given.runs} == {("inversion-t", 0.25)}
    for bad in ({"options": {}}, {"label": "", "options": {}}, {"label": "a/b", "options": {}}, {"label": "a", "rates": [1]}):
        with pytest.raises(PlanError, match="expected a label of its own"):
            plan.levers(names, FULL, {"ours": 0.5}, [bad])
    with pytest.raises(PlanError, match="expected a label of its own"):
        plan.levers(names, FULL, {"ours": 0.5}, [{"label": "a"}, {"label": "a"}])


def test_a_key_follows_from_all_that_decides_a_piece(names, monkeypatch):
    piece = plan.sweep(names, FULL, only=["inversion-t"])[0]
    run = replace(piece.runs[0], learning_rate=1.0)
    keys = [
        piece.key("weights"),
        piece.key("other weights"),
        replace(piece, runs=(run, *piece.runs[1:])).key("weights"),
        replace(piece, runs=(replace(run, options=(("rho", 1),)), *piece.runs[1:])).key("weights"),
        replace(piece, settings=replace(FULL, guidance=3.0)).key("weights"),
        replace(piece, pairs=True).key("weights"),
        replace(piece, stage="levers").key("weights"),
    ]
    ours = plan.sweep(names, FULL, only=["ours"])[0]
    keys.append(ours.key("weights"))
    monkeypatch.setattr(METHODS["ours"], "preset", {"rho": 7.0})
    keys.append(ours.key("weights"))
    monkeypatch.setattr(plan, "VERSION", plan.VERSION + 1)
    keys.append(piece.key("weights"))
    monkeypatch.setattr(plan, "METHOD_VERSIONS", {"inversion-t": 2})
    keys.append(piece.key("weights"))
    assert len(set(keys)) == len(keys) == 11
    monkeypatch.undo()
    assert plan.sweep(names, Settings(), only=["inversion-t"])[0].key("weights") == keys[0]


def test_work_counts_training_and_drawing(names):
    settings = Settings(steps=10, main=10, checkpoints=(5, 10), batch=2, samples=4, between=1, pair=3, drawing_steps=5)
    rates = dict.fromkeys(METHODS, 0.5)
    piece = plan.methods(names, settings, rates, only=["inversion-t"], teach=names.development[:3])[0]
    pictures = 3 * len(CONTEXTS) * (4 + 1) + 3 * 3
    assert piece.work() == 3 * 10 * 2 * 3 + pictures * 5 * 2
    assert replace(piece, draw_at=(5,), pairs=False).work() == 3 * 5 * 2 * 3 + 3 * len(CONTEXTS) * 1 * 5 * 2
    assert replace(piece, controls=("a",)).work() > piece.work()


def test_checkpoints_that_make_no_sense():
    for bad in ({"checkpoints": (100, 50, 300)}, {"main": 150}, {"checkpoints": (300, 500)}, {"checkpoints": (0, 300)}):
        with pytest.raises(PlanError, match="expected"):
            Settings(**bad)
