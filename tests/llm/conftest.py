"""Tiny causal LMs of the real classes, a tokenizer trained on this project's licence, and Engram that moves their logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast, StaticCache

from tiny_engram.llm import EngramConfig, EngramLayers

# The architectures that are promised: configuration class and what differs from llama's, with windows that tests outrun.
WINDOW = 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
CLASSES = {"gemma3_text": "Gemma3ForCausalLM"}
SPARE = 8  # ids that a model has beyond its tokenizer's


@pytest.fixture(scope="session")
def tokenizer(repo_root) -> PreTrainedTokenizerFast:
    """A real byte-level BPE tokenizer of 600 tokens, trained on a text that does not change: random ids mean the same ever after."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([(repo_root / "LICENSE").read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def causal_lm() -> Callable[..., Any]:
    """causal_lm(kind, seed, **options): a model of a promised architecture with random weights, in eval mode."""

    def make(kind: str, seed: int = 0, **options: Any) -> Any:
        name, own = MODELS[kind]
        sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**{**sizes, **own, **options})
        return getattr(transformers, CLASSES.get(kind, f"{name}ForCausalLM"))(config).eval()

    return make


@pytest.fixture(scope="session")
def build(tokenizer, causal_lm) -> Callable[..., Any]:
    """build(kind, **changes): a frozen model with random weights, large enough that every layer counts."""

    def make(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
        options = {
            "vocab_size": len(tokenizer) + SPARE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **changes,
        }
        model = causal_lm(kind, seed, **options)
        model.requires_grad_(False)
        model.generation_config.eos_token_id = None  # random models would stop anywhere
        return model

    return make


def fill(engrams: EngramLayers, seed: int = 1) -> EngramLayers:
    """Rows, convolution, norms and biases drawn anew, so that every part of them moves the logits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(value: torch.Tensor, std: float, mean: float = 0.0) -> None:
        value.copy_(torch.randn(value.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for rows in engrams.learned.values():
            draw(rows.weight, 1.0)
        for name, value in engrams.engrams.named_parameters():
            if "conv_weight" in name:
                draw(value, 0.5)
            elif name.endswith(("q_weight", "k_weight", "conv_norm_weight")):
                draw(value, 0.3, 1.0)
            elif name.endswith("bias"):
                draw(value, 0.3)
    return engrams


@pytest.fixture(scope="session")
def attach(tokenizer) -> Callable[..., EngramLayers]:
    """attach(model, **config): filled Engram in front of layers 1 and 2."""

    def make(model: Any, seed: int = 1, **options: Any) -> EngramLayers:
        config = EngramConfig(**{"layers": (1, 2), "vocab": 211, "heads": 2, **options})
        return fill(EngramLayers.attach(model, config, tokenizer), seed)

    return make


@pytest.fixture(scope="session")
def text(tokenizer) -> Callable[..., torch.Tensor]:
    """text(B, T, seed): int64 ids of random tokens, none of them special, with runs that come again."""

    def make(batch: int = 2, length: int = 14, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, len(tokenizer), (batch, length), generator=generator)
        if length >= 10:
            ids[:, 6:9] = ids[:, 1:4]
        return ids

    return make


class Noted:
    """The row ids of every call since, by layer."""

    def __init__(self, engrams: EngramLayers) -> None:
        self.calls: dict[int, list[torch.Tensor]] = {layer: [] for layer in engrams.layers}
        for layer in engrams.layers:
            engram: Any = engrams.engrams[str(layer)]
            engram.row_ids = self._noting(layer, engram.row_ids)

    def _noting(self, layer: int, row_ids: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
            found = row_ids(*args, **kwargs)
            self.calls[layer].append(found)
            return found

        return noting

    def only(self, calls: slice = slice(None), tokens: Any = slice(None), rows: Any = slice(None)) -> None:
        """Forget all but these calls, and of them all but these tokens and rows of the batch."""
        self.calls = {layer: [each[rows, tokens] for each in noted[calls]] for layer, noted in self.calls.items()}

    def taken(self) -> dict[int, torch.Tensor]:
        """``[B, T, columns]`` of all calls, which are forgotten."""
        found = {layer: torch.cat(calls, dim=1) for layer, calls in self.calls.items() if calls}
        for calls in self.calls.values():
            calls.clear()
        return found


@pytest.fixture(scope="session")
def note() -> type[Noted]:
    return Noted


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


class Checked:
    """A model with Engram, and how far its own ways of computing a text are apart without."""

    def __init__(self, model: Any, engrams: EngramLayers, noted: Noted) -> None:
        self.model, self.engrams, self.noted = model, engrams, noted

    def cache(self, kind: str = "dynamic") -> Any:
        """An empty cache for this model; a static one has room for 24 tokens."""
        config = self.model.config
        return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=24)

    def in_parts(self, ids: torch.Tensor, sizes: list[int], cache: Any) -> torch.Tensor:
        """Logits ``[B, T, V]`` of a text that comes in parts of these sizes."""
        assert sum(sizes) == ids.shape[1]
        return torch.cat([self.model(part, cache=cache).logits for part in ids.split(sizes, dim=1)], dim=1)

    def near(self, found: torch.Tensor, expected: torch.Tensor, share: float = 2e-5) -> bool:
        """Are two ways of computing the same logits within this share of the largest?"""
        return apart(found, expected) < share * float(expected.abs().max())

    def same(self, full: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Both ways (functions of nothing, which give logits) agree: hash ids to the bit, logits as far as the base's own do."""
        self.noted.taken()
        with_engram = full()
        ids = self.noted.taken()
        found = other()
        again = self.noted.taken()
        assert again.keys() == ids.keys() == set(self.engrams.layers)
        for layer, rows in again.items():
            assert torch.equal(rows, ids[layer]), f"hash ids of layer {layer}"
        self.engrams.enabled = False
        base = full()
        allowed = max(2 * apart(other(), base), 2e-5 * float(base.abs().max()))
        self.engrams.enabled = True
        assert apart(found, with_engram) <= allowed
        assert apart(with_engram, base) > 100 * allowed  # it is not as if Engram did nothing
        return with_engram


@pytest.fixture
def checked(build, attach, note) -> Callable[..., Checked]:
    """checked(kind, form, branches, **config): such a model, and its Engram."""

    def make(kind: str = "llama", form: str = "paper", branches: int = 1, **options: Any) -> Checked:
        model = build(kind)
        engrams = attach(model, form=form, branches=branches, **options)
        return Checked(model, engrams, note(engrams))

    return make


@pytest.fixture
def no_gradients():
    """For whole files of tests that do not train."""
    with torch.no_grad():
        yield


@pytest.fixture
def accelerator_state():
    """For runs of another precision that follow each other; in a process of their own they would not."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
