"""A pool whose store, master, network or connection dies, stalls or restarts: a bounded wait, an error or zeros, then right rows again."""

import gc
import importlib.util
import subprocess
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table import EngramTable
from tiny_engram.table.pool import MooncakeRows, PoolConfig, publish

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


@pytest.fixture
def pool(tmp_path, source):
    """A pool that the test may break."""
    cluster.need_programs()
    one = cluster.Cluster(tmp_path, client_ttl=5)
    try:
        one.start()
        publish(one.config(), "table", source, object_bytes=cluster.OBJECT_BYTES)
        yield one
    finally:
        one.stop()


def test_nobody_there_is_said_at_once():
    port = cluster.free_port()
    config = PoolConfig(master=f"127.0.0.1:{port}", local_host="127.0.0.1")
    started = time.monotonic()
    with pytest.raises(
        TableError, match=rf"pool table 'table' at 127.0.0.1:{port}, after .*no master answers there \(Connection refused\)"
    ):
        MooncakeRows(config, "table")
    assert time.monotonic() - started < cluster.BOUND_S


def test_a_store_that_dies(pool, source, local):
    pool.start_store()
    publish(pool.config(), "twice", cluster.filled(2_000), replicas=2)
    twice = MooncakeRows(pool.config(timeout_ms=1_000), "twice")
    rows, ids = MooncakeRows(pool.config(timeout_ms=1_000), "table"), torch.arange(0, cluster.ROWS, 400)
    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    killer = threading.Timer(0.1, pool.stores[0].kill)
    killer.start()
    message, seconds = cluster.failure(rows, torch.arange(0, cluster.ROWS, 2))  # 10,000 ranges: still being read when the store dies
    killer.join()
    assert seconds < cluster.BOUND_S and "pool table 'table'" in message
    for _ in range(3):
        message, seconds = cluster.failure(rows, ids)
        assert seconds < cluster.BOUND_S
    assert rows.failures == 4
    # The master forgets what the store held in its own time. Rows that lie twice come back, the others when they are published again.
    cluster.wait_for("the end of the old store", lambda: "is not published any more" in cluster.failure(rows, ids)[0], 30)
    assert torch.equal(cluster.until_it_answers(twice, ids[ids < 2_000]), local.lookup(ids[ids < 2_000]))
    publish(pool.config(), "table", source, object_bytes=cluster.OBJECT_BYTES)
    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    rows.close()
    twice.close()


def test_a_store_and_a_master_that_stall(pool, local):
    rows, ids = MooncakeRows(pool.config(timeout_ms=1_000), "table"), cluster.random_ids(50)
    for process in (pool.stores[0], pool.master):
        right = cluster.until_it_answers(rows, ids)
        assert torch.equal(right, local.lookup(ids))
        with cluster.stopped(process):
            message, seconds = cluster.failure(rows, ids)
            assert 0.9 < seconds < cluster.BOUND_S and "no answer in time" in message and "mooncake_master and the stores" in message
            for _ in range(2):
                message, seconds = cluster.failure(rows, cluster.random_ids(50, seed=5))
                assert seconds < cluster.BOUND_S
        assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    rows.close()


def test_a_master_that_dies_and_restarts_empty(pool, source, local):
    rows, ids = MooncakeRows(pool.config(timeout_ms=1_000), "table"), cluster.random_ids(50)
    pool.master.kill()
    pool.master.wait()
    for _ in range(3):
        assert cluster.failure(rows, ids)[1] < cluster.BOUND_S
    pool.start_master()
    said = "version .* is not published any more; its store ended, or its master restarted and forgot: publish the table again"
    deadline = time.monotonic() + 20
    with pytest.raises(TableError, match=said):
        while True:
            try:
                rows.lookup(ids)
            except TableError as error:
                if "published" in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    give_up = time.monotonic() + 20
    while True:
        try:
            publish(pool.config(), "table", source, object_bytes=cluster.OBJECT_BYTES)
            break
        except TableError as error:  # the new master has no memory before the store has found it
            assert "no memory left" in str(error) and time.monotonic() < give_up, error
            time.sleep(0.2)
    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    rows.close()


def test_zeros_where_the_config_says_so(pool, local):
    rows, ids = MooncakeRows(pool.config(timeout_ms=1_000, on_failure="zero"), "table"), cluster.random_ids(60).reshape(3, 20)
    right = local.lookup(ids)
    for _ in range(2):
        before = rows.failures
        with cluster.stopped(pool.stores[0]):
            started = time.monotonic()
            with pytest.warns(RuntimeWarning, match="pool table 'table' at .*until then rows are read as zeros"):
                got = rows.lookup(ids, dtype=torch.bfloat16)
            assert got.shape == right.shape and got.dtype == torch.bfloat16 and not got.any()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # once an outage
                assert not rows.lookup(ids).any()
            assert time.monotonic() - started < 2 * cluster.BOUND_S and rows.failures == before + 2
            with pytest.raises(TableError, match="outside"):  # a wrong id is no outage
                rows.lookup(torch.tensor([cluster.ROWS]))
        give_up = time.monotonic() + 20
        while not torch.equal(rows.lookup(ids), right):
            assert time.monotonic() < give_up
            time.sleep(0.1)
    rows.close()


def test_between_two_networks_and_a_cable_that_is_cut(tmp_path, source, local):
    cluster.need_programs("ip")
    ids = cluster.random_ids(300)
    with cluster.Cable() as cable:
        with cable.at("a"):
            far = cluster.Cluster(tmp_path, cable.hosts["a"], client_ttl=60)
        try:
            with cable.at("a"):
                far.start()
                publish(far.config(), "table", source, object_bytes=cluster.OBJECT_BYTES)
            with cable.at("b"):
                rows = MooncakeRows(far.config(local_host=cable.hosts["b"], timeout_ms=1_000), "table")
                assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
                for break_it, mend_it in ((cable.cut, cable.mend), (cable.unplug, cable.plug)):
                    break_it()
                    for _ in range(2):
                        message, seconds = cluster.failure(rows, ids)
                        assert seconds < cluster.BOUND_S and f"at {cable.hosts['a']}:" in message and cable.hosts["b"] in message
                    mend_it()
                    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
                rows.close()
            with pytest.raises(TableError, match="no master answers there"):  # from outside there is no way in
                MooncakeRows(far.config(connect_timeout_ms=1_000, local_host="127.0.0.1"), "table")
        finally:
            far.stop()


# -- the connection's process


def test_a_library_that_is_lacking_is_named(pool, tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TableError, match=r"libibverbs.so.1: cannot open.*pip install --editable '\.\[pool\]'.*libibverbs1"):
        MooncakeRows(pool.config(), "table")


def connection_of(rows) -> tuple[subprocess.Popen, Connection]:
    process, channel = rows._link._process, rows._link._channel
    assert process is not None and process.poll() is None and channel is not None
    return process, channel


def test_the_process_may_be_lost_and_ends_with_its_program(pool, local):
    rows, ids = MooncakeRows(pool.config(), "table"), torch.arange(5)
    killed, _ = connection_of(rows)
    killed.kill()
    message, _ = cluster.failure(rows, ids)
    assert "the connection's process ended (status -9)" in message
    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    left_alone, channel = connection_of(rows)
    channel.close()  # as when this program is killed
    assert left_alone.wait(10) == 0
    cluster.failure(rows, ids)
    assert torch.equal(cluster.until_it_answers(rows, ids), local.lookup(ids))
    last, _ = connection_of(rows)
    del rows
    gc.collect()
    assert last.poll() == -9
