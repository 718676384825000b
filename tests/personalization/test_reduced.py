"""The comparison in small, on the CPU: the ordering that the full one shows must hold here too."""

import json
import subprocess
import sys
from statistics import fmean

import pytest

from benchmarks.personalization.selection import FIDELITY, selection_score


@pytest.mark.slow
def test_ours_is_above_textual_inversion(repo_root, tmp_path):
    subprocess.run([sys.executable, "-m", "benchmarks.personalization", "--reduced", "--out", str(tmp_path)], cwd=repo_root, check=True)
    records = json.loads((tmp_path / "results.json").read_text())["stages"]["methods"]
    by_method = {m: [r for r in records if r["method"] == m] for m in ("inversion-t", "lora-unet-r8", "ours")}
    scores = {m: selection_score(own) for m, own in by_method.items()}
    assert scores["ours"] > scores["inversion-t"], scores
    likeness = {m: fmean(r[name] for r in own for name in FIDELITY) for m, own in by_method.items()}
    assert likeness["ours"] > likeness["inversion-t"] + 0.05, likeness
