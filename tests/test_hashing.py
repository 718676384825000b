import hashlib

import pytest
import torch

from tiny_engram.config import ConceptConfig, HashConfig
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.hashing import HashHistory, NgramHasher, layer_multipliers, next_primes


@pytest.fixture(scope="module")
def v41(golden):
    entry = golden["v41"]
    return HashConfig(
        max_ngram=entry["max_ngram"],
        heads=entry["heads"],
        vocab=entry["vocab"],
        pad_id=entry["pad"],
        compressed_vocab=entry["compressed_vocab"],
        layer_ids=tuple(entry["layer_ids"]),
    )


@pytest.fixture(scope="module")
def hasher(v41):
    return NgramHasher(v41, 1)


def test_golden_primes_multipliers_and_totals(golden, v41, hasher):
    assert hasher.primes.tolist() == golden["v41"]["primes_layer1"]
    assert hasher.multipliers.tolist() == golden["v41"]["multipliers_layer1"]
    assert hasher.rows_total == golden["v41"]["rows_layer1"] == 384_006_168
    second = NgramHasher(v41, 14)
    assert second.rows_total == 384_016_682
    assert hasher.rows_total + second.rows_total == 768_022_850


def test_golden_rows(golden, hasher):
    entry = golden["hash_layer1"]
    rows = hasher.rows(torch.tensor(entry["ids"]))
    assert rows.tolist() == entry["rows"]
    assert hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest() == entry["sha256_int64_le"]


def test_golden_blocked_rows(golden, hasher):
    entry = golden["hash_layer1_position1_blocked"]
    assert hasher.rows(torch.tensor(entry["ids"]), blocked=torch.tensor(entry["blocked"]).bool()).tolist() == entry["rows"]


def test_golden_small_config(golden):
    entry = golden["small"]
    # The file names one size: it is the table's per head and the compressed vocabulary's at once.
    config = HashConfig(
        max_ngram=entry["n"],
        heads=entry["heads"],
        vocab=entry["vocab"],
        pad_id=0,
        compressed_vocab=entry["vocab"],
        layer_ids=tuple(entry["layers"]),
    )
    for place, layer_id in enumerate(entry["layers"]):
        hasher = NgramHasher(config, layer_id)
        assert hasher.primes.tolist() == entry["primes"][place]
        assert hasher.multipliers.tolist() == entry["multipliers"][str(layer_id)]


def test_layer_order_moves_primes_and_layer_id_moves_multipliers():
    settings = {"max_ngram": 3, "heads": 2, "vocab": 1000, "pad_id": 0, "compressed_vocab": 500}
    forward, backward = (HashConfig(**settings, layer_ids=order) for order in ((1, 2), (2, 1)))
    assert torch.equal(NgramHasher(forward, 1).primes, NgramHasher(backward, 2).primes)
    assert torch.equal(NgramHasher(forward, 1).multipliers, NgramHasher(backward, 1).multipliers)
    assert not torch.equal(NgramHasher(forward, 1).multipliers, NgramHasher(forward, 2).multipliers)


def test_primes():
    assert next_primes(0, 5) == (2, 3, 5, 7, 11)
    assert next_primes(997, 2) == (997, 1009)
    sieve = [n for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert list(next_primes(2, len(sieve))) == sieve
    assert next_primes(2**31, 1) == (2147483659,)
    assert next_primes(3215031751, 1) != (3215031751,)  # a strong pseudoprime to bases 2, 3, 5 and 7


@pytest.mark.parametrize("compressed_vocab", [2, 500, 99_092, 2**40])
def test_products_stay_below_2_to_63(compressed_vocab):
    for multiplier in layer_multipliers(0, 3, 5, compressed_vocab).tolist():
        assert multiplier % 2 == 1 and 0 < multiplier * (compressed_vocab - 1) < 2**63


def test_rows_fall_into_their_own_column(hasher):
    rows = hasher.rows(torch.randint(0, 99_092, (4, 50), generator=torch.Generator().manual_seed(0)))
    ends = hasher.primes.flatten().cumsum(0)
    assert rows.shape == (4, 50, 24)
    assert (rows < ends).all() and (rows >= ends - hasher.primes.flatten()).all()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_sequences_shorter_than_n(hasher, length):
    ids = torch.tensor([7, 8, 9])[:length]
    assert torch.equal(hasher.rows(ids), hasher.rows(torch.tensor([7, 8, 9]))[:length])


def test_concept_hash_has_2_to_31_addresses_a_column():
    config = ConceptConfig().hash_config(width=768, compressed_vocab=40_000, pad_id=1, mounts=2)
    primes = [NgramHasher(config, mount).primes.flatten().tolist() for mount in (0, 1)]
    flat = primes[0] + primes[1]
    assert flat == sorted(set(flat)) and flat[0] >= 2**31 and len(flat) == 48


def test_unknown_layer_is_named(v41):
    with pytest.raises(ConfigError, match=r"layer_id is 2: expected one of \[1, 14\]"):
        NgramHasher(v41, 2)


def test_golden_history(golden):
    entry = golden["history_commit"]
    for accepted, expected in entry["committed"].items():
        history = HashHistory(entry["n_minus_1"] + 1)
        history.commit(torch.tensor([entry["history"]]))
        history.commit(torch.tensor([entry["block"]]), int(accepted))
        assert history.ids.tolist() == [expected] and not history.blocked.any()


def test_decoding_step_by_step_equals_the_whole_sequence(hasher):
    ids = torch.randint(0, 99_092, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = hasher.rows(ids)
    history = HashHistory(4, requests=3)
    history.commit(ids[:, :2])  # a prefill shorter than n - 1
    for t in range(2, 12):
        rows = hasher.rows(ids[:, t : t + 1], history=history.ids, history_blocked=history.blocked)
        assert torch.equal(rows[:, 0], whole[:, t])
        history.commit(ids[:, t : t + 1])


def test_verification_commits_only_what_was_accepted(hasher):
    true_ids = torch.tensor([[10, 11, 12, 20, 21, 30], [10, 11, 12, 20, 30, 31]])
    history = HashHistory(4, requests=2)
    history.commit(true_ids[:, :3])
    before = history.ids.clone()
    drafts = torch.tensor([[20, 21, 99, 99], [20, 98, 98, 0]])
    hasher.rows(drafts, history=history.ids, history_blocked=history.blocked)
    assert torch.equal(history.ids, before)
    history.commit(drafts, torch.tensor([2, 1]))
    assert history.ids.tolist() == [[12, 20, 21], [11, 12, 20]]


def test_padding_rows_never_commit_and_reset_forgets():
    history = HashHistory(3, requests=2)
    history.commit(torch.tensor([[5], [6]]), torch.tensor([1, 0]), blocked=torch.tensor([[True], [False]]))
    assert history.blocked.tolist() == [[True, True], [True, True]] and history.ids[0].tolist() == [0, 5]
    history.commit(torch.tensor([[7], [8]]))
    assert history.blocked.tolist() == [[True, False], [True, False]]
    history.reset([0])
    assert history.blocked.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("accepted", [-1, 3])
def test_history_refuses_what_the_block_does_not_hold(accepted):
    history = HashHistory(3)
    with pytest.raises(TinyEngramError, match=r"expected 0\.\.2"):
        history.commit(torch.tensor([[1, 2]]), accepted)
    with pytest.raises(TinyEngramError, match="1 requests"):
        history.commit(torch.tensor([[1], [2]]))
    assert history.blocked.all()
