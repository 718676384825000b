"""A slow tokenizer is served by a fast twin: the same ids, the places of words, the tokens that it has now."""

import copy
import importlib.util

import pytest
import torch
import transformers
from transformers import AddedToken, PreTrainedTokenizer, T5Tokenizer

import tiny_engram
from tests.pipelines.tiny.base import t5_tokenizer, tokenizer_folder
from tiny_engram.errors import TinyEngramError
from tiny_engram.fast_tokenizers import fast_tokenizer
from tiny_engram.triggers import encode_with_offsets

TEXTS = ("a photo of a zqx bolo's hat, 3 of 12!", "Caf\u00e9 (zqx) \u00dcBER  x", "a <glim> cat")
NONE_SLOW = f"transformers {transformers.__version__} has no slow {{}}"


@pytest.fixture
def slow(tiny):
    """CLIP's slow tokenizer, where transformers has one."""
    tokenizer = tiny.load_tokenizer()
    if not isinstance(tokenizer, PreTrainedTokenizer) or hasattr(tokenizer, "backend_tokenizer"):
        pytest.skip(NONE_SLOW.format("CLIPTokenizer"))
    return tokenizer


def agree(slow, texts=TEXTS):
    twin = fast_tokenizer(slow)
    for text in texts:
        ((ids, offsets),) = encode_with_offsets(twin, [text], special=True)
        assert ids == slow(text).input_ids and len(offsets) == len(ids)
    return twin


def test_a_fast_one_is_its_own_twin():
    fast = t5_tokenizer()
    assert fast_tokenizer(fast) is fast


@pytest.mark.older
def test_the_twin_of_clips_reads_the_same_and_tells_places(slow):
    twin = agree(slow)
    assert fast_tokenizer(slow) is twin and twin.model_max_length == slow.model_max_length == 77
    assert (twin.pad_token_id, twin.bos_token_id, twin.eos_token_id) == (slow.pad_token_id, slow.bos_token_id, slow.eos_token_id)
    padded = [one(list(TEXTS), padding="max_length", truncation=True, return_tensors="pt").input_ids for one in (slow, twin)]
    assert torch.equal(*padded)
    ((ids, offsets),) = encode_with_offsets(twin, ["a Kettle pot"])
    assert ["a Kettle pot"[start:end] for start, end in offsets][0] == "a" and offsets[-1] == (9, 12)


@pytest.mark.older
def test_tokens_added_later_are_in_a_new_twin(slow):
    before = agree(slow)
    slow.add_tokens([AddedToken("<glim>")])
    after = agree(slow)
    assert after is not before and len(after) == len(before) + 1


@pytest.mark.older
def test_the_twin_of_t5s_reads_the_same():
    if issubclass(T5Tokenizer, transformers.PreTrainedTokenizerFast):
        pytest.skip(NONE_SLOW.format("T5Tokenizer"))
    assert importlib.util.find_spec("sentencepiece") is not None, "sentencepiece is not installed, which slow tokenizers need"
    agree(T5Tokenizer.from_pretrained(tokenizer_folder("flux/tokenizer_2"), legacy=False), TEXTS[:2])


@pytest.mark.older
def test_a_pipeline_with_a_slow_tokenizer(tiny, slow):
    pipe = tiny.build()
    pipe.tokenizer = copy.deepcopy(slow)
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))
    (span,) = adapter.explain("a zqx bolo hat").fired
    with torch.no_grad():
        ours = pipe.encode_prompt("a zqx bolo hat", "cpu", 1, False)[0]
        adapter.disable_concepts()
        plain = pipe.encode_prompt("a zqx bolo hat", "cpu", 1, False)[0]
    assert (ours != plain).any(-1)[0].nonzero().flatten().tolist() == list(range(span.start, span.end))


class Letters(PreTrainedTokenizer):
    """A slow tokenizer that transformers cannot convert."""

    def __init__(self, **options):
        self.letters = {"<unk>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
        super().__init__(unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {**self.letters, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_options) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters.get(token, 0)


def test_one_that_has_no_twin_is_refused_in_a_line():
    with pytest.raises(TinyEngramError, match=r"^Letters is a slow tokenizer, .* load LettersFast and give it to the pipeline$") as told:
        fast_tokenizer(Letters())
    assert "\n" not in str(told.value)


@pytest.mark.older
def test_one_that_reads_other_ids_is_refused(slow):
    class Shouting(type(slow)):
        def _tokenize(self, text, **options):
            return super()._tokenize(text.replace("cat", "dog"), **options)

    Shouting.__name__ = "CLIPTokenizer"
    with pytest.raises(TinyEngramError, match="CLIPTokenizer reads .* expected the same; load CLIPTokenizerFast"):
        fast_tokenizer(Shouting.from_pretrained(slow.name_or_path))
