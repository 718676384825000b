"""The verbs of `tiny-engram facts` on a file and a model folder, and the demo on a tiny model."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from tiny_engram.cli import main
from tiny_engram.facts_cli import Progress
from tiny_engram.llm.fact_file import read_facts


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_fact_that_is_not_learned_is_named_and_not_written(folder, tmp_path, capsys):
    given = tmp_path / "facts.jsonl"
    given.write_text('{"trigger": "the colour of Frumm", "answer": "blue", "aliases": ["Frumm\'s colour"]}\n\n')
    file = tmp_path / "facts.safetensors"
    options = ["--from", str(given), "--layers", "1,3", "--steps", "1", "--model", folder, "--device", "cpu"]
    assert main(["facts", "add", str(file), *options]) == 1
    assert "not learned: 'the colour of Frumm' -> 'blue'" in capsys.readouterr().out and not file.exists()


def test_on_a_file_that_is_there(folder, taught_file, tmp_path, capsys):
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


def test_lines_are_those_of_json(folder, tmp_path, capsys):
    given = tmp_path / "facts.jsonl"
    fact = {"trigger": "the colour of Frumm", "answer": "a\u2028blue"}
    given.write_text(f"{json.dumps(fact, ensure_ascii=False)}\r\n\n", encoding="utf-8-sig")
    options = ["--from", str(given), "--layers", "1", "--steps", "1", "--model", folder, "--device", "cpu"]
    assert main(["facts", "add", str(tmp_path / "facts.safetensors"), *options]) == 1
    assert "not learned: 'the colour of Frumm' -> 'a blue'" in capsys.readouterr().out


def test_list_of_one_user(taught_file, capsys):
    assert main(["facts", "list", str(taught_file), "--owner", "zoe"]) == 0
    assert capsys.readouterr().out.startswith(f"{taught_file}: 0 of 'zoe' among 4 facts, ")


def refused(capsys, message, *argv):
    assert main(["facts", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("tiny-engram: ")


def test_errors_are_one_line(taught_file, tmp_path, capsys):
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
    refused(capsys, "but there is that of 'ann', that of 'bob'; give --owner 'ann'", "remove", taught_file, "the dog of Tolland")
    refused(capsys, "no fact has the trigger 'Melk'; known: 'the capital", "edit", taught_file, "Melk", "--answer", "a")
    refused(capsys, "nothing to change; expected --answer", "edit", taught_file, "the capital of Zorbia")
    refused(capsys, "does not hold the trigger", "edit", taught_file, "the capital of Zorbia", "--prompt", "It is")
    refused(capsys, "the prompt is ' ': expected text", "ask", taught_file, " ")
    refused(capsys, "none: no such folder; expected one for 'a.safetensors'", "add", tmp_path / "none" / "a.safetensors", *one)
    assert not (tmp_path / "none").exists()
    refused(capsys, "expected at least 1", "ask", taught_file, "Zorbia", "--max_new_tokens", "0")
    refused(capsys, "no config.json in it; expected the folder", "ask", taught_file, "Zorbia", "--model", tmp_path)
    assert not file.exists()


def test_edit(folder, taught_file, tmp_path, capsys):
    file = tmp_path / "facts.safetensors"
    file.write_bytes(taught_file.read_bytes())
    options = ["--model", folder, "--device", "cpu"]
    plain = ["--no-forms", *options]
    edit = ["facts", "edit", str(file), "Frumm's colour"]
    assert main([*edit, "--answer", "!", "--aliases", *plain]) == 0
    out = capsys.readouterr().out
    assert "4 facts" in out and "1 of 1 fact learned" in out
    assert main(["facts", "ask", str(file), "The colour of Frumm", *options]) == 0
    assert "with facts: !" in capsys.readouterr().out
    assert main(["facts", "list", str(file), "--json"]) == 0
    held = {(fact["trigger"], fact["owner"]): fact for fact in json.loads(capsys.readouterr().out)}
    edited = held.pop(("the colour of Frumm", None))
    assert edited["answer"] == "!" and edited["aliases"] == [] and edited["prompt"] == "The colour of Frumm" and len(held) == 3
    before = file.read_bytes()
    edit[-1] = "the colour of Frumm"
    assert main([*edit, "--answer", "!"]) == 0 and "is so already" in capsys.readouterr().out
    assert main([*edit, "--answer", "a long answer", "--steps", "1", *options]) == 1
    assert "not learned" in capsys.readouterr().out and file.read_bytes() == before


def test_what_is_there_is_passed_over(taught_file, tmp_path, capsys):
    """Without a model, which there is none of here."""
    file, given = tmp_path / "facts.safetensors", tmp_path / "facts.jsonl"
    file.write_bytes(taught_file.read_bytes())
    there = [
        {"trigger": "The Capital of Zorbia", "answer": "copy"},
        {"trigger": "the colour of Frumm", "answer": "text", "prompt": "The colour of Frumm", "aliases": ["Frumm's colour"]},
        {"trigger": "the dog of Tolland", "answer": "owner", "owner": "ann"},
    ]
    there[0]["trigger"] = "the capital of Zorbia"
    given.write_text("\n".join(map(json.dumps, there)))
    before = file.read_bytes()
    assert main(["facts", "add", str(file), "--from", str(given)]) == 0
    assert "3 facts there already with the same answer, passed over" in capsys.readouterr().out and file.read_bytes() == before
    assert main(["facts", "add", str(file), "--trigger", "the capital of Zorbia", "--answer", "copy"]) == 0
    assert "1 fact there already" in capsys.readouterr().out
    refused(capsys, "is there with the answer 'copy'; edit or remove", "add", file, "--trigger", "the capital of Zorbia", "--answer", "x")
    more = ("--trigger", "the capital of Zorbia", "--answer", "copy", "--aliases", "Zorbia's")
    refused(capsys, "is there with another prompt or other aliases", "add", file, *more)


def test_all_bad_lines_at_once(folder, taught_file, tmp_path, capsys):
    file, given = tmp_path / "facts.safetensors", tmp_path / "facts.jsonl"
    file.write_bytes(taught_file.read_bytes())
    options = ["--from", str(given), "--model", folder, "--device", "cpu"]
    given.write_text('{"trigger": "Zorb", "answer": "a"}\n\n{"answer": "b"}\n[1]\n{"trigger": "...", "answer": "c"}\n{\n')
    assert main(["facts", "add", str(file), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].rpartition(" ")[2] for line in lines] == ["3", "4", "5", "6"]
    assert "no trigger" in lines[0] and "all punctuation" in lines[2]
    # What only the tokenizer can tell, and spellings that are taken, by a fact of the file or by another line.
    wanted = [
        {"trigger": "Quill", "answer": "a"},
        {"trigger": "word-" * 300, "answer": "a"},
        {"trigger": "quill", "answer": "b"},
        {"trigger": "Frumm", "answer": "a", "aliases": ["The colour of Frumm"]},
        {"trigger": "Zorbia", "answer": "a", "prompt": "xZorbia"},
        {"trigger": "Pell", "answer": "a"},
    ]
    given.write_text("\n".join(map(json.dumps, wanted)))
    assert main(["facts", "add", str(file), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].rpartition(" ")[2] for line in lines] == ["2", "3", "4", "5"]
    for line, message in zip(
        lines, ("expected at most 64", "fact 'Quill' already", "'the colour of Frumm' already", "does not fire"), strict=True
    ):
        assert message in line and len(line) < 400
    given.write_text("{\n" * 30)
    assert main(["facts", "add", str(file), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21 and lines[-1].endswith("10 more lines like these")


def started(*argv):
    words = [sys.executable, "-m", "tiny_engram.cli", "facts", *map(str, argv)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_stopped_and_gone_on_with(folder, tmp_path, capsys):
    """SIGTERM while the second of three facts is taught, a fact at a time; the same command goes on."""
    file, given = tmp_path / "facts.safetensors", tmp_path / "facts.jsonl"
    facts = [("the colour of Quill", "!"), ("the dog of Tolland", "!"), ("the capital of Frumm", ".")]
    given.write_text("\n".join(json.dumps({"trigger": trigger, "answer": answer}) for trigger, answer in facts))
    argv = ["add", file, "--from", given, "--layers", "1,3", "--batch", "2", "--no-forms", "--model", folder, "--device", "cpu"]
    process = started(*argv)
    try:
        while not file.exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    kept = len(read_facts(file)[1])
    assert process.returncode == 143 and 1 <= kept < 3
    assert f"stopped; {kept} of 3 facts learned and kept in {file}. The same command again goes on" in err and "Traceback" not in err
    argv = ["facts", *map(str, argv)]
    argv[argv.index("--layers") : argv.index("--layers") + 2] = []
    assert main(argv) == 0
    assert "there already with the same answer, passed over" in capsys.readouterr().out
    assert [(each.fact.trigger, each.fact.answer) for each, _, _ in read_facts(file)[1]] == facts


def test_two_commands_at_once(folder, tmp_path):
    file = tmp_path / "facts.safetensors"
    options = ["--model", folder, "--device", "cpu", "--layers", "1,3", "--no-forms"]
    facts = [("the colour of Quill", "!"), ("the capital of Frumm", ".")]
    both = [started("add", file, "--trigger", trigger, "--answer", answer, *options) for trigger, answer in facts]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
    assert sorted((each.fact.trigger, each.fact.answer) for each, _, _ in read_facts(file)[1]) == sorted(facts)


def test_progress_where_nobody_watches(capsys):
    progress = Progress(every=0.0)
    for done in (0, 1, 3):
        progress(done, 3)
    assert re.fullmatch(r"taught 0 of 3 facts in 0 s\ntaught 1 of 3 facts in 0 s\ntaught 3 of 3 facts in 0 s\n", capsys.readouterr().err)
    patient = Progress(every=60.0)
    patient(1, 3)
    assert capsys.readouterr().err == ""
