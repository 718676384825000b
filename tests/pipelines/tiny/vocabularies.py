"""Tokenizers of language models. Llama's and Qwen's are the published ones, Gemma's and Mistral's are trained on our captions.

Qwen's byte pairs come with the package dashscope, of which nothing is imported.
"""

import base64
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AddedToken, GemmaTokenizerFast, PreTrainedTokenizerFast, Qwen2TokenizerFast  # pyright: ignore[reportAttributeAccessIssue] # in all releases, as an alias in newer ones
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assets.recipe.captions import COLOURS, STYLES, caption
from tests.pipelines.tiny.base import tokenizer_folder

# Since transformers 5; before that a fast tokenizer is made from files, or of a backend.
TAKES_VOCABULARIES = "vocab" in inspect.signature(Qwen2TokenizerFast.__init__).parameters

QWEN_25_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
QWEN_3_TOKENS = (*QWEN_25_TOKENS, "<tool_response>", "</tool_response>", "<think>", "</think>")
# What the published templates make of messages that are plain text, without tools.
QWEN_3_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *(f"<SPECIAL_{i}>" for i in range(20, 1000))),
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set name = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "[{{ name }}]{% for part in message.content %}{{ '[IMG]' if part.type == 'image' else part.text }}{% endfor %}[/{{ name }}]{% endfor %}"
)
MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_pairs(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of bytes by rank, as the characters and merges that byte-level BPE is made of."""
    letters = bytes_to_unicode()
    never = len(ranks)

    def halves(token: bytes) -> list[bytes]:
        """The two pieces that a token's last merge joins: what the merges of lower rank leave of it."""
        pieces = [bytes([value]) for value in token]
        while len(pieces) > 2:
            order = [ranks.get(pieces[i] + pieces[i + 1], never) for i in range(len(pieces) - 1)]
            i = order.index(min(order))
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        return pieces

    def text(token: bytes) -> str:
        return "".join(letters[value] for value in token)

    merges = [(text(one), text(other)) for one, other in (halves(token) for token in ranks if len(token) > 1)]
    return {text(token): rank for token, rank in ranks.items()}, merges


@cache
def _qwen_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None and spec.origin is not None, "dashscope is not installed: make test installs it"
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return _byte_pairs({base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)})


def qwen(tokens: tuple[str, ...]) -> Qwen2TokenizerFast:
    """The vocabulary of Qwen 2, 2.5 and 3: 151,643 byte pairs and a model's special tokens behind them."""
    vocab, merges = _qwen_pairs()
    ids = {token: len(vocab) + i for i, token in enumerate(tokens)}
    if TAKES_VOCABULARIES:
        tokenizer = Qwen2TokenizerFast(vocab={**vocab, **ids}, merges=merges, eos_token="<|im_end|>")
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
            files[0].write_text(json.dumps(vocab))
            files[1].write_text("#version: 0.2\n" + "".join(f"{one} {other}\n" for one, other in merges))
            tokenizer = Qwen2TokenizerFast(*map(str, files))
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<|")) for token in tokens])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def qwen_3() -> Qwen2TokenizerFast:
    tokenizer = qwen(QWEN_3_TOKENS)
    tokenizer.chat_template = QWEN_3_CHAT
    return tokenizer


def _captions() -> list[str]:
    """What the tokenizers without a published vocabulary here are trained on."""
    rng = np.random.default_rng(0)
    things = ("cat", "dog", "owl", "photo", "table", "ice cream", "mountain")
    return [
        caption(rng, STYLES[rng.integers(len(STYLES))], tuple(COLOURS)[rng.integers(len(COLOURS))], rng.choice(things, 1 + i % 2).tolist())
        for i in range(400)
    ]


@cache
def _gemma_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces of our captions, trained as Gemma's are: never across spaces, with bytes for characters that have none."""
    trained = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    words = pre_tokenizers.Split("\u2581", behavior="merged_with_next")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Punctuation()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{value:02X}>" for value in range(256))]
    letters = [chr(value) for value in (10, *range(32, 127))]
    trainer = BpeTrainer(vocab_size=640, special_tokens=special, initial_alphabet=letters, show_progress=False)
    trained.train_from_iterator(_captions(), trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [(one, other) for one, other in model["merges"]]


def gemma() -> GemmaTokenizerFast:
    """Gemma's class and special tokens, <bos> in front and padding on the left as there; its pieces are those of our captions."""
    vocab, merges = _gemma_pairs()
    if TAKES_VOCABULARIES:
        return GemmaTokenizerFast(vocab={**vocab}, merges=merges, add_bos_token=True)
    backend = Tokenizer(BPE({**vocab}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return GemmaTokenizerFast(tokenizer_object=backend, add_bos_token=True)


def mistral_3() -> PreTrainedTokenizerFast:
    """Mistral Small 3's special tokens and its rules for words, padding on the left; its byte pairs are those of our captions."""
    trained = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(MISTRAL_WORDS), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1600, special_tokens=list(MISTRAL_TOKENS), initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_captions(), trainer)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=trained, padding_side="left", chat_template=MISTRAL_CHAT, **names)


def llama_3() -> PreTrainedTokenizerFast:
    """Llama 3 with the two tokens of Llava: 128,259. Read as LlamaTokenizer, as its files say, it would lose its spaces."""
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder("hunyuan_video/tokenizer_2"))
