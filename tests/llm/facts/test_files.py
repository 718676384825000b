"""Facts in one file: what was saved is what is served; whatever is not such a file is refused in one line."""

import json
import struct

import pytest
import torch

from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.llm import Facts, FactsConfig, attach
from tiny_engram.llm.fact_file import read_facts


def logits(model, tokenizer, text):
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits


def test_save_and_open_give_the_same_bits(facts, model, tokenizer, make_llama, tmp_path, zorbia):
    path = facts.save(tmp_path / "deep" / "facts.safetensors")
    other = make_llama()
    again = Facts.open(other, path, tokenizer)
    assert torch.equal(logits(other, tokenizer, zorbia.prompt), logits(model, tokenizer, zorbia.prompt))
    assert [each.fact for each in again.list()] == [each.fact for each in facts.list()]
    (one, other) = (read_facts(file) for file in (again.save(tmp_path / "again.safetensors"), path))
    assert one[:2] == other[:2] and torch.equal(one[2].view(torch.uint8), other[2].view(torch.uint8)) and torch.equal(one[3], other[3])
    # Four facts of two layers, each row of 32 values and one scale.
    assert again.nbytes == 4 * 2 * again.config.columns * 33


def test_a_removed_fact_is_not_in_the_file(facts, tmp_path, zorbia):
    facts.remove(zorbia.trigger)
    _, saved, payload, _ = read_facts(facts.save(tmp_path / "facts.safetensors"))
    assert len(saved) == len(payload) == 3 and b"Zorbia" not in (tmp_path / "facts.safetensors").read_bytes()


def test_files_come_together(model, tokenizer, taught_file, zorbia, frumm, tmp_path):
    with_one = Facts.open(model, taught_file, tokenizer)
    for trigger, owner in ((frumm.trigger, None), ("the dog of Tolland", "ann"), ("the dog of Tolland", "bob")):
        with_one.remove(trigger, owner=owner)
    one = with_one.save(tmp_path / "one.safetensors")
    whole = logits(model, tokenizer, zorbia.prompt)
    with pytest.raises(TinyEngramError, match="of 'the capital of Zorbia' calls the fact 'the capital of Zorbia' already"):
        with_one.load(taught_file)
    assert len(with_one) == 1 and torch.equal(logits(model, tokenizer, zorbia.prompt), whole)
    with_one.remove(zorbia.trigger)
    with_one.load(one)
    assert torch.equal(logits(model, tokenizer, zorbia.prompt), whole)
    with_one.detach()


def test_another_model_or_tokenizer_is_refused(make_llama, tokenizer, taught_file, deepseek_backend):
    with pytest.raises(ConfigError, match="the facts were made for hidden 64, this model has 96"):
        Facts.open(make_llama(hidden_size=96), taught_file, tokenizer)
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=deepseek_backend, pad_token="<｜▁pad▁｜>")
    with pytest.raises(ConfigError, match="this tokenizer has"):
        Facts.open(make_llama(), taught_file, other)
    model = make_llama()
    facts = attach(model, FactsConfig(layers=(0,)), tokenizer)
    with pytest.raises(TinyEngramError, match=r"its facts have layers \(1, 3\), this configuration has \(0,\)"):
        facts.load(taught_file)


def broken(path, tmp_path, change):
    """The file with its header, a dict, and its bytes changed."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    data = change(header, blob[8 + length :])
    text = json.dumps(header).encode()
    out = tmp_path / "broken.safetensors"
    out.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return out


def described(header):
    return json.loads(header["__metadata__"]["tiny_engram"])


def test_bad_files(taught_file, tmp_path, repo_root):
    with pytest.raises(TinyEngramError, match="does not exist, expected a facts file"):
        read_facts(tmp_path / "none.safetensors")
    with pytest.raises(TinyEngramError, match="is a folder, expected a facts file"):
        read_facts(tmp_path)
    short = tmp_path / "short.safetensors"
    short.write_bytes(taught_file.read_bytes()[:-40])
    with pytest.raises(TinyEngramError, match="truncated"):
        read_facts(short)
    flipped = bytearray(taught_file.read_bytes())
    flipped[-3] ^= 1
    short.write_bytes(flipped)
    with pytest.raises(TinyEngramError, match="its data is not what was saved"):
        read_facts(short)
    short.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(TinyEngramError, match="header of 1099511627776 bytes"):
        read_facts(short)

    def many(header, data):
        about = described(header)
        about["facts"] = 7
        header["__metadata__"]["tiny_engram"] = json.dumps(about)
        return data

    with pytest.raises(TinyEngramError, match=r"not a sound facts file \(rows \[4, 2, 2, 32\] for \[7, 2, 2, 32\]\)"):
        read_facts(broken(taught_file, tmp_path, many))

    def kind(header, data):
        about = described(header)
        del about["kind"]
        header["__metadata__"]["tiny_engram"] = json.dumps(about)
        return data

    with pytest.raises(TinyEngramError, match="holds 'a concept', expected facts"):
        read_facts(broken(taught_file, tmp_path, kind))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float8_e8m0fnu])
def test_a_sound_file_of_something_else(tmp_path, dtype):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(4, dtype=torch.uint8).view(torch.uint8).to(dtype)}, path)
    with pytest.raises(TinyEngramError, match=r"tensor 'x' has type \w+, expected a facts file saved by tiny-engram"):
        read_facts(path)


def test_a_facts_file_is_no_concept(taught_file):
    from tiny_engram.concept import Concept

    with pytest.raises(TinyEngramError, match=taught_file.name):
        Concept.load(taught_file)
