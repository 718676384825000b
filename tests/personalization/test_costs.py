"""What a method costs: figures that agree with the method's own, and zeros where ours promises them."""

from types import SimpleNamespace

import pytest

from benchmarks.personalization.costs import measure, trigger_free
from benchmarks.personalization.plan import Settings

SETTINGS = Settings(steps=1, main=1, checkpoints=(1,), batch=1, drawing_steps=1)
FEW, TEXTS = {"timed": 1, "warm": 0}, {"texts": 7, "pictures": 1}


@pytest.fixture(scope="module")
def bench(base, subjects, taught):
    return SimpleNamespace(base=base, subjects=subjects, taught_to=lambda adapters, _: [taught[run.subject] for run in adapters.runs])


def test_ours_costs_little_and_changes_nothing_elsewhere(bench, run):
    lines = []
    found = measure(bench, run("ours", "spot", plain=False, collage=0), SETTINGS, say=lines.append, **FEW)
    assert found["steps_timed"] == 1 and found["batch"] == 1 and found["step_seconds"] > 0
    assert found["step_ratio"] == pytest.approx(found["step_seconds"] / found["bare_seconds"], rel=2)
    assert found["bytes"] * 25 <= 265_216 and found["values"] > 0
    assert min(found["peak_bytes"], found["bare_peak_bytes"]) > 100 * 2**20  # the base's own weights are 75 MiB
    found = trigger_free(bench, run("ours", "spot", plain=False, collage=0), SETTINGS, say=lines.append, **TEXTS)
    assert [kind for at in ("trigger_free", "shipped") for kind, d in found[at].items() if isinstance(d, dict) and d["max"] > 0] == []
    assert len(lines) == 2 and all(line.startswith("ours: ") for line in lines)


@pytest.mark.slow
def test_a_run_that_no_file_can_hold_says_so(bench, run):
    one = run("ours", "spot", norm="plain")
    found = trigger_free(bench, one, SETTINGS, **TEXTS)
    assert "shipped" not in found and "concept file" in found["not_shipped"] and found["trigger_free"]["conditioning"]["max"] == 0
    assert measure(bench, one, SETTINGS, **FEW)["options"] == dict(one.options)
