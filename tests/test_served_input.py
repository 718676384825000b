"""The input mount in an encoder: a second pass of what fires, whose states are taken at the spans alone."""

import pytest
import torch

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.deep_mounts import encoder_layers
from tiny_engram.hooks import MountError
from tiny_engram.input_mount import encode_with_input, token_embeddings
from tiny_engram.mounts import EncoderMounts
from tiny_engram.residual import apply_concept

PROMPT = "a zqx bolo on a table"
INPUT = ConceptConfig(mounts=("input",))
BOTH = ConceptConfig(mounts=("input", "span"))
ALL = ConceptConfig(mounts=("input", "span", "context"), share="block", bands=2, attention_rank=1, feedforward_rank=1)


def encode(pipe, prompt, **options):
    with torch.no_grad():
        return pipe.encode_prompt(prompt, "cpu", 1, False, **options)[0]


def ids_of(pipe, *prompts):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def expected_states(pipe, adapter, concepts, prompt, strength=1.0):
    """What the encoder gives for one prompt when these concepts, which fire in it, move its token embeddings, as training would ask."""
    ids = ids_of(pipe, prompt)

    def move(embeddings):
        for concept in concepts:
            rows = concept.mount_rows("clip_l", "input")
            spans = adapter.spans(concept, ids)
            embeddings = apply_concept(embeddings, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho, strength=strength)
        return embeddings

    adapter.disable_concepts()
    with torch.no_grad():
        made = encode_with_input(pipe.text_encoder, ids, move, output_hidden_states=True)
    adapter.enable_concepts()
    return made


def test_the_spans_are_taken_from_a_pass_of_their_own(tiny, adapter, pipe):
    prompts = [PROMPT, "a tree", "two zqx bolo, zqx bolo"]
    ids = ids_of(pipe, *prompts)
    with torch.no_grad():
        plain = pipe.text_encoder(ids, output_hidden_states=True)
    concept = tiny.concept(adapter, "zqx bolo", config=INPUT)
    adapter.load_concept(concept, strength=0.7)
    with torch.no_grad():
        ours = pipe.text_encoder(ids, output_hidden_states=True)
        as_tuple = pipe.text_encoder(ids, output_hidden_states=True, return_dict=False)
    fired = torch.zeros(3, 77, dtype=torch.bool)
    fired[adapter.spans(concept, ids).flat()[:2]] = True
    assert fired.sum() == 9 and torch.equal((ours.last_hidden_state != plain.last_hidden_state).any(-1), fired)
    assert torch.equal(ours.pooler_output, plain.pooler_output) and len(ours.hidden_states) == 3
    for row in (0, 2):
        alone = expected_states(pipe, adapter, [concept], prompts[row], 0.7)
        for k, state in enumerate(ours.hidden_states):
            assert torch.equal(state[row][fired[row]], alone.hidden_states[k][0][fired[row]])
        assert torch.equal(ours.last_hidden_state[row][fired[row]], alone.last_hidden_state[0][fired[row]])
        # The rest of the sentence would have moved with it.
        assert not torch.equal(alone.last_hidden_state[0, -1], plain.last_hidden_state[row, -1])
    for state, before in zip(ours.hidden_states, plain.hidden_states, strict=True):
        assert torch.equal(state[~fired], before[~fired]) and not torch.equal(state, before)
    assert torch.equal(as_tuple[0], ours.last_hidden_state) and torch.equal(as_tuple[1], ours.pooler_output)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple[2], ours.hidden_states, strict=True))


def test_a_prompt_has_the_same_bits_at_its_spans_in_every_batch(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    together = encode(pipe, ["a tree", PROMPT, "zqx bolo", PROMPT])
    alone = encode(pipe, PROMPT)
    assert torch.equal(together[1, 2:5], alone[0, 2:5]) and torch.equal(together[3, 2:5], alone[0, 2:5])


def test_without_a_trigger_nothing_is_encoded_twice(tiny, adapter, pipe):
    plain, picture = encode(pipe, ["a tree", "zqx bolos"]), tiny.picture(pipe, "a tree")
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ALL))
    calls, asked = [], adapter.mounts["clip_l"].calls
    handle = encoder_layers(pipe.text_encoder)[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        assert torch.equal(plain, encode(pipe, ["a tree", "zqx bolos"])) and torch.equal(picture, tiny.picture(pipe, "a tree"))
        assert len(calls) == 3  # two prompts, one prompt, and the empty one beside it
        mixed = encode(pipe, ["a tree", PROMPT])
        assert len(calls) == 5 and adapter.mounts["clip_l"].calls == asked + 4
    finally:
        handle.remove()
    adapter.disable_concepts()
    assert torch.equal(mixed[0], encode(pipe, ["a tree", PROMPT])[0])


def test_the_span_s_residual_reads_the_moved_state(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=BOTH)
    adapter.load_concept(concept)
    ours = encode(pipe, PROMPT)
    moved = expected_states(pipe, adapter, [concept], PROMPT).last_hidden_state
    rows, spans = concept.mount_rows("clip_l"), adapter.spans(concept, ids_of(pipe, PROMPT))
    expected = apply_concept(moved, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho)
    assert torch.equal(ours[0, 2:5], expected[0, 2:5])


def test_two_concepts_share_the_pass(tiny, adapter, pipe):
    both = "a zqx bolo and a cat-toy"
    first = tiny.concept(adapter, "zqx bolo", seed=1, config=INPUT)
    second = tiny.concept(adapter, "cat-toy", seed=2, config=ConceptConfig(mounts=("input",), heads=4))  # another shape of rows
    third = tiny.concept(adapter, "on", seed=3)  # no rows there
    for concept in (first, second, third):
        adapter.load_concept(concept)
    ours = encode(pipe, both)
    alone = expected_states(pipe, adapter, [first, second], both).last_hidden_state
    at = [place for span in adapter.explain(both).fired for place in range(span.start, span.end)]
    assert len(at) == 6 and torch.equal(ours[0, at], alone[0, at])
    adapter.set_strength("cat-toy", 0.0)
    alone = expected_states(pipe, adapter, [first], both).last_hidden_state
    changed = (encode(pipe, both) != ours).any(-1)[0].nonzero().flatten().tolist()
    assert changed and torch.equal(encode(pipe, both)[0, 2:5], alone[0, 2:5])


@pytest.mark.parametrize("skip", [1, 2])
def test_clip_skip_norms_the_moved_state(tiny, adapter, pipe, text_model, skip):
    plain = encode(pipe, [PROMPT, "a tree"], clip_skip=skip)
    concept = tiny.concept(adapter, "zqx bolo", config=INPUT)
    adapter.load_concept(concept)
    ours = encode(pipe, [PROMPT, "a tree"], clip_skip=skip)
    assert (ours != plain).any(-1).nonzero().tolist() == [[0, 2], [0, 3], [0, 4]]
    moved = expected_states(pipe, adapter, [concept], PROMPT).hidden_states[-(skip + 1)]
    with torch.no_grad():
        normed = text_model.final_layer_norm(moved)
    torch.testing.assert_close(ours[0, 2:5], normed[0, 2:5])


def test_switches_and_detach(tiny, own_pipe):
    plain = encode(own_pipe, PROMPT)
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    ours = encode(own_pipe, PROMPT)
    assert not torch.equal(ours, plain)
    adapter.set_strength("zqx bolo", 0.5)
    half = encode(own_pipe, PROMPT)
    assert not torch.equal(half, ours) and not torch.equal(half, plain)
    for off in (adapter.disable_concepts, lambda: adapter.set_strength("zqx bolo", 0.0), adapter.unload_concept):
        off()
        assert torch.equal(encode(own_pipe, PROMPT), plain)
        adapter.enable_concepts()
    adapter.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own_pipe.text_encoder.modules())


def test_an_untrained_one_keeps_the_states(adapter, pipe):
    plain = encode(pipe, PROMPT)
    adapter.load_concept(adapter.new_concept("zqx bolo", config=BOTH))
    torch.testing.assert_close(encode(pipe, PROMPT), plain)  # a batch of one, as the plain pass was


def test_masks_and_other_arguments_are_those_of_the_row(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    ids = ids_of(pipe, "a tree", PROMPT)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    with torch.no_grad():
        ours = pipe.text_encoder(ids, attention_mask=mask)[0]
        assert torch.equal(ours, pipe.text_encoder(ids, mask)[0])
        assert not torch.equal(ours[1, 4], pipe.text_encoder(ids)[0][1, 4])
        assert torch.equal(ours[1, 2:5], pipe.text_encoder(ids[1:], mask[1:])[0][0, 2:5])


def test_offloaded_weights(tiny, own_pipe):
    from accelerate import cpu_offload

    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    ours = encode(own_pipe, PROMPT)
    cpu_offload(own_pipe.text_encoder, execution_device=torch.device("cpu"))
    assert torch.equal(ours, encode(own_pipe, PROMPT))


def test_a_vocabulary_resized_later_and_hooks_taken_out(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    ours = encode(own_pipe, PROMPT)
    own_pipe.text_encoder.resize_token_embeddings(len(own_pipe.tokenizer) + 3)
    assert torch.equal(ours, encode(own_pipe, PROMPT)) and adapter.mounts["clip_l"].attached
    (embedding,) = token_embeddings(own_pipe.text_encoder)
    embedding._forward_hooks.clear()
    assert torch.equal(ours, encode(own_pipe, PROMPT))
    adapter.detach()
    assert not embedding._forward_hooks


def test_an_encoder_compiled_after_attach(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    torch.compiler.reset()
    own_pipe.text_encoder.compile(backend="eager")
    plain = encode(own_pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    moved = (encode(own_pipe, PROMPT) != plain).any(-1)[0].nonzero().flatten().tolist()
    torch.compiler.reset()
    assert moved == [2, 3, 4]


def test_gradients_pass_through_the_second_pass(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=INPUT))
    weight = pipe.text_encoder.get_input_embeddings().weight
    states = pipe.text_encoder(ids_of(pipe, PROMPT))[0]
    (gradient,) = torch.autograd.grad(states[0, 2:5].square().sum(), weight)
    assert bool(gradient.isfinite().all()) and bool(gradient.ne(0).any())


def test_a_dead_mount_is_told_at_attach(own_pipe, monkeypatch):
    monkeypatch.setattr(EncoderMounts, "_embedded", lambda *_: None)
    with pytest.raises(Exception, match="ran without looking its tokens up"):
        tiny_engram.attach(own_pipe)
    monkeypatch.undo()

    def elsewhere(self, row, args, kwargs):
        moved = real(self, row, args, kwargs)
        return type(moved)(row, moved.times + 1, moved.output)

    real = EncoderMounts._second_pass
    monkeypatch.setattr(EncoderMounts, "_second_pass", elsewhere)
    with pytest.raises(MountError, match=r"clip_l input \(changed positions \[3\], expected \[2\]\)"):
        tiny_engram.attach(own_pipe)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own_pipe.text_encoder.modules())
