"""Plans over every kind of mount, which maps fire, what counts as a context, and addresses that must stay."""

import pytest
import torch

from tiny_engram.config import ConceptConfig

MAPPED = ConceptConfig(mounts=("input", "value"), share="block", bands=2, attention_rank=2, feedforward_rank=1)
# Made before there were other mounts than these: the rows of files do not move, but stored tables and logs would.
FIRST_ROWS = {
    "span": [1847415364, 3350776280, 5036774972, 7205512713],
    "context.0.key": [10604122832, 12117108525, 14186032049, 17007883530],
    "context.3.value": [69693344353, 72484300968, 74193078098, 77298014904],
}


@pytest.fixture
def store(adapter):
    return adapter.mounts["clip_l"].store


@pytest.fixture
def add(tiny, adapter, store):
    """Put a concept of random rows and maps into the store alone: no hook looks at it."""

    def add(trigger, config, strength=1.0, seed=0):
        concept = tiny.concept(adapter, trigger, config=config, seed=seed)
        place = concept.roles["clip_l"]
        store.add(trigger, adapter.compile(trigger)["clip_l"], place.mounts, config, strength, maps=place.maps)
        return concept

    return add


def ids_of(pipe, *prompts):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def test_mounts_and_maps_of_a_pipeline(store, adapter):
    assert store.mounts[:9] == ("span", *adapter.contexts["clip_l"].names) and store.mounts[9] == "input"
    assert store.mounts[10:12] == ("context.down1.key", "context.down1.value") and "context.mid.value.2of3" in store.mounts
    assert store.context_mounts == tuple(m for m in store.mounts if m not in ("span", "input", "deep.0", "deep.1"))
    assert store.maps == {f"{site}.{i}": 32 for i in range(4) for site in ("attention", "feedforward")}
    assert store.empty().mounts == store.mounts and store.empty().maps == store.maps


def test_addresses_of_the_first_mounts_did_not_move(store, add):
    add("zqx bolo", ConceptConfig(mounts=("span", "context")))
    assert {m: store.bank_of("zqx bolo", m).row_ids("zqx bolo")[0].tolist() for m in FIRST_ROWS} == FIRST_ROWS


def test_every_mount_has_addresses_of_its_own(store, add):
    everything = ConceptConfig(mounts=store.mounts)
    add("zqx bolo", everything)
    ids = torch.cat([store.bank_of("zqx bolo", m).row_ids("zqx bolo").flatten() for m in store.mounts])
    assert len(ids.unique()) == len(ids)
    assert [store.bank_of("zqx bolo", m).hasher.layer_id for m in store.mounts] == list(range(len(store.mounts)))
    store.remove("zqx bolo")
    assert store.row_bytes == 0 and not store.any_at_denoiser


def test_rows_of_new_mounts_are_read_as_they_were_put_in(store, add, pipe):
    concept = add("zqx bolo", MAPPED, strength=0.5)
    wanted = ("input", "context.up0.value.2of2", "context.up0.value.1of2")
    plan = store.plan_at(wanted, ids_of(pipe, "a tree", "a zqx bolo on a table"))
    assert plan.mounts == wanted and plan.places == (("zqx bolo", 1, 2, 3),)
    (fired,) = plan.fired
    rows = torch.cat([concept.mount_rows("clip_l", m).rows() for m in wanted])
    assert torch.equal(fired.rows, rows) and fired.spans.batch.tolist() == [1, 3, 5]
    assert store.plan_at(("span", "context.up0.value"), ids_of(pipe, "a zqx bolo")).fired == ()


def test_maps_fire_with_their_concept(store, add, pipe):
    concept = add("zqx bolo", MAPPED, strength=0.5)
    other = add("cat-toy", ConceptConfig(attention_rank=1), seed=1)
    add("plain", ConceptConfig())
    plan = store.plan_at((), ids_of(pipe, "a zqx bolo beside a zqx bolo", "a tree", "a plain cat-toy and a zqx bolo"))
    assert plan.mounts == () and plan.fired == ()
    found = {fired.name: fired for fired in plan.maps}
    assert set(found) == {"zqx bolo", "cat-toy"} and found["cat-toy"].strength == 1.0
    assert found["zqx bolo"].spans == ((0, 2, 3), (0, 7, 3), (2, 8, 3)) and found["cat-toy"].spans == ((2, 3, 3),)
    assert list(found["zqx bolo"].maps) == list(store.maps) and set(found["cat-toy"].maps) == {f"attention.{i}" for i in range(4)}
    into, out = concept.map_factors("clip_l", "feedforward.2").factors()
    got = found["zqx bolo"].factors("feedforward.2")
    assert torch.equal(got[0], into) and torch.equal(got[1], 0.5 * out)
    assert torch.equal(found["cat-toy"].factors("attention.1")[1], other.map_factors("clip_l", "attention.1").factors()[1])
    store.set_strength("zqx bolo", 0.0)
    store.set_strength("cat-toy", 0.25)
    (fired,) = store.plan_at((), ids_of(pipe, "a cat-toy and a zqx bolo")).maps
    assert fired.name == "cat-toy" and fired.strength == 0.25
    assert store.plan_at(("span",), ids_of(pipe, "a tree")).maps == ()


def test_what_counts_as_a_context(store, add):
    add("zqx bolo", ConceptConfig(mounts=("span", "input")))
    assert not store.any_at_denoiser and not store.active_at_denoiser
    add("cat-toy", ConceptConfig(mounts=("input",), feedforward_rank=1))
    assert store.any_at_denoiser and store.active_at_denoiser == {f"feedforward.{i}" for i in range(4)}
    assert store.maps_of("cat-toy") == tuple(f"feedforward.{i}" for i in range(4)) and store.maps_of("zqx bolo") == ()
    add("sks", MAPPED)
    store.set_strength("cat-toy", 0.0)
    values = {f"context.{block}.value.{k}of2" for block in ("down1", "mid", "up0") for k in (1, 2)}
    assert store.active_at_denoiser == values | set(store.maps)
    store.remove("sks")
    assert store.any_at_denoiser and not store.active_at_denoiser
    store.remove("cat-toy")
    assert not store.any_at_denoiser
