"""Textual inversion against a token that is really added to tokenizer and encoder, and trained the plain way."""

import dataclasses

import pytest
import torch

from benchmarks.personalization.methods import METHODS, RATES
from benchmarks.personalization.methods.inversion import InversionOne, InversionTrigger
from benchmarks.personalization.teach import teach

NAMES = {1: "inversion-1", 4: "inversion-t"}
CLASSES = {1: InversionOne, 4: InversionTrigger}


def test_names():
    assert [METHODS[name] for name in NAMES.values()] == list(CLASSES.values())


@pytest.mark.parametrize("vectors", NAMES)
def test_training_equals_that_of_real_new_tokens(base, taught, run, own_pipe, plain_batch, vectors):
    name = NAMES[vectors]
    # the class word has three tokens; the other run is of one, at another rate
    runs = [run(name, "dot", seed=1, factor=3), run(name, "spot", seed=2)]
    adapters = CLASSES[vectors](base, runs)
    losses = teach(base, adapters, [taught["dot"], taught["spot"]], steps=2, batch_size=1)

    tokens = [f"<new-{i}>" for i in range(vectors)]
    tokenizer, encoder = own_pipe.tokenizer, own_pipe.text_encoder
    tokenizer.add_tokens(tokens)
    encoder.resize_token_embeddings(len(tokenizer))
    table = encoder.get_input_embeddings().weight
    word = tokenizer("hot air balloon", add_special_tokens=False).input_ids
    assert len(word) == 3
    new = tokenizer.convert_tokens_to_ids(tokens)
    with torch.no_grad():
        table[new] = table[word].mean(0)
    table.requires_grad_(True)
    adam = torch.optim.AdamW([table], lr=RATES[name], weight_decay=1e-2)
    for step in range(2):
        texts, loss_of = plain_batch(taught["spot"], 2, step, 1)
        said = [text.replace("vex-lumo", " ".join(tokens)) for text in texts]
        ids = tokenizer(said, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        assert ((ids >= new[0]).sum(1) == vectors).all()
        loss = loss_of(own_pipe.unet, encoder(ids)[0])
        adam.zero_grad()
        loss.backward()
        assert table.grad is not None
        rest = torch.ones(len(table), dtype=torch.bool)
        rest[new] = False
        table.grad[rest] = 0
        torch.nn.utils.clip_grad_norm_([table], 1.0)
        adam.step()
        torch.testing.assert_close(losses[1, step], loss.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(adapters.embeddings[1], table[new], rtol=1e-4, atol=1e-5)
    assert (adapters.embeddings[1] - table[word].mean(0)).abs().max() > RATES[name]


def test_prompts_without_a_trigger_keep_their_bits(base, run):
    adapters = METHODS["inversion-t"](base, [run("inversion-t", "disc")])
    rows = base.rows(["a {0}", "a red kite"], [("rugo-bin",), ()], torch.tensor([[0], [0]]))
    states = adapters.states(base, rows)
    assert torch.equal(states[1], rows.states[1])
    # the positions before the trigger are as they were, those from it on are not
    assert torch.equal(states[0, :2], rows.states[0, :2]) and (states[0, 2:] != rows.states[0, 2:]).any(1).all()


def test_two_subjects_in_one_prompt(base, run):
    adapters = METHODS["inversion-1"](base, [run("inversion-1", "disc"), run("inversion-1", "spot")])
    words = [("rugo-bin", "vex-lumo")]
    both = base.rows(["a {0} and a {1}"], words, torch.tensor([[0, 1]]), vectors=1)
    swapped = base.rows(["a {1} and a {0}"], words, torch.tensor([[1, 0]]), vectors=1)
    # one stand-in for both, so only the runs say which is which
    assert torch.equal(both.ids, swapped.ids)
    torch.testing.assert_close(adapters.states(base, both), adapters.states(base, swapped))
    other = base.rows(["a {0} and a {1}"], words, torch.tensor([[1, 0]]), vectors=1)
    assert (adapters.states(base, both) - adapters.states(base, other)).abs().max() > 0.1


def test_what_is_shipped(base, run):
    one, four = (METHODS[name](base, [run(name, "disc"), run(name, "spot")]) for name in NAMES.values())
    assert one.trainable() == 128 and four.trainable() == 4 * 128
    assert one.payload(0) == 256 and {k: v.shape for k, v in four.values(1).items()} == {"embeddings": (4, 128)}
    word = base.word_ids("ball")
    start = base.text_encoder.get_input_embeddings().weight[word].mean(0)
    torch.testing.assert_close(one.values(0)["embeddings"][0].float(), start, rtol=1e-3, atol=1e-4)


def test_triggers_of_several_lengths_share_a_stack(base, run, subjects):
    base.subjects = {**subjects, "long": dataclasses.replace(subjects["disc"], name="long", trigger="zaki-lun")}
    try:
        both = METHODS["inversion-t"](base, [run("inversion-t", "disc"), run("inversion-t", "long")])
        alone = METHODS["inversion-t"](base, [run("inversion-t", "long")])
        rows = base.rows(["a {0}", "{0}"], [("rugo-bin",), ("zaki-lun",)], torch.tensor([[0], [1]]))
        other = base.rows(["a {0}", "{0}"], [("rugo-bin",), ("zaki-lun",)], torch.tensor([[-1], [0]]))
        assert torch.equal(both.states(base, rows)[1], alone.states(base, other)[1])
        assert [both.payload(i) for i in range(2)] == [4 * 128 * 2, 3 * 128 * 2] and alone.payload(0) == both.payload(1)
    finally:
        base.subjects = subjects
    rows = base.rows(["a {0}"], [("rugo-bin rugo-bin",)], torch.tensor([[0]]))
    with pytest.raises(ValueError, match="a span of 8 tokens, expected at most 4"):
        METHODS["inversion-t"](base, [run("inversion-t", "disc")]).states(base, rows)
