"""Addresses and rows of facts: nobody's rows are another's, whatever the hash says; what is stored is what is read."""

import pytest
import torch

from tiny_engram.errors import TableError, TinyEngramError
from tiny_engram.llm import Fact, FactsConfig, attach
from tiny_engram.llm.fact_rows import Address, FactRows
from tiny_engram.quantization import dequantize, quantize


def make(vocab=2**31) -> FactRows:
    config = FactsConfig(layers=(1, 3), vocab=vocab, hidden=64, depth=4, compressed_vocab=600, pad_id=0)
    return FactRows(config)


def rows_of(count, seed=0):
    return quantize(torch.randn(count, 2, 2, 32, generator=torch.Generator().manual_seed(seed)))


def test_rows_are_read_as_they_were_stored():
    held = make()
    addresses = [Address((5, 9, k), 0) for k in range(30)]
    payload, scale = rows_of(30)
    slots = held.add(addresses, payload, scale)
    assert len(set(slots)) == 30 and len(held.table) == 30 * 4
    read = held.lookup(torch.tensor(slots))
    assert torch.equal(read, dequantize(payload, scale).transpose(0, 1))
    packed = held.pack(torch.device("cpu"))
    for slot in slots[:3]:
        for layer in range(2):
            at = (slot * 2 + layer) * 2 + torch.arange(2)
            assert torch.equal(packed.lookup(at), held.lookup(torch.tensor([slot]))[layer, 0])
    stored = held.stored(slots)
    assert torch.equal(stored[0].view(torch.uint8), payload.view(torch.uint8)) and torch.equal(stored[1], scale)


def test_slots_and_addresses_are_given_again():
    held = make()
    payload, scale = rows_of(3)
    addresses = [Address((1, 2, k), 0) for k in range(3)]
    slots = held.add(addresses, payload, scale)
    ids = held.row_ids[slots].clone()
    held.remove(slots[1:2])
    with pytest.raises(TableError, match="not in the table"):
        held.stored(slots[1:2])
    again = held.add(addresses[1:2], *rows_of(1, seed=1))
    assert again == slots[1:2] and torch.equal(held.row_ids[slots], ids)


def test_address_depends_on_the_trigger_its_owner_and_nothing_else():
    held = make()
    addresses = [Address((5, 9, 7), 0), Address((5, 9, 7), 3), Address((9, 7), 0), Address((7,), 0), Address((9, 7, 5), 0)]
    ids, moved = held.find(addresses)
    assert moved == 0 and len(torch.unique(ids)) == ids.numel()
    held.add(addresses[1:], *rows_of(4))
    assert torch.equal(held.find(addresses[:1])[0][0], ids[0])


def test_taken_addresses_move_the_newcomer():
    held = make(vocab=60)
    payload, scale = rows_of(40)
    first = [Address((k, k + 1), 0) for k in range(20)]
    slots = held.add(first, payload[:20], scale[:20])
    read = held.lookup(torch.tensor(slots))
    later = [Address((k, k + 1), 0) for k in range(100, 112)]
    _, moved = held.find(later)
    assert moved > 0
    held.add(later, payload[20:32], scale[20:32])
    taken = held.row_ids[held.row_ids[:, 0, 0] >= 0]
    assert len(torch.unique(taken)) == taken.numel() == 32 * 4
    assert torch.equal(held.lookup(torch.tensor(slots)), read)
    with pytest.raises(TinyEngramError, match="no free rows after"):
        held.find([Address((k, k + 1), 1) for k in range(60)])


def test_rows_of_another_shape_are_refused():
    held = make()
    payload, scale = rows_of(1)
    with pytest.raises(TinyEngramError, match=r"rows have shape \[1, 1, 2, 32\], expected \[1, 2, 2\] of them"):
        held.add([Address((1,), 0)], payload[:, :1], scale[:, :1])
    assert len(held.table) == 0


@pytest.mark.gpu
def test_on_a_device(make_llama, tokenizer, taught_file, how):
    from tiny_engram.llm import Facts

    base, model = make_llama().cuda(), make_llama().cuda()
    facts = Facts.open(model, taught_file, tokenizer)
    inputs = tokenizer(["the capital of Zorbia, the dog of Tolland", "the capital of Zorb"], return_tensors="pt", padding=True).to("cuda")
    with torch.no_grad(), facts.reading_as(["ann", "bob"]):
        moved, own = model(**inputs).logits, base(**inputs).logits
    assert torch.equal(moved[1], own[1]) and not torch.equal(moved[0], own[0])
    report = facts.add(Fact("the founder of Quill", "author", "The founder of Quill"), how=how)
    assert not report.unlearned and facts.ask("The founder of Quill").startswith("author")
    facts.detach()
    other = attach(make_llama().cuda(), FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
    assert not other.add(Fact("the founder of Quill", "author", "The founder of Quill"), how=how).unlearned
