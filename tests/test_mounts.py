"""The span mount on a real encoder: every link is live, dtypes, offload, lost hooks, clip_skip, the probe, training = serving."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers import CLIPTextModel

import tiny_engram
from tests.tiny_pipeline import unload_inversions
from tiny_engram import residual
from tiny_engram.errors import TableError
from tiny_engram.hooks import MountError
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept, span_mean_norm

PROMPT = "a zqx bolo on a table"


def encode(pipe, prompt, **options):
    with torch.no_grad():
        return pipe.encode_prompt(prompt, "cpu", 1, False, **options)[0]


def ids_of(pipe, *prompts):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


# -- no link of the chain is decoration ----------------------------------------------------------------------------------------


def break_multipliers(bank, monkeypatch):
    bank.hasher.multipliers = bank.hasher.multipliers.flip(0)
    bank.hasher._constants = {bank.hasher.primes.device: (bank.hasher.multipliers, bank.hasher.primes)}


def break_primes(bank, monkeypatch):
    bank.hasher.primes = bank.hasher.primes.flip(1)
    bank.hasher._constants = {bank.hasher.primes.device: (bank.hasher.multipliers, bank.hasher.primes)}


@pytest.mark.parametrize("breaks", [break_multipliers, break_primes])
def test_a_corrupted_hash_is_a_missing_row(tiny, adapter, pipe, monkeypatch, breaks):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    ours, picture = encode(pipe, PROMPT), tiny.picture(pipe, PROMPT)
    bank = adapter.mounts["clip_l"].store.bank_of("zqx bolo")
    kept = bank.hasher.multipliers, bank.hasher.primes, bank.hasher._constants
    breaks(bank, monkeypatch)
    assert torch.equal(ours, encode(pipe, PROMPT))  # rows are read once
    adapter.mounts["clip_l"].store.forget_read()
    with pytest.raises(TableError, match="is not in the table"):
        encode(pipe, PROMPT)
    lookup = bank.table.lookup
    monkeypatch.setattr(bank.table, "lookup", lambda ids, bounds: lookup(ids, bounds="ignore"))
    assert not torch.equal(ours, encode(pipe, PROMPT)) and not torch.equal(picture, tiny.picture(pipe, PROMPT))
    monkeypatch.undo()
    bank.hasher.multipliers, bank.hasher.primes, bank.hasher._constants = kept
    adapter.mounts["clip_l"].store.forget_read()
    assert torch.equal(ours, encode(pipe, PROMPT))


def zero_scales(store, bank, monkeypatch):
    bank.table._rows.scale.zero_()


def zero_payload(store, bank, monkeypatch):
    bank.table._rows.payload.zero_()


def swap_canonical_ids(store, bank, monkeypatch):
    store._canonical = store._canonical[::-1].copy()


def change_salts(store, bank, monkeypatch):
    placed = bank._placed["zqx bolo"]
    bank._placed["zqx bolo"] = dataclasses.replace(placed, salts=placed.salts + 2**40)


def other_basis(store, bank, monkeypatch):
    bank.basis_seed += 1


def no_gate(store, bank, monkeypatch):
    monkeypatch.setattr(residual, "span_residual", lambda h, *a, **k: torch.zeros_like(h))


@pytest.mark.parametrize("breaks", [zero_scales, zero_payload, swap_canonical_ids, change_salts, other_basis, no_gate])
def test_corrupting_any_link_changes_conditioning_and_picture(tiny, pipe, monkeypatch, breaks):
    adapter = tiny_engram.attach(pipe)
    try:
        adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
        ours, picture = encode(pipe, PROMPT), tiny.picture(pipe, PROMPT)
        store = adapter.mounts["clip_l"].store
        bank = store.bank_of("zqx bolo")
        lookup = bank.table.lookup
        monkeypatch.setattr(bank.table, "lookup", lambda ids, bounds: lookup(ids, bounds="ignore"))
        breaks(store, bank, monkeypatch)
        store.forget_read()
        assert not torch.equal(ours, encode(pipe, PROMPT)) and not torch.equal(picture, tiny.picture(pipe, PROMPT))
    finally:
        adapter.detach()


@pytest.mark.parametrize("what", ["gain", "bias"])
def test_gates_are_read_per_position(tiny, adapter, pipe, what):
    concept = tiny.concept(adapter, "zqx bolo")
    adapter.load_concept(concept)
    plain = encode(pipe, PROMPT)
    rows = concept.mount_rows("clip_l")
    changed = {"gain": rows.gain.clone(), "bias": rows.bias.clone()}
    changed[what][1] -= 40.0
    adapter.unload_concept()
    adapter.load_concept(concept.with_rows("clip_l", rows.rows(), changed["gain"], changed["bias"]))
    moved = (plain != encode(pipe, PROMPT)).any(-1)[0].nonzero().flatten().tolist()
    assert moved == [adapter.explain(PROMPT).fired[0].start + 1]


# -- what is trained is what is served -----------------------------------------------------------------------------------------


def test_serving_from_the_file_equals_training_on_fake_quantised_masters(tiny, adapter, pipe, tmp_path):
    concept = adapter.new_concept("zqx bolo", ["zqx bolos"])
    old = concept.mount_rows("clip_l")
    torch.manual_seed(3)
    masters = (torch.randn(old.payload.shape) * 0.3).requires_grad_()
    gain, bias = (torch.randn(old.gain.shape).requires_grad_() for _ in range(2))
    prompts = ["a zqx bolo on a table", "two zqx bolos", "a tree", "zqx bolo and zqx bolo"]
    hidden = encode(pipe, prompts)
    spans = adapter.spans(concept, ids_of(pipe, *prompts))
    assert spans.batch.tolist() == [0, 1, 3, 3] and spans.offset.tolist()[1] == concept.roles["clip_l"].groups[1].offset > 0
    trained = apply_concept(
        hidden, spans, fake_quantize(masters), gain, bias, rho=old.rho, strength=1.0, basis_seed=concept.config.basis_seed
    )
    path = concept.with_rows("clip_l", masters, gain, bias).save(tmp_path / "c.safetensors")
    adapter.load_concept(path)
    assert torch.equal(trained, encode(pipe, prompts))
    trained.square().sum().backward()
    for tensor in (masters, gain, bias):
        assert (
            tensor.grad is not None
            and bool(torch.isfinite(tensor.grad).all())
            and bool((tensor.grad != 0).flatten(1 if tensor.ndim > 1 else 0).any())
        )


def test_zero_rows_get_a_gradient_and_change_nothing(adapter, pipe):
    concept = adapter.new_concept("zqx")
    old = concept.mount_rows("clip_l")
    rows = torch.zeros(old.payload.shape, requires_grad=True)
    hidden = encode(pipe, "a zqx")
    spans = adapter.spans(concept, ids_of(pipe, "a zqx"))
    out = apply_concept(hidden, spans, fake_quantize(rows), old.gain, old.bias, rho=1.0)
    assert torch.equal(out, hidden)
    out.square().sum().backward()
    assert rows.grad is not None and bool((rows.grad != 0).any(-1).all())


def test_a_span_has_the_same_bits_in_every_batch():
    torch.manual_seed(0)
    hidden, rows, gain, bias = torch.randn(40, 20, 160), torch.randn(9, 6, 32), torch.randn(9), torch.randn(9)
    places = [(b, b % 11, 5 + b % 4, 0) for b in range(40)] + [(b, 17, 2, 4) for b in range(40)]
    together = apply_concept(hidden, Spans.of(places), rows, gain, bias, rho=0.8)
    for b, s, n, o in places:
        alone = apply_concept(hidden[b : b + 1], Spans.of([(0, s, n, o)]), rows, gain, bias, rho=0.8)
        assert torch.equal(alone[0, s : s + n], together[b, s : s + n])
    assert not torch.equal(together, hidden)


@pytest.mark.parametrize("width", [1, 3, 128, 160, 768])
def test_the_mean_norm_is_the_mean_norm(width):
    torch.manual_seed(width)
    h, length = torch.randn(6, width), torch.tensor([1, 3, 2])
    found = span_mean_norm(h, length)
    norms = h.double().norm(dim=-1)
    expected = torch.cat([norms[a : a + n].mean().repeat(n) for a, n in ((0, 1), (1, 3), (4, 2))])
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=0)


def test_the_residual_is_the_written_formula():
    """strength * rho * mean|h| * a * v / max(1, |v|), a = sigmoid(g * ssqrt(<rms h, rms k> / sqrt d) + b), in float64."""
    torch.manual_seed(5)
    hidden, rows, gain, bias = torch.randn(2, 7, 160), torch.randn(4, 6, 32), torch.randn(4), torch.randn(4)
    ours = apply_concept(hidden, Spans.of([(1, 2, 3, 1)]), rows, gain, bias, rho=0.8, strength=0.5, basis_seed=3)
    e = rows[1:4].flatten(1)
    key, value = (fixed_basis(e, width=160, seed=seed).double() for seed in (6, 7))
    h = hidden[1, 2:5].double()
    dot = (h * key).mean(-1) / h.square().mean(-1).sqrt() / key.square().mean(-1).sqrt() * 160**0.5
    gate = torch.sigmoid(gain[1:4].double() * dot.sign() * dot.abs().sqrt() + bias[1:4].double())
    shrunk = value / value.norm(dim=-1).clamp(min=1)[:, None]
    expected = 0.5 * 0.8 * h.norm(dim=-1).mean() * gate[:, None] * shrunk
    torch.testing.assert_close(ours[1, 2:5].double() - h, expected, rtol=2e-4, atol=2e-5)
    untouched = torch.ones(2, 7, dtype=torch.bool)
    untouched[1, 2:5] = False
    assert torch.equal(ours[untouched], hidden[untouched])


def test_no_span_gives_the_tensor_itself():
    hidden = torch.randn(1, 4, 128)
    assert apply_concept(hidden, Spans.of([]), torch.zeros(1, 4, 32), torch.ones(1), torch.zeros(1), rho=1.0) is hidden


# -- outputs, dtypes, devices --------------------------------------------------------------------------------------------------


def test_model_outputs_and_tuples(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    ids = ids_of(pipe, PROMPT)
    with torch.no_grad():
        named = pipe.text_encoder(ids, output_hidden_states=True)
        plain_tuple = pipe.text_encoder(input_ids=ids, return_dict=False)
        adapter.disable_concepts()
        base = pipe.text_encoder(ids, output_hidden_states=True)
    assert type(named) is type(base) and isinstance(plain_tuple, tuple)
    assert torch.equal(named.last_hidden_state, plain_tuple[0]) and not torch.equal(named[0], base[0])
    assert torch.equal(named.pooler_output, base.pooler_output) and torch.equal(plain_tuple[1], base.pooler_output)
    assert all(torch.equal(a, b) for a, b in zip(named.hidden_states, base.hidden_states, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_bases(tiny, dtype):
    pipe = tiny.build(dtype=dtype)
    plain = encode(pipe, [PROMPT, "a tree"])
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    ours = encode(pipe, [PROMPT, "a tree"])
    span = adapter.explain(PROMPT).fired[0]
    changed = (plain != ours).any(-1)
    assert ours.dtype == pipe.text_encoder.dtype == dtype and changed.nonzero().tolist() == [[0, t] for t in range(span.start, span.end)]
    adapter.set_strength("zqx bolo", 0)
    assert torch.equal(plain, encode(pipe, [PROMPT, "a tree"]))


def test_sequentially_offloaded_encoder(tiny, own_pipe):
    from accelerate import cpu_offload

    plain = encode(own_pipe, PROMPT)
    # What enable_sequential_cpu_offload does, with the CPU as the accelerator.
    for part in (own_pipe.text_encoder, own_pipe.unet, own_pipe.vae):
        cpu_offload(part, torch.device("cpu"))
    assert next(own_pipe.text_encoder.parameters()).device.type == "meta"
    adapter = tiny_engram.attach(own_pipe)
    assert torch.equal(plain, encode(own_pipe, PROMPT))
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    assert not torch.equal(plain, encode(own_pipe, PROMPT))
    assert tiny.picture(own_pipe, PROMPT).isfinite().all()
    assert next(own_pipe.text_encoder.parameters()).device.type == "meta"
    adapter.detach()
    assert torch.equal(plain, encode(own_pipe, PROMPT))


# -- other features ------------------------------------------------------------------------------------------------------------


def test_textual_inversion_before_and_after(tiny, own_pipe):
    vector = torch.randn(128)
    own_pipe.load_textual_inversion({"<early>": vector}, token="<early>")
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo")
    adapter.load_concept(concept)
    own_pipe.load_textual_inversion({"<late>": -vector}, token="<late>")
    for prompt in ("a zqx bolo <early>", "<late> zqx bolo", "(<late>) zqx bolo"):
        before = encode(own_pipe, prompt)
        adapter.disable_concepts()
        span = adapter.explain(prompt).unfired[0]
        changed = (before != encode(own_pipe, prompt)).any(-1)[0].nonzero().flatten().tolist()
        adapter.enable_concepts()
        assert changed and changed[0] == span.start
    unload_inversions(own_pipe)
    assert adapter.mounts["clip_l"].attached and adapter.explain(PROMPT).fired
    with_ours = tiny.picture(own_pipe, PROMPT)
    adapter.disable_concepts()
    assert not torch.equal(with_ours, tiny.picture(own_pipe, PROMPT))
    # The base's tokenizer is the same with or without a user's tokens: the concept fits a plain pipeline.
    plain = tiny_engram.attach(tiny.build())
    plain_pipe = plain._pipe()
    assert plain_pipe is None or plain.load_concept(concept)


def test_lost_hooks_are_put_back_and_told(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    ours = tiny.picture(pipe, PROMPT)
    for lost in (pipe.text_encoder._forward_hooks, pipe.text_encoder._forward_pre_hooks):
        lost.clear()
        with pytest.raises(MountError, match="encoded without its concepts; they are back now: run the call again"):
            tiny.picture(pipe, PROMPT)
        assert torch.equal(ours, tiny.picture(pipe, PROMPT))


def test_a_replaced_encoder_is_told(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    old, own_pipe.text_encoder = own_pipe.text_encoder, CLIPTextModel(own_pipe.text_encoder.config)
    with pytest.raises(MountError, match="text_encoder of the pipeline was replaced after attach"):
        tiny.picture(own_pipe, PROMPT)
    own_pipe.text_encoder = old
    tiny.picture(own_pipe, PROMPT)


def test_embeddings_made_elsewhere_are_warned_of_once(tiny, adapter, pipe, recwarn):
    embeds = encode(pipe, PROMPT)
    options = {"prompt_embeds": embeds, "negative_prompt_embeds": torch.zeros_like(embeds)}
    tiny.picture(pipe, None, **options)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    with pytest.warns(UserWarning, match="no prompt was encoded since they were last changed.*adapter.encode"):
        tiny.picture(pipe, None, **options)
    recwarn.clear()
    tiny.picture(pipe, None, **options)
    tiny.picture(pipe, PROMPT)
    adapter.set_strength("zqx bolo", 0.5)
    tiny.picture(pipe, [PROMPT, "a tree"], num_images_per_prompt=2)
    assert not [w for w in recwarn if "concepts" in str(w.message)]
    adapter.set_strength("zqx bolo", 1.0)
    with pytest.warns(UserWarning, match="only 1 of 2 prompts was encoded since"):  # the negative one, by the pipeline
        tiny.picture(pipe, None, prompt_embeds=embeds)


def test_an_encoder_called_without_ids_is_told(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    with pytest.raises(MountError, match="called without input_ids"):
        pipe.text_encoder(inputs_embeds=torch.zeros(1, 4, 128))


def test_an_encoder_that_raises_leaves_the_next_call_sound(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    ours = encode(pipe, PROMPT)
    with pytest.raises((IndexError, RuntimeError)):
        pipe.text_encoder(torch.full((1, 77), 10**6))
    assert not adapter.mounts["clip_l"]._state.inside
    assert torch.equal(ours, encode(pipe, PROMPT))


def test_an_encoder_that_the_pipeline_does_not_read_fails_at_attach(own_pipe):
    plain = own_pipe.encode_prompt
    fixed = plain(["a photo", "a tree"], "cpu", 1, False)
    own_pipe.encode_prompt = lambda *args, **kwargs: fixed
    with pytest.raises(MountError, match="does not follow the concepts at: clip_l \\(changed positions \\[\\]"):
        tiny_engram.attach(own_pipe)
    assert not own_pipe.text_encoder._forward_hooks and not own_pipe.unet._forward_pre_hooks


def test_fired_spans_are_logged(tiny, adapter, pipe, caplog):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"), strength=0.5)
    with caplog.at_level("INFO", logger="tiny_engram"):
        encode(pipe, ["a tree", PROMPT])
    assert "concept 'zqx bolo' fires at clip_l: prompt 1 tokens 2..4 (strength 0.5)" in caplog.text


# -- clip_skip -----------------------------------------------------------------------------------------------------------------


def test_clip_skip_crashes_upstream_on_a_flat_encoder(pipe):
    # diffusers looks for `.text_model`, which CLIPTextModel lost in transformers 5.6. When this fails, the next test is the rule.
    with nullcontext() if hasattr(pipe.text_encoder, "text_model") else pytest.raises(AttributeError, match="text_model"):
        encode(pipe, "a tree", clip_skip=1)


@pytest.mark.parametrize("skip", [0, 1])
def test_clip_skip_where_it_works(tiny, adapter, pipe, text_model, skip):
    plain = encode(pipe, [PROMPT, "a tree"], clip_skip=skip)
    plain_whole = encode(pipe, [PROMPT, "a tree"])
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    span = adapter.explain(PROMPT).fired[0]
    expected = [[0, t] for t in range(span.start, span.end)]
    ours = encode(pipe, [PROMPT, "a tree"], clip_skip=skip)
    assert (plain != ours).any(-1).nonzero().tolist() == expected
    assert (plain_whole != encode(pipe, [PROMPT, "a tree"])).any(-1).nonzero().tolist() == expected
    # A norm call that belongs to no encode is left alone.
    h = torch.randn(2, 77, 128)
    once = text_model.final_layer_norm(h)
    adapter.disable_concepts()
    assert torch.equal(once, text_model.final_layer_norm(h))
    assert torch.equal(plain, encode(pipe, [PROMPT, "a tree"], clip_skip=skip))


# -- cost ----------------------------------------------------------------------------------------------------------------------


def test_seconds_are_counted(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    before = adapter.seconds
    encode(pipe, PROMPT)
    assert 0 < adapter.seconds - before < 1


def test_gates_do_not_follow_the_default_type(tiny, adapter, pipe):
    """Under torch.set_default_dtype(bfloat16) they were rounded: other bits than those validated."""
    concept = tiny.concept(adapter, "sks")
    rows = concept.mount_rows("clip_l")
    adapter.load_concept(concept.with_rows("clip_l", rows.rows(), rows.gain + 0.123, rows.bias + 0.0777))
    store, ids = adapter.mounts["clip_l"].store, ids_of(pipe, "a sks")
    (expected,) = store.plan(ids)
    torch.set_default_dtype(torch.bfloat16)
    try:
        (fired,) = store.plan(ids)
    finally:
        torch.set_default_dtype(torch.float32)
    for what in ("gain", "bias", "scale"):
        assert getattr(fired, what).dtype == torch.float32
        assert torch.equal(getattr(fired, what), getattr(expected, what))
