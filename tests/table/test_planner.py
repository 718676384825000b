"""LookupPlanner: every path gives the same rows; on the CPU the path over the host runs whole, without streams."""

import itertools

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table.costs import VARIABLE, Curve, LookupCosts
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.planner import LookupPlanner
from tiny_engram.table.storage import RowStorage

ROWS = 700
COSTS = LookupCosts(
    zero_copy=Curve(((1, 20.0), (1000, 40.0))),
    cpu_gather=Curve(((1, 60.0), (1000, 65.0))),
    deduplicate=Curve(((1, 10.0), (1000, 11.0))),
)


def filled(head_dim=64, layout="record", home="pageable", rows=ROWS) -> tuple[RowStorage, FillRule]:
    storage = RowStorage.allocate(rows, head_dim, home=home, layout=layout)
    rule = FillRule(head_dim)
    rule.fill(storage)
    return storage, rule


def some_ids(*shape: int, high=ROWS, seed=0, device="cpu") -> torch.Tensor:
    """Ids with duplicates and without, and "no row" among them."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, high, shape, generator=dice)
    return torch.where(torch.rand(shape, generator=dice) < 0.1, -1, ids).to(device)


@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("head_dim", [32, 256])
@pytest.mark.parametrize("path", [None, "cpu_gather"])
def test_rows_are_the_rules_rows(layout, head_dim, path):
    storage, rule = filled(head_dim, layout)
    planner = LookupPlanner(storage, "cpu", chunk_rows=16)
    for seed, shape in enumerate([(), (1,), (0,), (3, 0, 2), (5, 7), (700,), (2, 3, 150), (1300,)]):
        ids = some_ids(*shape, seed=seed)
        rows = planner.lookup(ids, path=path)
        assert rows.shape == (*shape, head_dim) and torch.equal(rows, rule.values(ids))


@pytest.mark.parametrize("path", ["device", "cpu_gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_strides_and_out(path, dtype):
    storage, rule = filled()
    planner = LookupPlanner(storage, "cpu", chunk_rows=16)
    ids = some_ids(40, 60)
    for strided in (ids.t(), ids[::3, 1::2], ids[:, 0].expand(5, 40)):
        assert torch.equal(planner.lookup(strided, dtype=dtype, path=path), rule.values(strided, dtype))
    out = torch.full((40, 60, 64), float("nan"), dtype=dtype)
    assert planner.lookup(ids, out=out, path=path) is out
    assert torch.equal(out, rule.values(ids, dtype))


def test_spans_of_a_large_lookup(monkeypatch):
    monkeypatch.setattr("tiny_engram.table.planner._SPAN", 100)
    storage, rule = filled()
    for share in (0.2, 1.0):  # with and without dropping duplicates
        planner = LookupPlanner(storage, "cpu", chunk_rows=16)
        planner._large_lookups, planner.distinct_share = 10, share
        ids = some_ids(1234)
        assert torch.equal(planner.lookup(ids, path="cpu_gather"), rule.values(ids))
        violations = torch.zeros(2, dtype=torch.int64)
        ids[[250, 251, 900]] = torch.tensor([ROWS + 5, -9, ROWS])
        rows = planner.lookup(ids, path="cpu_gather", bounds="warn", violations=violations)
        assert violations.tolist() == [3, ROWS + 5]
        assert torch.equal(rows, rule.values(torch.where(ids < ROWS, ids, -1)))


@pytest.mark.parametrize("share", [0.0, 0.13, 1.0])
def test_rows_read_in_place_beside_those_over_the_cpu(monkeypatch, share):
    monkeypatch.setattr("tiny_engram.table.planner._SHARED_ROWS", 100)
    storage, rule = filled()
    planner = LookupPlanner(storage, "cpu", chunk_rows=16)
    planner._large_lookups, planner.__dict__["_share"] = 10, share
    ids = some_ids(1234)
    assert torch.equal(planner.lookup(ids, path="cpu_gather"), rule.values(ids))
    for place in (0, 1233):
        wrong = ids.index_fill(0, torch.tensor([place]), ROWS + 5)
        violations = torch.zeros(2, dtype=torch.int64)
        rows = planner.lookup(wrong, path="cpu_gather", bounds="warn", violations=violations)
        assert violations.tolist() == [1, ROWS + 5] and torch.equal(rows, rule.values(torch.where(wrong < ROWS, wrong, -1)))
        with pytest.raises(TableError, match=f"row id {ROWS + 5} is outside"):
            planner.lookup(wrong, path="cpu_gather")
    assert torch.equal(planner.lookup(ids[:90], path="cpu_gather"), rule.values(ids[:90]))


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("path", ["device", "cpu_gather"])
def test_ids_outside_the_table(path, probe):
    storage, rule = filled()
    planner = LookupPlanner(storage, "cpu", chunk_rows=16)
    planner._large_lookups = 0 if probe else 10
    for bad in (ROWS, 2**62, -2, -(2**63)):
        ids = some_ids(600)
        ids[[5, 77]] = bad
        with pytest.raises(TableError, match=rf"row id {bad} is outside \[0, {ROWS}\)"):
            planner.lookup(ids, path=path)
        expected = rule.values(ids.masked_fill(ids == bad, -1))
        assert torch.equal(planner.lookup(ids, bounds="ignore", path=path), expected)
        with pytest.warns(RuntimeWarning, match=f"row id {bad} "):
            assert torch.equal(planner.lookup(ids, bounds="warn", path=path), expected)
        violations = torch.zeros(2, dtype=torch.int64)
        for count in (2, 4):
            assert torch.equal(planner.lookup(ids, bounds="warn", violations=violations, path=path), expected)
            assert violations.tolist() == [count, bad]


@pytest.mark.parametrize("path", ["device", "cpu_gather"])
def test_a_table_without_rows(path):
    planner = LookupPlanner(RowStorage.allocate(0, 32, home="pageable"), "cpu")
    assert planner.lookup(torch.full((3,), -1), path=path).eq(0).all()
    with pytest.raises(TableError, match=r"row id 0 is outside \[0, 0\)"):
        planner.lookup(torch.zeros(3, dtype=torch.int64), path=path)


def test_no_row_at_all():
    planner = LookupPlanner(filled()[0], "cpu")
    for _ in range(4):
        assert planner.lookup(torch.full((900,), -1), path="cpu_gather").eq(0).all()


def test_arguments_that_do_not_fit():
    planner = LookupPlanner(filled()[0], "cpu")
    ids = some_ids(6)
    with pytest.raises(TableError, match=r"int32 on cpu: expected torch.int64 on cpu"):
        planner.lookup(ids.int())
    with pytest.raises(TableError, match="path 'zero_copy' for rows in home 'pageable' and ids on cpu"):
        planner.lookup(ids, path="zero_copy")
    for path in ("device", "cpu_gather"):
        with pytest.raises(TableError, match=r"out \[6, 32\]"):
            planner.lookup(ids, out=torch.empty(6, 32), path=path)
        with pytest.raises(TableError, match="bounds 'loud'"):
            planner.lookup(ids, bounds="loud", path=path)  # pyright: ignore[reportArgumentType]


def test_paths_are_counted_and_explained():
    planner = LookupPlanner(filled()[0], "cpu")
    ids = some_ids(6)
    planner.lookup(ids)
    planner.lookup(ids)
    planner.lookup(ids, path="cpu_gather")
    assert planner.path_counts == {"device": 2, "cpu_gather": 1}
    assert planner.choose(10**6) == "device" and "where they are asked for" in planner.explain()


def test_duplicates_are_looked_for_now_and_then(monkeypatch):
    storage, rule = filled()
    planner = LookupPlanner(storage, "cpu", chunk_rows=64)
    counted = []
    expand = planner._gather.expand
    monkeypatch.setattr(planner._gather, "expand", lambda *a: (counted.append(planner._large_lookups), expand(*a))[1])
    distinct = torch.randperm(ROWS)
    for _ in range(130):
        planner.lookup(distinct, path="cpu_gather")
    assert counted == [1, 2, 64, 128] and planner.distinct_share == 1.0
    twice = torch.arange(1000) % 10
    for _ in range(100):
        assert torch.equal(planner.lookup(twice, path="cpu_gather"), rule.values(twice))
    # Found out at the next probe, and kept up from then on: duplicates are most of the ids.
    assert counted[4:] == list(range(192, 231)) and planner.distinct_share < 0.02
    planner.lookup(twice[:100], path="cpu_gather")
    assert counted[-1] == 230, "a few ids are not worth it"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inference_mode_comes_and_goes(device):
    storage, rule = filled()
    planner = LookupPlanner(storage, device, costs=COSTS, chunk_rows=64)
    for seed, inference in enumerate([True, False, True, False]):
        ids = some_ids(900 + seed, seed=seed, device=device)
        with torch.inference_mode(inference):
            rows = planner.lookup(ids, path="cpu_gather")
        assert torch.equal(rows.cpu(), rule.values(ids.cpu()))


def test_staging_is_bounded():
    planner = LookupPlanner(filled()[0], "cpu", chunk_rows=32)
    for count in (40, 5000, 100):
        planner.lookup(some_ids(count), path="cpu_gather")
    assert 0 < planner.staging_bytes <= 4 * 32 * planner.storage.row_bytes


# -- on a device

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("home", ["pinned", "pageable"])
def test_every_path_gives_the_same_bits(layout, home):
    storage, rule = filled(256, layout, home, rows=20_000)
    assert storage.home == home
    planner = LookupPlanner(storage, "cuda", costs=COSTS, chunk_rows=512)
    paths = ("zero_copy", "cpu_gather", None) if home == "pinned" else ("cpu_gather", None)
    for seed, shape in enumerate([(), (0,), (7,), (31, 24), (5000,), (3, 4000)]):
        for path, dtype in itertools.product(paths, (torch.float32, torch.bfloat16)):
            ids = some_ids(*shape, high=20_000, seed=seed, device="cuda")
            rows = planner.lookup(ids, dtype=dtype, path=path)
            assert rows.is_cuda and torch.equal(rows.cpu(), rule.values(ids.cpu(), dtype)), (shape, path)
            strided = ids.reshape(-1)[::2]
            assert torch.equal(planner.lookup(strided, dtype=dtype, path=path).cpu(), rule.values(strided.cpu(), dtype))


@gpu
@pytest.mark.parametrize("path", ["zero_copy", "cpu_gather"])
def test_ids_outside_the_table_on_a_device(path):
    storage, rule = filled(home="pinned")
    planner = LookupPlanner(storage, "cuda", costs=COSTS)
    ids = some_ids(3000, device="cuda")
    ids[[5, 77]] = ROWS
    expected = rule.values(ids.masked_fill(ids == ROWS, -1).cpu())
    with pytest.raises(TableError, match=rf"row id {ROWS} is outside"):
        planner.lookup(ids, path=path)
    assert torch.equal(planner.lookup(ids, bounds="ignore", path=path).cpu(), expected)
    violations = torch.zeros(2, dtype=torch.int64, device="cuda")
    assert torch.equal(planner.lookup(ids, bounds="warn", violations=violations, path=path).cpu(), expected)
    assert violations.tolist() == [2, ROWS]


@gpu
@pytest.mark.parametrize("layout", ["record", "split"])
@pytest.mark.parametrize("share", [0.0, 0.15])
def test_large_lookups_over_the_cpu_with_rows_read_in_place_meanwhile(layout, share):
    storage, rule = filled(256, layout, "pinned", rows=200_000)
    planner = LookupPlanner(storage, "cuda", costs=COSTS)
    planner._large_lookups, planner.__dict__["_share"] = 10, share
    for seed, count in enumerate((65_535, 65_536, 262_144, 150_001, 1_200_000)):
        ids = some_ids(count, high=200_000, seed=seed, device="cuda")
        first = planner.lookup(ids, dtype=torch.bfloat16, path="cpu_gather")  # nothing waits between the two
        again = planner.lookup(ids.flip(0), dtype=torch.bfloat16, path="cpu_gather")
        assert torch.equal(first, rule.values(ids, torch.bfloat16)) and torch.equal(again.flip(0), first), count
    wrong = some_ids(100_000, high=200_000, device="cuda")
    wrong[-1] = 200_000
    with pytest.raises(TableError, match="row id 200000 is outside"):
        planner.lookup(wrong, path="cpu_gather")


@gpu
def test_the_choice_follows_the_costs():
    storage, _ = filled(home="pinned")
    planner = LookupPlanner(storage, "cuda", costs=COSTS)
    crossing = COSTS.crossing()
    assert crossing > 512 and planner.choose(crossing - 1) == "zero_copy" and planner.choose(crossing) == "cpu_gather"
    assert "zero_copy us" in planner.explain()
    pageable = LookupPlanner(filled()[0], "cuda")
    assert pageable.choose(1) == "cpu_gather" and "not registered" in pageable.explain()
    on_device = RowStorage.allocate(4, 32, home="device")
    assert LookupPlanner(on_device, "cuda").choose(10**6) == "device"
    with pytest.raises(TableError, match="asked for on cpu"):
        LookupPlanner(on_device, "cpu")


@gpu
def test_costs_are_measured_at_the_first_large_lookup(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "costs.json"))
    storage = RowStorage.allocate(300_000, 256, home="pinned")
    planner = LookupPlanner(storage, "cuda")
    planner.lookup(some_ids(100, device="cuda"))
    assert not (tmp_path / "costs.json").exists()
    planner.lookup(some_ids(1000, device="cuda"))
    assert planner.costs.source == "measured" and (tmp_path / "costs.json").exists()
    assert LookupPlanner(storage, "cuda").costs == planner.costs


@gpu
def test_captured_lookups_read_in_place():
    storage, rule = filled(home="pinned")
    planner = LookupPlanner(storage, "cuda", costs=COSTS)
    ids, out = some_ids(5000, device="cuda"), torch.empty(5000, 64, device="cuda")
    violations = torch.zeros(2, dtype=torch.int64, device="cuda")
    planner.lookup(ids, bounds="warn", out=out, violations=violations, path="zero_copy")  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.lookup(ids, bounds="warn", out=out, violations=violations)
    for seed in (1, 2):
        ids.copy_(some_ids(5000, seed=seed, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out.cpu(), rule.values(ids.cpu()))
    assert violations.tolist() == [0, 0]


@gpu
@pytest.mark.parametrize(("home", "bounds", "words"), [("pageable", "warn", "home='pinned'"), ("pinned", "fatal", "bounds='warn'")])
def test_captures_that_would_have_to_wait_are_refused(home, bounds, words):
    planner = LookupPlanner(filled(home=home)[0], "cuda", costs=COSTS)
    ids, other = some_ids(10, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(TableError, match=words):
            planner.lookup(ids, bounds=bounds)
        other.add_(1)
