"""The planner on paper: published arithmetic, measured tiers, sums by hand."""

import json
import math
from dataclasses import replace

import pytest

from tiny_engram.errors import TableError
from tiny_engram.table.budget import HotTier, Stack, exposed_us, fetch_us, harmonic, hit_rate, plan, predict
from tiny_engram.table.costs import default_costs
from tiny_engram.table.tiers import DEFAULT_TIERS, Tier, load_tiers, tiers_from_dict

V41_ROWS = (384_006_168, 384_016_682)
TIERS = {tier.name: tier for tier in DEFAULT_TIERS}


def stack(**changes):
    values = dict(layers=40, layer_us=100.0, engram_layers=(1, 14), batch=32, columns=24, row_bytes=264, rows=V41_ROWS[0])
    return Stack(**{**values, **changes})


def tier(**changes):
    return Tier(**{**dict(name="x", latency_us=10.0, ns_per_row=20.0, gb_per_s=50.0, source="test"), **changes})


def test_the_published_window():
    """The CXL pool's arithmetic (arXiv 2603.10087): 16 segments of 320 B per token and Engram layer, 64 layers, 56 us before
    layer 2, 0.7 GB/s.

    Layers are counted from 1 there, so one layer stands before layer 2 and takes 56 us, a step 3.584 ms. 0.7 GB/s is what two
    Engram layers then read per step at batch 256 (0.731), and, which is the same sum, what 8 tokens need inside one window. At the
    published 5,683.7 tokens per second end to end it would be 0.058 GB/s. Batch and layers are our assumption; what is published
    are the window, the bytes and the rate.
    """
    published = stack(layers=64, layer_us=56.0, batch=256, columns=16, row_bytes=320)
    found = plan(published)
    assert found["windows"][0] == {"layer": 1, "us": 56.0} and found["step_us"] == 3584.0
    assert found["demand"]["bytes_per_token"] == 2 * 16 * 320 == 10_240
    assert round(found["demand"]["gb_per_s"], 1) == 0.7 and found["demand"]["gb_per_s"] == pytest.approx(0.7314, abs=1e-4)
    in_window = plan(replace(published, batch=8, engram_layers=(1,)))["demand"]
    assert in_window["gb_per_s_in_windows"] == pytest.approx(found["demand"]["gb_per_s"])
    end_to_end = 5683.7 * found["demand"]["bytes_per_token"] / 1e9
    assert end_to_end == pytest.approx(0.0582, abs=1e-4)
    # 8 tokens hide behind that window on every tier but the disk: latency decides, not the rate.
    hidden = {t["tier"] for t in plan(replace(published, batch=8))["tiers"] if not t["exposed_us"]}
    assert hidden == {"device", "dram zero-copy", "dram gather+dma", "cxl zero-copy", "rdma"}


def test_real_sizes():
    found = plan(stack())
    assert V41_ROWS[0] * 264 == found["table"]["bytes_per_layer"] == 101_377_628_352
    assert round(found["table"]["bytes_per_layer"] / 2**30, 2) == 94.42
    assert round(sum(V41_ROWS) * 264 / 2**30, 2) == 188.83 and round(sum(V41_ROWS) * 256 / 1e9, 1) == 196.6
    assert found["demand"]["bytes_per_token"] == 12_672
    fits = {t["tier"]: t["fits"] for t in found["tiers"]}
    assert fits["device"] is False and fits["dram zero-copy"] is None
    assert plan(stack(rows=10**6))["tiers"][0]["fits"] is True


@pytest.mark.parametrize(
    ("name", "rows", "us", "within"),
    [
        ("device", 16_384, 42.0, 0.0),
        ("device", 262_144, 64.0, 0.2),
        ("device", 4_194_304, 579.0, 0.0),
        ("dram zero-copy", 1_024, 25.0, 0.0),
        ("dram zero-copy", 16_384, 428.0, 0.0),
        ("dram zero-copy", 262_144, 8_500.0, 0.0),
        ("dram gather+dma", 1_024, 29.0, 0.0),
        ("dram gather+dma", 16_384, 135.0, 0.0),
        ("dram gather+dma", 262_144, 1_530.0, 0.0),
    ],
)
def test_measured_tiers_give_what_was_measured(name, rows, us, within):
    assert TIERS[name].fetch_us(rows, 256) == pytest.approx(us, rel=within + 1e-9)


def test_fetch_time_between_and_beyond_the_points():
    line = tier(points=((100, 30.0), (300, 50.0)), gb_per_s=1e9)
    assert [line.fetch_us(rows, 1) for rows in (0, 50, 100, 200, 500)] == pytest.approx([0, 20, 30, 40, 70])
    plain = tier()
    assert plain.fetch_us(1000, 264) == pytest.approx(10 + 20)  # 20 ns a row
    assert plain.fetch_us(1000, 4096) == pytest.approx(10 + 1000 * 4096 / 50e3)  # by bytes
    for some in DEFAULT_TIERS:
        times = [some.fetch_us(2**k, 264) for k in range(24)]
        assert times == sorted(times)


def test_waits_add_up():
    assert exposed_us(stack(), 50.0) == [0.0, 0.0]
    assert exposed_us(stack(), 130.0) == [30.0, 0.0]
    # Layer 1 waits 900 us; layer 14 would begin at 1,400 and now begins at 2,300, long after its rows came at 2,000.
    assert exposed_us(stack(), 1000.0) == [900.0, 0.0]
    # 3,000 and 6,000: the first wait of 2,900 moves layer 14 to 4,300.
    assert exposed_us(stack(), 3000.0) == [2900.0, 1700.0]
    assert exposed_us(stack(start_us=60.0), 50.0) == [10.0, 0.0]
    assert exposed_us(stack(engram_layers=(0,)), 5.0) == [5.0]
    slow = tier(ns_per_row=3000 / 0.768)
    assert fetch_us(stack(), slow) == pytest.approx(3010.0) and predict(stack(), slow) == pytest.approx(2910 + 1710)
    (found,) = plan(stack(), [slow])["tiers"]
    assert found["slowdown"] == pytest.approx(4620 / 4000) and found["layers_needed"] == 31 and found["hides_behind"] == []
    assert plan(stack(), [replace(slow, ns_per_row=1.0)])["tiers"][0]["hides_behind"] == [1, 14]


def test_duplicates_and_tokens():
    assert stack(unique_share=0.5).rows_per_layer == 32 * 24 / 2
    assert stack(tokens_per_sequence=4).rows_per_layer == 4 * 32 * 24
    assert plan(stack(tokens_per_sequence=4))["tokens_per_s"] == pytest.approx(4 * 32 / 4e-3)
    assert predict(stack(unique_share=0.1, batch=2048), TIERS["dram zero-copy"]) < predict(stack(batch=2048), TIERS["dram zero-copy"])
    tight = plan(stack(engram_layers=(0, 3)))["demand"]
    assert tight["gb_per_s_in_windows"] is None


@pytest.mark.parametrize("s", [0.0, 0.5, 0.99, 1.0, 1.01, 1.3, 2.5])
def test_harmonic_numbers(s):
    for count in (0, 1, 7, 1000, 1001, 50_000):
        assert harmonic(count, s) == pytest.approx(math.fsum(k**-s for k in range(1, count + 1)), rel=1e-12)


def test_harmonic_numbers_of_real_tables():
    assert harmonic(10**12, 1.0) == pytest.approx(math.log(10**12) + 0.577215664901533, rel=1e-12)
    assert harmonic(384_006_168, 2.0) == pytest.approx(math.pi**2 / 6, abs=3e-9)
    assert harmonic(V41_ROWS[0], 0.0) == pytest.approx(V41_ROWS[0])


def test_a_hot_tier():
    rows = V41_ROWS[0]
    assert hit_rate(HotTier(s=1.0, rows=rows), rows) == 1 and hit_rate(HotTier(s=1.0, rows=0), rows) == 0
    assert hit_rate(HotTier(s=0.0, rows=rows // 4), rows) == pytest.approx(0.25)
    hot = HotTier(s=1.0, rows=1_000_000)
    expected = harmonic(1_000_000, 1.0) / harmonic(rows, 1.0)
    assert hit_rate(hot, rows) == expected == pytest.approx(0.7074, abs=1e-3)
    busy = stack(batch=512)
    found = plan(busy, DEFAULT_TIERS, hot)["hot"]
    assert found["device_bytes"] == 2 * 264_000_000 and found["hit_rate"] == expected
    zero_copy = next(t for t in found["tiers"] if t["tier"] == "dram zero-copy")
    assert zero_copy["exposed_us"] == pytest.approx(predict(busy, TIERS["dram zero-copy"], hot))
    assert (
        zero_copy["saved_us"] == pytest.approx(predict(busy, TIERS["dram zero-copy"]) - zero_copy["exposed_us"])
        and zero_copy["saved_us"] > 0
    )
    missed = busy.rows_per_layer * (1 - expected)
    assert zero_copy["fetch_us"] == pytest.approx(TIERS["dram zero-copy"].fetch_us(missed, 264))
    assert all(t["tier"] != "device" for t in found["tiers"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"layer_us": -1.0}, "layer_us is -1.0"),
        ({"layer_us": math.nan}, "layer_us is nan"),
        ({"batch": 0}, "batch is 0"),
        ({"unique_share": 1.5}, "unique_share is 1.5, expected at most 1"),
        ({"start_us": -3.0}, "start_us is -3.0"),
        ({"engram_layers": ()}, "engram_layers is"),
        ({"engram_layers": (14, 1)}, "ascending"),
        ({"engram_layers": (1, 40)}, "expected from 0 to 39"),
    ],
)
def test_nonsense_is_refused(changes, words):
    with pytest.raises(TableError, match=words):
        stack(**changes)


def test_tiers_from_a_file(tmp_path):
    path = tmp_path / "tiers.json"

    def loaded(content):
        path.write_text(json.dumps(content))
        return {found.name: found for found in load_tiers(path, 264)}

    given = {"rdma": {"ns_per_row": 50.0}, "tape": {"latency_us": 1e7, "ns_per_row": 1e6, "gb_per_s": 0.4, "capacity_gib": 18e3}}
    found = loaded({"tiers": given})
    assert found["rdma"].ns_per_row == 50 and found["rdma"].latency_us == TIERS["rdma"].latency_us and "tiers.json" in found["rdma"].source
    assert found["tape"].capacity_gib == 18e3 and set(found) == {*TIERS, "tape"} and found["nvme"] == TIERS["nvme"]
    assert loaded({"tiers": {"device": {"latency_us": 2.0}}})["device"].points == ()
    measured = loaded({"tiers": {"cxl zero-copy": {"points": [[10, 5], [1000, 40.0]]}}})["cxl zero-copy"]
    assert measured.fetch_us(1000, 32) == 40.0

    # The cache of the lookup planner's own measurements.
    costs = default_costs(264, 2**34)
    entries = {"H200|16 cores|264 B|2^37 B|pinned|record": costs.to_dict(), "H200|16 cores|512 B|2^37 B|pinned|record": {}}
    cached = loaded({"format": 1, "entries": entries})
    assert cached["dram zero-copy"].source.startswith("measured: H200")
    for rows in (1, 64, 5000, 100_000):
        assert cached["dram zero-copy"].fetch_us(rows, 264) == pytest.approx(costs.zero_copy.us(rows))
    assert cached["dram gather+dma"].fetch_us(10_000, 1) == pytest.approx(costs.cpu_gather.us(10_000))
    assert TIERS["dram gather+dma"].fetch_us(262_144, 512) == pytest.approx(2 * 1_530, rel=0.01)  # wider rows take longer


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "expected {'tiers'"),
        ({"tiers": {}}, "expected {'tiers'"),
        ({"tiers": {"x": 3}}, "tier 'x' has 3"),
        ({"tiers": {"rdma": {"speed": 3}}}, r"unknown \['speed'\]"),
        ({"tiers": {"tape": {"latency_us": 3}}}, r"tier 'tape' lacks \['gb_per_s', 'ns_per_row'\]"),
        ({"tiers": {"rdma": {"latency_us": "3"}}}, "latency_us is '3'"),
        ({"tiers": {"rdma": {"gb_per_s": 0}}}, "gb_per_s is 0"),
        ({"tiers": {"rdma": {"points": [[3, 4], [1, 2]]}}}, "rows ascending"),
        ({"tiers": {"rdma": {"points": 7}}}, "has points 7"),
        ({"entries": {}}, "no costs for rows of 264 B"),
        ({"entries": {"a|264 B|": {"zero_copy": 3}}}, "has zero_copy 3"),
    ],
)
def test_tiers_that_are_none(tmp_path, content, words):
    (tmp_path / "t.json").write_text(json.dumps(content))
    if isinstance(content, dict):
        with pytest.raises(TableError, match=words):
            tiers_from_dict(content, 264)
    with pytest.raises(TableError, match=words if isinstance(content, dict) else "expected a JSON object"):
        load_tiers(tmp_path / "t.json", 264)
    for raw in (b"{", b"\xff"):
        (tmp_path / "t.json").write_bytes(raw)
        with pytest.raises(TableError, match="cannot read the tiers"):
            load_tiers(tmp_path / "t.json", 264)


def test_harmonic_numbers_beside_one():
    for distance in (1e-13, 1e-10, 1e-7):
        for s in (1 - distance, 1 + distance):
            # To first order the sum changes by the integral of log(k) / k.
            change = (1 - s) * math.log(384_006_168) ** 2 / 2
            assert harmonic(384_006_168, s) == pytest.approx(harmonic(384_006_168, 1.0) + change, rel=1e-6)
