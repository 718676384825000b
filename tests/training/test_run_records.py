"""What a run measures and writes while it goes on: loss on fixed draws, the best concept, an early stop, metrics, trackers, resumes."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.training import run_files, train
from tiny_engram.training.costs import peak_memory
from tiny_engram.training.validation_loss import ValidationLoss

MEASURING = {"validation_loss_steps": 2, "validation_loss_samples": 6}


def teach(pipe, config, **options):
    return train(pipe, config, progress=False, **options)


def stop_at(last: int):
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    return on_step


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def ups_and_downs(monkeypatch):
    """Validation losses of a script, so that the best is in the middle; the real ones hardly move in a few steps."""
    told = iter(())

    def play(*losses: float):
        nonlocal told
        told = iter(losses)

    monkeypatch.setattr(ValidationLoss, "__call__", lambda self, run: next(told))
    return play


def test_losses_and_random_state_are_the_same_with_measuring_and_without(pipe, recipe, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plain = teach(pipe, recipe(output_dir=str(tmp_path / "plain")))
    pipe.unet.train()
    try:
        measured = teach(pipe, recipe(output_dir=str(tmp_path / "measured"), validation_loss_steps=1, validation_loss_samples=5))
        assert pipe.unet.training
    finally:
        pipe.unet.eval()
    assert measured.losses == plain.losses and torch.equal(torch.get_rng_state(), before)
    one, two = (load_checkpoint(tmp_path / run / "checkpoint-4")[0] for run in ("plain", "measured"))
    assert set(two) - set(one) == {f"best.{name}" for name in ("rows", "gain", "bias", "maps")}
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_is_that_of_the_averages_on_the_same_draws_each_time(pipe, recipe, tmp_path, monkeypatch):
    """Measured by hand: the averages put in the place of the masters, in one batch."""
    seen, by_hand, real = [], [], ValidationLoss.__call__

    def watched(self, run):
        draws = [one for batch in self._batches for one in batch]
        seen.append(draws)
        masters = {name: p.detach().clone() for name, p in run.module.named_parameters()}
        with torch.no_grad():
            for name, p in run.module.named_parameters():
                p.copy_(run.average[name])
            by_hand.append(float(self._loss(run.module, draws)))
            for name, p in run.module.named_parameters():
                p.copy_(masters[name])
        return real(self, run)

    monkeypatch.setattr(ValidationLoss, "__call__", watched)
    teach(pipe, recipe(**MEASURING))
    assert seen[0] == seen[1] and len(seen[0]) == 6 and all(d.other is None for d in seen[0])
    found = [(each["step"], each["validation_loss"]) for each in lines(tmp_path / "out") if "validation_loss" in each]
    assert [step for step, _ in found] == [2, 4] and [loss for _, loss in found] == pytest.approx(by_hand, rel=1e-5)
    assert len(set(by_hand)) == 2


def test_pictures_of_their_own_are_measured_and_not_taught(pipe, config, tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(held / "a.png")
    own = teach(pipe, config(**MEASURING))
    mine = lines(tmp_path / "out")
    other = teach(pipe, config(**MEASURING, validation_data_dir=str(held), output_dir=str(tmp_path / "b")))
    assert other.losses == own.losses and lines(tmp_path / "b")[1]["validation_loss"] != mine[1]["validation_loss"]
    with pytest.raises(TinyEngramError, match="nowhere: no such folder"):
        teach(pipe, config(**MEASURING, validation_data_dir=str(tmp_path / "nowhere")))


def test_the_best_is_kept_beyond_the_limit_and_the_run_stops_early(pipe, config, tmp_path, ups_and_downs, caplog):
    ups_and_downs(0.5, 0.3, 0.4, math.nan, 0.35, 0.1)
    options = {"max_train_steps": 12, "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    with caplog.at_level("INFO", "tiny_engram"):
        result = teach(pipe, config(**options, validation_loss_steps=1, early_stop_patience=3))
    out = tmp_path / "out"
    assert result.steps == 5 and [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-5"]
    assert "stopped at step 5: the last 3 validation losses were no new best; best/ holds step 2 (0.3000)" in caplog.text
    best = Concept.load(out / "best" / "concept.safetensors")
    assert best.recipe["step"] == 2 and best.recipe["validation_loss"] == 0.3
    assert [each.get("validation_loss") for each in lines(out)] == [0.5, 0.3, 0.4, None, 0.35]
    ups_and_downs(0.5, 0.3)
    teach(pipe, config(max_train_steps=2, lr_scheduler="constant", validation_loss_steps=1, output_dir=str(tmp_path / "two")))
    ups_and_downs(0.5, 0.3, 0.4)
    teach(pipe, config(max_train_steps=3, lr_scheduler="constant", validation_loss_steps=1, output_dir=str(tmp_path / "three")))
    two, three = (Concept.load(tmp_path / run / "best" / "concept.safetensors").mount_rows("clip_l") for run in ("two", "three"))
    ended = Concept.load(tmp_path / "two" / "concept.safetensors").mount_rows("clip_l")
    assert torch.equal(two.gain, three.gain) and torch.equal(two.gain, ended.gain)
    # a settled run that is taken up again has nothing left to do
    assert teach(pipe, config(**options, validation_loss_steps=1, early_stop_patience=3, resume_from_checkpoint="latest")).steps == 5


def test_an_earlier_run_s_best_does_not_stay(pipe, config, tmp_path, ups_and_downs):
    ups_and_downs(0.5)
    teach(pipe, config(max_train_steps=1, validation_loss_steps=1))
    assert (tmp_path / "out" / "best" / "concept.safetensors").is_file()
    teach(pipe, config(max_train_steps=1))
    assert not (tmp_path / "out" / "best" / "concept.safetensors").exists()


@pytest.mark.parametrize("where", ["between steps", "while it measures", "while it writes"])
def test_ten_steps_are_five_and_five_with_all_that_is_kept(tiny, pipe, recipe, tmp_path, monkeypatch, where):
    options = {"max_train_steps": 10, "lr_scheduler": "cosine", "optimizer": "adamw", "adam_weight_decay": 0.01}
    options |= {"validation_loss_steps": 3, "validation_loss_samples": 5, "early_stop_patience": 9, "checkpoints_total_limit": 1}
    whole = teach(pipe, recipe(**options, output_dir=str(tmp_path / "whole")))
    cut = recipe(**options, output_dir=str(tmp_path / "cut"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "while it measures":
            real, calls = ValidationLoss.__call__, []

            def measure(self, run):
                calls.append(run.step)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                return real(self, run)

            patch.setattr(ValidationLoss, "__call__", measure)
        if where == "while it writes":
            step_done = run_files.RunFiles.step_done

            def write(self):
                if self.run.step == 5:
                    raise KeyboardInterrupt
                step_done(self)

            patch.setattr(run_files.RunFiles, "step_done", write)
        teach(pipe, cut, on_step=stop_at(5) if where == "between steps" else None)
    stood = lines(tmp_path / "cut")
    assert [each["step"] for each in stood] == [1, 2, 3, 4, 5] and stood == lines(tmp_path / "whole")[:5]
    # what a kill could have left behind the last checkpoint
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 9.0}\n{"step": 7, "lo')
    # another pipeline object, as another process would have
    resumed = teach(tiny.build(), recipe(**options, output_dir=str(tmp_path / "cut"), resume_from_checkpoint="latest"))
    assert resumed.losses == whole.losses and resumed.steps == 10
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    (one, first), (two, second) = (load_checkpoint(tmp_path / run / "checkpoint-10") for run in ("whole", "cut"))
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert {k: v for k, v in first.items() if k != "config"} == {k: v for k, v in second.items() if k != "config"}
    bests = [Concept.load(tmp_path / run / "best" / "concept.safetensors") for run in ("whole", "cut")]
    assert bests[0].recipe == bests[1].recipe and torch.equal(bests[0].mount_rows("clip_l", "input").payload.view(torch.uint8),
                                                              bests[1].mount_rows("clip_l", "input").payload.view(torch.uint8))  # fmt: skip


def test_metrics_are_there_while_the_run_goes_on(pipe, config, tmp_path):
    def look(step: int, loss: float) -> None:
        told = lines(tmp_path / "out")
        assert [each["step"] for each in told] == list(range(1, step + 1)) and told[-1]["loss"] == loss
        assert told[-1]["lr"] == config().learning_rate * config().rate(step - 1) and told[-1]["grad_norm"] > 0

    teach(pipe, config(), on_step=look)
    assert all(set(each) == {"step", "loss", "lr", "grad_norm"} for each in lines(tmp_path / "out"))


def test_trackers_are_given_numbers_alone(pipe, config, monkeypatch):
    """Neither lists nor None, which trackers refuse; and the pictures in the way of each."""
    from accelerate.tracking import TensorBoardTracker

    logged, told = [], []
    monkeypatch.setattr(TensorBoardTracker, "log", lambda self, values, step=None, **_: logged.append(values))
    monkeypatch.setattr(TensorBoardTracker, "store_init_configuration", lambda self, values: told.append(values))
    config = config(report_to="tensorboard", **MEASURING)
    teach(pipe, config)
    assert len(logged) == 4 and all(type(value) is float for values in logged for value in values.values())
    assert set(logged[1]) == {"loss", "lr", "grad_norm", "validation_loss"} and set(logged[0]) == {"loss", "lr", "grad_norm"}
    assert all(isinstance(value, int | float | str) for value in told[0].values()) and set(told[0]) == set(config.to_dict())


def test_report_to_takes_lists(config):
    assert config(report_to="tensorboard, wandb").trackers == ("tensorboard", "wandb") and config(report_to="none").trackers == ()
    assert config(report_to=["tensorboard"]).trackers == ("tensorboard",)


def test_flow_matching_teaches_through_the_same_loop(tiny, config, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = tiny.build()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    seen = []
    handle = pipe.unet.register_forward_pre_hook(lambda module, args: seen.extend(args[1].tolist()))
    try:
        result = teach(pipe, config(timestep_sampling="logit_normal", mounts=("span", "value"), bands=2, max_train_steps=20))
    finally:
        handle.remove()
    assert all(math.isfinite(loss) for loss in result.losses) and len(seen) == 40 and all(0 < t <= 1000 for t in seen)
    assert any(t != int(t) for t in seen) and sum(seen) / len(seen) > 550
    rows = load_checkpoint(tmp_path / "out" / "checkpoint-20")[0]["master.rows"]
    assert all(each.abs().max() > 0 for each in rows)


def test_a_run_that_an_earlier_version_began_goes_on(pipe, config, tmp_path):
    teach(pipe, config(max_train_steps=2))
    path = tmp_path / "out" / "checkpoint-2" / "state.json"
    state = json.loads(path.read_text())
    for key in ("norms", "measured", "optimizer"):
        del state[key]
    for key in ("optimizer", "noise_offset", "validation_loss_steps"):
        del state["config"][key]
    path.write_text(json.dumps(state))
    assert teach(pipe, config(resume_from_checkpoint="latest")).steps == 4
    assert [set(each) for each in lines(tmp_path / "out")] == [{"step", "loss", "lr"}] * 2 + [{"step", "loss", "lr", "grad_norm"}] * 2


def test_peak_memory_is_that_of_the_process_alone():
    """A process that a large one starts does not take over what that one has held."""
    held = bytearray(400 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    script = "from tiny_engram.training.costs import peak_memory; print(peak_memory())"
    child = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert child > 1 << 20 and peak_memory() > len(held)
    assert child < peak_memory() - (100 << 20)
