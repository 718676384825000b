"""The Studio's guide: its program runs as it stands, its commands are understood, its figures and pictures are there."""

import importlib.util
import json
import re
import shlex
from typing import Any

import pytest
from PIL import Image

PICTURES = ("register", "teach", "create", "library")
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def guide(repo_root) -> str:
    return (repo_root / "docs/studio.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_its_program(guide, page_url, opened_studio, repo_root, tmp_path, monkeypatch, capsys):
    (tmp_path / "assets").symlink_to(repo_root / "assets")
    monkeypatch.chdir(tmp_path)
    [code] = blocks(guide, "python")
    for stands, here in (
        (r'"http://127\.0\.0\.1:7860"', f'"{page_url}", download_files="{tmp_path / "client"}"'),
        (
            r'options=\{"max_train_steps": \d+',
            'options={"max_train_steps": 2, "train_batch_size": 1, "validation_steps": 0'
            ', "validation_inference_steps": 2',
        ),
        (r"steps=25", "steps=2"),
    ):
        code, count = re.subn(stands, here, code)
        assert count == 1, stands
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        exec(compile(code, "studio.md", "exec"), names)
        said = capsys.readouterr().out
        assert names["job"]["state"] == "done" and names["job"]["step"] == 2, names["job"]
        assert "of its pixels differ" in said and f"('{names['trigger']}', True, " in said
        assert Image.open(names["picture"]).size == Image.open(names["base"]).size == Image.open(names["difference"]).size
    finally:
        if "client" in names:
            names["client"].close()
        for state in opened_studio.runner.states():
            opened_studio.runner.delete(state.id)
        for card in opened_studio.library.cards():
            opened_studio.library.delete(card.id)


def test_every_command_is_understood(guide):
    from tiny_engram.cli import _parser

    commands = [shlex.split(line) for block in blocks(guide, "sh") for line in block.splitlines()]
    assert len(commands) > 3 and {tuple(command[:2]) for command in commands} == {("tiny-engram", "app")}
    for command in commands:
        assert _parser().parse_args(command[1:]).verb == "app"


def test_every_endpoint_is_named(guide):
    from tiny_engram.studio.ui.api import ENDPOINTS

    assert set(re.findall(r"`/(\w+)`", guide)) == set(ENDPOINTS)


def test_its_table_is_what_was_measured(guide, repo_root):
    spec = importlib.util.spec_from_file_location("benchmark_tables", repo_root / "benchmarks/tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert "<!-- table:studio -->" in guide and tables.fill_in(guide) == guide


def test_what_it_links_to_exists(guide, repo_root):
    named = re.findall(r"\]\((?!https?:)([\w./-]+\.\w+)[^)]*\)", guide) + re.findall(r"\b(\w+/\w+\.py)\b", guide)
    lacking = [path for path in named if not (repo_root / "docs" / path).exists() and not (repo_root / path).exists()]
    assert len(named) > 5 and not lacking


@pytest.mark.parametrize("name", PICTURES)
def test_its_pictures(repo_root, name):
    path = repo_root / f"docs/images/studio/{name}.png"
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width == 1440 and path.stat().st_size <= MOST_BYTES


def test_the_table_is_made_of_the_figures(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmark_studio", repo_root / "benchmarks/studio.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    report = json.loads((repo_root / "benchmarks/results/studio.json").read_text())
    assert benchmark.rows_of(report["figures"]) == report["table"]
    assert benchmark.percentile(list(range(50, 0, -1)), 0.95) == 48 and benchmark.percentile([7.0], 0.95) == 7
