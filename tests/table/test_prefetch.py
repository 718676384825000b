import os
import threading
import time

import pytest
import torch

from tiny_engram.config import HashConfig, LayerConfig
from tiny_engram.errors import TableError
from tiny_engram.hashing import NgramHasher
from tiny_engram.layer import EngramLayer
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.mapped import write_pool
from tiny_engram.table.prefetch import Prefetcher, side_stream

ROWS, COLUMNS, DIM = 500, 6, 64
LONG = 100_000_000  # cycles, about a twentieth of a second


def stored(seed=0):
    return quantize(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)))


def ids_of(*lead, seed=0):
    return torch.randint(0, ROWS, (*lead, COLUMNS), generator=torch.Generator().manual_seed(seed))


def prefetcher(table, kind=Prefetcher, capacity=32, device="cpu", dtype=torch.float32, **more):
    return kind(table, capacity=capacity, columns=COLUMNS, device=device, dtype=dtype, **more)


class SlowTable(EngramTable):
    """Takes its time, as page faults or a full bus do."""

    def lookup(self, row_ids, **more):
        if row_ids.is_cuda:
            torch.cuda._sleep(LONG)
        else:
            time.sleep(0.1)
        return super().lookup(row_ids, **more)


class ReadsWithoutWaiting(Prefetcher):
    def _join(self):
        pass


class StartsBeforeTheIds(Prefetcher):
    """On the CPU ids are read when the worker comes to it, on a device the side stream does not wait for them."""

    def _hold(self, row_ids, tokens):
        return super()._hold(row_ids, tokens) if row_ids.is_cuda else row_ids.view(tokens, COLUMNS)

    def branch_off(self):
        """As of now, which is too early: ids are made after it. Without it a capture would not hold the side stream at all."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def _fork(self):
        pass


# -- CPU -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_tokens_and_of_batches(dtype):
    table = EngramTable.dense(*stored())
    ahead = prefetcher(table, dtype=dtype)
    rows = dequantize(*stored()).to(dtype)
    for seed, lead in enumerate([(32,), (4, 8), (1, 1), (0,), (5,), (2, 0)]):
        ids = ids_of(*lead, seed=seed)
        ahead.start(ids)
        out = ahead.wait()
        assert out.dtype == dtype and torch.equal(out, rows[ids].flatten(-2))
        assert out.data_ptr() == ahead.staging.data_ptr() or not out.numel()
    ids = ids_of(8, 4, seed=9).transpose(0, 1)
    ahead.start(ids)
    assert torch.equal(ahead.wait(), rows[ids].flatten(-2))


class MeetingTable(EngramTable):
    """Answers no lookup before four of them are waiting."""

    meeting = threading.Barrier(4, timeout=30)

    def lookup(self, row_ids, **more):
        self.meeting.wait()
        return super().lookup(row_ids, **more)


def test_start_returns_before_the_rows_are_there_and_tables_are_read_side_by_side():
    table = MeetingTable.dense(*stored())
    layers = [prefetcher(table) for _ in range(4)]
    for seed, ahead in enumerate(layers):
        ahead.start(ids_of(3, seed=seed))
    for seed, ahead in enumerate(layers):
        assert torch.equal(ahead.wait(), dequantize(*stored())[ids_of(3, seed=seed)].flatten(-2))


def cpu_steps(kind):
    """Three steps of a decoder that writes the next ids into the same memory; which of them gave the right rows."""
    ahead, right = prefetcher(SlowTable.dense(*stored()), kind), []
    rows, ids = dequantize(*stored()), torch.zeros(2, 3, COLUMNS, dtype=torch.int64)
    for seed in range(3):
        wanted = ids_of(2, 3, seed=seed)
        ids.copy_(wanted)
        ahead.start(ids)
        ids.copy_(ids_of(2, 3, seed=seed + 100))
        right.append(torch.equal(ahead.wait().clone(), rows[wanted].flatten(-2)))
        Prefetcher._join(ahead)
    return right


def test_a_missing_wait_shows():
    assert cpu_steps(Prefetcher) == [True] * 3
    assert cpu_steps(ReadsWithoutWaiting) == [False] * 3
    assert cpu_steps(StartsBeforeTheIds) == [False] * 3


def test_what_fails_in_the_worker_is_raised_by_wait():
    ahead = prefetcher(EngramTable.dense(*stored()))
    ids = ids_of(4)
    ids[2, 1] = ROWS
    ahead.start(ids)
    with pytest.raises(TableError, match=f"row {ROWS}"):
        ahead.wait()
    ahead.start(ids_of(4))
    assert torch.equal(ahead.wait(), dequantize(*stored())[ids_of(4)].flatten(-2))
    reads_zeros = prefetcher(ahead.table, bounds="ignore")
    reads_zeros.start(ids)
    assert not bool(reads_zeros.wait().view(4, COLUMNS, DIM)[2, 1].any())


def test_calls_in_the_wrong_order_and_ids_that_do_not_fit():
    ahead = prefetcher(EngramTable.dense(*stored()), capacity=4)
    with pytest.raises(TableError, match="wait was called without start"):
        ahead.wait()
    for wrong, message in (
        (ids_of(5), "5 tokens, capacity 4"),
        (ids_of(2, 3), "6 tokens, capacity 4"),
        (ids_of(2).int(), "int32"),
        ([[1] * COLUMNS], "row ids are of type list"),
        (ids_of(2)[:, :-1], r"expected torch.int64 \[tokens, 6\]"),
        (ids_of(1, 1, 1), r"\[B, T, 6\]"),
    ):
        with pytest.raises(TableError, match=message):
            ahead.start(wrong)
    ahead.start(ids_of(2))
    with pytest.raises(TableError, match="start was called again before wait: rows of 2 tokens"):
        ahead.start(ids_of(2))
    ahead.wait()
    with pytest.raises(TableError, match="wait was called without start"):
        ahead.wait()
    with pytest.raises(TableError, match="capacity 0"):
        prefetcher(ahead.table, capacity=0)
    with pytest.raises(TableError, match="float64"):
        prefetcher(ahead.table, dtype=torch.float64)


def test_a_layer_reads_what_was_fetched_ahead():
    hashes = HashConfig(max_ngram=3, heads=COLUMNS // 2, vocab=101, pad_id=2, compressed_vocab=90, layer_ids=(0,))
    config = LayerConfig(hash=hashes, layer_id=0, hidden=32, copies=1, head_dim=DIM)
    table = EngramTable.dense(*quantize(torch.randn(NgramHasher(hashes, 0).rows_total, DIM)))
    layer, ahead = EngramLayer(config, table), prefetcher(table)
    canonical, x = torch.randint(0, 90, (2, 5)), torch.randn(2, 5, 1, 32)
    ahead.start(layer.row_ids(canonical))
    with torch.no_grad():
        assert torch.equal(layer(x, canonical, rows=ahead.wait()), layer(x, canonical))


def test_rows_of_a_mapped_table(tmp_path):
    write_pool(tmp_path / "pool", stored())
    table = EngramTable.open(tmp_path / "pool")
    assert table.storage.home == "mapped"
    ahead = prefetcher(table, dtype=torch.bfloat16)
    ahead.start(ids_of(4, 8))
    assert torch.equal(ahead.wait(), dequantize(*stored()).bfloat16()[ids_of(4, 8)].flatten(-2))


def test_works_across_inference_mode():
    with torch.inference_mode():
        ahead = prefetcher(EngramTable.dense(*stored()))
        ahead.start(ids_of(2))
        ahead.wait()
    ahead.start(ids_of(3))
    assert torch.equal(ahead.wait(), dequantize(*stored())[ids_of(3)].flatten(-2))


# -- CUDA ----------------------------------------------------------------------------------------------------------------------


def gpu_table(home, kind=EngramTable):
    table = kind.over(EngramTable.dense(*stored()).copy_to("pinned" if home == "pinned" else "device").storage, bounds="warn")
    # Compiles the kernel, makes the counter: both would have no place in a capture, and compiling takes longer than any sleep.
    EngramTable.lookup(table, ids_of(32).cuda(), bounds="warn")
    EngramTable.lookup(table, ids_of(32).cuda(), bounds="warn", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    return table


def step(ahead, late, source):
    """A step whose ids are late: what a sampler does in a fraction of the time."""
    if isinstance(ahead, StartsBeforeTheIds):
        ahead.branch_off()
    torch.cuda._sleep(LONG)
    late.copy_(source)
    ahead.start(late)
    late.fill_(0)
    out = ahead.wait().clone()
    Prefetcher._join(ahead)  # so that nothing of a step without wait reaches into the next, or past a capture
    return out


def captured(ahead, late, source):
    """The step as a graph: a call replays it and gives its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(ahead, late, source)
    return lambda: (graph.replay(), out)[1]


def gpu_steps(kind, table, graphed):
    """Which of three steps gave the right rows."""
    rows, right = dequantize(*stored()), []
    ahead = prefetcher(table, kind, device="cuda")
    late, source = (torch.zeros(4, 8, COLUMNS, dtype=torch.int64, device="cuda") for _ in range(2))
    step(ahead, late, source)
    act = captured(ahead, late, source) if graphed else lambda: step(ahead, late, source)
    for seed in range(3):
        wanted = ids_of(4, 8, seed=seed)
        source.copy_(wanted)
        out = act()
        torch.cuda.synchronize()
        right.append(torch.equal(out.cpu(), rows[wanted].flatten(-2)))
    return right


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("home", ["device", "pinned"])
def test_device_steps_and_what_each_wait_is_for(home, graphed):
    fast, slow = gpu_table(home), gpu_table(home, SlowTable)
    assert gpu_steps(Prefetcher, fast, graphed) == [True] * 3
    assert gpu_steps(Prefetcher, slow, graphed) == [True] * 3
    assert gpu_steps(ReadsWithoutWaiting, slow, graphed) == [False] * 3
    assert gpu_steps(StartsBeforeTheIds, fast, graphed) == [False] * 3


@pytest.mark.gpu
def test_device_layers_share_a_stream_and_do_not_wait_for_the_host():
    table, rows = gpu_table("pinned", SlowTable), dequantize(*stored())
    layers = [prefetcher(table, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    assert {ahead._stream for ahead in layers} == {side_stream(layers[0].device)}
    wanted = [ids_of(2, 5, seed=seed) for seed in range(3)]
    there = [ids.cuda() for ids in wanted]

    def act():
        torch.cuda.synchronize()
        for ahead, ids in zip(layers, there, strict=True):
            ahead.start(ids)
        return [ahead.wait() for ahead in layers], not torch.cuda.current_stream().query()

    act()  # compiles
    found, waiting = act()
    assert waiting  # the host is through while the device has not read the last rows
    assert all(torch.equal(out.cpu(), rows[ids].flatten(-2).bfloat16()) for out, ids in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_device_memory_of_the_ids_may_be_taken_again_at_once():
    table, rows = gpu_table("device", SlowTable), dequantize(*stored())
    ahead = prefetcher(table, device="cuda")
    wanted = ids_of(32)
    ids = wanted.cuda()
    place = ids.data_ptr()
    ahead.start(ids)
    del ids
    others = [torch.full((32, COLUMNS), 7, dtype=torch.int64, device="cuda") for _ in range(100)]
    assert place in {other.data_ptr() for other in others}
    assert torch.equal(ahead.wait().cpu(), rows[wanted].flatten(-2))


@pytest.mark.gpu
def test_device_refuses_fatal_bounds_and_half_a_pair_under_capture():
    table = gpu_table("pinned")
    ids = ids_of(4).cuda()
    fatal, ahead = prefetcher(table, device="cuda", bounds="fatal"), prefetcher(table, device="cuda")
    with pytest.raises(TableError, match="captured stream"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fatal.start(ids)
    ahead.start(ids)
    with pytest.raises(TableError, match="not captured into a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ahead.wait()
    assert torch.equal(ahead.wait().cpu(), dequantize(*stored())[ids_of(4)].flatten(-2))


def test_a_fork_prefetches_with_a_thread_of_its_own():
    table = EngramTable.dense(*FillRule(32).rows(torch.arange(10)))
    ahead = Prefetcher(table, capacity=4, columns=2, device="cpu", dtype=torch.float32)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    ahead.start(ids)
    child = os.fork()
    if not child:  # no assertion may leave this block: it would run the rest of the tests twice
        import signal

        signal.alarm(20)
        code = 1
        try:
            ahead.wait()
        except TableError as error:
            ahead.start(ids)
            code = 0 if "forked" in str(error) and ahead.wait().shape == (4, 64) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ahead.wait().shape == (4, 64)
