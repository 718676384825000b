"""The verbs of `tiny-engram facts` on a file and a model folder, and the demo on a tiny model."""

import json

import pytest

from tiny_engram.cli import main


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_fact_that_is_not_learned_is_named_and_not_written(folder, tmp_path, capsys, log_levels):
    given = tmp_path / "facts.jsonl"
    given.write_text('{"trigger": "the colour of Frumm", "answer": "blue", "aliases": ["Frumm\'s colour"]}\n\n')
    file = tmp_path / "facts.safetensors"
    options = ["--from", str(given), "--layers", "1,3", "--steps", "1", "--model", folder, "--device", "cpu"]
    assert main(["facts", "add", str(file), *options]) == 1
    assert "not learned: 'the colour of Frumm' -> 'blue'" in capsys.readouterr().out and not file.exists()


def test_on_a_file_that_is_there(folder, taught_file, tmp_path, capsys, log_levels):
    file = tmp_path / "facts.safetensors"
    file.write_bytes(taught_file.read_bytes())
    options = ["--model", folder, "--device", "cpu"]
    assert main(["facts", "list", str(file)]) == 0
    out = capsys.readouterr().out
    assert "4 facts" in out and "'the colour of Frumm', also \"Frumm's colour\" -> 'text'" in out and "'owner'  (ann's)" in out
    assert main(["facts", "list", str(file), "--owner", "bob", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only == {
        "trigger": "the dog of Tolland", "answer": "form", "prompt": "The dog of Tolland", "aliases": [], "owner": "bob"
    }  # fmt: skip
    assert main(["facts", "ask", str(file), "The capital of Zorbia", *options]) == 0
    captured = capsys.readouterr()
    said = dict(line.split(":", 1) for line in captured.out.splitlines())
    assert said["with facts"].strip().startswith("copy") and said["with facts"].strip() != said["without"].strip()
    assert captured.err == "'the capital of Zorbia' fires\n"
    assert main(["facts", "ask", str(file), "xthe capital of Zorbia", "--json", *options]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["with"] == about["without"]
    assert about["fired"] == [{"trigger": "the capital of Zorbia", "token": about["fired"][0]["token"], "reason": "cut by a word boundary"}]
    assert main(["facts", "remove", str(file), "The Capital of Zorbia"]) == 0
    assert main(["facts", "remove", str(file), "the dog of Tolland", "--owner", "ann"]) == 0
    assert "2 left" in capsys.readouterr().out
    assert main(["facts", "ask", str(file), "the capital of Zorbia", "--json", *options]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["with"] == about["without"] and about["fired"] == []


def test_lines_are_those_of_json(folder, tmp_path, capsys, log_levels):
    given = tmp_path / "facts.jsonl"
    fact = {"trigger": "the colour of Frumm", "answer": "a\u2028blue"}
    given.write_text(f"{json.dumps(fact, ensure_ascii=False)}\r\n\n", encoding="utf-8-sig")
    options = ["--from", str(given), "--layers", "1", "--steps", "1", "--model", folder, "--device", "cpu"]
    assert main(["facts", "add", str(tmp_path / "facts.safetensors"), *options]) == 1
    assert "not learned: 'the colour of Frumm' -> 'a blue'" in capsys.readouterr().out


def refused(capsys, message, *argv):
    assert main(["facts", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("tiny-engram: ")


def test_errors_are_one_line(taught_file, tmp_path, capsys, log_levels):
    file = tmp_path / "facts.safetensors"
    refused(capsys, "expected either --trigger with --answer, or --from", "add", file)
    refused(capsys, "has no --answer", "add", file, "--trigger", "Zorbia")
    refused(capsys, "cannot be read", "add", file, "--from", tmp_path / "none.jsonl")
    given = tmp_path / "facts.jsonl"
    for text, message in (
        ("", "no facts in it"),
        ("\n{", "facts.jsonl, line 2: "),
        ("[1]", "line 1: "),
        ("[" * 100_000, "line 1: "),
        ('{"trigger": "Zorbia"}', "line 1: "),
        ('{"trigger": "Zorbia", "answer": "a", "alias": "b"}', "line 1: unknown field 'alias', known are trigger, answer"),
    ):
        given.write_text(text)
        refused(capsys, message, "add", file, "--from", given)
    one = ("--trigger", "Zorbia", "--answer", "Melk", "--model", tmp_path)  # no model: it is not come to
    refused(capsys, "is a folder, expected a facts file", "add", tmp_path, *one)
    refused(capsys, "has its own; expected none, or a file that is not there yet", "add", taught_file, *one, "--layers", "1")
    refused(capsys, "FactsConfig.layers is (3, 1)", "add", file, *one, "--layers", "3", "1")
    refused(capsys, "TeachConfig.batch is 0", "add", file, *one, "--batch", "0")
    refused(capsys, "does not exist, expected a facts file", "list", file)
    refused(capsys, "does not exist, expected a facts file", "ask", file, "Zorbia")
    refused(capsys, "no fact of 'ann' has the trigger 'Melk'", "remove", taught_file, "Melk", "--owner", "ann")
    refused(capsys, "expected at least 1", "ask", taught_file, "Zorbia", "--max_new_tokens", "0")
    refused(capsys, "no config.json in it; expected the folder", "ask", taught_file, "Zorbia", "--model", tmp_path)
    assert not file.exists()
