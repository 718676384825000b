"""`tiny-engram table` with nonsense: one line on stderr and exit code 2 each time, never a traceback."""

import io
import json
import os
import sys

import pytest
import torch

from tiny_engram.cli import main
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.table_writer import write_table

NUMBER = "9" * 400  # no float holds it


def rows_by_rule(rows, head_dim=32):
    return FillRule(head_dim).rows(torch.arange(rows))


def said(*words):
    """The command ends with an error for the user."""
    assert main([str(word) for word in words]) == 2


@pytest.mark.parametrize(
    "words",
    [
        *((option, NUMBER) for option in ("--batch", "--layers", "--columns", "--row-bytes", "--rows")),
        *(("--layer-time-us", value) for value in ("1e-320", "1e308", "nan")),
        ("--tokens-per-step", "1e308"),
        ("--unique-share", "1e-320"),
        ("--start-us", "1e308"),
        ("--zipf", "1e200", "--hot-rows", "9"),
        ("--zipf", "1", "--hot-rows", NUMBER),
    ],
)
def test_plans_of_nonsense(capsys, words):
    said("table", "plan", "--layers", "43", "--layer-time-us", "56", *words)
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("tiny-engram: ") and len(err) < 300


@pytest.mark.parametrize(
    "figures",
    [
        {"gb_per_s": 1e-320},
        {"gb_per_s": int(NUMBER)},
        {"capacity_gib": int(NUMBER)},
        {"ns_per_row": 1e308},
        {"points": [[int(NUMBER), 1]]},
        {"points": [[1, 1e308]]},
        {"points": [["x" * 10_000, 1]]},
        {"source": "\ud800"},
        {"source": "a\nb"},
    ],
)
def test_plans_of_tiers_that_are_none(tmp_path, capsys, figures):
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps({"tiers": {"a": {"latency_us": 1, "ns_per_row": 1, "gb_per_s": 1, **figures}}}))
    said("table", "plan", "--layers", "43", "--layer-time-us", "56", "--tiers", path)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 500
    costs = {"entries": {"x|264 B|": {"zero_copy": [[int(NUMBER), 1]], "cpu_gather": [[1, 1]]}}}
    path.write_text(json.dumps(costs))
    said("table", "plan", "--layers", "43", "--layer-time-us", "56", "--tiers", path)


def test_conversions_to_places_that_are_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t", rows_by_rule(10))
    for words in ((".",), ("/",), ("",), ("x" * 300,), ("new", "--new-prefix", "a\nb"), (tmp_path, "--shard-bytes", "1"), ("no/t",)):
        said("table", "convert", "t", *words)
        assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["t"]


def test_names_that_are_no_text_are_printed(tmp_path, monkeypatch):
    path = os.fsencode(tmp_path) + b"/t\xff"
    write_table(os.fsdecode(path), rows_by_rule(10))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
    assert main(["table", "inspect", os.fsdecode(path)]) == 0
    assert b"t\\udcff: 10 rows" in out.getvalue()
