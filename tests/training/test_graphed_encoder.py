"""The encoder behind its token embeddings, captured or not: states and gradients are those of the plain call."""

import gc
import warnings

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from tiny_engram.input_mount import encode_with_input
from tiny_engram.training.graphed_encoder import GraphedEncoder, encode_graphed

WIDTH, TIME = 32, 8


@pytest.fixture
def encoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPTextConfig(vocab_size=20, max_position_embeddings=TIME, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes)
    return CLIPTextModel(config).eval().requires_grad_(False)


def batch(number: int, rows: int = 3, device: str = "cpu"):
    """ids, a change of the embeddings and what it learns, other ones for each number."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(2, 20, (rows, TIME), generator=generator).to(device)
    ids[:, -1] = 1
    way = torch.randn(rows, WIDTH, generator=generator).to(device).requires_grad_()

    def move(embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings.index_put((torch.arange(rows, device=device), ids.new_full((rows,), 2)), embeddings[:, 2] + way.tanh())

    return ids, move, way


def results(encode, number, **options):
    ids, move, way = batch(number, **options)
    states = encode(ids, move)
    loss = (states * torch.linspace(-1, 1, WIDTH, device=states.device)).square().sum()
    (gradient,) = torch.autograd.grad(loss, way)
    return states.detach(), loss.detach(), gradient


class Captures:
    """Stands for a capture: the function itself, in memory that each call overwrites, as a graph's is."""

    def __init__(self) -> None:
        self.shapes, self.calls = [], 0

    def __call__(self, rest, sample):
        self.shapes.append(tuple(sample.shape))
        static = torch.zeros_like(sample)

        def replay(moved: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            made = rest(moved)
            with torch.no_grad():
                static.copy_(made)
            return made + (static - static.clone())

        return replay


def test_the_embeddings_outside_and_the_rest_inside_are_the_plain_call_bit_for_bit(encoder):
    captures = Captures()
    graphed = GraphedEncoder(encoder, capture=captures)
    for number in range(6):
        made = results(graphed, number)
        plain = results(lambda ids, move: encode_with_input(encoder, ids, move)[0], number)
        assert all(torch.equal(one, other) for one, other in zip(made, plain, strict=True))
    assert captures.shapes == [(3, TIME, WIDTH)] and captures.calls == 4 and graphed.captured == 1


def test_without_a_device_that_has_graphs_it_is_the_plain_call(encoder):
    for number in range(4):
        made = results(lambda ids, move: encode_graphed(encoder, ids, move), number)
        plain = results(lambda ids, move: encode_with_input(encoder, ids, move)[0], number)
        assert all(torch.equal(one, other) for one, other in zip(made, plain, strict=True))


def test_a_pass_keeps_its_graph_until_it_went_back_or_is_gone(encoder):
    captures = Captures()
    graphed = GraphedEncoder(encoder, capture=captures)
    for number in range(3):
        results(graphed, number)
    calls = captures.calls
    ids, move, way = batch(7)
    first = graphed(ids, move)
    assert captures.calls == calls + 1
    second = graphed(ids, move)  # the first may still be walked back
    assert captures.calls == calls + 1 and torch.equal(first, second)
    torch.autograd.grad(first.sum(), way, retain_graph=True)
    with pytest.raises(RuntimeError, match="walked back twice"):
        torch.autograd.grad(first.sum(), way)
    third = graphed(ids, move)
    assert captures.calls == calls + 2
    del third
    gc.collect()
    graphed(ids, move)
    assert captures.calls == calls + 3


def test_only_shapes_that_stay_are_captured_and_only_so_many(encoder):
    captures = Captures()
    graphed = GraphedEncoder(encoder, limit=2, capture=captures)
    for rows in (1, 2, 3, 4, 1, 2, 3, 4):
        results(graphed, rows, rows=rows)
    assert not captures.shapes
    for rows in (1, 2, 3, 4):
        results(graphed, rows, rows=rows)
    assert [shape[0] for shape in captures.shapes] == [1, 2] == list(range(1, graphed.captured + 1))


def test_what_a_graph_would_not_see_runs_as_it_is(encoder):
    captures = Captures()
    graphed = GraphedEncoder(encoder, capture=captures)
    for number in range(3):
        results(graphed, number)
    assert captures.calls == 1
    ids, move, _ = batch(0)
    with torch.no_grad():
        graphed(ids, move)
    graphed(ids, lambda x: x)  # nothing to learn
    encoder.train()
    results(graphed, 0)
    encoder.eval().requires_grad_(True)
    results(graphed, 0)
    encoder.requires_grad_(False)
    hook = encoder.register_forward_hook(lambda *_: None)
    results(graphed, 0)
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        results(graphed, 0)
    assert captures.calls == 1
    results(graphed, 0)
    assert captures.calls == 2
    layer = encoder.get_submodule("encoder.layers.0.mlp")
    layer.fc2 = nn.Linear(64, WIDTH).requires_grad_(False)
    made = results(graphed, 0)
    plain = results(lambda ids, move: encode_with_input(encoder, ids, move)[0], 0)
    assert captures.calls == 2 and graphed.captured == 0 and all(torch.equal(a, b) for a, b in zip(made, plain, strict=True))


def test_a_capture_that_fails_is_said_once(encoder):
    def broken(rest, sample):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphed = GraphedEncoder(encoder, capture=broken)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(6):
            results(graphed, number)
    said = [str(w.message) for w in said if "CUDA graphs" in str(w.message)]
    assert len(said) == 1 and said[0].endswith("RuntimeError: operation not permitted when stream is capturing") and graphed.failed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_graphs_give_the_plain_calls_losses_and_gradients(encoder, dtype):
    encoder.cuda()
    graphed = GraphedEncoder(encoder)
    kept = []
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        for number in range(8):  # the first two as they are
            made = results(graphed, number, device="cuda")
            plain = results(lambda ids, move: encode_with_input(encoder, ids, move)[0], number, device="cuda")
            for one, other in zip(made, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            kept.append((made, [part.clone() for part in made]))
    assert graphed.captured == 1 and not graphed.failed
    assert all(torch.equal(one, other) for pair in kept for one, other in zip(*pair, strict=True))  # later replays left them alone


@pytest.mark.gpu
def test_what_waits_for_the_device_is_not_captured_and_leaves_it_well(encoder):
    encoder.cuda()
    hook = encoder.register_forward_hook(lambda _module, _args, out: None if out[0].sum().item() == 0 else out)
    graphed = GraphedEncoder(encoder)
    with pytest.warns(UserWarning, match="runs without CUDA graphs"):
        for number in range(3):
            results(graphed, number, device="cuda")
    hook.remove()
    made = results(GraphedEncoder(encoder), 3, device="cuda")
    plain = results(lambda ids, move: encode_with_input(encoder, ids, move)[0], 3, device="cuda")
    assert graphed.failed and all(torch.equal(one, other) for one, other in zip(made, plain, strict=True))
