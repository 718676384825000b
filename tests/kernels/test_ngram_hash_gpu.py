"""The hash on a device against the reference, whose own tests are in test_ngram_hash.py."""

import pytest
import torch

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.ngram_hash import ngram_hash

pytestmark = pytest.mark.gpu
VOCAB = 99_092


def rule(order: int, heads: int, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    multipliers = torch.randint(0, (2**63 - 1) // VOCAB // 2, (order,), generator=generator) * 2 + 1
    primes = torch.randint(2, 2**31, (order - 1, heads), generator=generator)
    return {"multipliers": multipliers, "primes": primes, "pad_id": 2}


def moved(given: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def test_a_million_tokens_equal_the_reference():
    ids = torch.randint(0, VOCAB, (8, 1 << 17), device="cuda")
    given = moved(rule(4, 8))
    given["blocked"] = torch.rand(ids.shape, device="cuda") < 0.01
    out = ngram_hash(ids, **given)
    with implementation("reference"):
        assert torch.equal(out, ngram_hash(ids, **given))


@pytest.mark.parametrize("order", [2, 3, 4, 7])
@pytest.mark.parametrize("heads", [1, 3, 8, 24, 100])
def test_equals_the_cpu_at_odd_sizes(order, heads):
    generator = torch.Generator().manual_seed(order * heads)
    for length, kind in ((0, torch.int64), (1, torch.int32), (order - 1, torch.int16), (517, torch.uint8), (1111, torch.int64)):
        top = 200 if kind == torch.uint8 else 30_000
        ids = torch.randint(0, top, (length, 3), generator=generator).to(kind).t()
        given = rule(order, heads, heads)
        given["blocked"] = torch.rand(3, length, generator=generator) < 0.1
        given["salt"] = torch.randint(0, 2**63 - 1, (3, length), generator=generator)
        if length % 2:
            given["history"] = torch.randint(0, top, (3, order - 1), generator=generator).to(kind)
            given["history_blocked"] = torch.rand(3, order - 1, generator=generator) < 0.3
        assert torch.equal(ngram_hash(ids.cuda(), **moved(given)).cpu(), ngram_hash(ids, **given)), (length, kind)


def test_modulo_at_the_extremes():
    moduli = [2, 3, 2**31 - 1, 2**32 + 15, 16_000_057, 2**61 - 1, 2**62 - 1]
    around = [m * k + d for m in moduli for k in (1, (2**63 - 2) // m) for d in (-1, 0, 1)]
    values = [x for x in (*around, 0, 1, 2**63 - 1, 2**62) if 0 <= x < 2**63]
    ids, salt = torch.zeros(len(values), dtype=torch.uint8), torch.tensor(values)
    given = {"multipliers": torch.tensor([1, 1]), "primes": torch.tensor([moduli]), "pad_id": 0, "salt": salt}
    assert torch.equal(ngram_hash(ids.cuda(), **moved(given)).cpu(), ngram_hash(ids, **given))


def test_a_graph_replays_with_other_ids_and_windows():
    given = moved(rule(4, 8))
    ids = torch.zeros(256, 1, dtype=torch.int64, device="cuda")
    window = torch.zeros(256, 3, dtype=torch.int64, device="cuda")
    stops = torch.zeros(256, 3, dtype=torch.bool, device="cuda")
    given |= {"history": window, "history_blocked": stops}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ngram_hash(ids, **given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ngram_hash(ids, **given)
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        ids.random_(0, VOCAB, generator=generator)
        window.random_(0, VOCAB, generator=generator)
        stops.copy_(torch.rand(256, 3, generator=generator, device="cuda") < 0.3)
        graph.replay()
        with implementation("reference"):
            assert torch.equal(out, ngram_hash(ids, **given))


def test_more_rows_than_32_bits_count():
    ids = torch.randint(0, VOCAB, (90_000_000,), dtype=torch.int32, device="cuda")
    given = moved(rule(4, 8))
    out = ngram_hash(ids, **given)
    for start in (3, 89_478_400, 89_999_000):
        part = ids[start : start + 1000]
        with implementation("reference"):
            assert torch.equal(out[start : start + 1000], ngram_hash(part, history=ids[start - 3 : start], **given))
    del out
    torch.cuda.empty_cache()


def test_compiles_in_one_graph():
    given = moved(rule(3, 8))
    ids = torch.randint(0, VOCAB, (5, 77), device="cuda")
    out = torch.compile(lambda x: ngram_hash(x + 1, **given) + 1, fullgraph=True)(ids)
    with implementation("reference"):
        assert torch.equal(out, ngram_hash(ids + 1, **given) + 1)
