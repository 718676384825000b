"""Checkpoints of train-lm: a full disk, what a run may not go on from, and layers that are really computed again."""

import copy
import errno
import os
import shutil
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramLayers
from tiny_engram.llm_training import LMTrainConfig, train_lm
from tiny_engram.llm_training.run import Run

pytestmark = pytest.mark.usefixtures("accelerator_state")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "a.txt").write_text("A row is read by the last tokens of a text. " * 60)
    options = {"train_file": (str(tmp_path / "a.txt"),), "output_dir": str(tmp_path / "out"), "layers": (1, 2), "heads": 2, "rows": 211}
    options |= {"block_size": 32, "train_batch_size": 4, "max_train_steps": 2, "report_to": "none"}
    return lambda **changes: LMTrainConfig(**options | changes)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("cache", "logs"))


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("at", ["state.safetensors", "table_layer_2.safetensors", "README.md", "tokens-"])
def test_a_full_disk_is_one_line_and_leaves_no_half_folder(build, tokenizer, recipe, tmp_path, monkeypatch, at):
    model, replace = build(), os.replace

    def full(source, target):
        if os.path.basename(target).startswith(at):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TinyEngramError, match="No space left on device.*(free|choose)") as caught:
        train_lm(model, tokenizer, recipe(), progress=False)
    assert "\n" not in str(caught.value) and names(tmp_path / "out") == [] and hooks(model) == 0
    assert "checkpoint-2" in str(caught.value) or at in str(caught.value)


OTHERS = {
    "rows": ({"rows": 307}, "its rows is 211, expected 307"),
    "layers": ({"layers": (1,)}, r"its layers is \[1, 2\], expected \[1\]"),
    "windows": ({"block_size": 16}, "its block_size is 32, expected 16"),
    "held out": ({"validation_split_percentage": 30.0}, "its validation_split_percentage is 5.0, expected 30.0"),
    "fewer steps": ({"max_train_steps": 1}, "it is at step 2, and max_train_steps is 1"),
}


def test_a_run_goes_on_only_with_what_it_was_made_for(build, tokenizer, recipe, tmp_path):
    model = build()
    train_lm(model, tokenizer, recipe(), progress=False)
    for changes, message in OTHERS.values():
        with pytest.raises(TinyEngramError, match=f"checkpoint-2: {message}") as caught:
            train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest", **changes), progress=False)
        assert "\n" not in str(caught.value) and hooks(model) == 0
    with pytest.raises(TinyEngramError, match="checkpoint-2: its hidden is 32, expected 64"):
        train_lm(build(hidden_size=64), tokenizer, recipe(resume_from_checkpoint="latest"), progress=False)
    (tmp_path / "a.txt").write_text("Another text altogether. " * 60)
    with pytest.raises(TinyEngramError, match="checkpoint-2: it was taught from another text, or .*; resume with the files"):
        train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest"), progress=False)
    state = tmp_path / "out" / "checkpoint-2" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(TinyEngramError, match="checkpoint-2: cannot read the checkpoint"):
        train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest"), progress=False)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_what_a_caller_switched_off_is_on_within(build, tokenizer, recipe, tmp_path, mode):
    """Gradients, and the padding of the tokenizer's last call, which is no part of the texts."""
    model, used = build(), copy.deepcopy(tokenizer)
    losses = train_lm(model, used, recipe(), progress=False).losses
    used(["one", "two and three"], padding=True, truncation=True, max_length=4)
    with mode():
        more = train_lm(model, used, recipe(max_train_steps=3, resume_from_checkpoint="latest"), progress=False).losses
    assert more[:2] == losses and len(more) == 3


def test_out_of_memory_is_one_line(build, tokenizer, recipe, tmp_path):
    model, calls = build(), []

    def allocate(*_):
        calls.append(1)
        return torch.empty(1 << 50) if len(calls) == 6 else None

    handle = model.model.layers[2].register_forward_pre_hook(allocate)
    with pytest.raises(TinyEngramError, match="out of memory for 4 windows of 32 tokens at a time .*; lower --train_batch_size") as caught:
        train_lm(model, tokenizer, recipe(max_train_steps=9, checkpointing_steps=1), progress=False)
    assert "\n" not in str(caught.value) and hooks(model) == 1 and "checkpoint-1" in names(tmp_path / "out")
    handle.remove()
    wrong = model.model.layers[2].register_forward_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):  # another mistake is not taken for it
        train_lm(model, tokenizer, recipe(overwrite_output_dir=True), progress=False)
    wrong.remove()


def test_another_batch_goes_on_where_the_data_was_left(build, tokenizer, recipe, tmp_path):
    """The position in the data is a number of windows, not of steps."""
    from tiny_engram.checkpoints import load_checkpoint

    model = build()
    train_lm(model, tokenizer, recipe(), progress=False)
    more = recipe(resume_from_checkpoint="latest", train_batch_size=2, max_train_steps=4)
    train_lm(model, tokenizer, more, progress=False)
    assert load_checkpoint(tmp_path / "out" / "checkpoint-4")[1]["samples"] == 2 * 4 + 2 * 2


def test_layers_are_computed_again(build, tokenizer, recipe):
    """As often again as there are teaching passes; validation computes them once."""
    model = build()
    counts = {}
    for again in (False, True):
        calls = []
        # before, not after: computing again ends as soon as it has all that is needed
        handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        train_lm(model, tokenizer, recipe(gradient_checkpointing=again, overwrite_output_dir=True), progress=False)
        handle.remove()
        counts[again] = len(calls)
    assert counts[True] == counts[False] + 2


def test_ctrl_c_waits_for_a_whole_step(build, tokenizer, recipe, tmp_path, monkeypatch):
    """It arrives in the middle of an update; the checkpoint that it leaves is of the step after it."""
    plain = Run.update

    def interrupted(self):
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(self)

    model = build()
    whole = train_lm(model, tokenizer, recipe(max_train_steps=5, output_dir=str(tmp_path / "whole")), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_lm(model, tokenizer, recipe(max_train_steps=5), progress=False)
    assert names(tmp_path / "out") == ["checkpoint-3"] and hooks(model) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = train_lm(model, tokenizer, recipe(max_train_steps=5, resume_from_checkpoint="latest"), progress=False)
    tables = [(run.path / "table_layer_1.safetensors").read_bytes() for run in (whole, result)]
    assert result.losses == whole.losses and tables[0] == tables[1]


def test_a_checkpoint_is_an_adapter_too(build, tokenizer, recipe, tmp_path, text):
    model = build()
    train_lm(model, tokenizer, recipe(checkpointing_steps=1, learning_rate=1e-2), progress=False)
    logits = []
    for folder in ("checkpoint-1", "checkpoint-2", "."):
        engrams = EngramLayers.from_pretrained(model, tmp_path / "out" / folder, tokenizer)
        logits.append(model(text()).logits)
        engrams.detach()
    assert not (logits[0] == logits[1]).all() and (logits[1] == logits[2]).all()


def test_a_text_of_its_own_is_measured(build, tokenizer, recipe, tmp_path):
    (tmp_path / "b.txt").write_text("Another text, which nobody learns. " * 20)
    result = train_lm(build(), tokenizer, recipe(validation_file=(str(tmp_path / "b.txt"),), max_validation_samples=3), progress=False)
    assert [each.tokens for each in result.measured] == [3 * 31] * 2
    nothing = train_lm(build(), tokenizer, recipe(validation_split_percentage=0, output_dir=str(tmp_path / "n")), progress=False)
    assert nothing.measured == () and "| step |" not in (nothing.path / "README.md").read_text()


def test_other_settings_are_told_and_never_unused(build, tokenizer, recipe, caplog):
    model = build()
    train_lm(model, tokenizer, recipe(), progress=False)
    with pytest.raises(TinyEngramError, match=r"checkpoint-2: step 2 is the last.*learning_rate 0.5 \(it had 0.001\); raise max_train"):
        train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest", learning_rate=0.5), progress=False)
    caplog.clear()
    again = train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest"), progress=False)
    assert again.steps == 2 and "checkpoint-2: step 2 is the last; raise max_train_steps" in caplog.text
    caplog.clear()
    more = recipe(resume_from_checkpoint="latest", learning_rate=0.01, max_train_steps=3)
    assert train_lm(model, tokenizer, more, progress=False).steps == 3
    (line,) = [line for line in caplog.messages if "other settings" in line]
    assert line.startswith("from step 2 on") and line.endswith("max_train_steps 3 (it had 2), learning_rate 0.01 (it had 0.001)")
    caplog.clear()
    assert "holds checkpoint" not in caplog.text
    train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest", learning_rate=0.01, max_train_steps=4), progress=False)
    assert "learning_rate" not in caplog.text and "max_train_steps 4 (it had 3)" in caplog.text
    caplog.clear()
    train_lm(model, tokenizer, recipe(resume_from_checkpoint="checkpoint-2", max_train_steps=3), progress=False)
    assert "holds checkpoint-4 too, which 'latest' means until this run is past it" in caplog.text


def test_a_new_run_does_not_begin_among_the_files_of_another(build, tokenizer, recipe, tmp_path, caplog):
    model, out = build(), tmp_path / "out"
    missing = recipe(resume_from_checkpoint="latest", max_train_steps=4)
    train_lm(model, tokenizer, missing, progress=False)
    assert f"no checkpoint in {out} to resume from: a new run starts" in caplog.text
    with pytest.raises(TinyEngramError, match="out holds checkpoint-4 of another run; .*--overwrite_output_dir") as caught:
        train_lm(model, tokenizer, recipe(), progress=False)
    assert "\n" not in str(caught.value)

    def stop(step, loss):
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(TinyEngramError, match="block_size is 256"):  # what is refused deletes nothing
        train_lm(model, tokenizer, recipe(overwrite_output_dir=True, block_size=256), progress=False)
    assert (out / "checkpoint-4").is_dir()
    with pytest.raises(KeyboardInterrupt):
        train_lm(model, tokenizer, recipe(overwrite_output_dir=True), progress=False, on_step=stop)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    assert train_lm(model, tokenizer, recipe(resume_from_checkpoint="latest"), progress=False).steps == 2
    shutil.rmtree(out / "checkpoint-1")
    shutil.rmtree(out / "checkpoint-2")
    with pytest.raises(TinyEngramError, match="out holds adapter_config.json of another run"):
        train_lm(model, tokenizer, recipe(), progress=False)


def test_the_way_out_of_a_first_step_that_is_not_finite_names_no_checkpoint(build, tokenizer, recipe):
    model = build()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TinyEngramError, match="the loss of step 1 is nan; lower .*and start anew$"):
        train_lm(model, tokenizer, recipe(validation_split_percentage=0), progress=False)


def test_the_card_names_the_base(build, tokenizer, recipe, tmp_path):
    build().save_pretrained(tmp_path / "a-base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a-base")
    card = (train_lm(model, tokenizer, recipe(max_train_steps=1), progress=False).path / "README.md").read_text()
    assert "# Engram layers for a-base" in card and 'base = "a-base"  # a folder' in card and str(tmp_path) not in card
    assert "Taught for 1 step from" in card
