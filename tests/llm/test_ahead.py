"""Rows of stored tables are read beside the layers before theirs: the same bits, and no two calls share memory."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm import EngramLayers
from tiny_engram.llm.ahead import Ahead
from tiny_engram.table import EngramTable
from tiny_engram.table.hot import HotRows

WAIT = 20  # seconds, before a test that hangs says so


@pytest.fixture
def stored(build, attach, tokenizer, tmp_path, text):
    """A model with Engram over mapped tables, and a function for logits by lookups in the rows as they were learned."""
    model = build()
    learned = attach(model)
    learned.save_pretrained(tmp_path)
    learned.detach()
    direct = build()
    reference = attach(direct)
    engrams = EngramLayers.from_pretrained(model, tmp_path, tokenizer)
    assert not engrams.learned and reference.learned
    return model, engrams, lambda ids: direct(ids).logits


class Watched:
    """A table's rows; `before` and `after` are called around every lookup."""

    def __init__(self, table, before=lambda: None, after=lambda: None):
        self.table, self.before, self.after = table, before, after
        self.threads = []

    @property
    def head_dim(self):
        return self.table.head_dim

    def lookup(self, row_ids, **options):
        self.threads.append(threading.current_thread())
        self.before()
        rows = self.table.lookup(row_ids, **options)
        self.after()
        return rows


@torch.no_grad()
def test_reading_begins_before_the_first_layer_and_ends_beside_it(stored, text):
    model, engrams, direct = stored
    begun, layer, ended = threading.Event(), threading.Event(), threading.Event()

    def before():
        begun.set()
        assert layer.wait(WAIT), "the first layer waits for rows of the second"

    def beside(module, args):
        assert begun.wait(WAIT), "no reading is under way in the first layer"
        layer.set()
        assert ended.wait(WAIT)

    rows = Watched(engrams.stored(1), before, ended.set)
    engrams.use_rows(1, rows)
    model.model.layers[0].register_forward_pre_hook(beside)
    assert torch.equal(model(text()).logits, direct(text()))
    assert len(rows.threads) == 1 and rows.threads[0] is not threading.current_thread()


@torch.no_grad()
def test_calls_on_many_threads_do_not_share_memory(stored, text):
    model, engrams, direct = stored
    texts = [text(1, 9, seed=seed) for seed in range(4)]
    expected = [direct(ids) for ids in texts]
    lagging = iter([0.02, 0.0, 0.01, 0.0, 0.03] * 100)
    for layer in engrams.layers:
        engrams.use_rows(layer, Watched(engrams.stored(layer), after=lambda: time.sleep(next(lagging))))
    wrong = []

    def work(number):
        with torch.no_grad():
            for _ in range(4):
                if not torch.equal(model(texts[number]).logits, expected[number]):
                    wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))  # raises what a thread raised
    assert not wrong


@torch.no_grad()
def test_a_call_that_fails_halfway_leaves_nothing_under_way(stored, text):
    model, _, direct = stored

    def fail(module, args):
        raise MemoryError("no room")

    handle = model.model.layers[0].register_forward_pre_hook(fail)
    for seed in range(3):
        with pytest.raises(MemoryError):
            model(text(seed=seed))
    handle.remove()
    assert torch.equal(model(text()).logits, direct(text()))


def test_gradients_see_the_rows_of_their_own_call(stored, attach, build, text):
    model, engrams, _ = stored
    other = build()
    direct = attach(other)
    losses = []
    for module, each in ((model, engrams), (other, direct)):
        each.engrams.requires_grad_(True)
        first = module(text(), labels=text()).loss
        second = module(text(seed=5), labels=text(seed=5)).loss  # a call in between, in whose memory the rows would be
        (first + 2 * second).backward()
        losses.append(second)
    assert torch.equal(*losses)
    grads = {name: p.grad for name, p in direct.engrams.named_parameters() if ".table." not in name}
    found = {name: p.grad for name, p in engrams.engrams.named_parameters()}
    assert grads.keys() == found.keys() and all(torch.equal(grad, found[name]) for name, grad in grads.items())


@torch.no_grad()
def test_a_text_too_long_to_be_read_ahead(stored):
    _, engrams, _ = stored
    table = engrams.stored(1)
    ahead = Ahead(table, 4)
    ids = torch.randint(0, len(table), (3, 1367, 4))
    assert ahead.begin(ids, torch.float32) is None and ahead.begin(ids[:, :0], torch.float32) is None
    for _ in range(2):
        coming = ahead.begin(ids[:, :1000], torch.float32)
        assert coming is not None
        assert torch.equal(coming.wait(), table.lookup(ids[:, :1000]).flatten(-2))
        coming.done()
    assert sum(len(idle) for idle in ahead._idle.values()) == 1  # the second read used the memory of the first


@torch.no_grad()
def test_hot_rows_in_front_of_a_table(stored, text, tmp_path):
    model, engrams, direct = stored
    hot = HotRows(engrams.stored(2), capacity_rows=200, device="cpu", window=4096)
    engrams.use_rows(2, hot)
    assert torch.equal(model(text()).logits, direct(text()))
    assert hot.hit_rate == 0
    hot.refresh()  # the ids of the call were noted
    assert torch.equal(model(text()).logits, direct(text())) and hot.hit_rate == 1
    assert torch.equal(model(text(seed=7)).logits, direct(text(seed=7))) and 0 < hot.hit_rate < 1
    assert engrams.stored(2) is hot.table
    engrams.save_pretrained(tmp_path / "again")


@torch.no_grad()
def test_rows_that_do_not_fit_are_refused(stored, text):
    model, engrams, direct = stored
    with pytest.raises(TinyEngramError, match=r"layer 0 has no Engram: expected one of \[1, 2\]"):
        engrams.use_rows(0, engrams.stored(1))
    with pytest.raises(TinyEngramError, match="rows have 64 values: expected 32"):
        engrams.use_rows(1, EngramTable.virtual(64))
    assert torch.equal(model(text()).logits, direct(text()))
    engrams.use_rows(1, Watched(engrams.stored(1)))
    with pytest.raises(TinyEngramError, match="layer 1 reads from Watched: expected an EngramTable"):
        engrams.stored(1)


@torch.no_grad()
def test_copies_of_a_model_with_tables(stored, text):
    model, _, direct = stored
    model(text(seed=9))  # with memory of reads that are over
    copied = copy.deepcopy(model)
    assert torch.equal(copied(text()).logits, direct(text())) and torch.equal(model(text()).logits, direct(text()))


@torch.no_grad()
def test_tables_in_a_graph(stored, text):
    model, _, direct = stored
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(step(text(), use_cache=False).logits, direct(text()))
    torch.compiler.reset()
