"""Engram beside the model: nothing changes at first, nothing stays behind, and each of its links counts."""

import copy
import gc
import io
import pickle
import weakref

import peft
import pytest
import torch
from transformers import DynamicCache

from tiny_engram import llm
from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramConfig, EngramLayers
from tiny_engram.llm.host import DecoderHost
from tiny_engram.quantization import quantize
from tiny_engram.table import EngramTable

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ("rows", "values"))
@pytest.mark.parametrize("form", ("paper", "v41"))
@torch.no_grad()
def test_nothing_changes_at_first_and_after_it(build, attach, text, tokenizer, kind, start, form):
    model, ids = build(kind), text()
    base = model(ids).logits
    config = EngramConfig(layers=(0, 3), vocab=211, heads=2, form=form, start=start, branches=2)
    engrams = EngramLayers.attach(model, config, tokenizer)
    assert torch.equal(model(ids).logits, base)
    # One of the two factors is zero, never both.
    zero_rows = not any(bool(rows.weight.any()) for rows in engrams.learned.values())
    assert zero_rows == (start == "rows")
    engrams.detach()
    filled = attach(model, form=form)
    assert not torch.equal(model(ids).logits, base)
    filled.enabled = False
    assert torch.equal(model(ids).logits, base)
    filled.enabled = True
    filled.detach()
    assert torch.equal(model(ids).logits, base)
    modules = (model.model, *model.model.layers)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules[:1])
    assert not any(module._forward_pre_hooks for module in modules)


@pytest.mark.parametrize("start", ("rows", "values"))
@pytest.mark.parametrize("form", ("paper", "v41"))
def test_the_first_gradient_moves_something(build, text, tokenizer, start, form):
    model, ids = build(), text()
    engrams = EngramLayers.attach(model, EngramConfig(layers=(1,), vocab=211, heads=2, form=form, start=start), tokenizer)
    model(ids, labels=ids).loss.backward()
    rows = engrams.learned["1"].weight
    assert rows.grad is not None and rows.grad.is_sparse
    value = engrams.engrams.get_parameter("1.projections." + ("wkv" if form == "v41" else "value_proj") + ".weight")
    found = rows.grad.coalesce().values() if start == "rows" else value.grad
    assert found is not None and bool(found.any())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("form", ("paper", "v41"))
@torch.no_grad()
def test_every_link_counts(build, attach, text, form):
    model, ids = build(), text()
    engrams = attach(model, form=form)
    whole = model(ids).logits

    def moves(change, undo):
        change()
        moved = model(ids).logits
        undo()
        assert torch.equal(model(ids).logits, whole)
        return float((moved - whole).abs().max()) > 1e-3

    engram = engrams.engrams["1"]
    hasher = engram.hasher
    kept = dict(hasher._constants)
    ((device, (multipliers, primes)),) = kept.items()
    assert moves(lambda: hasher._constants.update({device: (multipliers.flip(0), primes)}), lambda: hasher._constants.update(kept))

    # The stored table, with the scales of all its rows at zero's.
    learned, stored = engram.table, engrams.stored(1)
    engrams.use_rows(1, stored)
    assert torch.equal(model(ids).logits, whole)
    scales = stored.storage.scale.clone()
    assert moves(lambda: stored.storage.scale.fill_(0), lambda: stored.storage.scale.copy_(scales))
    engrams.use_rows(1, learned)

    # The gate: at exactly a half in the paper's form, next to it in V4.1's.
    for parameter in (parameter for name, parameter in engram.named_parameters() if not name.startswith("table")):
        before = parameter.clone()
        assert moves(lambda p=parameter: p.zero_(), lambda p=parameter, b=before: p.copy_(b))
    other = engrams.tokenizer.canonical.roll(1)
    table = engrams._canonical[device]
    before = table.clone()
    assert moves(lambda: table[: len(other)].copy_(other), lambda: table.copy_(before))


@torch.no_grad()
def test_the_model_saves_itself_without_engram(build, attach, text, tmp_path):
    model, ids = build(), text()
    base, names = model(ids).logits, set(model.state_dict())
    attach(model)
    assert set(model.state_dict()) == names and not any("ngram" in name for name, _ in model.named_modules())
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again.eval()(ids).logits, base)


@torch.no_grad()
def test_a_copy_of_the_model_has_engram_of_its_own(build, attach, text):
    model, ids = build(), text()
    base = model(ids).logits
    engrams = attach(model)
    whole = model(ids).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids).logits, whole)
    (other,) = DecoderHost.of(copied).readers
    assert other is not engrams and isinstance(other, EngramLayers)
    next(iter(other.learned.values())).weight.zero_()
    assert not torch.equal(copied(ids).logits, whole) and torch.equal(model(ids).logits, whole)
    engrams.detach()
    assert torch.equal(model(ids).logits, base) and not torch.equal(copied(ids).logits, base)
    other.detach()
    assert torch.equal(copied(ids).logits, base)


@torch.no_grad()
def test_what_was_detached_is_forgotten(build, attach, text):
    model = build()
    kept = []
    for _ in range(5):
        engrams = attach(model)
        model(text())
        engrams.detach()
        engrams.detach()  # nothing happens
        kept.append(weakref.ref(engrams))
        del engrams
    gc.collect()
    assert not any(each() for each in kept) and not DecoderHost.of(model).readers
    whole = weakref.ref(model.model)
    attach(model)
    del model
    gc.collect()
    assert whole() is None


@torch.no_grad()
def test_engram_copied_alone_is_attached_to_nothing(build, attach, text):
    model, ids = build(), text()
    engrams = attach(model)
    whole = model(ids).logits
    for copied in (copy.deepcopy(engrams), pickle.loads(pickle.dumps(engrams))):
        copied.detach()
        assert torch.equal(model(ids).logits, whole)
        assert all(torch.equal(a, b) for a, b in zip(copied.state_dict().values(), engrams.state_dict().values(), strict=True))
    layer = copy.deepcopy(model.model.layers[1])
    with pytest.raises(TinyEngramError, match="layer 1 was copied without its model"):
        layer(torch.zeros(1, 1, 32))
    with pytest.raises(TinyEngramError, match="cannot be pickled: call detach first"):
        torch.save(model, io.BytesIO())
    engrams.detach()
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("first", ("engram", "lora"))
def test_beside_lora(build, attach, text, tmp_path, first):
    model, ids = build(), text()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    if first == "engram":
        engrams = attach(model)
        tuned = peft.get_peft_model(model, lora)
    else:
        tuned = peft.get_peft_model(model, lora)
        engrams = attach(tuned)
    tuned.eval()
    with torch.no_grad():
        both = tuned(ids).logits
        cache = DynamicCache(config=model.config)
        steps = torch.cat([tuned(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])], dim=1)
        assert float((steps - both).abs().max()) < 2e-5 * float(both.abs().max())
        with tuned.disable_adapter():
            engram_alone = tuned(ids).logits
        engrams.enabled = False
        lora_alone = tuned(ids).logits
        engrams.enabled = True
        assert not torch.equal(both, engram_alone) and not torch.equal(both, lora_alone)
        assert torch.equal(tuned.generate(ids, max_new_tokens=4, do_sample=False)[:, :-4], ids)
    tuned.train()
    tuned(ids, labels=ids).loss.backward()
    grads = [parameter.grad for name, parameter in tuned.named_parameters() if "lora_B" in name]
    assert len(grads) == 8 and all(grad is not None and bool(grad.any()) for grad in grads)
    assert all(bool(rows.weight.grad.coalesce().values().any()) for rows in engrams.learned.values())
    tuned.save_pretrained(tmp_path)
    with torch.no_grad():
        tuned.eval()
        engrams.detach()
        assert torch.equal(tuned(ids).logits, lora_alone)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("form", ("paper", "v41"))
def test_gradient_checkpointing_gives_the_same_gradients(build, attach, text, form, reentrant):
    found = []
    for checkpointing in (False, True):
        model = build()
        engrams = attach(model, form=form)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()  # as peft does, since the reentrant kind looks at inputs alone
        model.train()
        loss = model(text(), labels=text()).loss
        loss.backward()
        grads = {name: p.grad.to_dense() for name, p in engrams.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
        with torch.no_grad():  # nothing is checkpointed then, and the cache is kept
            first = model(text(), use_cache=True)
            assert model(text(), cache=first.cache).cache.get_seq_length() == 2 * text().shape[1]
    (loss, grads), (again, others) = found
    assert torch.equal(loss, again) and grads.keys() == others.keys() and len(grads) > 6
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form, branches", (("paper", 2), ("v41", 1)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@torch.no_grad()
def test_a_model_of_another_dtype(build, attach, text, dtype, form, branches):
    model, ids = build().to(dtype), text(2, 15)
    engrams = attach(model, form=form, branches=branches)
    assert {p.dtype for p in engrams.parameters()} == {torch.float32}

    def apart():
        full = model(ids).logits
        cache = DynamicCache(config=model.config)
        steps = torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])], dim=1)
        assert full.dtype == dtype
        return full, float((steps - full).abs().max())

    full, difference = apart()
    engrams.enabled = False
    base, allowed = apart()
    # Projections in float32 are cut otherwise for one token than for many, and that may flip a rounding of the model's.
    rounding = torch.finfo(dtype).eps * float(base.abs().max())
    assert difference <= max(2 * allowed, 2 * rounding)
    assert float((full - base).abs().max()) > 20 * rounding
    engrams.enabled = True
    engrams.engrams.to(torch.bfloat16)
    assert float((model(ids).logits - full).abs().max()) < 0.1 * float((full - base).abs().max())


@pytest.mark.parametrize("form, branches", (("paper", 2), ("v41", 1)))
@torch.no_grad()
def test_double_precision_agrees_to_its_own_rounding(build, attach, text, form, branches):
    model, ids = build("gemma2").double(), text(2, 15)
    attach(model, form=form, branches=branches).double()
    full, cache = model(ids).logits, DynamicCache(config=model.config)
    steps = torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])], dim=1)
    assert float((steps - full).abs().max()) < 1e-12 * float(full.abs().max())


@torch.no_grad()
def test_the_decoder_is_called_by_position_too(build, attach, text):
    model, ids = build(), text(2, 9)
    attach(model)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = DynamicCache(config=model.config)
    expected = model.model(ids, attention_mask=mask).last_hidden_state
    places = torch.arange(9)[None]
    found = torch.cat(
        [model.model(ids[:, a:b], mask[:, :b], places[:, a:b], cache).last_hidden_state for a, b in ((0, 5), (5, 6), (6, 9))], dim=1
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 9


@torch.no_grad()
def test_layers_put_in_the_place_of_others_are_missed(build, attach, text):
    model = build()
    attach(model)
    model.model.layers[1] = build().model.layers[1]
    with pytest.raises(TinyEngramError, match=r"layers \[1\] of the LlamaModel were not called.*attach again"):
        model(text())


@torch.no_grad()
def test_attached_to_rows_that_are_there(build, attach, tokenizer, text):
    model, ids = build(), text(2, 12)
    learned = attach(model, seed=3)
    expected, weights = model(ids).logits, learned.engrams.state_dict()
    tables = {layer: learned.stored(layer) for layer in learned.layers}
    config = learned.config
    learned.detach()
    served = llm.attach(model, config, tokenizer, tables=tables)
    assert not served.learned
    served.engrams.load_state_dict({name: value for name, value in weights.items() if ".table." not in name})
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    "spoil, said",
    (
        (lambda tables: {1: tables[1]}, r"tables are for layers \[1\]: expected one for each of \[1, 2\]"),
        (lambda tables: {**tables, 2: EngramTable.virtual(64)}, "layer 2: rows have 64 values, expected 32"),
        (lambda tables: {**tables, 2: EngramTable.dense(*quantize(torch.zeros(9, 32)))}, "layer 2: the table has 9 rows, its hash reaches"),
    ),
)
def test_tables_that_do_not_fit(build, attach, tokenizer, spoil, said):
    model = build()
    learned = attach(model)
    tables = {layer: learned.stored(layer) for layer in learned.layers}
    learned.detach()
    with pytest.raises(TinyEngramError, match=said):
        llm.attach(model, learned.config, tokenizer, tables=spoil(tables))
    assert model.model not in DecoderHost._hosts or not DecoderHost.of(model).readers


@pytest.mark.usefixtures("no_gradients")
def test_embeddings_that_were_added_later(build, attach, text, tokenizer):
    model, ids = build(), text(1, 9)
    attach(model)
    before = model(ids).logits
    model.resize_token_embeddings(len(tokenizer) + 50, mean_resizing=False)
    assert torch.equal(model(ids).logits[..., : before.shape[-1]], before)
    ids[0, 4] = len(tokenizer) + 40
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    steps = [model(ids[:, t : t + 1], cache=cache).logits for t in range(9)]
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 2e-5 * float(whole.abs().max())
