"""Engram layers in somebody's own training loop, and in transformers' Trainer: they learn, the base does not."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramConfig, EngramLayers, UnsupportedModelError
from tiny_engram.llm_training import EngramOptimizer, RowAdam


@pytest.fixture
def layers(tokenizer):
    """layers(model, **config): Engram layers as they are made, in front of layers 1 and 2."""
    return lambda model, **options: EngramLayers.attach(
        model, EngramConfig(**{"layers": (1, 2), "vocab": 211, "heads": 2, **options}), tokenizer
    )


def weights(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def steps(model, optimizer, ids, count, scheduler=None):
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("form, start", (("paper", "rows"), ("v41", "values")))
def test_a_loop_of_ones_own(build, layers, text, form, start):
    model = build()
    base, engrams = weights(model), layers(model, form=form, start=start)
    before = weights(engrams)
    optimizer = EngramOptimizer(engrams, lr=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02, 0.1]
    losses = steps(model, optimizer, text(4, 24), 30)
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(base[name], value) for name, value in model.state_dict().items())
    moved = {name for name, value in engrams.state_dict().items() if not torch.equal(before[name], value)}
    assert moved == set(dict(engrams.named_parameters()))  # all that can learn has
    assert all(p.grad is None for p in engrams.parameters())


def test_both_parts_are_what_they_would_be_alone(build, layers, text):
    """The same bits as AdamW and RowAdam beside each other, with gradients that are not cut."""
    found = []
    for whole in (True, False):
        model = build()
        engrams, ids = layers(model), text(2, 14)
        rows = [table.weight for table in engrams.learned.values()]
        if whole:
            optimizers = [EngramOptimizer(engrams, lr=0.01, table_lr=0.03, weight_decay=0.1, max_grad_norm=None)]
        else:
            dense = {name: p for name, p in engrams.named_parameters() if not any(p is row for row in rows)}
            decaying = [p for name, p in dense.items() if ".projections." in name and p.ndim == 2]
            others = [p for p in dense.values() if not any(p is each for each in decaying)]
            groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            optimizers = [torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)), RowAdam(rows, lr=0.03, betas=(0.9, 0.95))]
        for _ in range(4):
            model(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights(engrams))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_it_goes_on_from_its_state_under_a_schedule(build, layers, text):
    model = build()
    engrams, ids = layers(model), text(2, 14)

    def made():
        optimizer = EngramOptimizer(engrams, lr=0.02)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=6)

    optimizer, schedule = made()
    steps(model, optimizer, ids, 3, schedule)
    assert [round(group["lr"], 6) for group in optimizer.param_groups] == [0.011, 0.011, 0.055]
    kept = copy.deepcopy((weights(engrams), optimizer.state_dict(), schedule.state_dict()))
    steps(model, optimizer, ids, 3, schedule)
    expected = weights(engrams)
    engrams.load_state_dict(kept[0])
    optimizer, schedule = made()
    optimizer.load_state_dict(kept[1])
    schedule.load_state_dict(kept[2])
    steps(model, optimizer, ids, 3, schedule)
    assert all(torch.equal(value, expected[name]) for name, value in engrams.state_dict().items())


def test_a_scaler_leaves_out_what_overflowed(build, layers, text):
    model, ids = build(), text(2, 14)
    engrams, scaler = layers(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer, before = EngramOptimizer(engrams, lr=0.02), weights(engrams)
    scaler.scale(model(ids, labels=ids).loss * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(before[name], value) for name, value in engrams.state_dict().items())
    scaler.scale(model(ids, labels=ids).loss).backward()
    scaler.step(optimizer)
    scaled = weights(engrams)
    other = build()
    engrams = layers(other)
    steps(other, EngramOptimizer(engrams, lr=0.02), ids, 1)
    assert all(torch.equal(value, scaled[name]) for name, value in engrams.state_dict().items())  # a power of two takes no digits


def test_the_trainer_teaches_engram(build, layers, text, tmp_path, tokenizer, caplog):
    model, ids = build(), text(16, 24)
    base, engrams = weights(model), layers(model)
    before = weights(engrams)
    optimizer = EngramOptimizer(engrams, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    options = {"output_dir": str(tmp_path), "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(**options, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=24, logging_steps=1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 24 and losses[-1] < losses[0] - 0.5
    assert all(torch.equal(base[name], value) for name, value in model.state_dict().items())
    assert {name for name, value in engrams.state_dict().items() if not torch.equal(before[name], value)} == set(
        dict(engrams.named_parameters())
    )
    assert "require gradients" not in caplog.text
    model.eval()
    expected = model(ids).logits
    engrams.save_pretrained(tmp_path / "notes")
    engrams.detach()
    again = EngramLayers.from_pretrained(model, tmp_path / "notes", tokenizer)
    assert torch.equal(model(ids).logits, expected)
    with pytest.raises(TinyEngramError, match="read rows that do not learn"):
        EngramOptimizer(again)


def test_a_base_that_would_be_taught_instead_is_told_of_once(build, layers, text, caplog):
    model, ids = build(), text()
    engrams = layers(model)
    model.requires_grad_(True)
    model(ids, labels=ids).loss.backward()  # in eval mode nobody trains
    model.train()
    with torch.no_grad():
        model(ids)
    assert not caplog.text
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    (line,) = caplog.messages
    assert "teaches these and not Engram" in line and "model.requires_grad_(False)" in line and "EngramOptimizer" in line
    assert engrams.enabled


def test_what_learns_is_counted_and_printed(build, layers, capsys):
    model = build()
    engrams = layers(model)
    own, base = (sum(p.numel() for p in module.parameters()) for module in (engrams, model))
    assert engrams.get_nb_trainable_parameters() == (own, own + base)
    engrams.print_trainable_parameters()
    share = f"{100 * own / (own + base):.4f}"
    assert capsys.readouterr().out == f"trainable params: {own:,} || all params: {own + base:,} || trainable%: {share}\n"
    assert model.requires_grad_(True) and engrams.get_nb_trainable_parameters()[0] == own + base
    other = copy.deepcopy(model)
    engrams.detach()
    assert engrams.get_nb_trainable_parameters() == (own, own) and other is not model


def test_numbers_that_are_not_finite_change_nothing(build, layers, text):
    model, ids = build(), text()
    engrams = layers(model)
    optimizer, before = EngramOptimizer(engrams), weights(engrams)
    with pytest.raises(TinyEngramError, match="no Engram parameter has a gradient"):
        optimizer.step()
    (model(ids, labels=ids).loss * float("nan")).backward()
    with pytest.raises(TinyEngramError, match="gradients of Engram are not finite; lower lr or table_lr"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in engrams.state_dict().items())
    assert all(p.grad is None for p in engrams.parameters())


@torch.no_grad()
def test_layers_come_back_after_detach(build, attach, text, caplog):
    model, ids = build(), text()
    engrams = attach(model)
    expected = model(ids).logits
    cache = model(ids[:, :9], use_cache=True).cache
    engrams.reattach(model)  # nothing happens
    assert torch.equal(model(ids).logits, expected) and "has Engram layers already" not in caplog.text
    with pytest.raises(TinyEngramError, match="attached to another LlamaForCausalLM: expected none; call detach"):
        engrams.reattach(build())
    engrams.detach()
    engrams.reattach(model)
    assert torch.equal(model(ids).logits, expected)
    found = model(ids[:, 9:], cache=cache).logits  # what the cache has of the layers is theirs still
    assert float((found - expected[:, 9:]).abs().max()) < 2e-5 * float(expected.abs().max())
    engrams.detach()
    with pytest.raises(UnsupportedModelError, match="width 64: expected 32"):
        engrams.reattach(build(hidden_size=64))
    engrams.reattach(model)
    attach(model, layers=(0, 3))
    assert "has Engram layers already, in front of layers [1, 2]" in caplog.text


@pytest.mark.parametrize("vocab", (10**12, 10**16))
def test_rows_that_no_memory_holds_are_one_line(build, layers, vocab):
    said = r"out of memory for the rows of layer 1: [\d,]+ of 32 float32 values, [\d,]+ bytes.*; lower EngramConfig.vocab"
    with pytest.raises(TinyEngramError, match=said) as caught:
        layers(build(), vocab=vocab)
    assert "\n" not in str(caught.value)


def test_another_base_is_told_of(build, layers, tmp_path, tokenizer, caplog):
    model = build()
    model.config.name_or_path = "owner/first"
    engrams = layers(model)
    engrams.save_pretrained(tmp_path)
    engrams.detach()
    for name, told in (("/models/first/", False), ("owner/second", True)):
        model.config.name_or_path = name
        EngramLayers.from_pretrained(model, tmp_path, tokenizer).detach()
        assert ("made for first, this model is second" in caplog.text) is told


@pytest.mark.gpu
def test_a_model_that_is_moved_to_a_gpu_afterwards(build, layers, text):
    """As the Trainer does with a model that it is given."""
    model = build()
    engrams = layers(model)
    optimizer = EngramOptimizer(engrams, lr=0.02)
    losses = steps(model.cuda(), optimizer, text(4, 24).cuda(), 30)
    assert losses[-1] < losses[0] - 0.5 and all(p.is_cuda for p in engrams.parameters())
