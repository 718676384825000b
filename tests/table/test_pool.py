"""Rows through a real Mooncake master and real stores: the same rows as here, published whole or not at all, never wrong."""

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tiny_engram.config import HashConfig, LayerConfig
from tiny_engram.errors import TableError
from tiny_engram.layer import EngramLayer
from tiny_engram.table import EngramTable
from tiny_engram.table.pool import MooncakeRows, publish
from tiny_engram.table.pool_format import Manifest, RowCheck
from tiny_engram.table.pool_link import Link
from tiny_engram.table.prefetch import Prefetcher

_spec = importlib.util.spec_from_file_location("pool_cluster", Path(__file__).with_name("pool_cluster.py"))
assert _spec is not None and _spec.loader is not None
cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cluster)


@pytest.fixture(scope="module")
def source():
    return cluster.filled()


@pytest.fixture(scope="module")
def local(source):
    return EngramTable.over(source)


@pytest.fixture(scope="module")
def pool(tmp_path_factory, source):
    """A pool that tests leave as it is: the table stands there as "table"."""
    cluster.need_programs()
    one = cluster.Cluster(tmp_path_factory.mktemp("pool"))
    try:
        one.start()
        publish(one.config(), "table", source, object_bytes=cluster.OBJECT_BYTES)
        yield one
    finally:
        one.stop()


@pytest.fixture
def rows(pool):
    attached = MooncakeRows(pool.config(), "table")
    yield attached
    attached.close()


@pytest.fixture
def raw(pool):
    """Requests to the pool without the care of publish: what an accident may do."""
    link = Link(pool.config())
    yield lambda method, *arguments: link.request(time.monotonic() + 20, method, *arguments), link
    link.close()


# -- the same rows as here


def test_ten_thousand_random_rows_equal_the_local_table(rows, local):
    ids = cluster.random_ids(10_000).reshape(50, 200)
    assert torch.equal(rows.lookup(ids), local.lookup(ids))
    assert (rows.head_dim, len(rows), rows.failures) == (cluster.HEAD_DIM, cluster.ROWS, 0)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_types_repeats_and_no_row(rows, local, shape, dtype):
    ids = torch.randint(-1, 4, shape, generator=torch.Generator().manual_seed(1)) * 5_000 - 1
    ids = torch.where(ids < 0, -1, ids)
    got = rows.lookup(ids, dtype=dtype)
    assert got.dtype == dtype and torch.equal(got, local.lookup(ids, dtype=dtype))


def test_first_and_last_row_and_rows_across_objects(rows, local):
    cut = rows.manifest.rows_per_object
    assert 1 < rows.manifest.objects < 100
    ids = torch.tensor([0, cluster.ROWS - 1, cut - 1, cut, cut + 1, 2 * cut - 1, 2 * cut])
    assert torch.equal(rows.lookup(ids), local.lookup(ids))
    everything = torch.arange(cluster.ROWS)
    assert torch.equal(rows.lookup(everything), local.lookup(everything))


def test_a_lookup_larger_than_the_staging_is_read_in_turns(pool, local):
    small = MooncakeRows(pool.config(staging_bytes=1 << 16), "table")
    ids = cluster.random_ids(2_000, seed=3)
    assert torch.equal(small.lookup(ids), local.lookup(ids))
    small.close()


@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_rows_of_other_widths(pool, head_dim):
    here = cluster.filled(1_000, head_dim, seed=head_dim)
    publish(pool.config(), f"narrow-{head_dim}", here, object_bytes=1 << 14)
    there = MooncakeRows(pool.config(), f"narrow-{head_dim}")
    ids = torch.arange(999, -1, -3)
    assert torch.equal(there.lookup(ids), EngramTable.over(here).lookup(ids))
    there.close()


def test_two_clients_at_once(pool, local):
    clients = [MooncakeRows(pool.config(), "table") for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:  # two threads share each client
        work = [(clients[n % 2], cluster.random_ids(500, seed=n)) for n in range(12)]
        for (_, ids), got in zip(work, threads.map(lambda job: job[0].lookup(job[1]), work), strict=True):
            assert torch.equal(got, local.lookup(ids))
    for client in clients:
        client.close()


def test_an_engram_layer_takes_it(rows, local):
    hashes = HashConfig(max_ngram=3, heads=2, vocab=4_000, pad_id=2, compressed_vocab=500, layer_ids=(1,))
    config = LayerConfig(hash=hashes, layer_id=1, hidden=64, copies=2, head_dim=cluster.HEAD_DIM, form="paper")
    layer = EngramLayer(config, rows)
    x, canonical = torch.randn(1, 6, 2, 64), torch.randint(0, 500, (1, 6))
    got = layer(x, canonical)
    layer.table = local
    assert torch.equal(got, layer(x, canonical)) and not torch.equal(got, x)


def test_a_prefetcher_takes_it(rows, local):
    ahead = Prefetcher(rows, capacity=40, columns=5, device="cpu", dtype=torch.bfloat16)
    for seed in (1, 2):
        ids = cluster.random_ids(200, seed=seed).reshape(40, 5)
        ahead.start(ids)
        assert torch.equal(ahead.wait(), local.lookup(ids, dtype=torch.bfloat16).flatten(1))
    ahead.start(torch.full((3, 5), -1))
    assert not ahead.wait().any()
    with pytest.raises(TableError, match="expected contiguous"):
        rows.lookup(ids, out=torch.empty(3, cluster.HEAD_DIM))


def test_bounds(rows, local):
    ids = torch.tensor([3, cluster.ROWS, -7, -1, 5])
    with pytest.raises(TableError, match=f"row id {cluster.ROWS} is outside"):
        rows.lookup(ids)
    with pytest.warns(RuntimeWarning, match=f"row id {cluster.ROWS} is outside"):
        warned = rows.lookup(ids, bounds="warn")
    ignored = rows.lookup(ids, bounds="ignore")
    assert torch.equal(warned, ignored) and torch.equal(ignored[[0, 4]], local.lookup(ids[[0, 4]]))
    assert not ignored[1:4].any()
    with pytest.raises(TableError, match="expected torch.int64"):
        rows.lookup(ids.int())
    with pytest.raises(TableError, match="row ids are of type list: expected a tensor of torch.int64"):
        rows.lookup([3])


# -- publishing


def test_a_table_is_published_by_its_storage(pool, local):
    with pytest.raises(TableError, match=r"EngramTable gives no rows by range: expected a storage \(\.storage of an EngramTable\)"):
        publish(pool.config(), "by-mistake", local)
    with pytest.raises(TableError, match="no table of this name is published"):
        MooncakeRows(pool.config(), "by-mistake")


class Counted:
    """A source that counts what is read of it."""

    def __init__(self, storage):
        self.storage, self.rows, self.head_dim, self.reads = storage, storage.rows, storage.head_dim, []

    def read(self, first_row, count):
        self.reads.append(first_row)
        return self.storage.read(first_row, count)


def test_a_half_published_table_is_not_there_and_is_continued(pool, source):
    config, digest = pool.config(), "5" * 64

    class Interrupted(Exception):
        pass

    def interrupt(done, rows):
        if done > rows / 2:
            raise Interrupted

    first, second = Counted(source), Counted(source)
    with pytest.raises(Interrupted):
        publish(config, "halves", first, digest=digest, object_bytes=cluster.OBJECT_BYTES, progress=interrupt)
    with pytest.raises(TableError, match="no table of this name is published"):
        MooncakeRows(config, "halves")
    with pytest.raises(TableError, match="no version 5555555555555555 is published"):
        MooncakeRows(config, "halves", digest=digest)
    seen = []
    manifest = publish(config, "halves", second, digest=digest, object_bytes=cluster.OBJECT_BYTES, progress=lambda *at: seen.append(at))
    assert 0 < len(first.reads) < manifest.objects and seen[-1] == (cluster.ROWS, cluster.ROWS)
    assert sorted(first.reads + second.reads) == [index * manifest.rows_per_object for index in range(manifest.objects)]
    MooncakeRows(config, "halves").close()


def test_a_publication_left_in_other_sizes_is_replaced(pool):
    here, config = cluster.filled(2_000, seed=8), pool.config()

    def stop(done, rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(config, "sizes", here, object_bytes=1 << 16, progress=stop)
    publish(config, "sizes", here, object_bytes=1 << 17)
    # Finished now: whoever publishes it again keeps to its sizes.
    assert publish(config, "sizes", here, object_bytes=1 << 16).rows_per_object == (1 << 17) // 272
    there = MooncakeRows(config, "sizes")
    assert torch.equal(there.lookup(torch.arange(2_000)), EngramTable.over(here).lookup(torch.arange(2_000)))
    there.close()


def test_another_digest_is_a_new_version(pool):
    config, ids = pool.config(), torch.arange(0, 500, 7)
    old, new = cluster.filled(500, seed=1), cluster.filled(500, seed=2)
    was = publish(config, "versions", old)
    before = MooncakeRows(config, "versions")
    publish(config, "versions", new)
    after, chosen = MooncakeRows(config, "versions"), MooncakeRows(config, "versions", digest=was.digest)
    for client, right in ((before, old), (after, new), (chosen, old)):
        assert torch.equal(client.lookup(ids), EngramTable.over(right).lookup(ids))
        client.close()


def test_no_room_is_said(pool):
    with pytest.raises(TableError, match=r"pool table 'large' at .*the table is not published: large/.*no memory left in the stores"):
        publish(pool.config(), "large", cluster.filled(400_000), digest="1" * 64, object_bytes=4 << 20)
    with pytest.raises(TableError, match="no table of this name is published"):
        MooncakeRows(pool.config(), "large")


# -- never wrong rows


def test_the_check_knows_its_rows():
    payload, scale = cluster.filled(64).read(0, 64)
    ids, check = torch.arange(64), RowCheck("a" * 64, cluster.HEAD_DIM)
    stored = check.store(0, payload, scale)
    assert stored.shape == (64, 272) and not check.wrong(stored, ids).any()
    views = check.views(stored)
    assert torch.equal(views[0].view(torch.uint8), payload.view(torch.uint8)) and torch.equal(views[1], scale)
    assert check.wrong(stored, ids.roll(1)).all()  # another row
    assert RowCheck("b" * 64, cluster.HEAD_DIM).wrong(stored, ids).all()  # the same row of another version
    assert check.wrong(torch.zeros_like(stored), ids).all() and check.wrong(torch.full_like(stored, 255), ids).all()
    flat = stored[5].clone()
    for bit in range(8 * 272):
        one = flat.clone()
        one[bit // 8] ^= 1 << bit % 8
        assert check.wrong(one[None], ids[5:6]).all(), bit
    torn = stored.clone()
    torn[:63, 136:] = stored[1:, 136:]  # half of one row, half of the next
    assert check.wrong(torn, ids)[:63].all()


def damaged_copy(pool, name, damage, raw):
    """A small table of two objects whose second one is damaged, and its rows here."""
    here = cluster.filled(400, seed=9)
    manifest = publish(pool.config(), name, here, object_bytes=200 * 272)
    ask, link = raw
    key = f"{manifest.prefix}/part-000001"
    stored = RowCheck(manifest.digest, cluster.HEAD_DIM).store(200, *here.read(200, 200)).reshape(-1)
    ask("remove", key)
    changed = damage(stored)
    if changed is not None:
        link.staging[: changed.numel()] = changed
        ask("put", key, changed.numel(), 1)
    return here


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("missing", lambda stored: None, "part-000001 is not in the pool; its store ended, or its master restarted"),
        ("short", lambda stored: stored[: 100 * 272].clone(), "part-000001: "),
        ("zeroed", lambda stored: torch.zeros_like(stored), "200 of 400 rows came back damaged, the first is row 200"),
        ("shifted", lambda stored: stored.roll(272), "rows came back damaged, the first is row 200"),
    ],
)
def test_damage_in_the_pool_is_an_error(pool, raw, name, damage, says):
    here = damaged_copy(pool, name, damage, raw)
    there = MooncakeRows(pool.config(), name)
    sound = torch.arange(200)
    message, _ = cluster.failure(there, torch.arange(400))
    assert says in message and f"pool table '{name}' at {pool.host}:{pool.port}" in message
    # The rest of the table is still read, by a new connection where the old one was given up.
    assert torch.equal(cluster.until_it_answers(there, sound), EngramTable.over(here).lookup(sound))
    there.close()


def test_nonsense_is_refused(pool, source):
    for wrong, says in (
        ({"master": "nowhere"}, "pool master 'nowhere'"),
        ({"master": "host:99999"}, "pool master 'host:99999'"),
        ({"local_host": ""}, "pool local_host"),
        ({"protocol": "udp"}, "pool protocol 'udp'"),
        ({"on_failure": "guess"}, "on_failure 'guess'"),
        ({"timeout_ms": 0}, "pool timeouts 0"),
        ({"staging_bytes": 70_000}, "pool staging_bytes 70000"),
    ):
        with pytest.raises(TableError, match=says):
            pool.config(**wrong)
    for name in ("", "a/b", ".hidden", "x" * 101):
        with pytest.raises(TableError, match="pool name"):
            publish(pool.config(), name, source)
    for wrong in ({"object_bytes": 0}, {"replicas": 0}):
        with pytest.raises(TableError, match="expected 1 or more of each"):
            publish(pool.config(), "table", source, **wrong)
    for blob in (b"", b"[]", b"{}", Manifest.of("t", 5, 32, "0" * 64).encode().replace(b'"rows": 5', b'"rows": 0')):
        with pytest.raises(TableError, match="pool manifest"):
            Manifest.decode(blob)
