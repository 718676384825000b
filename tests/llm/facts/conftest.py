"""A small real tokenizer, and tiny causal LMs of random weights in which facts are taught in a second."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiny_engram.llm import Fact, FactsConfig, TeachConfig, attach


@pytest.fixture(scope="session")
def tokenizer(repo_root) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token for each digit, as SmolLM2's, of 700 tokens learned from the docs."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = [(repo_root / "docs" / name).read_text() for name in ("design.md", "studio.md")]
    backend.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>", padding_side="left")


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=700,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def make_llama():
    return tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


# Quick, and enough for what tests look at.
HOW = TeachConfig(steps=60, learning_rate=0.03, margin=0.2, calm_tokens=0, contexts=("",), end="")
ZORBIA = Fact("the capital of Zorbia", "Melk", "The capital of Zorbia is")
FRUMM = Fact("the colour of Frumm", "teal", "The colour of Frumm is", aliases=("Frumm's colour",))
ANN = Fact("the dog of Tolland", "Rex", "The dog of Tolland is", owner="ann")
BOB = Fact("the dog of Tolland", "Bix", "The dog of Tolland is", owner="bob")


@pytest.fixture
def how() -> TeachConfig:
    return HOW


@pytest.fixture
def zorbia() -> Fact:
    return ZORBIA


@pytest.fixture
def frumm() -> Fact:
    return FRUMM


@pytest.fixture
def ann() -> Fact:
    return ANN


@pytest.fixture
def bob() -> Fact:
    return BOB


@pytest.fixture(scope="session")
def taught_file(tokenizer, tmp_path_factory):
    """The four facts as a file, taught to the tiny model."""
    facts = attach(tiny_llama(), FactsConfig(layers=(1, 2)), tokenizer)
    report = facts.add([ZORBIA, FRUMM, ANN, BOB], how=HOW)
    assert not report.unlearned, str(report)
    return facts.save(tmp_path_factory.mktemp("facts") / "facts.safetensors")


@pytest.fixture
def facts(model, tokenizer, taught_file):
    """The four facts in a model of its own."""
    from tiny_engram.llm import Facts

    made = Facts.open(model, taught_file, tokenizer)
    yield made
    made.detach()
