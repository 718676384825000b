"""Compiled decoding over a static cache: one graph, the same tokens, and no graph that outlives an attach or a detach."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache

pytestmark = pytest.mark.usefixtures("no_gradients", "fresh_graphs")


@pytest.fixture
def fresh_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def decoded(model, step, ids, steps):
    """Logits of the steps behind an eager prefill, token by token through `step`."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    length = ids.shape[1] - steps
    model(ids[:, :length], cache=cache)
    places = torch.arange(ids.shape[1])[None]
    return torch.cat(
        [step(ids[:, t : t + 1], position_ids=places[:, t : t + 1], cache=cache).logits for t in range(length, ids.shape[1])], dim=1
    )


@pytest.mark.parametrize("kind, form, branches", (("llama", "paper", 2), ("llama", "v41", 1), ("qwen3", "paper", 1)))
def test_decoding_is_one_graph(build, attach, text, kind, form, branches):
    # In float64: the gate's square root makes of float32's noise on a score near zero one that no tolerance can tell from a fault.
    model, ids = build(kind, num_hidden_layers=2).double(), text(2, 16)
    attach(model, layers=(0, 1), form=form, branches=branches).double()
    expected = model(ids).logits[:, 9:]
    counter = CompileCounter()
    step = torch.compile(model, backend=counter, fullgraph=True)
    found = decoded(model, step, ids, 7)
    assert float((found - expected).abs().max()) < 1e-7 * float(expected.abs().max())
    assert counter.frame_count == 1
    # A second request takes the graph of the first.
    other = text(2, 16, seed=3)
    expected = model(other).logits[:, 9:]
    assert float((decoded(model, step, other, 7) - expected).abs().max()) < 1e-7 * float(expected.abs().max())
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ("mistral", pytest.param("gemma2", marks=pytest.mark.slow)))
def test_windows_that_are_outrun(build, attach, text, kind):
    model, ids = build(kind, num_hidden_layers=2, layer_types=None), text(1, 12)
    attach(model, layers=(1,))
    expected = model(ids).logits[:, 6:]
    found = decoded(model, torch.compile(model, backend="eager"), ids, 6)
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())


def test_generate_compiles_as_ever(build, attach, text, tokenizer):
    model, ids = build(num_hidden_layers=2), text(2, 9)
    attach(model, layers=(1,))
    ids[0, :3] = tokenizer.pad_token_id
    mask = (ids != tokenizer.pad_token_id).long()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    graphs = []

    def backend(graph, inputs):  # a function, since generate copies its options
        graphs.append(graph)
        return graph.forward

    compiled = CompileConfig(backend=backend, fullgraph=True, mode=None)
    compiled._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue]  # the CPU is left out otherwise
    options = {"cache_implementation": "static", "compile_config": compiled, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    assert len(graphs) == 1


def test_aot_graphs_write_the_history(build, attach, text):
    model, ids = build(num_hidden_layers=2), text(2, 14)
    attach(model, layers=(1,))
    expected = model(ids).logits[:, 8:]
    found = decoded(model, torch.compile(model, backend="aot_eager", fullgraph=True), ids, 6)
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())


def test_graphs_follow_attach_enable_and_detach(build, attach, text):
    model, ids = build(num_hidden_layers=1), text(2, 9)
    step = torch.compile(model, backend="eager")

    def logits():
        return step(ids, use_cache=False).logits

    base = logits()
    engrams = attach(model, layers=(0,))
    moved = logits()
    assert not torch.equal(moved, base) and torch.equal(moved, model(ids, use_cache=False).logits)
    engrams.enabled = False
    assert torch.equal(logits(), base)
    engrams.enabled = True
    assert torch.equal(logits(), moved)
    engrams.detach()
    assert torch.equal(logits(), base)
    attach(step, layers=(0,))  # what was compiled is as good as the model itself
    assert torch.equal(logits(), moved)
