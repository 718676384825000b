"""Optimisers: what each decays, that a run of each is taken up again bit for bit, and what is said where its package is missing."""

import importlib.util
import json

import pytest
import torch

from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.training import train
from tiny_engram.training.optimizers import make_optimizer
from tiny_engram.training.rows import ConceptRows

# Hundreds of megabytes, so no part of what the tests need: tried where it happens to be.
EIGHT_BIT = ["adamw8bit"] if importlib.util.find_spec("bitsandbytes") else []


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


@pytest.fixture
def module(adapter, recipe):
    """Masters at the default mounts, with maps; none of them zero."""
    made = ConceptRows(adapter.new_concept("zqx", (), None, recipe().concept_config), "clip_l", adapter.contexts["clip_l"].layout)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(1.0)
    return made


@pytest.mark.parametrize("name", ["adamw", "prodigy"])
@pytest.mark.parametrize(
    ("changes", "moved"),
    [({}, set()), ({"adam_weight_decay": 0.1}, {"maps"}), ({"row_weight_decay": 0.1}, {"rows"})],
)
def test_nothing_decays_that_was_not_asked_to(module, recipe, name, changes, moved):
    """Without gradients only decay can move anything."""
    if name == "prodigy":
        pytest.importorskip("prodigyopt")
    optimizer = make_optimizer(module, recipe(optimizer=name, learning_rate=1.0, **changes))
    before = {k: p.detach().clone() for k, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    module.gain.grad = torch.full_like(module.gain, 1e-30)  # prodigy does nothing where there is no gradient at all
    with torch.no_grad():
        optimizer.step()
    found = {k for k, p in module.named_parameters() if not torch.equal(p, before[k])}
    assert found - {"gain"} == moved and "bias" not in found
    for k in moved:
        assert dict(module.named_parameters())[k].abs().max() < before[k].abs().max()


def test_the_default_is_adam_as_it_was(pipe, config, module, recipe):
    optimizer = make_optimizer(module, recipe())
    assert type(optimizer) is torch.optim.Adam and [g["lr"] for g in optimizer.param_groups] == [1.4e-2, 1.4e-2, 5.6e-3]
    assert all(g["betas"] == (0.9, 0.95) and g["eps"] == 1e-8 and g["weight_decay"] == 0 for g in optimizer.param_groups)


@pytest.mark.parametrize("name", ["adamw", "prodigy", *EIGHT_BIT])
def test_ten_steps_are_five_and_five(pipe, recipe, tmp_path, name):
    """With every number that the optimiser keeps; prodigy's estimate of the rate is one of a group, 8 bits have tables of their own."""
    package = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}.get(name)
    if package is not None:
        pytest.importorskip(package)
    options = {
        "optimizer": name,
        "max_train_steps": 10,
        "train_batch_size": 2,
        "collages": 0,
        "learning_rate": 0.5,
        "lr_scheduler": "cosine",
    }
    whole = teach(pipe, recipe(**options, output_dir=str(tmp_path / "whole")))

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    cut = {**options, "output_dir": str(tmp_path / "cut")}
    with pytest.raises(KeyboardInterrupt):
        teach(pipe, recipe(**cut), on_step=stop)
    state = json.loads((tmp_path / "cut" / "checkpoint-5" / "state.json").read_text())["optimizer"]
    assert name != "prodigy" or (state["groups"][0]["d"] > 0 and state["groups"][0]["k"] == 5)
    resumed = teach(pipe, recipe(**cut, resume_from_checkpoint="latest"))
    assert resumed.losses == whole.losses and len(set(whole.losses)) == 10
    (one, first), (two, second) = (load_checkpoint(tmp_path / run / "checkpoint-10") for run in ("whole", "cut"))
    assert set(one) == set(two) and all(torch.equal(one[k], two[k]) for k in one) and first["optimizer"] == second["optimizer"]
    assert one["master.rows"].abs().max() > 0


def test_another_optimizer_cannot_take_up_a_run(pipe, config):
    teach(pipe, config(max_train_steps=1))
    with pytest.raises(TinyEngramError, match="its optimizer is 'adam', expected 'adamw'; resume with what it was made for"):
        teach(pipe, config(max_train_steps=2, optimizer="adamw", resume_from_checkpoint="latest"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "adamw8bit"}, "optimizer 'adamw8bit' needs the package bitsandbytes, .*; pip install bitsandbytes"),
        ({"optimizer": "prodigy", "learning_rate": 1.0}, "optimizer 'prodigy' needs the package prodigyopt, .*; pip install prodigyopt"),
        ({"report_to": "tensorboard,wandb"}, "report_to 'wandb' needs the package wandb, .*; pip install wandb"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_written(pipe, config, tmp_path, monkeypatch, change, words):
    real = importlib.util.find_spec
    missing = {"bitsandbytes", "prodigyopt", "wandb"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name in missing else real(name, *args))
    with pytest.raises(TinyEngramError, match=words) as caught:
        teach(pipe, config(**change))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr", "inverse_sqrt", "polynomial"])
def test_schedules_against_plain_formulas(recipe, name):
    config = recipe(lr_scheduler=name, lr_warmup_steps=10, max_train_steps=100, lr_num_cycles=2, lr_power=2.0)
    assert config.rate(0) == pytest.approx(0.1 * config.rate(9), rel=0.25) and config.rate(4) < config.rate(9)
    expected = {
        "constant_with_warmup": {10: 1.0, 99: 1.0},
        "cosine_with_restarts": {25: 0.5, 49: 0.000987, 50: 1.0, 75: 0.5},
        "cosine_with_min_lr": {50: 0.55, 99: 0.1002},
        "inverse_sqrt": {39: 0.5, 89: 1 / 3},
        "polynomial": {50: 0.25, 90: 0.01},
    }[name]
    assert {step: config.rate(step) for step in expected} == {step: pytest.approx(rate, abs=1e-4) for step, rate in expected.items()}


def test_the_last_fifth_of_warmup_stable_decay_falls(recipe):
    config = recipe(lr_scheduler="warmup_stable_decay", max_train_steps=100)
    assert (
        config.rate(0) == 1
        and config.rate(80) == pytest.approx(1)
        and config.rate(90) == pytest.approx(0.5)
        and config.rate(99) == pytest.approx(0.05)
    )


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_cosine_behind_the_warm_up_is_transformers_own(recipe, warmup):
    from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

    config = recipe(lr_scheduler="cosine_warmup_with_min_lr", lr_warmup_steps=warmup, max_train_steps=40, lr_min_ratio=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(optimizer, warmup, 40, min_lr_rate=0.3)
    theirs = []
    for _ in range(40):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [config.rate(step) for step in range(40)] == pytest.approx(theirs, abs=1e-12)
    assert config.rate(39) == pytest.approx(0.3) and max(theirs) > 0.9


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
def test_the_least_rate_is_the_one_that_was_asked_for(recipe, ratio):
    config = recipe(lr_scheduler="cosine_with_min_lr", lr_min_ratio=ratio, max_train_steps=1000)
    rates = [config.rate(step) for step in range(1000)]
    assert rates[0] == 1 and rates == sorted(rates, reverse=True) and ratio < rates[-1] < ratio + 1e-4


def test_a_schedule_that_follows_the_loss_is_refused_with_the_nearest_one(recipe):
    with pytest.raises(ConfigError, match="function of the step alone.*The nearest is warmup_stable_decay") as caught:
        recipe(lr_scheduler="reduce_lr_on_plateau")
    assert "\n" not in str(caught.value) and "reduce_lr_on_plateau" in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("No API key configured.\nUse `wandb login`"), OSError(28, "No space left on device")])
def test_a_tracker_that_does_not_start_is_one_line(pipe, config, tmp_path, monkeypatch, error):
    """As wandb without a key, or a disk that is full; the run can be had without it."""
    from accelerate.tracking import TensorBoardTracker

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    monkeypatch.setattr(TensorBoardTracker, "__init__", fail)
    with pytest.raises(TinyEngramError, match=r"report_to 'tensorboard': a tracker cannot start \(.*\); pass --report_to none") as caught:
        teach(pipe, config(report_to="tensorboard"))
    assert "\n" not in str(caught.value) and str(error).split()[-1] in str(caught.value)
    monkeypatch.undo()
    assert teach(pipe, config(max_train_steps=1)).steps == 1
