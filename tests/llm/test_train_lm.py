"""train-lm on tiny models of the real classes: what it teaches, what it leaves alone, what comes back from its files."""

import json
import math

import pytest
import torch

from tiny_engram.checkpoints import load_checkpoint
from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramLayers
from tiny_engram.llm_training import LMTrainConfig, train_lm
from tiny_engram.llm_training.run import Run
from tiny_engram.llm_training.validation import validate
from tiny_engram.llm_training.windows import Windows, end_token, tokenize

pytestmark = pytest.mark.usefixtures("accelerator_state")


@pytest.fixture
def words(tmp_path):
    """A folder of texts that say one thing over and over, so that a few steps learn it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The table is read by the last tokens of a text. " * 40)
    (folder / "b.md").write_text("A gate says how much of a row is added to the state. " * 30)
    lines = [{"text": f"Row {k} of the table stays as it is while nobody reads it."} for k in range(20)]
    (folder / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def recipe(words, tmp_path):
    def make(**changes) -> LMTrainConfig:
        options = {
            "train_file": (str(words),),
            "output_dir": str(tmp_path / "out"),
            "layers": (1, 2),
            "heads": 2,
            "rows": 211,
            "block_size": 32,
            "train_batch_size": 4,
            "max_train_steps": 4,
            "lr_warmup_steps": 2,
            "learning_rate": 1e-2,
            "report_to": "none",
        }
        return LMTrainConfig(**{**options, **changes})

    return make


def stop_at(last):
    """Ctrl-C after so many steps."""

    def stop(step, loss):
        if step == last:
            raise KeyboardInterrupt

    return stop


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind, form", [("llama", "paper"), ("qwen3", "v41")])
def test_the_file_says_what_validation_measured_and_the_base_keeps_its_bits(build, tokenizer, text, recipe, kind, form):
    model = build(kind)
    before, base, random = {k: v.clone() for k, v in model.state_dict().items()}, model(text()).logits, torch.get_rng_state()
    config = recipe(form=form, max_train_steps=12, validation_steps=5)
    result = train_lm(model, tokenizer, config, progress=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()) and torch.equal(model(text()).logits, base)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters()) and not model.training

    assert [each.step for each in result.measured] == [0, 5, 10, 12] and len(result.losses) == result.steps == 12
    assert result.measured[-1].loss < result.measured[0].loss - 0.2 and result.losses[-1] < result.losses[0] - 0.2
    tokens, _ = tokenize(config.train_file, tokenizer, result.path / "cache")
    _, held = Windows.of(tokens, 32, end_token(tokenizer)).split(5)
    assert validate(model, held, 4).loss == result.measured[0].loss
    engrams = EngramLayers.from_pretrained(model, result.path, tokenizer)
    assert validate(model, held, 4, step=12) == result.measured[-1]
    assert engrams.config.blocked_ids == (tokenizer.eos_token_id,)
    engrams.detach()

    card = (result.path / "README.md").read_text()
    assert f"| 12 | {result.measured[-1].loss:.4f} | {result.measured[-1].perplexity:.2f} |" in card and str(result.path) not in card


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "train_batch_size": 2, "form": "v41"}])
def test_a_resumed_run_ends_with_the_same_bits(build, tokenizer, recipe, tmp_path, changes):
    model = build()
    whole = train_lm(model, tokenizer, recipe(max_train_steps=10, validation_steps=2, **changes), progress=False)

    cut = recipe(max_train_steps=10, validation_steps=2, output_dir=str(tmp_path / "cut"), **changes)
    with pytest.raises(KeyboardInterrupt):
        train_lm(model, tokenizer, cut, progress=False, on_step=stop_at(5))
    assert sorted(p.name for p in (tmp_path / "cut").glob("checkpoint-*")) == ["checkpoint-5"]
    assert not (tmp_path / "cut" / "adapter_config.json").exists()
    again = LMTrainConfig.from_dict(cut.to_dict() | {"resume_from_checkpoint": "latest"})
    result = train_lm(model, tokenizer, again, progress=False)
    assert result.losses == whole.losses and result.measured == whole.measured
    first, second = files(whole.path), files(result.path)
    names = ("adapter_model.safetensors", "table_layer_1.safetensors", "table_layer_2.safetensors")
    assert all(first[name] == second[name] for name in names)
    state = "checkpoint-10/state.safetensors"
    assert (whole.path / state).read_bytes() == (result.path / state).read_bytes()


def test_passes_of_a_step_and_layers_computed_again_change_nothing_but_rounding(build, tokenizer, recipe, tmp_path):
    model = build()
    plain = train_lm(model, tokenizer, recipe(), progress=False)
    others = {"parts": {"train_batch_size": 1, "gradient_accumulation_steps": 4}, "again": {"gradient_checkpointing": True}}
    for name, changes in others.items():
        result = train_lm(model, tokenizer, recipe(output_dir=str(tmp_path / name), **changes), progress=False)
        assert result.losses == pytest.approx(plain.losses, rel=1e-4), name
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_rows_that_no_step_read_keep_their_bits(build, tokenizer, recipe, monkeypatch):
    read, seen = {}, []
    plain = Run.update

    def watched(self):
        before = {name: p.detach().clone() for name, p in self.tables.items()}
        rows = {name: p.grad.coalesce().indices()[0] for name, p in self.tables.items()}
        done = plain(self)
        for name, p in self.tables.items():
            moved = (p.detach() != before[name]).any(1).nonzero()[:, 0]
            assert set(moved.tolist()) <= set(rows[name].tolist())
            read.setdefault(name, set()).update(moved.tolist())
        seen.append(min(map(len, self.tables.values())))
        return done

    monkeypatch.setattr(Run, "update", watched)
    train_lm(build(), tokenizer, recipe(), progress=False)
    assert len(seen) == 4 and all(0 < len(rows) < seen[0] for rows in read.values())


@pytest.mark.parametrize("dtype, precision", [("float32", "bf16"), ("bfloat16", "no"), ("bfloat16", "bf16"), ("float16", "no")])
def test_masters_are_float32_whatever_the_base_is(build, tokenizer, recipe, dtype, precision):
    model = build().to(getattr(torch, dtype))
    result = train_lm(model, tokenizer, recipe(mixed_precision=precision, max_train_steps=8), progress=False)
    assert result.measured[-1].loss < result.measured[0].loss and next(model.parameters()).dtype == getattr(torch, dtype)
    tensors, state = load_checkpoint(result.path / "checkpoint-8")
    assert {v.dtype for v in tensors.values()} == {torch.float32} and state["samples"] == 32
    EngramLayers.from_pretrained(model, result.path, tokenizer).detach()


def test_numbers_that_are_not_finite_stop_in_one_line_and_keep_the_last_checkpoint(build, tokenizer, recipe, tmp_path):
    model = build()

    def spoil(step, loss):
        if step == 3:
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)

    with pytest.raises(TinyEngramError, match="the loss of step 4 is nan; lower --learning_rate") as caught:
        train_lm(model, tokenizer, recipe(max_train_steps=8, checkpointing_steps=2), progress=False, on_step=spoil)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]
    assert all(torch.isfinite(v).all() for v in load_checkpoint(tmp_path / "out" / "checkpoint-2")[0].values())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_on_a_gpu_it_learns_is_taken_up_and_comes_back(build, tokenizer, recipe, precision):
    model = build().cuda()
    with pytest.raises(KeyboardInterrupt):
        train_lm(model, tokenizer, recipe(mixed_precision=precision, max_train_steps=12), progress=False, on_step=stop_at(6))
    config = recipe(mixed_precision=precision, max_train_steps=12, resume_from_checkpoint="latest", gradient_checkpointing=True)
    result = train_lm(model, tokenizer, config, progress=False)
    assert result.steps == 12 and result.measured[-1].loss < result.measured[0].loss - 0.2
    if precision == "fp16":
        state = json.loads((result.path / "checkpoint-12" / "state.json").read_text())
        assert state["scaler"]["scale"] >= 1
    engrams = EngramLayers.from_pretrained(model, result.path, tokenizer, home="device")
    tokens, _ = tokenize(config.train_file, tokenizer, result.path / "cache")
    held = Windows.of(tokens, 32, end_token(tokenizer)).split(5)[1]
    assert validate(model, held, 4, step=12).loss == pytest.approx(result.measured[-1].loss, rel=1e-6)
    engrams.detach()
