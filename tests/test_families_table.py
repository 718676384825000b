"""The README's table of families is what the record of the last run gives, and a mode holds only where all of it held."""

from benchmarks.families import NAME, exceptions, family_rows, with_table
from benchmarks.tables import MARKED, load, render
from tiny_engram.pipelines.families import FAMILIES

ABOUT = {"classes": ["APipeline", "BPipeline"], "roles": ["t5"], "refuses": {"deep": "its layers run twice"}, "real_tokenizer": True}
RECORD = {
    "versions": {"torch": "2"},
    "pipelines": [{**ABOUT, "pipeline": "a:1", "family": "a"}, {**ABOUT, "pipeline": "a:2", "family": "a", "real_tokenizer": False}],
    "results": [
        {"pipeline": "a:1", "mode": "span", "check": "fires", "result": "passed"},
        {"pipeline": "a:2", "mode": "span", "check": "fires", "result": "passed"},
        {"pipeline": "a:1", "mode": "input", "check": "fires", "result": "passed"},
        {"pipeline": "a:2", "mode": "input", "check": "fires", "result": "failed"},
        {"pipeline": "a:1", "mode": "", "check": "draws", "result": "passed"},
    ],
}


def test_a_mode_holds_where_all_of_it_held():
    (row,) = family_rows(RECORD)
    assert row["modes that hold"] == "span" and row["checks passed"] == "4 of 5" and row["pipelines tried"] == "a:1, a:2"
    assert row["classes"] == 2 and row["published tokenizer"] == "no"
    assert exceptions(RECORD) == ["a:2, fires (input): failed", "a has no deep: its layers run twice"]
    assert "a:2, fires (input): failed; a has no deep: its layers run twice." in with_table(RECORD)["note"]


def test_the_readme_says_what_the_record_gives(repo_root):
    report = load(NAME)
    shown = next(found["old"] for found in MARKED.finditer((repo_root / "README.md").read_text()) if found["name"] == NAME)
    assert shown == render(with_table(report), f"benchmarks/results/{NAME}.json")


def test_the_record_is_of_every_family():
    rows = load(NAME)["table"]
    assert {row["family"] for row in rows} == {family.name for family in FAMILIES} and len(rows) == len(FAMILIES)
