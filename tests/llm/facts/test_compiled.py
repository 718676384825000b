"""A static cache, by itself and in a compiled graph: facts fire at the same places, and their change is seen."""

import pytest
import torch
from transformers import StaticCache

from tiny_engram.llm import Fact


@torch.no_grad()
def steps(model, call, ids, prefill):
    """Logits of all tokens: the first `prefill` by the model itself, the others one by one by `call`, over one static cache."""
    cache = StaticCache(config=model.config, max_cache_len=64)
    said = [model(ids[:, :prefill], past_key_values=cache, use_cache=True).logits]
    for at in range(prefill, ids.shape[1]):
        said.append(call(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits.clone())
    return torch.cat(said, dim=1)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_static_cache_and_compiled_steps(facts, model, tokenizer, how):
    torch.compiler.reset()
    text = "Say the capital of Zorbia and the dog of Tolland and then"
    ids = tokenizer([text, text], return_tensors="pt").input_ids
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=False)
    with facts.reading_as(["ann", None]):
        with torch.no_grad():
            full = model(ids).logits
        plain, graph = steps(model, model, ids, 3), steps(model, compiled, ids, 3)
        with facts.disabled():
            base = steps(model, model, ids, 3)
    assert (full - base).abs().max() > 0.1
    torch.testing.assert_close(plain, full, rtol=0, atol=1e-4)
    torch.testing.assert_close(graph, full, rtol=0, atol=1e-4)
    # A change is seen by the graph that was compiled before it.
    facts.remove("the capital of Zorbia")
    facts.add(Fact("Say", "owner"), how=how)
    with facts.reading_as(["ann", None]):
        plain, graph = steps(model, model, ids, 3), steps(model, compiled, ids, 3)
    torch.testing.assert_close(graph, plain, rtol=0, atol=1e-4)
    assert (plain - full).abs().max() > 0.1


def test_every_position_at_once_is_what_places_give(facts, model, tokenizer):
    """The arithmetic of compiled graphs against that of all others, in float32: the same bits."""
    reader = facts._reader
    ids = tokenizer(["the capital of Zorbia, Frumm's colour and more"], return_tensors="pt").input_ids
    hidden = torch.randn(1, ids.shape[1], 64, generator=torch.Generator().manual_seed(3))
    before = torch.full((1, reader.reach), -1)
    from tiny_engram.llm.host import Call

    call = Call(ids, torch.zeros_like(ids, dtype=torch.bool), before, None)
    found, slots = reader.prepare(call), reader.index.everywhere(ids, before, None)
    assert int((slots >= 0).sum()) == 2
    for layer in reader.layers:
        assert torch.equal(reader.at(layer, hidden, call, found), reader.at(layer, hidden, call, slots))
