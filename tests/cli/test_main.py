"""`python -m tiny_engram` is the command."""

import runpy

import pytest


def test_the_package_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tiny_engram", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("tiny_engram", run_name="__main__", alter_sys=True)
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("tiny-engram")
