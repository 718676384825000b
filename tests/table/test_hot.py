import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table import EngramTable
from tiny_engram.table.hot import HotRows
from tiny_engram.table.prefetch import Prefetcher

ROWS, DIM, HOT = 20_000, 64, 1000


def table_of(rows=ROWS, seed=0, home="pageable", layout="record"):
    """Every byte there is but NaNs, which never equal themselves."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 0x7F, (rows, DIM), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = EngramTable.allocate(rows, DIM, home=home, layout=layout)
    table.storage.write(0, payload, torch.randint(0, 255, (rows, DIM // 32), generator=generator, dtype=torch.uint8))
    return table


class Zipf:
    """Ids that come up with probability 1 / rank, under names that say nothing of the rank."""

    def __init__(self, rows=ROWS, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
        self.names = torch.randperm(rows, generator=self.generator)

    def draw(self, *shape):
        ranks = torch.multinomial(self.weights, torch.Size(shape).numel(), replacement=True, generator=self.generator)
        return self.names[ranks].view(shape)

    def share(self, count):
        """H_K / H_N: what the K most frequent ids get of all reads."""
        return float(self.weights[:count].sum() / self.weights.sum())


def same(hot, table, ids, **more):
    return torch.equal(hot.lookup(ids, **more), table.lookup(ids, **more))


@pytest.mark.parametrize("layout", ["record", "split"])
def test_zipf_traffic_hits_as_often_as_the_law_says(layout):
    table, traffic = table_of(layout=layout), Zipf()
    hot = HotRows(table, capacity_rows=HOT, device="cpu")
    assert same(hot, table, traffic.draw(50, 8)) and hot.hit_rate == 0.0
    for _ in range(5):
        hot.observe(traffic.draw(5000, 8))
    hot.refresh()
    for _ in range(5):
        assert same(hot, table, traffic.draw(4000, 8), dtype=torch.bfloat16)
    assert abs(hot.hit_rate - traffic.share(HOT)) < 0.02  # H_1000 / H_20000 = 0.714
    report = hot.report()
    assert (report.rows, report.capacity, report.refreshes, report.lookups) == (HOT, HOT, 1, 160_000)
    assert report.hits / report.lookups == report.hit_rate == hot.hit_rate and report.nbytes == hot.nbytes
    assert f"{HOT:,} of {HOT:,} hot rows" in str(report)


def test_follows_traffic_that_changes():
    table, first, second = table_of(), Zipf(), Zipf(seed=1)
    hot = HotRows(table, capacity_rows=HOT, device="cpu", window=40_000)
    seen = []

    def rate(traffic):
        before = hot.report()
        hot.lookup(traffic.draw(4000, 8))
        after = hot.report()
        return (after.hits - before.hits) / (after.lookups - before.lookups)

    for traffic in (first, first, *[second] * 12):
        hot.observe(traffic.draw(4000, 8))
        hot.refresh()
        assert same(hot, table, first.draw(500, 8)) and same(hot, table, second.draw(500, 8))
        seen.append((rate(first), rate(second)))
    share = first.share(HOT)
    assert seen[1][0] > share - 0.03 and seen[1][1] < 0.15
    assert seen[3][1] > share - 0.05  # two refreshes on
    assert seen[-1][1] > share - 0.03 and seen[-1][0] < 0.15  # once the counts of the old favourites have decayed


def test_every_hot_row_is_read_from_the_copy():
    table = table_of(300)
    hot = HotRows(table, capacity_rows=40, device="cpu")
    wanted = torch.arange(0, 120, 3)
    hot.observe(wanted)
    hot.refresh()
    hot._payload.zero_()
    found = hot.lookup(torch.arange(300), bounds="ignore")
    touched = ~(found == table.lookup(torch.arange(300))).all(dim=-1)
    assert torch.equal(touched.nonzero().squeeze(1), wanted)


def test_a_refresh_changes_addresses_of_nothing_and_swap_is_what_shows():
    table = table_of(300)
    hot = HotRows(table, capacity_rows=40, device="cpu")
    places = [part.data_ptr() for part in (hot._payload, hot._scale, hot._keys, hot._displacement)]
    hot.observe(torch.arange(40))
    hot.prepare()
    hot.lookup(torch.arange(40))
    assert hot.hit_rate == 0.0
    hot.swap()
    hot.lookup(torch.arange(50))
    assert hot.hit_rate == 0.8
    assert [part.data_ptr() for part in (hot._payload, hot._scale, hot._keys, hot._displacement)] == places
    with pytest.raises(TableError, match="swap was called without prepare"):
        hot.swap()


def test_rows_that_were_written_show_after_a_refresh():
    table, other = table_of(100), table_of(100, seed=1)
    hot = HotRows(table, capacity_rows=10, device="cpu")
    hot.observe(torch.arange(10))
    hot.refresh()
    table.storage.write(0, other.storage.payload, other.storage.scale)
    hot.refresh()
    assert hot.report().rows == 10 and same(hot, other, torch.arange(100))


def test_what_is_observed():
    table = table_of(1000)
    hot = HotRows(table, capacity_rows=8, device="cpu", window=64, decay=0.0)
    hot.observe(torch.full((10,), -1))
    hot.observe(torch.tensor([1000, 5000, -7]))
    hot.refresh()
    assert hot.report().rows == 0 and same(hot, table, torch.arange(1000))
    hot.observe(torch.arange(100))  # more than the window: an even sample
    hot.observe(torch.arange(900, 1000).view(50, 2))
    hot.observe(torch.tensor([3, 3, 3, 4, 4, 5]))
    hot.refresh()
    kept = hot._keys[hot._keys >= 0]
    assert kept.numel() == 8 and {3, 4, 5} <= set(kept.tolist())
    # A sample of many calls sees every column.
    wide = HotRows(table, capacity_rows=8, device="cpu", window=16)
    wide.observe(torch.arange(8).expand(12, 8))
    wide.refresh()
    assert sorted(wide._keys[wide._keys >= 0].tolist()) == list(range(8))


def test_bounds_and_out_are_the_tables():
    table = table_of(100)
    hot = HotRows(table, capacity_rows=10, device="cpu")
    hot.observe(torch.arange(10))
    hot.refresh()
    ids = torch.tensor([[3, -1], [50, 100]])
    with pytest.raises(TableError, match=r"row 100 is not in the table \(1 of 4 missing\): expected 0 to 99, or -1"):
        hot.lookup(ids)
    out = torch.full((2, 2, DIM), 7.0, dtype=torch.float16)
    assert hot.lookup(ids, bounds="warn", out=out) is out and hot.report().out_of_bounds == 1
    assert torch.equal(out, table.lookup(ids, bounds="ignore", dtype=torch.float16))
    with pytest.raises(TableError, match="'nonsense'"):
        hot.lookup(ids, bounds="nonsense")
    with pytest.raises(TableError, match="int32"):
        hot.lookup(ids.int())
    with pytest.raises(TableError, match="int32"):
        hot.observe(ids.int())
    with pytest.raises(TableError, match="row ids are of type list: expected a tensor of torch.int64"):
        hot.observe([3])  # pyright: ignore[reportArgumentType]


def test_over_a_table_that_the_device_cannot_read(monkeypatch):
    table, traffic = table_of(), Zipf()
    hot = HotRows(table, capacity_rows=HOT, device="cpu")
    monkeypatch.setattr(hot, "_readable", False)  # as a mapped file is to a GPU
    hot.observe(traffic.draw(5000, 8))
    hot.refresh()
    ids = traffic.draw(2000, 8)
    out = torch.zeros(2000, 8, DIM)
    assert hot.lookup(ids, out=out) is out and torch.equal(out, table.lookup(ids))
    assert abs(hot.hit_rate - traffic.share(HOT)) < 0.05
    ids[3, 4], ids[5, 6] = ROWS, -1
    assert same(hot, table, ids, bounds="ignore")
    hot.lookup(ids, bounds="warn")
    assert hot.report().out_of_bounds == 1
    with pytest.raises(TableError, match=f"row {ROWS}"):
        hot.lookup(ids)


def test_no_capacity_small_tables_and_what_cannot_be():
    table = table_of(5)
    for capacity in (0, 5, 100):
        hot = HotRows(table, capacity_rows=capacity, device="cpu")
        hot.observe(torch.arange(5))
        hot.refresh()
        assert same(hot, table, torch.tensor([0, 4, -1, 2])) and hot.report().rows == min(capacity, 5) == hot.capacity
    with pytest.raises(TableError, match="virtual"):
        HotRows(EngramTable.virtual(64), capacity_rows=5, device="cpu")
    with pytest.raises(TableError, match="decay 2"):
        HotRows(table, capacity_rows=5, device="cpu", decay=2)


def test_prefetch_over_hot_rows():
    table, traffic = table_of(), Zipf()
    hot = HotRows(table, capacity_rows=HOT, device="cpu")
    ahead = Prefetcher(hot, capacity=64, columns=8, device="cpu", dtype=torch.bfloat16)
    for _ in range(3):
        ids = traffic.draw(8, 8, 8)
        ahead.start(ids)
        hot.observe(ids)
        assert torch.equal(ahead.wait(), table.lookup(ids, dtype=torch.bfloat16).flatten(-2))
        hot.refresh()


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned", "pageable"])
def test_device_hit_rate_and_exact_rows_through_refreshes(home):
    host, traffic = table_of(), Zipf()
    table = host.copy_to(home)
    assert table.storage.home == home
    hot = HotRows(table, capacity_rows=HOT, device="cuda")
    for _ in range(3):
        hot.observe(traffic.draw(20_000, 8).cuda())
        hot.refresh()
        ids = traffic.draw(4000, 8)
        assert torch.equal(hot.lookup(ids.cuda()).cpu(), host.lookup(ids))
    assert abs(hot.hit_rate - traffic.share(HOT)) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_device_graphs_see_each_refresh_and_are_observed(home):
    host, traffic = table_of(), Zipf()
    hot = HotRows(host.copy_to(home), capacity_rows=HOT, device="cuda")
    ids = torch.zeros(4000, 8, dtype=torch.int64, device="cuda")
    out = torch.zeros(4000, 8, DIM, device="cuda")

    def act():
        hot.observe(ids)
        hot.lookup(ids, bounds="warn", out=out)

    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    rates = []
    for _ in range(4):
        for _ in range(4):
            wanted = traffic.draw(4000, 8)
            ids.copy_(wanted)
            graph.replay()
            assert torch.equal(out.cpu(), host.lookup(wanted))
        rates.append(hot.hit_rate)
        hot.refresh()  # by nothing but what replays noted
    assert rates[0] == 0.0 and abs(rates[-1] - traffic.share(HOT)) < 0.03
    with pytest.raises(TableError, match="captured stream"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hot.lookup(ids, bounds="fatal")


@pytest.mark.gpu
def test_device_work_before_a_swap_reads_all_old_rows_and_work_after_it_all_new_ones():
    table = table_of(1000).copy_to("device")
    hot = HotRows(table, capacity_rows=100, device="cuda")
    hot.observe(torch.arange(100, device="cuda"))
    hot.refresh()
    ids = torch.arange(200, device="cuda")
    hot.lookup(ids, bounds="ignore")
    hot.observe(torch.arange(100, 200, device="cuda").repeat(4))
    hot.prepare()
    torch.cuda._sleep(200_000_000)
    before = hot.lookup(ids, bounds="ignore")
    counted = hot._hits.clone()
    hot.swap()
    after = hot.lookup(ids, bounds="ignore")
    assert not torch.cuda.current_stream().query()  # all of it was in line behind the sleep
    assert counted.tolist() == [200, 400] and hot.report().hits == 100
    assert torch.equal(before, table.lookup(ids)) and torch.equal(after, before)
