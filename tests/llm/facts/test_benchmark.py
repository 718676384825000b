"""The benchmark of facts runs through on a tiny model: it checks, teaches, asks and compares; figures of random weights mean nothing."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.llm import facts as benchmark


@pytest.fixture
def run(model, tokenizer, tmp_path, repo_root):
    """Runs it on a tiny model: the rows that it prints."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = [sys.executable, "-m", "benchmarks.llm.facts", "--device", "cpu", "--model", str(tmp_path / "model"), "--how", '{"steps": 3}']

    def call(*more):
        told = {**os.environ, "PYTHONPATH": str(repo_root), "TINY_ENGRAM_COMMIT": "0123abcd"}
        done = subprocess.run([*words, *more], cwd=repo_root, env=told, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return call


def test_dry_run(run):
    rows = run("--dry")
    assert [row["method"].partition(" ")[0] for row in rows] == ["base", *["facts", "LoRA", "LoRA"] * 2]
    for row in rows:
        assert set(row["recall"]) == {"as taught", "context", "alias", "other paraphrase"}
        assert row["method"] == "base" or row["seconds"] > 0
        assert row.get("off_trigger_change", 0) == 0


def test_what_is_there_is_not_run_again(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    kept = {"method": "facts", "facts": 4, "bytes": 594, "seconds": 0.05}
    (out / "facts-4.json").write_text(json.dumps(kept))
    rows = run("--out", str(out), "--counts", "4", "--lora-shapes", "r8", "--rates", "1e-3")
    assert [row["method"] for row in rows] == ["base", "LoRA r8", "facts with aliases", "LoRA r8 with aliases"]
    names = ["base-4", "facts-4", "facts-with-aliases-4", "lora-r8-0.001-4", "lora-r8-0.001-with-aliases-4"]
    assert sorted(path.stem for path in out.iterdir()) == names
    assert json.loads((out / "facts-4.json").read_text()) == kept
    for row, name in zip(rows, ("base-4", "lora-r8-0.001-4", "facts-with-aliases-4", "lora-r8-0.001-with-aliases-4"), strict=True):
        piece = json.loads((out / f"{name}.json").read_text())
        assert row.items() <= piece.items() and piece["commit"] == "0123abcd" and piece["versions"]["peft"]
        assert piece["settings"]["teaching"]["steps"] == 3


def test_made_up_facts_are_a_thousand_different_ones():
    facts = benchmark.made_up_facts(1000)
    spellings = {text.lower() for fact, other in facts for text in (*fact.spellings, other)}
    assert len(spellings) == 3000 and facts == benchmark.made_up_facts(1000) and facts[:20] == benchmark.made_up_facts(20)
