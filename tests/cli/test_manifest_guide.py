"""The guide to manifests runs as it stands, in a step of one sample, and names options that are there."""

import re
import shlex

import pytest

from tiny_engram.cli import main
from tiny_engram.library import ConceptLibrary


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_guide(repo_root, tmp_path, monkeypatch, capsys):
    (tmp_path / "assets").symlink_to(repo_root / "assets")
    monkeypatch.chdir(tmp_path)
    guide = (repo_root / "docs" / "manifest.md").read_text()
    (told,), (command,), (code,) = (blocks(guide, language) for language in ("yaml", "bash", "python"))
    (tmp_path / "concepts.yaml").write_text(told)
    quick = ["--max_train_steps", "1", "--train_batch_size", "1", "--device", "cpu"]
    assert main([*shlex.split(command)[1:], *quick]) == 0
    with ConceptLibrary.open("taught/all.engrams") as library:
        assert [entry.name for entry in library] == ["zed-quack", "tako-blip", "a bear of mine"]
    assert (tmp_path / "taught" / "a-bear-of-mine" / "report.html").exists() and (tmp_path / "taught" / "summary.html").exists()
    capsys.readouterr()
    exec(compile(code, "manifest.md", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out.splitlines() == [f"{word} out/{name}/concept.safetensors" for word, name in
                                                    (("zed-quack", "duck"), ("tako-blip", "octopus"))]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in re.findall(r"`(--\w+)`", guide))
