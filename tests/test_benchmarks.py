"""The scripts that put kept figures into documents: one line where a result is not there, and nothing written."""

import json
import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def run(repo_root, tmp_path):
    """Runs a script of benchmarks in a tree without results: (exit code, stdout, stderr)."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("tables.py", "plots.py"):
        shutil.copy(repo_root / "benchmarks" / name, tmp_path / "benchmarks")

    def call(name, *words):
        done = subprocess.run([sys.executable, f"benchmarks/{name}", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    return call


def test_tables_of_results_that_are_missing(run, tmp_path):
    page, result = tmp_path / "page.md", tmp_path / "benchmarks" / "results" / "speed.json"
    text = "a\n<!-- table:speed -->\nold\n<!-- /table:speed -->\nb\n"
    for kept, says in (
        (None, "page.md: no benchmarks/results/speed.json; run the benchmark that writes it\n"),
        ("{", "speed.json: no JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "holds no 'table' of one or more rows"),
        (json.dumps({"table": [{"a": 1}, {"b": 2}]}), "every row needs the same columns"),
    ):
        page.write_text(text)
        if kept is not None:
            result.write_text(kept)
        code, out, err = run("tables.py", "page.md")
        assert code == 2 and not out and err.count("\n") == 1 and says in err, err
        assert page.read_text() == text
    result.write_text(json.dumps({"table": [{"rows": 1000}]}))
    assert run("tables.py", "page.md") == (0, "page.md: speed\n", "")
    assert "| 1,000 |" in page.read_text()
    code, _, err = run("tables.py", "absent.md")
    assert code == 2 and err.count("\n") == 1 and "absent.md" in err


def test_plots_of_results_that_are_missing(run, tmp_path):
    code, out, err = run("plots.py")
    assert (code, out, err) == (1, "", "no benchmarks/results/kernels.json; run the benchmark that writes it\n")
    (tmp_path / "benchmarks" / "results" / "kernels.json").write_text(json.dumps({"sections": {}}))
    code, out, err = run("plots.py")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "no figures 'gate' in section 'gate'" in err
