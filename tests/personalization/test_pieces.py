"""One piece at a time, as small as it gets: what is taught, drawn and recorded, and that a control is drawn from the same noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.personalization import plan
from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.pieces import WINDOW, Bench, run_piece, save_piece, windowed
from benchmarks.personalization.plan import Settings
from benchmarks.personalization.prompts import pair_prompts
from benchmarks.personalization.shots import averaged, draw_shots, pair_shots, single_shots
from benchmarks.personalization.store import merge

SETTINGS = Settings(steps=2, main=2, checkpoints=(1, 2), batch=1, samples=1, between=1, pair=1, drawing_steps=1)
SUBJECT = "octopus"


@pytest.fixture(scope="module")
def bench(base, few):
    """The bench itself, on the base that all tests share."""
    made = Bench("cpu")
    before = base.subjects
    base.subjects = made.subjects
    made.base = base
    yield made
    base.subjects = before


@pytest.fixture(scope="module")
def taught(bench):
    """Ours on one subject, drawn at both checkpoints, and with the control that is the base."""
    rates = dict.fromkeys(METHODS, 0.1)
    piece = plan.methods(bench.names, SETTINGS, rates, only=["ours"], teach=[SUBJECT], drawn_controls=["ours-off"])[0]
    piece = replace(piece, gallery=(SUBJECT,))
    lines = []
    return piece, run_piece(bench, piece, lines.append), lines


def test_records_at_every_checkpoint(taught, few):
    _, outcome, lines = taught
    assert [(r["step"], r["subject"], r["context"]) for r in outcome.records["methods"]] == [
        (step, SUBJECT, context) for step in (1, 2) for context in few
    ]
    assert [(r["method"], r["step"], r["context"]) for r in outcome.records["controls"]] == [("ours-off", 2, c) for c in few]
    assert not outcome.pairs, "one subject makes no pair"
    assert any(line.startswith("step 2 of 2") for line in lines)


def test_the_switched_off_control_is_the_base(bench, taught):
    _, outcome, _ = taught
    subject = bench.subjects[SUBJECT]
    # run -1: the words stand there, and nothing is loaded
    asked = single_shots({-1: subject}, {-1: 0}, 1)
    plain = draw_shots(bench.base, None, asked, SETTINGS)
    for shot, picture in zip(asked, plain, strict=True):
        name = f"{SUBJECT}/0/2/{shot.prompt.context}"
        drawn = outcome.pictures[f"ours-off/{name}"].astype(int)
        assert np.abs(drawn - picture).max() <= 1  # batches of other sizes round otherwise
        assert np.abs(outcome.pictures[f"ours/{name}"].astype(int) - drawn).max() > 1


def test_a_piece_keeps_what_others_read(bench, taught, tmp_path, few):
    piece, outcome, _ = taught
    assert len(outcome.pictures) == 2 * len(few) and all(name.split("/")[3] == "2" for name in outcome.pictures)
    assert list(outcome.files) == ["octopus-0.safetensors"]
    read = save_piece(bench, piece, outcome, 1.5, tmp_path).read()
    assert read["key"] == piece.key(bench.inputs) and read["cells"] == ["octopus/0"] and read["seconds"] == 1.5
    results = merge({"pieces": {}, "judges": {}, "ceilings": {}, "stages": {}, "pairs": [], "losses": {}, "costs": {}}, [read])
    assert set(results["stages"]) == {"methods", "controls"} and set(results["losses"]) == {"methods/Ours/octopus/0/0.1"}


@pytest.mark.slow
def test_methods_that_hold_one_run_take_turns(bench, few):
    piece, second = plan.sweep(bench.names, SETTINGS, only=["full"], teach=[SUBJECT])[:2]
    assert [run.subject for p in (piece, second) for run in p.runs] == ["octopus", "octopus"]
    before = {name: p.clone() for name, p in bench.base.denoiser.named_parameters()}
    outcome = run_piece(bench, replace(piece, gallery=(SUBJECT,)))
    assert all(torch.equal(before[name], p) for name, p in bench.base.denoiser.named_parameters())
    assert len(outcome.records["sweep"]) == len(few) and not outcome.pairs and not outcome.pictures


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_base_draws_without_being_taught(bench, number, few):
    piece = plan.base(bench.names, SETTINGS)[number]
    whose = (bench.names.known, bench.names.final, bench.names.development)[number - 1][0]
    piece = replace(piece, gallery=(whose, "fox") if number > 1 else (whose,))
    outcome = run_piece(bench, piece)
    assert [(r["subject"], r["context"]) for r in outcome.records["base"]] == [(whose, context) for context in few]
    assert {(r["method"], r["step"]) for r in outcome.records["base"]} == {("base", 0)} and not outcome.pairs
    assert len(outcome.pictures) == (len(few) if piece.keep else 0)


def test_shots_share_their_noise(bench, few):
    octopus, snowman, duck = (bench.subjects[name] for name in ("octopus", "snowman", "duck"))
    one, other = single_shots({0: octopus}, {0: 0}, 3), single_shots({4: duck, 5: snowman}, {4: 0, 5: 1}, 2)
    seeds = {(shot.prompt.context, shot.sample): shot.seed for shot in one}
    assert len(set(seeds.values())) == 3 * len(few)
    assert all(seeds[shot.prompt.context, shot.sample] == shot.seed for shot in other if shot.runs == (4,))
    assert not set(seeds.values()) & {shot.seed for shot in other if shot.runs == (5,)}, "another training seed has noise of its own"
    named = single_shots({-1: octopus}, {-1: 0}, 1, by_class_word=True)
    assert {shot.words for shot in named} == {(octopus.class_word,)} and {shot.runs for shot in named} == {(-1,)}
    pairs = pair_shots({2: octopus, 3: snowman, 7: duck}, 0, 2)
    things, runs = (octopus, snowman, duck), (2, 3, 7)
    wanted = [(p.text, tuple(things[i] for i in at), tuple(runs[i] for i in at)) for p, at in pair_prompts(things)]
    assert [(shot.prompt.text, shot.subjects, shot.runs) for shot in pairs[::2]] == wanted and len({shot.seed for shot in pairs}) == 6
    assert not {shot.seed for shot in pairs} & set(seeds.values())


def test_means_are_over_the_pictures_that_have_a_score(bench, few):
    asked = single_shots({0: bench.subjects["octopus"]}, {0: 0}, 2)
    scores = [{"identity": float(shot.sample), "colour": 1.0} if shot.sample else {"identity": 0.0} for shot in asked]
    found = averaged(asked, scores)
    assert [shot.prompt.context for shot, _ in found] == list(few)
    assert all(means == {"pictures": 2, "identity": 0.5, "colour": 1.0} for _, means in found)


def test_losses_of_a_run_that_diverged():
    losses = torch.cat([torch.full((WINDOW,), 0.5), torch.tensor([0.25, float("nan"), 1.0])])
    assert windowed(losses) == [0.5, None] and windowed(losses[:-3] * float("inf")) == [None]
