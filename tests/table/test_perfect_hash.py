import numpy as np
import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.hot_gather import EMPTY, bucket_of, mix, probe
from tiny_engram.table.perfect_hash import PerfectHash, index_shape

LARGEST = (1 << 63) - 1


def drawn(count, seed=0, high=1 << 62):
    return torch.unique(torch.randint(0, high, (count * 2,), generator=torch.Generator().manual_seed(seed)))[:count]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 17, 100, 4097])
def test_every_key_has_a_slot_of_its_own(count):
    for seed in range(20 if count < 100 else 1):
        keys = drawn(count, seed)[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
        index = PerfectHash.build(keys)
        slots = index.slots(keys)
        assert torch.equal(index.keys[slots], keys) and slots.unique().numel() == count
        assert int((index.keys == EMPTY).sum()) == index.keys.numel() - count
        assert count < 100 or 1.03 <= index.keys.numel() / count <= 1.25


def test_foreign_ids_are_never_found():
    keys = drawn(2000)
    index = PerfectHash.build(keys, capacity=2500)
    foreign = torch.cat((keys + 1, keys ^ (1 << 40), torch.arange(-3000, 3000), torch.tensor([-1, LARGEST, -LARGEST - 1])))
    foreign = foreign[~torch.isin(foreign, keys)]
    assert foreign.numel() > 9000 and bool((index.slots(foreign) == -1).all())


def test_the_check_of_the_whole_key_is_what_refuses_them():
    keys = torch.arange(1000)
    index = PerfectHash.build(keys)
    foreign = torch.arange(1000, 9000)
    # Every foreign id lands on some slot: an index that trusted the hash alone would find most of them.
    claimed = PerfectHash(torch.where(index.keys == EMPTY, index.keys, 0), index.displacement)
    landed = probe(claimed.keys, claimed.displacement, foreign)
    assert bool((landed == -1).all()) and bool((index.slots(foreign) == -1).all())
    trusting = index.displacement[_bucket(foreign, index)].to(torch.int64)
    assert int((index.keys[_slot(foreign, trusting, index)] != EMPTY).sum()) > 6000


def _bucket(ids, index):
    from tiny_engram.kernels.hot_gather import bucket_of

    return bucket_of(mix(ids), index.displacement.shape[0])


def _slot(ids, displacement, index):
    from tiny_engram.kernels.hot_gather import slot_of

    return slot_of(mix(ids), displacement, index.keys.shape[0])


@pytest.mark.parametrize("keys", [torch.arange(30_000), torch.arange(30_000) << 33, LARGEST - torch.arange(30_000) * 65536])
def test_regular_keys_are_no_harder(keys):
    index = PerfectHash.build(keys)
    assert torch.equal(index.keys[index.slots(keys)], keys) and int(index.displacement.max()) < 20_000


def test_the_shape_depends_on_the_capacity_alone():
    shapes = {(part.keys.numel(), part.displacement.numel()) for part in (PerfectHash.build(drawn(k), capacity=999) for k in (0, 1, 999))}
    assert shapes == {index_shape(999)}


def test_numpy_and_torch_mix_to_the_same_bits():
    values = torch.cat((drawn(5000), -drawn(5000, 1), torch.tensor([0, -1, LARGEST, -LARGEST - 1])))
    assert np.array_equal(mix(values.numpy()), mix(values).numpy())
    assert mix(values).unique().numel() == values.unique().numel()
    # splitmix64 of 0 and its next states, as published with the generator: the mix of k steps.
    step = 0x9E3779B97F4A7C15
    states = torch.tensor([(k * step + (1 << 63)) % (1 << 64) - (1 << 63) for k in (1, 2, 3)])
    assert [value % (1 << 64) for value in mix(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_same_keys_make_the_same_index():
    keys = drawn(3000)
    a, b = PerfectHash.build(keys), PerfectHash.build(keys.clone())
    assert torch.equal(a.keys, b.keys) and torch.equal(a.displacement, b.displacement)


def test_refuses_what_cannot_be_a_key():
    with pytest.raises(TableError, match="key -5 is negative"):
        PerfectHash.build(torch.tensor([3, -5]))
    with pytest.raises(TableError, match="1 of 3 keys are given twice"):
        PerfectHash.build(torch.tensor([3, 4, 3]))
    with pytest.raises(TableError, match="at most 2"):
        PerfectHash.build(torch.tensor([3, 4, 5]), capacity=2)
    with pytest.raises(TableError, match="int32"):
        PerfectHash.build(torch.tensor([3], dtype=torch.int32))


def test_keys_that_were_chosen_to_collide():
    drawn = torch.unique(torch.randint(0, 1 << 62, (5000,), generator=torch.Generator().manual_seed(0)))
    keys = drawn[torch.from_numpy(bucket_of(mix(drawn.numpy()), 25) == 0)][:100]
    assert keys.numel() == 100
    with pytest.raises(TableError, match="not chosen to collide"):
        PerfectHash.build(keys)
    with pytest.raises(TableError, match=r"torch\.bfloat16"):
        PerfectHash.build(torch.ones(1, dtype=torch.bfloat16))
