"""benchmarks/llm_facts.py runs through on a tiny model: it checks, teaches, asks and compares; figures of random weights mean nothing."""

import importlib
import json
import os
import subprocess
import sys


def test_dry_run(model, tokenizer, tmp_path, repo_root):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "benchmarks/llm_facts.py", "--dry", "--device", "cpu", "--model", str(tmp_path), "--how", '{"steps": 3}'],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["method"].partition(" ")[0] for row in rows] == ["facts", "LoRA", "LoRA"] * 2
    for row in rows:
        assert row["seconds"] > 0 and set(row["recall"]) == {"as taught", "context", "alias", "other paraphrase"}
        assert row.get("off_trigger_change", 0) == 0


def test_made_up_facts_are_a_thousand_different_ones(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    llm_facts = importlib.import_module("llm_facts")
    facts = llm_facts.made_up_facts(1000)
    spellings = {text.lower() for fact, other in facts for text in (*fact.spellings, other)}
    assert len(spellings) == 3000 and facts == llm_facts.made_up_facts(1000) and facts[:20] == llm_facts.made_up_facts(20)
