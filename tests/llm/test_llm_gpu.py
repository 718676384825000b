"""Decoding on a CUDA device: rows from every home, beside the layers, in graphs, on streams of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tiny_engram.llm import EngramLayers
from tiny_engram.llm.decoders import decoder_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_gradients")]

HOMES = ("device", "pinned", "mapped")


@pytest.fixture
def served(build, attach, tokenizer, tmp_path):
    """served(home): a model on the device with stored tables there, and its twin whose rows are looked up as they were learned."""
    twin = build().cuda()
    attach(twin).save_pretrained(tmp_path)

    def make(home):
        model = build().cuda()
        return model, EngramLayers.from_pretrained(model, tmp_path, tokenizer, home=home), twin

    return make


def called(model, ids, cache):
    return model(ids, **{decoder_of(model).cache_argument: cache}).logits


@pytest.mark.parametrize("home", HOMES)
def test_rows_from_every_home(served, text, home):
    model, engrams, twin = served(home)
    ids = text(3, 40).cuda()
    whole = twin(ids).logits
    for _ in range(3):  # memory of earlier reads is used again
        assert torch.equal(model(ids).logits, whole)
    cache = DynamicCache(config=model.config)
    steps = torch.cat([called(model, ids[:, t : t + 1], cache) for t in range(40)], dim=1)
    engrams.enabled = False
    cache, base = DynamicCache(config=model.config), model(ids).logits
    allowed = (torch.cat([called(model, ids[:, t : t + 1], cache) for t in range(40)], dim=1) - base).abs().max()
    assert float((steps - whole).abs().max()) <= max(2 * float(allowed), 1e-4)
    assert float((whole - base).abs().max()) > 0.1


@pytest.mark.parametrize("home", ("device", "pinned"))
def test_generate_compiles_for_a_static_cache(served, text, home):
    model, _, twin = served(home)
    ids = text(2, 12).cuda()
    expected = twin.generate(ids, max_new_tokens=20, do_sample=False)
    torch.compiler.reset()
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, cache_implementation="static"), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("home", ("device", "pinned"))
def test_a_decoding_step_is_captured(served, text, home):
    model, _, twin = served(home)
    ids = text(2, 20).cuda()
    expected = twin(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    called(model, ids[:, :10], cache)
    token = ids[:, 10:11].clone()
    place = torch.full((1, 1), 10, device="cuda")

    def step():
        return model(token, position_ids=place, **{decoder_of(model).cache_argument: cache}).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # at place 10, whose token this is
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for t in range(11, 20):
        token.copy_(ids[:, t : t + 1])
        place.fill_(t)
        graph.replay()
        assert float((found[:, 0] - expected[:, t]).abs().max()) < 1e-3 * float(expected.abs().max()), t


@pytest.mark.parametrize("home", HOMES)
def test_threads_with_streams_of_their_own(served, text, home):
    model, _, twin = served(home)
    texts = [text(2, 30, seed=seed).cuda() for seed in range(4)]
    expected = [twin(ids).logits for ids in texts]
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(model(texts[number]).logits, expected[number]):
                    wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what a thread raised
    assert not wrong
