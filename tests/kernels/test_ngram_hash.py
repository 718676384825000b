"""The hash against the rule in Python's integers, by both implementations; the kernel runs in Triton's interpreter without a GPU."""

import random

import pytest
import torch

from tiny_engram.kernels.backend import implementation
from tiny_engram.kernels.ngram_hash import ngram_hash

MULTIPLIERS = torch.tensor([7593627661414631, 479593001838623, 3563315849468963])
PRIMES = torch.tensor([[1009, 1013], [1019, 1021]])
PAD = 2


@pytest.fixture(params=["reference", "triton"], autouse=True)
def by(request):
    """Every test runs by each implementation."""
    with implementation(request.param):
        yield request.param


def hashed(ids, **kwargs):
    return ngram_hash(torch.as_tensor(ids), multipliers=MULTIPLIERS, primes=PRIMES, pad_id=PAD, **kwargs)


def by_hand(ids, blocked=None, salt=0, *, past=None, past_blocked=None, multipliers=None, primes=None, pad=PAD):
    """The rule in plain Python integers, for one sequence."""
    multipliers = (MULTIPLIERS if multipliers is None else multipliers).tolist()
    primes = (PRIMES if primes is None else primes).tolist()
    kept = len(multipliers) - 1
    blocked = (past_blocked or [past is None] * kept) + (blocked or [False] * len(ids))
    ids = (past or [pad] * kept) + ids
    salts = salt if isinstance(salt, list) else [salt] * len(ids)
    rows = []
    for t in range(kept, len(ids)):
        running, dead, columns, offset = salts[t - kept], False, [], 0
        for s in range(kept + 1):
            dead = dead or blocked[t - s]
            running ^= (pad if dead else ids[t - s]) * multipliers[s]
            if s:
                for prime in primes[s - 1]:
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


@pytest.mark.parametrize("heads", [1, 3, 8, 24])
def test_any_order_window_type_and_layout(heads):
    draw = random.Random(heads)
    for order in (2, 3, 4, 7):
        batch, length = draw.randint(1, 3), draw.choice((1, order - 1, 40 // heads + 3))
        kind = draw.choice((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
        multipliers = torch.tensor([2 * draw.randrange(2**54) + 1 for _ in range(order)])
        primes = torch.tensor([[draw.randrange(2, 2**31) for _ in range(heads)] for _ in range(order - 1)])
        # Every second id of a longer tensor, and the batch innermost: neither is contiguous.
        ids = torch.tensor([[draw.randrange(128) for _ in range(batch)] for _ in range(2 * length)]).to(kind)[::2].t()
        flags = [[draw.random() < 0.2 for _ in range(length)] for _ in range(batch)]
        salt = [[draw.randrange(2**63) for _ in range(length)] for _ in range(batch)]
        past = [[draw.randrange(128) for _ in range(order - 1)] for _ in range(batch)]
        past_flags = [[draw.random() < 0.3 for _ in range(order - 1)] for _ in range(batch)]
        given = {"blocked": torch.tensor(flags), "salt": torch.tensor(salt)}
        if window := draw.random() < 0.7:
            given |= {"history": torch.tensor(past, dtype=kind), "history_blocked": torch.tensor(past_flags)}
        out = ngram_hash(ids, multipliers=multipliers, primes=primes, pad_id=3, **given)
        for b in range(batch):
            window_of = {"past": past[b], "past_blocked": past_flags[b]} if window else {}
            rule = by_hand(ids[b].tolist(), flags[b], salt[b], multipliers=multipliers, primes=primes, pad=3, **window_of)
            assert out[b].tolist() == rule, (order, batch, length, kind)


@pytest.mark.parametrize(
    "moduli",
    [
        [2, 3, 5, 2**31 - 1, 2**32 + 15, 16_000_057, 2**61 - 1, 2**62 - 57, 2**62 - 1],
        [3, 4, 5, 7, 8, 9, 1021, 2**24, 16_000_057, 2**25 - 39, 2**28, 2**28 + 1, 2**29 - 3, 2**29 - 1],  # all fit the narrow division
        [3, 2**29],  # the least that does not
    ],
)
def test_the_modulo_is_exact_at_the_extremes(moduli):
    around = [m * k + d for m in moduli for k in (1, (2**63 - 2) // m) for d in (-1, 0, 1)]
    values = [x for x in (*around, 0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**62, 2**63 - 2**10) if 0 <= x < 2**63]
    # Id 0 hashes to 0, so the salt alone meets the moduli.
    out = ngram_hash(
        torch.zeros(len(values), dtype=torch.uint8),
        multipliers=torch.tensor([1, 1]),
        primes=torch.tensor([moduli]),
        pad_id=0,
        salt=torch.tensor(values),
    )
    offsets = [sum(moduli[:i]) % 2**64 for i in range(len(moduli))]
    for x, row in zip(values, out.tolist(), strict=True):
        assert [(cell - offset) % 2**64 for cell, offset in zip(row, offsets, strict=True)] == [x % m for m in moduli], x


@pytest.mark.parametrize("primes", [PRIMES, PRIMES << 40], ids=["narrow", "wide"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int8])
def test_ids_below_zero_give_the_rows_that_a_floor_modulo_gives(primes, kind):
    ids = [5, -1, -100, 0, 7, -128]
    given = {"multipliers": MULTIPLIERS, "primes": primes}
    assert ngram_hash(torch.tensor(ids, dtype=kind), pad_id=PAD, **given).tolist() == by_hand(ids, **given)


def test_products_beyond_63_bits_wrap_in_both():
    ids = torch.tensor([2**62 + 5, 3, -(2**63), 2**63 - 1, 2**40])
    with implementation("reference"):
        expected = hashed(ids)
    assert torch.equal(hashed(ids), expected) and bool((expected >= 0).all())


def test_tensors_without_data_go_through_the_op():
    given = {"multipliers": MULTIPLIERS.to("meta"), "primes": PRIMES.to("meta"), "pad_id": PAD}
    out = ngram_hash(torch.zeros(3, 5, dtype=torch.int64, device="meta"), **given)
    assert out.shape == (3, 5, 4) and out.is_meta


def test_golden_rows(golden):
    model = golden["v41"]
    for name in ("hash_layer1", "hash_layer1_position1_blocked"):
        entry = golden[name]
        out = ngram_hash(
            torch.tensor(entry["ids"], dtype=torch.int32),
            multipliers=torch.tensor(model["multipliers_layer1"]),
            primes=torch.tensor(model["primes_layer1"]),
            pad_id=model["pad"],
            blocked=torch.tensor(entry.get("blocked", [0] * len(entry["ids"]))).bool(),
        )
        assert out.tolist() == entry["rows"]


def test_one_row_of_flags_and_salts_serves_the_batch():
    ids, flags = torch.tensor([[[5, 17, 31]], [[9, 8, 7]]]), [False, True, False]
    out = hashed(ids, blocked=torch.tensor(flags), salt=torch.tensor(77), history=torch.tensor([1, 2]))
    assert out.shape == (2, 1, 3, 4)
    for b in range(2):
        assert out[b, 0].tolist() == by_hand(ids[b, 0].tolist(), flags, 77, past=[1, 2], past_blocked=[False, False])


def test_more_tokens_than_one_block():
    ids = [(7 * i * i + 3) % 50 for i in range(1100)]
    assert hashed(ids).tolist() == by_hand(ids)


def test_empty_batch():
    assert hashed(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 4)
    assert hashed(torch.zeros(2, 0, dtype=torch.int64), history=torch.ones(2, 2, dtype=torch.int64)).shape == (2, 0, 4)


def test_the_op_is_sound():
    ids = torch.tensor([[5, 17, 31], [2, 0, 9]], dtype=torch.int16)
    past = torch.tensor([[1, 2], [3, 4]])
    op = torch.ops.tiny_engram.ngram_hash.default
    torch.library.opcheck(op, (ids, MULTIPLIERS, PRIMES, PAD, None, None, None, None))
    torch.library.opcheck(op, (ids, MULTIPLIERS, PRIMES, PAD, ids > 20, past, past > 3, torch.ones(2, 3, dtype=torch.int64)))


def test_compiles_in_one_graph():
    ids = [5, 17, 31, 8]
    step = torch.compile(lambda x: hashed(x + 1) * 2, fullgraph=True, backend="aot_eager")
    assert step(torch.tensor(ids)).tolist() == [[2 * cell for cell in row] for row in by_hand([i + 1 for i in ids])]


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="canonical has dtype torch.float32"):
        hashed(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="history has dtype torch.bool"):
        hashed([1], history=torch.tensor([True, True]))
    with pytest.raises(ValueError, match="salt has dtype torch.int32"):
        hashed([1], salt=torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="blocked has dtype torch.int64"):
        hashed([1], blocked=torch.tensor([1]))
    with pytest.raises(ValueError, match="n - 1 = 2"):
        hashed([1], history=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="without history"):
        hashed([1], history_blocked=torch.tensor([True, True]))
    with pytest.raises(ValueError, match="one device"):
        hashed([1], salt=torch.zeros(1, dtype=torch.int64, device="meta"))
