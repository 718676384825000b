"""Encoders whose token embeddings are changed on the way in, of each kind that pipelines have."""

import threading

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from tiny_engram.errors import TinyEngramError
from tiny_engram.input_mount import encode_with_input, moved_embeddings, token_embeddings

IDS = torch.tensor([[3, 7, 9, 1], [5, 5, 2, 1]])


def build(kind: type) -> nn.Module:
    torch.manual_seed(0)
    if kind is T5EncoderModel:
        made = kind(T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        made = kind(CLIPTextConfig(vocab_size=20, max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes))
    return made.eval()


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel])
def test_a_change_of_the_embeddings_is_what_other_weights_would_give(kind):
    encoder = build(kind)
    plain = encoder(IDS).last_hidden_state

    def move(embeddings: torch.Tensor) -> torch.Tensor:
        assert embeddings.shape == (2, 4, 32)
        return torch.where((IDS == 7)[..., None], embeddings + way, embeddings)

    way = torch.randn(32, requires_grad=True)
    moved = encode_with_input(encoder, IDS, move, output_hidden_states=True)
    (gradient,) = torch.autograd.grad(moved.last_hidden_state.square().sum(), way)
    assert gradient.ne(0).all() and len(moved.hidden_states) == 3
    assert torch.equal(moved.last_hidden_state[1], plain[1]) and not torch.equal(moved.last_hidden_state[0], plain[0])
    assert not any(m._forward_hooks for m in token_embeddings(encoder))
    with torch.no_grad():
        encoder.get_input_embeddings().weight[7] += way
        torch.testing.assert_close(encoder(IDS).last_hidden_state, moved.last_hidden_state)


def test_hooks_that_stay_take_the_change_of_their_own_thread_alone():
    encoder = build(CLIPTextModel)
    (embedding,) = token_embeddings(encoder)
    handle = embedding.register_forward_hook(lambda _module, _args, output: moved_embeddings(output))
    with torch.no_grad():
        plain = encoder(IDS).last_hidden_state
        beside: list[torch.Tensor] = []

        def move(embeddings: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=lambda: beside.append(encoder(IDS).last_hidden_state))
            other.start()
            other.join()
            return embeddings * 2

        moved = encode_with_input(encoder, IDS, move, hooked=True).last_hidden_state
        assert len(beside) == 1 and not torch.equal(moved, plain)
        torch.testing.assert_close(beside[0], plain)
        assert torch.equal(encoder(IDS).last_hidden_state, plain)
    assert len(embedding._forward_hooks) == 1
    handle.remove()


def test_what_cannot_be_moved_says_so():
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def get_input_embeddings(self) -> nn.Module:
            return self.table

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table.weight[ids]

    silent = Silent()
    with pytest.raises(TinyEngramError, match="Silent ran without looking its tokens up"):
        encode_with_input(silent, IDS, lambda x: x)
    with pytest.raises(TinyEngramError, match="Linear names no token embeddings"):
        encode_with_input(nn.Linear(2, 2), IDS, lambda x: x)

    def broken(embeddings: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        encode_with_input(build(CLIPTextModel), IDS, broken)
    assert not silent.table._forward_hooks and moved_embeddings(torch.zeros(1)) is None
