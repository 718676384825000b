"""The guide to pictures runs: its Python with one step, its commands, and every option that it names is there."""

import re
import shlex

import pytest

from tiny_engram.cli import main
from tiny_engram.scan_cli import DATA_HELP


@pytest.fixture
def guide(repo_root, tmp_path, monkeypatch) -> str:
    (tmp_path / "assets").symlink_to(repo_root / "assets")
    monkeypatch.chdir(tmp_path)
    return (repo_root / "docs" / "pictures.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_commands_of_the_guide(guide, capsys):
    lines = [line for block in blocks(guide, "bash") for line in block.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
    assert "buckets " in capsys.readouterr().out


def test_python_of_the_guide(guide, tmp_path):
    (code,) = blocks(guide, "python")
    quick, count = re.subn(r"max_train_steps=300", "max_train_steps=1, collages=0, report_to='none'", code)
    assert count == 1
    names: dict[str, object] = {"__name__": "guide"}
    exec(compile(quick, "pictures.md", "exec"), names)
    assert (tmp_path / "out" / "ducks" / "concept.safetensors").stat().st_size > 0


def test_every_option_of_pictures_is_in_the_guide(guide, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    known = set(re.findall(r"--[a-z_]+", capsys.readouterr().out)) | {"--json", "--class_data_dir", "--prior_loss_weight"}
    named = set(re.findall(r"--[a-z_]+", guide))
    assert named <= known and {f"--{name}" for name in DATA_HELP} <= named
