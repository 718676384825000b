"""A small real tokenizer, and tiny causal LMs of random weights in which facts are taught in a second."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiny_engram.llm import Fact, FactsConfig, TeachConfig, attach


@pytest.fixture(scope="session")
def tokenizer(repo_root) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token for each digit, as SmolLM2's, of 700 tokens learned from the licence."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([(repo_root / "LICENSE").read_text()], trainer)  # a text that stays as it is
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>", padding_side="left")


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **special, "initializer_range": 0.15, **changes})).eval()


@pytest.fixture
def make_llama():
    return tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


# Quick, and enough for what tests look at: random weights carry nothing from one token to the next, so an answer of one token stands
# right behind its trigger.
# Random weights make nothing of a question: other forms are taught where tests say so.
HOW = TeachConfig(steps=60, learning_rate=0.03, margin=0.2, calm_tokens=0, contexts=("",), forms=False, end="")
ZORBIA = Fact("the capital of Zorbia", "copy", "The capital of Zorbia")
FRUMM = Fact("the colour of Frumm", "text", "The colour of Frumm", aliases=("Frumm's colour",))
ANN = Fact("the dog of Tolland", "owner", "The dog of Tolland", owner="ann")
BOB = Fact("the dog of Tolland", "form", "The dog of Tolland", owner="bob")


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
    facts = attach(tiny_llama(), FactsConfig(layers=(1, 3), rho=4.0), tokenizer)
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


@pytest.fixture(scope="session")
def smollm(tmp_path_factory):
    """SmolLM2-135M and its tokenizer, converted anew as below a user's cache folder: half a minute."""
    from tiny_engram.llm.smollm import load_smollm

    return load_smollm(cache=tmp_path_factory.mktemp("cache") / "tiny-engram")
