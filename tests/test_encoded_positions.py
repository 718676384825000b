"""Rows of text states are found by what they hold at each position: through crops, cuts, zeros, casts and lists."""

import numpy as np
import pytest
import torch

from tiny_engram.encoded_positions import EncodedPositions, position_digests


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def known():
    """Two prompts of 12 tokens that begin alike, as an encoder that reads from left to right gives them."""
    made = states(2, 12, 16)
    made[1, :7] = made[0, :7]
    found = EncodedPositions()
    ids = torch.arange(12).repeat(2, 1)
    ids[1, 7:] += 100
    found.note(ids, made)
    return found, made


def test_rows_as_they_are_and_as_half_types_round_them(known):
    found, made = known
    for given in (made, made.half(), made.bfloat16(), made.half().float(), made.flip(0).flip(0)):
        rows = found.find(given)
        assert [row.ids[11] for row in rows] == [11, 111] and all((row.shift, row.first, row.end) == (0, 0, 12) for row in rows)
    assert [row.ids[11] for row in found.find(made.flip(0))] == [111, 11]


def test_a_crop_in_front_moves_positions_and_a_start_token_may_stay(known):
    found, made = known
    (row, _) = found.find(made[:, 4:])
    assert (row.shift, row.first, row.end) == (4, 0, 8)
    (_, row) = found.find(torch.cat([made[:, :1], made[:, 5:]], 1))
    assert (row.shift, row.first, row.end) == (4, 1, 8) and row.ids[11] == 111


def test_zeros_behind_and_in_front_and_lists(known):
    found, made = known
    filled = torch.cat([made, -torch.zeros(2, 5, 16)], 1)
    assert [(row.shift, row.first, row.end) for row in found.find(filled)] == [(0, 0, 12)] * 2
    filled = torch.cat([torch.zeros(2, 5, 16), made], 1)
    assert [(row.shift, row.first, row.end) for row in found.find(filled)] == [(-5, 5, 17)] * 2
    rows = found.find([made[1, :9], made[0], torch.zeros(4, 16)])
    assert [(len(row.ids), row.end) for row in rows] == [(12, 9), (12, 12), (0, 0)] and rows[0].ids[11] == 111


def test_what_the_two_have_in_common_is_either_and_what_is_of_neither_is_told(known):
    found, made = known
    assert found.find(made[:, :7])[0].end == 7  # ids are equal as far as this goes
    mixed = made.clone()
    mixed[0, 8] = made[1, 8]  # one state of another prompt
    changed = made.clone()
    changed[1, 3, 5] += 1e-3
    assert found.find(mixed)[0] is None and found.find(mixed)[1] is not None
    assert found.find(changed)[1] is None
    assert found.find(states(1, 12, 16, seed=5)) == [None]
    assert EncodedPositions().find(made) == [None, None]


def test_equal_states_of_padding_do_not_shift_a_row():
    found, made = EncodedPositions(), states(1, 12, 16)
    made[:, 6:] = made[:, 6:7]
    found.note(torch.arange(12)[None], made)
    (row,) = found.find(made)
    assert row is not None and (row.shift, row.first, row.end) == (0, 0, 12)


def test_several_entries_side_by_side(known):
    found, made = known
    (row, _) = found.find(torch.cat([made, states(2, 12, 32, seed=3)], -1))
    assert (row.shift, row.end) == (0, 12)


def test_the_oldest_are_forgotten_by_bytes():
    found = EncodedPositions(limit=6 * 1000)  # 8 ids and 2 x 3 x 8 digests of 8 bytes: 448 a prompt
    made = states(20, 8, 16)
    for k in range(20):
        found.note(torch.full((1, 8), k), made[k : k + 1])
        found.note(torch.full((1, 8), k), made[k : k + 1])
    assert len(found) == 13 and [row is None for row in found.find(made)] == [True] * 7 + [False] * 13


def test_digests_tell_every_value_and_take_any_float():
    made = states(1, 3, 8)
    base, there = position_digests(made)
    assert there.all() and np.array_equal(position_digests(made.double().float())[0], base)
    for column in range(8):
        other = made.clone()
        other[0, 1, column] = torch.nextafter(other[0, 1, column], torch.tensor(9.0))
        assert (position_digests(other)[0] != base).tolist() == [[False, True, False]]
    swapped = made[..., [1, 0, 2, 3, 4, 5, 6, 7]]
    assert (position_digests(swapped)[0] != base).all()
