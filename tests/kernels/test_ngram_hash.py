import pytest
import torch

from tiny_engram.kernels.ngram_hash import ngram_hash

MULTIPLIERS = torch.tensor([7593627661414631, 479593001838623, 3563315849468963])
PRIMES = torch.tensor([[1009, 1013], [1019, 1021]])
PAD = 2


def hashed(ids, **kwargs):
    return ngram_hash(torch.as_tensor(ids), multipliers=MULTIPLIERS, primes=PRIMES, pad_id=PAD, **kwargs)


def by_hand(ids, blocked=None, salt=0):
    """The rule in plain Python integers, for one sequence."""
    blocked = blocked or [False] * len(ids)
    rows = []
    for t in range(len(ids)):
        running, dead, columns, offset = salt, False, [], 0
        for s in range(3):
            dead = dead or t - s < 0 or blocked[t - s]
            running ^= (PAD if dead else ids[t - s]) * int(MULTIPLIERS[s])
            if s:
                for prime in PRIMES[s - 1].tolist():
                    columns.append(running % prime + offset)
                    offset += prime
        rows.append(columns)
    return rows


@pytest.mark.parametrize("length", [0, 1, 2, 3, 17])
def test_equals_the_rule_in_python_integers(length):
    ids = [(7 * i * i + 3) % 50 for i in range(length)]
    out = hashed(torch.tensor(ids, dtype=torch.int64))
    assert out.shape == (length, 4) and out.dtype == torch.int64
    assert out.tolist() == by_hand(ids)


@pytest.mark.parametrize("blocked", [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
def test_blocked_positions_cut_every_older_look_back(blocked):
    ids = [5, 17, 31, 0, 5]
    flags = [bool(b) for b in blocked]
    assert hashed(ids, blocked=torch.tensor(flags)).tolist() == by_hand(ids, flags)


def test_left_padding_equals_the_sequence_alone():
    ids = [5, 17, 31, 9]
    padded = hashed([[0, 0, *ids], [*ids, 0, 0]], blocked=torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]).bool())
    alone = hashed(ids)
    assert torch.equal(padded[0, 2:], alone)
    assert torch.equal(padded[1, :4], alone)


def test_a_blocked_token_reads_pads_only():
    everything_pad = hashed([PAD])[0]
    out = hashed([5, 17, 31], blocked=torch.tensor([False, True, False]))
    assert torch.equal(out[1], everything_pad)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_history_equals_the_sequence_in_one_piece(split):
    ids = torch.tensor([[5, 17, 31, 9, 40], [1, 2, 3, 4, 5]])
    whole = hashed(ids)
    past = torch.cat((torch.zeros(2, 2, dtype=torch.int64), ids[:, :split]), dim=1)[:, -2:]
    past_blocked = torch.arange(2).expand(2, 2) < 2 - split
    out = hashed(ids[:, split:], history=past, history_blocked=past_blocked)
    assert torch.equal(out, whole[:, split:])


def test_zero_salt_is_the_published_rule_and_another_moves_every_column():
    ids = torch.tensor([5, 17, 31])
    assert torch.equal(hashed(ids, salt=torch.zeros(3, dtype=torch.int64)), hashed(ids))
    salt = torch.full((3,), 0x1234_5678_9ABC_DEF)
    assert hashed(ids, salt=salt).tolist() == by_hand([5, 17, 31], salt=0x1234_5678_9ABC_DEF)


def test_batched_equals_rows_alone():
    ids = torch.randint(0, 50, (3, 2, 7))
    out = hashed(ids)
    assert torch.equal(out[1, 0], hashed(ids[1, 0]))


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="int32"):
        hashed(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="n - 1 = 2"):
        hashed([1], history=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="without history"):
        hashed([1], history_blocked=torch.tensor([True, True]))
