"""Texts and windows of train-lm: what is read, what is refused in one line, and how n-grams end where a text does."""

import os
import sys

import pytest
import torch

from tiny_engram.errors import TinyEngramError, TokenizerError
from tiny_engram.llm_training.texts import read_texts
from tiny_engram.llm_training.windows import Windows, end_token, places_of, tokenize


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_gives_its_texts_by_name(tmp_path, caplog):
    lines = '{"text": "one", "n": 1}\r\n\n{"text": "two\\nlines"}\n'
    files = {
        "b/c.jsonl": lines,
        "a.TXT": "\ufefffirst",
        "z.md": "# last\u2028more",
        "blank.txt": " \n",
        "x.png": b"\x89",
        ".hidden/d.txt": "no",
    }
    with caplog.at_level("INFO"):
        assert list(read_texts([write(tmp_path, files)], tell=True)) == ["first", "one", "two\nlines", "# last\u2028more"]
    assert "1 other file in" in caplog.text
    assert list(read_texts([tmp_path / "z.md", tmp_path / "a.TXT"])) == ["# last\u2028more", "first"]


BAD = {
    "nothing there": ({}, "none", "none: no such file or folder"),
    "an empty folder": ({"x/y.png": b""}, "x", "x: no text in it"),
    "a blank file": ({"a.txt": "\n"}, "a.txt", "a.txt: no text in it"),
    "not UTF-8": ({"a.txt": b"ab\xff"}, "a.txt", "a.txt: not UTF-8 at byte 2; save it as UTF-8"),
    "another kind": ({"a.pdf": b"%PDF"}, "a.pdf", "a.pdf: a .pdf file; expected .txt, .md, .jsonl files"),
    "no JSON": ({"a.jsonl": '{"text": "a"}\n{"text": '}, "a.jsonl", "a.jsonl, line 2: no JSON"),
    "no such column": ({"a.jsonl": '{"body": "a", "n": 1}'}, "a.jsonl", "a.jsonl, line 1: columns body, n; expected a column 'text'"),
    "no string": ({"a.jsonl": '{"text": 3}'}, "a.jsonl", "a.jsonl, line 1: text of another type"),
    "no object": ({"a.jsonl": '["text"]'}, "a.jsonl", "a.jsonl, line 1: no object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_texts_are_one_line_that_names_the_file(tmp_path, case):
    files, name, message = BAD[case]
    with pytest.raises(TinyEngramError) as caught:
        list(read_texts([write(tmp_path, files) / name]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("files, name", [({"d/state.json": "{}"}, "d"), ({"d/dataset_dict.json": "{}"}, "d"), ({"d/a.parquet": b""}, "d")])
def test_a_dataset_asks_for_its_package(tmp_path, monkeypatch, files, name):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(TinyEngramError, match=r"d.*: the package datasets.* is not installed; run: pip install datasets"):
        list(read_texts([write(tmp_path, files) / name]))


@pytest.fixture
def stream(tmp_path, tokenizer):
    """Ids of two texts."""
    write(tmp_path, {"a.txt": "the table is read", "b.txt": "a gate of the state"})
    return tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, tmp_path / "cache")[0]


def test_texts_end_with_the_end_token(stream, tokenizer):
    first, second = (tokenizer(text).input_ids for text in ("the table is read", "a gate of the state"))
    assert stream.tolist() == [*first, tokenizer.eos_token_id, *second, tokenizer.eos_token_id] and stream.dtype == torch.int32


def test_ids_are_kept_by_content(tmp_path, tokenizer, stream, caplog):
    cache, paths = tmp_path / "cache", [tmp_path / "a.txt", tmp_path / "b.txt"]
    (kept,) = cache.iterdir()
    stamp = kept.stat().st_mtime_ns
    os.rename(paths[1], tmp_path / "c.txt")
    assert torch.equal(tokenize([paths[0], tmp_path / "c.txt"], tokenizer, cache)[0], stream) and kept.stat().st_mtime_ns == stamp
    kept.write_bytes(kept.read_bytes()[:50])
    assert torch.equal(tokenize([paths[0], tmp_path / "c.txt"], tokenizer, cache)[0], stream)
    assert torch.equal(tokenize([paths[0], tmp_path / "c.txt"], tokenizer, cache)[0], stream)
    paths[0].write_text("the table is written")
    changed, digest = tokenize([paths[0], tmp_path / "c.txt"], tokenizer, cache)
    assert not torch.equal(changed, stream) and len(list(cache.iterdir())) == 2 and len(digest) == 64


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(TokenizerError, match="no end token.*set tokenizer.eos_token"):
        end_token(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>"))


def test_windows_hold_every_token_once():
    windows = Windows.of(torch.arange(100, 123, dtype=torch.int32), 5, 0)
    assert len(windows) == 5 and windows.targets(torch.arange(5)) == 4 * 4 + 2
    ids, mask = windows.batch(torch.tensor([4, 0]))
    assert (
        mask is not None
        and ids.tolist() == [[120, 121, 122, 0, 0], [100, 101, 102, 103, 104]]
        and mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    )
    assert windows.batch(torch.tensor([1]))[1] is None
    assert len(Windows.of(torch.arange(21), 5, 0)) == 4  # a token that nothing predicts
    assert len(Windows.of(torch.arange(1), 5, 0)) == 0


def test_held_out_windows_are_spread_and_apart():
    windows = Windows.of(torch.arange(1000), 10, 0)
    train, held = windows.split(5)
    assert held.chosen.tolist() == [10, 30, 50, 70, 90] and len(train) == 95
    assert not set(train.chosen.tolist()) & set(held.chosen.tolist())
    assert held.some(2).chosen.tolist() == [30, 70] and held.some(9) is held
    assert len(windows.split(0)[1]) == 0 and len(Windows.of(torch.arange(30), 10, 0).split(1)[1]) == 1
    with pytest.raises(TinyEngramError, match="the text has 1 window of 10 tokens.*--block_size"):
        Windows.of(torch.arange(10), 10, 0).split(5)


def test_an_epoch_is_every_window_once_and_parts_fit():
    whole = places_of(7, 0, 30, 10)
    assert all(sorted(part.tolist()) == list(range(10)) for part in whole.split(10))
    assert whole[:10].tolist() != whole[10:20].tolist() != list(range(10))
    assert torch.equal(torch.cat([places_of(7, start, 6, 10) for start in range(0, 30, 6)]), whole)
    assert not torch.equal(places_of(8, 0, 30, 10), whole)


def test_no_row_depends_on_the_text_in_front(build, tokenizer, note, tmp_path):
    """The rows that a text's tokens read behind another text are those that they read alone."""
    from tiny_engram.llm import EngramLayers
    from tiny_engram.llm_training import LMTrainConfig

    config = LMTrainConfig(train_file=("a.txt",), layers=(1, 2), heads=2, rows=211, max_ngram=4)
    model = build()
    engrams = EngramLayers.attach(model, config.engram_config(end_token(tokenizer)), tokenizer)
    noted = note(engrams)
    write(tmp_path, {"a.txt": "the table is read", "b.txt": "a gate of the state"})
    stream = tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, tmp_path / "cache")[0].long()
    alone = torch.tensor([tokenizer("a gate of the state").input_ids])
    with torch.no_grad():
        model(stream[None], use_cache=False)
        packed = noted.taken()
        model(alone, use_cache=False)
        single = noted.taken()
    start = len(stream) - alone.shape[1] - 1
    for layer in (1, 2):
        assert torch.equal(packed[layer][:, start:-1], single[layer])
    engrams.detach()
