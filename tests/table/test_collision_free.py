import pytest
import torch

from tiny_engram.config import HashConfig
from tiny_engram.errors import TableError
from tiny_engram.hashing import NgramHasher
from tiny_engram.quantization import dequantize, quantize
from tiny_engram.table import EngramTable
from tiny_engram.table.collision_free import CollisionFreeTier
from tiny_engram.table.fill_rule import FillRule

VOCAB, PAD, ORDER, COLUMNS, DIM = 50, 2, 3, 4, 32


def random_ids(*shape, seed=0):
    """Canonical ids but the pad."""
    ids = torch.randint(0, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))
    return ids + (ids >= PAD)


def tier_of(keys, columns=COLUMNS, device="cpu"):
    payload, scale = quantize(torch.randn(len(keys), columns, DIM, generator=torch.Generator().manual_seed(5)))
    return CollisionFreeTier(keys, payload, scale, pad_id=PAD, device=device), dequantize(payload, scale)


def plain_search(keys, canonical, blocked, history=None, history_blocked=None):
    """Which key ends where, by tuples; -1 for none."""
    known = {tuple(key): k for k, key in enumerate(keys.tolist())}
    found = torch.full(canonical.shape, -1)
    for b in range(canonical.shape[0]):
        past = [None] * (ORDER - 1) if history is None else history[b].tolist()
        if history is not None and history_blocked is not None:
            past = [None if stop else i for i, stop in zip(past, history_blocked[b].tolist(), strict=True)]
        ids = past + [None if stop else i for i, stop in zip(canonical[b].tolist(), blocked[b].tolist(), strict=True)]
        for t in range(canonical.shape[1]):
            found[b, t] = known.get(tuple(ids[t : t + ORDER]), -1)
    return found


@pytest.mark.parametrize("columns", [COLUMNS, 2])
def test_known_ngrams_have_their_own_rows_and_nothing_else_moves(columns):
    text = random_ids(4, 300)
    blocked = torch.rand(4, 300, generator=torch.Generator().manual_seed(1)) < 0.1
    keys = torch.unique(text.unfold(1, ORDER, 1).reshape(-1, ORDER), dim=0)[::3]
    tier, rows = tier_of(keys, columns)
    history, history_blocked = random_ids(4, ORDER - 1, seed=2), torch.tensor([[False, True], [True, False], [False] * 2, [False] * 2])
    history[2], history[3] = keys[7, :2], keys[8, :2]
    text[2, 0], text[3, 0] = keys[7, 2], keys[8, 2]
    blocked[2, 0], blocked[3, 0] = False, True
    hashed = torch.randn(4, 300, COLUMNS, DIM)
    before = hashed.clone()
    for past in ({}, {"history": history}, {"history": history, "history_blocked": history_blocked}):
        found = plain_search(keys, text, blocked, **past)
        assert int((found >= 0).sum()) > 100
        assert torch.equal(tier.find(text, blocked=blocked, **past) >= 0, found >= 0)
        expected = hashed.clone()
        expected[:, :, COLUMNS - columns :][found >= 0] = rows[found[found >= 0]]
        assert torch.equal(tier.lookup(text, hashed, blocked=blocked, **past), expected)
        if past:
            assert found[2, 0] == 7 and found[3, 0] == -1
    assert torch.equal(hashed, before)


def test_no_ngram_is_found_across_a_gap_or_before_the_text():
    tier, _ = tier_of(torch.tensor([[5, 6, 7]]))
    text = torch.tensor([[5, 6, 7, 5, 6, 7]])
    assert (tier.find(text) >= 0).tolist() == [[False, False, True, False, False, True]]
    for place, expected in ((0, [5]), (1, [5]), (2, [5]), (3, [2]), (4, [2]), (5, [2])):
        blocked = torch.zeros(1, 6, dtype=torch.bool)
        blocked[0, place] = True
        assert (tier.find(text, blocked=blocked)[0] >= 0).nonzero().flatten().tolist() == expected
    assert bool((tier.find(torch.tensor([[6, 7], [PAD, 7]])) == -1).all())
    assert int(tier.find(torch.tensor([[7]]), history=torch.tensor([[5, 6]]))) >= 0


def test_the_whole_ngram_is_compared_not_its_fingerprint(monkeypatch):
    keys = torch.tensor([[5, 6, 7], [8, 9, 10]])
    tier, _ = tier_of(keys)
    # All n-grams of text now have the fingerprint of the first key.
    fingerprint = tier._fingerprints(keys[:1])
    monkeypatch.setattr(CollisionFreeTier, "_fingerprints", lambda self, ngrams: fingerprint.expand(ngrams.shape[:-1]))
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    assert (tier.find(text) >= 0).tolist() == [[False, False, True, False, False, False]]


def test_beside_the_hashed_table():
    config = HashConfig(max_ngram=ORDER, heads=2, vocab=101, pad_id=PAD, compressed_vocab=VOCAB, layer_ids=(0,))
    hasher = NgramHasher(config, 0)
    table = EngramTable.dense(*quantize(torch.randn(hasher.rows_total, DIM)))
    text = random_ids(2, 40)
    keys = torch.unique(text.unfold(1, ORDER, 1).reshape(-1, ORDER), dim=0)[:10]
    tier, rows = tier_of(keys, columns=2)  # the heads of the largest n-gram
    ids = hasher.rows(text)
    hashed = table.lookup(ids, dtype=torch.bfloat16)
    out = tier.lookup(text, hashed)
    known = plain_search(keys, text, torch.zeros_like(text, dtype=torch.bool))
    assert torch.equal(out[:, :, :2], hashed[:, :, :2]) and int((known >= 0).sum()) >= 10
    assert torch.equal(out[known >= 0][:, 2:], rows[known[known >= 0]].bfloat16())
    assert torch.equal(out[known < 0], hashed[known < 0])


def test_ngrams_with_one_fingerprint_get_another_seed(monkeypatch):
    original = CollisionFreeTier._fingerprints
    monkeypatch.setattr(CollisionFreeTier, "_fingerprints", lambda self, grams: original(self, grams) >> (58 if self._seed < 2 else 0))
    keys = torch.unique(random_ids(200, ORDER), dim=0)
    tier, _ = tier_of(keys)
    assert tier._seed == 2 and torch.equal(tier.keys[tier.find(keys)[:, -1]], keys)


def test_empty_tier_and_empty_text():
    tier, _ = tier_of(torch.zeros(0, ORDER, dtype=torch.int64))
    hashed = torch.randn(2, 5, COLUMNS, DIM)
    assert torch.equal(tier.lookup(random_ids(2, 5), hashed), hashed)
    assert tier.lookup(random_ids(2, 0), hashed[:, :0]).shape == (2, 0, COLUMNS, DIM)


def test_refuses_what_does_not_fit():
    keys = torch.tensor([[5, 6, 7], [8, 9, 10], [5, 6, 7]])
    with pytest.raises(TableError, match="1 of 3 n-grams are given twice"):
        tier_of(keys)
    with pytest.raises(TableError, match="pad id 2"):
        tier_of(torch.tensor([[5, PAD, 7]]))
    with pytest.raises(TableError, match="negative id"):
        tier_of(torch.tensor([[5, -1, 7]]))
    with pytest.raises(TableError, match="n of 2 or more"):
        tier_of(torch.tensor([[5]]))
    tier, _ = tier_of(keys[:2])
    with pytest.raises(TableError, match="expected the tier's 4 or more"):
        tier.lookup(random_ids(1, 3), torch.zeros(1, 3, 3, DIM))
    with pytest.raises(TableError, match=r"expected \[1, 3, 'columns', 32\]"):
        tier.lookup(random_ids(1, 3), torch.zeros(1, 4, 4, DIM))
    with pytest.raises(TableError, match="history is"):
        tier.find(random_ids(1, 3), history=random_ids(1, 3))
    with pytest.raises(TableError, match="int32"):
        tier.find(random_ids(1, 3).int())


@pytest.mark.gpu
def test_on_the_device_in_a_graph():
    text = random_ids(4, 64)
    keys = torch.unique(text.unfold(1, ORDER, 1).reshape(-1, ORDER), dim=0)[::2]
    (tier, _), (there, _) = tier_of(keys), tier_of(keys, device="cuda")
    hashed, ids = torch.randn(4, 64, COLUMNS, DIM), torch.zeros(4, 64, dtype=torch.int64, device="cuda")
    rows = hashed.cuda()
    there.lookup(ids, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = there.lookup(ids, rows)
    for wanted in (text, random_ids(4, 64, seed=3), text.flip(0)):
        ids.copy_(wanted)
        graph.replay()
        assert torch.equal(out.cpu(), tier.lookup(wanted, hashed))


def test_arguments_of_the_collision_free_tier():
    keys = torch.tensor([[1, 2, 3]])
    with pytest.raises(TableError, match="columns of 1 or more"):
        CollisionFreeTier(keys, torch.zeros(1, 0, 32, dtype=torch.float8_e4m3fn), torch.zeros(1, 0, 1, dtype=torch.uint8), pad_id=0)
    payload, scale = FillRule(32).rows(torch.zeros(1, 1, dtype=torch.int64))
    tier = CollisionFreeTier(keys, payload, scale, pad_id=0)
    one = torch.zeros(1, 2, dtype=torch.int64)
    for more, words in (
        ({"history": one.expand(5, 2)}, "history is torch.int64"),
        ({"history": one.float()}, "history is torch.float32"),
        ({"blocked": one.bool()}, "blocked is torch.bool"),
        ({"history": one, "history_blocked": one}, "history_blocked is torch.int64"),
    ):
        with pytest.raises(TableError, match=words):
            tier.find(keys, **more)
    assert tier.find(keys, history=one, history_blocked=one.bool()).tolist()[0][-1] >= 0
