"""What lookups cost: curves, crossing points, defaults, and the measurement kept on disk."""

import json
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table.costs import VARIABLE, Curve, LookupCosts, cache_path, default_costs, machine_key, measure, resolve

GIB = 1 << 30
MADE = LookupCosts(
    zero_copy=Curve(((100, 10.0), (200, 20.0))),
    cpu_gather=Curve(((100, 50.0), (1100, 60.0))),
    deduplicate=Curve(((100, 5.0), (1100, 6.0))),
    source="measured",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own; returns its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return cache_path()


class Runs:
    """A measurement that counts how often it is made."""

    def __init__(self):
        self.count = 0

    def __call__(self) -> LookupCosts:
        self.count += 1
        return MADE


def resolved(run, key="key", table_bytes=16 * GIB) -> LookupCosts:
    return resolve(key, row_bytes=264, table_bytes=table_bytes, run=run)


def test_curve_between_before_and_beyond_its_points():
    curve = Curve(((100, 10.0), (200, 20.0), (400, 100.0)))
    assert [curve.us(rows) for rows in (1, 100, 150, 200, 300, 400, 800)] == [10, 10, 15, 20, 60, 100, 260]
    noisy = Curve(((100, 10.0), (200, 9.0)))
    assert noisy.us(10_000) == 10.0  # more rows never cost less than nothing


@pytest.mark.parametrize(
    "points", [(), ((1, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0), (1, 1.0)), ((1, -1.0), (2, 1.0))]
)
def test_curves_that_no_measurement_gives(points):
    with pytest.raises(TableError, match="cost points"):
        Curve(points)


def test_the_crossing_is_where_the_choice_changes():
    for costs in (MADE, default_costs(264, 16 * GIB), default_costs(264, GIB), default_costs(4096, 16 * GIB)):
        for distinct in (1.0, 0.3):
            crossing = costs.crossing(distinct)
            assert costs.choose(crossing - 1, distinct) == "zero_copy" and costs.choose(crossing, distinct) == "cpu_gather"
    never = LookupCosts(zero_copy=Curve(((1, 1.0), (2, 1.0))), cpu_gather=MADE.cpu_gather, deduplicate=MADE.deduplicate)
    assert never.crossing() == 1 << 24


def test_defaults_say_what_was_measured():
    large, small = default_costs(264, 16 * GIB), default_costs(264, GIB)
    results = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "table.json").read_text())
    for line in results["sections"]["host_lookup_sweep"]["figures"]["record_16_gib"]:
        if line["rows"] >= 16_384:  # below, the calls cost more than the rows, and one run's differ from the next one's
            assert large.zero_copy.us(line["rows"]) == pytest.approx(line["us"]["zero_copy"], rel=0.05)
            assert large.cpu_gather.us(line["rows"]) == pytest.approx(line["us"]["cpu_gather"], rel=0.05)
        assert line["us"][large.choose(line["rows"])] <= 1.1 * min(line["us"]["zero_copy"], line["us"]["cpu_gather"])
    assert default_costs(1024, 16 * GIB).zero_copy.us(16_384) == 2 * large.zero_copy.us(16_384)
    assert small.crossing() > 1.5 * large.crossing()


def test_both_shares_of_a_lookup_are_ready_at_once():
    costs = LookupCosts(zero_copy=Curve(((1, 1.0), (10, 10.0))), cpu_gather=Curve(((1, 0.15), (10, 1.5))), deduplicate=MADE.deduplicate)
    share = costs.share_in_place(262_144)
    assert costs.zero_copy.us(262_144 * share) == pytest.approx(costs.cpu_gather.us(262_144 * (1 - share)), rel=0.01)
    assert 0.1 < share < 0.2 and default_costs(264, GIB).share_in_place(262_144) == pytest.approx(0.2)
    slow = LookupCosts(zero_copy=Curve(((1, 1e6), (2, 2e6))), cpu_gather=costs.cpu_gather, deduplicate=costs.deduplicate)
    assert slow.share_in_place(262_144) < 1e-6


def test_duplicates_are_looked_for_where_that_pays():
    costs = default_costs(264, 16 * GIB)
    assert not costs.deduplicates(262_144, 1.0) and costs.deduplicates(262_144, 0.3)
    assert not costs.deduplicates(2048, 0.3)
    assert costs.cpu_gather_us(262_144, 0.1) < 0.7 * costs.cpu_gather_us(262_144) == 0.7 * costs.cpu_gather.us(262_144)


def test_explanation_names_both_times_and_the_choice():
    text = MADE.explain()
    assert text.startswith("measured costs, 100% of the ids distinct")
    assert f"from {MADE.crossing():,} rows on" in text
    assert "4,194,304" in text and text.count("\n") > 5


def test_measuring_real_reads_gives_usable_curves():
    table = torch.zeros(1000, 64)
    actions = {name: lambda ids: table[ids] for name in ("zero_copy", "cpu_gather", "deduplicate")}
    costs = measure(actions, rows=1000, device=torch.device("cpu"), repeats=1)
    assert costs.source == "measured" and costs.zero_copy.us(65_536) > costs.zero_copy.us(256) > 0


def test_measured_once_then_read(cache):
    run = Runs()
    assert resolved(run) == resolved(run) == MADE
    assert run.count == 1 and json.loads(cache.read_text())["entries"].keys() == {"key"}
    assert resolved(run, "other") == MADE and run.count == 2
    assert json.loads(cache.read_text())["entries"].keys() == {"key", "other"}
    assert resolved(run) == MADE and run.count == 2


def test_small_tables_are_not_measured(cache):
    run = Runs()
    assert resolved(run, table_bytes=1 << 20) == default_costs(264, 1 << 20)
    assert run.count == 0 and not cache.exists()


def test_the_environment_decides(cache, monkeypatch, tmp_path):
    run = Runs()
    monkeypatch.setenv(VARIABLE, "default")
    assert resolved(run).source == "default" and run.count == 0
    monkeypatch.setenv(VARIABLE, "measure")
    resolved(run)
    resolved(run)
    assert run.count == 2 and cache.exists()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    resolved(run)
    resolved(run)
    assert run.count == 3 and (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    "blob",
    [
        b"\xff\xfe",
        b"{",
        b"[]",
        b'{"format": 99, "entries": {}}',
        b'{"format": 1, "entries": []}',
        b'{"format": 1, "entries": {"key": null}}',
        b'{"format": 1, "entries": {"key": {"zero_copy": []}}}',
        b'{"format": 1, "entries": {"key": {"zero_copy": [[1, NaN], [2, 3]], "cpu_gather": [[1, 1], [2, 3]]}}}',
    ],
)
def test_a_foreign_cache_is_said_once_and_replaced(cache, blob):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(blob)
    run = Runs()
    with pytest.warns(RuntimeWarning, match="cannot use the kept lookup costs") as said:
        assert resolved(run) == MADE
    assert len(said) == 1 and run.count == 1
    assert resolved(run) == MADE and run.count == 1


def test_no_place_to_keep_them(cache):
    cache.parent.parent.write_text("a file where the cache's folder should be")
    run = Runs()
    with pytest.warns(RuntimeWarning, match="cannot use"):
        assert resolved(run) == MADE
    assert run.count == 1


def test_full_device_takes_the_defaults(cache):
    def run() -> LookupCosts:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.warns(RuntimeWarning, match="too little device memory"):
        assert resolved(run).source == "default"
    assert not cache.exists()


def test_keys_tell_machines_and_tables_apart():
    keys = {
        machine_key(torch.device("cpu"), row_bytes, table_bytes, home, layout, gathering)
        for row_bytes in (264, 132)
        for table_bytes in (GIB, 16 * GIB)
        for home in ("pinned", "mapped")
        for layout in ("record", "split")
        for gathering in ("native gather, 16 threads", "torch.index_select")
    }
    assert len(keys) == 32
