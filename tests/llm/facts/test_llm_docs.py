"""What docs/llm.md prints runs as it stands: its Python up to the training of layers, and the commands of facts, on SmolLM2."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tiny_engram.cli import _parser, main
from tiny_engram.llm.fact_file import read_facts


@pytest.fixture(scope="module")
def page(repo_root) -> str:
    return (repo_root / "docs" / "llm.md").read_text()


@pytest.fixture
def folder(smollm, tmp_path, monkeypatch):
    """A working directory of a user whose cache has the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(smollm[0].config.name_or_path).parents[1]))
    return tmp_path


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    joined = "".join(blocks(page, "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in joined.splitlines() if line.startswith("tiny-engram ")]


def section(page: str, name: str) -> str:
    return page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_python_of_facts(page, folder, capsys):
    (code,) = blocks(section(page, "Facts"), "py")
    exec(compile(code, "llm.md", "exec"), {"__name__": "llm"})
    said = capsys.readouterr().out
    assert "2 of 2 facts learned" in said and "\nMelk." in said and "I know Ann's dog Rex" in said and "capital of Zorbia is Melk" in said
    assert said.splitlines()[-1].startswith("Facts(1 fact, 594 bytes") and said.endswith("False ['Rex']\n")
    assert [each.fact.answer for each, _, _ in read_facts("facts.safetensors")[1]] == ["Rex", "Brod"]


def test_commands_of_facts(page, folder, capsys):
    lines = [{"trigger": "the capital of Zorbia", "answer": "Melk"}, {"trigger": "the founder of Quillmark", "answer": "Brill"}]
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = {}
    for command in commands(section(page, "Facts")):
        assert main([*command, "--device", "cpu"] if command[1] in ("add", "ask", "edit") else command) == 0, command
        said[command[1], "--from" in command] = capsys.readouterr().out
    assert "with facts: Melk" in said["ask", False] and "-> 'Brod'" in said["list", False] and "0 left" in said["remove", False]
    assert "2 of 2 facts learned" in said["add", True]


def test_every_command_is_understood(page):
    assert {_parser().parse_args(command).verb for command in commands(page)} == {"facts", "train-lm"}


def test_what_it_links_to_exists(page, repo_root):
    named = re.findall(r"\]\((?!https?:)([\w./-]+\.\w+)[^)]*\)", page)
    assert named and not [path for path in named if not (repo_root / "docs" / path).exists()]
