"""What a choice of mounts means."""

import pytest

from tiny_engram.config import ConceptConfig
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.mount_names import (
    ContextName,
    band_at,
    choose_maps,
    choose_mounts,
    context_name,
    describe_maps,
    describe_mounts,
    every_mount,
    map_name,
    mounts_in_words,
)

KNOWN = ("span", "context.0.key", "context.0.value", "context.1.key", "context.1.value")

ALL = every_mount(KNOWN[1:], ("down", "up"))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (("span",), KNOWN[:1]),
        (("context",), KNOWN[1:]),
        (("context", "span"), KNOWN),
        (("value",), KNOWN[2::2]),
        (("key", "context.1.value", "key"), (KNOWN[1], KNOWN[3], KNOWN[4])),
    ],
)
def test_names_and_groups(asked, meant):
    assert choose_mounts(asked, KNOWN, role="clip_l") == meant


@pytest.mark.parametrize("asked", ["context.2.key", "context.1", "", "Span", "query"])
def test_what_the_pipeline_has_not_is_refused(asked):
    told = f"mount '{asked}' is unknown at t5; expected a group .* or one of: span, context.0.key to context.1.value"
    with pytest.raises(TinyEngramError, match=told):
        choose_mounts(("span", asked), KNOWN, role="t5")


def test_groups_of_a_pipeline_without_context_mounts():
    with pytest.raises(TinyEngramError, match="mount 'context' is unknown at t5; .* one of: span$"):
        choose_mounts(("context",), ("span",), role="t5")


def test_in_words():
    assert describe_mounts(KNOWN) == "span, 2 keys, 2 values"
    assert describe_mounts(("context.1.value",)) == "1 value" and describe_mounts(("span",)) == "span"
    banded = choose_mounts(("input", "value"), ALL, role="clip_l", share="block", bands=2)
    assert describe_mounts(banded) == "input, 2 shared values in 2 bands"
    assert describe_mounts(("context.up.key", "context.1.key.1of3", "context.1.key.2of3")) == "1 shared key, 1 key in 3 bands"
    assert describe_maps(("attention.0", "feedforward.0", "attention.1")) == "2 attention maps, 1 feedforward map"


def test_the_config_keeps_the_choice_and_a_bound_of_their_own():
    config = ConceptConfig(mounts=("span", "context"), rho=2.0, context_rho=0.5)
    assert ConceptConfig.from_dict(config.to_dict()) == config
    assert config.rho_at("span") == 2.0 and config.rho_at("context.3.value") == 0.5
    assert ConceptConfig(rho=2.0).rho_at("context.3.value") == 2.0
    old = {name: value for name, value in ConceptConfig().to_dict().items() if name not in ("mounts", "context_rho")}
    assert ConceptConfig.from_dict(old) == ConceptConfig() and ConceptConfig().mounts == ("span",)


@pytest.mark.parametrize("change", [{"mounts": ()}, {"mounts": "span"}, {"mounts": (1,)}, {"mounts": ("",)}, {"context_rho": 0.0}])
def test_nonsense_is_refused(change):
    with pytest.raises(ConfigError, match=f"ConceptConfig.{next(iter(change))} is"):
        ConceptConfig(**change)


def test_new_kinds_of_mounts_come_after_those_that_have_addresses():
    assert ALL[: len(KNOWN)] == KNOWN and ALL[len(KNOWN) :][:5] == (
        "input", "context.down.key", "context.down.value", "context.up.key", "context.up.value",
    )  # fmt: skip
    assert ALL[10:14] == ("context.down.key.1of2", "context.down.key.2of2", "context.down.value.1of2", "context.down.value.2of2")
    assert len(ALL) == len(set(ALL)) == 10 + 8 * (2 + 3 + 4) and ALL[-1] == "context.1.value.4of4"
    assert every_mount(()) == ("span", "input")


def test_every_name_says_what_it_means():
    names = {mount: context_name(mount) for mount in ALL}
    assert [mount for mount, name in names.items() if name is None] == ["span", "input"]
    assert all(str(name) == mount and name.shared == (name.where in ("down", "up")) for mount, name in names.items() if name is not None)


@pytest.mark.parametrize(
    ("mount", "name"),
    [
        ("context.12.key", ContextName("12", "key")),
        ("context.mid.value.3of4", ContextName("mid", "value", 2, 4)),
        *(
            (other, None)
            for other in ("context.01.key", "context.1.query", "context.1.key.1of1", "context.1.key.3of2", "context.1.key.1of5")
        ),
    ],
)
def test_names_taken_apart(mount, name):
    assert context_name(mount) == name


def test_names_of_maps():
    assert map_name("attention.3") == ("attention", 3) and map_name("feedforward.0") == ("feedforward", 0)
    assert [map_name(name) for name in ("attention", "attention.03", "context.3.key", "other.1")] == [None] * 4


@pytest.mark.parametrize(
    ("timestep", "bands", "band"), [(0, 2, 0), (499, 2, 0), (500, 2, 1), (999, 2, 1), (1000, 2, 1), (749.9, 4, 2), (999, 1, 0), (333, 3, 0)]
)
def test_bands_are_equal_shares_of_the_timesteps(timestep, bands, band):
    assert band_at(timestep, bands, 1000) == band


@pytest.mark.parametrize(
    ("asked", "share", "bands", "meant"),
    [
        (("value",), "none", 1, ("context.0.value", "context.1.value")),
        (("value",), "block", 1, ("context.down.value", "context.up.value")),
        (("input", "key"), "none", 2, ("input", *(f"context.{i}.key.{k}of2" for i in (0, 1) for k in (1, 2)))),
        (
            ("context",),
            "block",
            3,
            tuple(f"context.{s}.{kind}.{k}of3" for s in ("down", "up") for kind in ("key", "value") for k in (1, 2, 3)),
        ),
        (("context.1.key", "value", "span"), "block", 1, ("span", "context.1.key", "context.down.value", "context.up.value")),
        (("context.up.key.2of4",), "none", 2, ("context.up.key.2of4",)),
    ],
)
def test_groups_follow_share_and_bands_and_names_do_not(asked, share, bands, meant):
    assert choose_mounts(asked, ALL, role="clip_l", share=share, bands=bands) == meant


def test_bands_are_said_and_not_listed():
    words = mounts_in_words(ALL)
    assert words.endswith("context.up.value, and each context in bands such as context.1.value.4of4") and len(words) < 250
    with pytest.raises(TinyEngramError, match="mount 'context.1.key.3of2' is unknown at t5; .* such as context.1.value.4of4$"):
        choose_mounts(("context.1.key.3of2",), ALL, role="t5")
    with pytest.raises(TinyEngramError, match="mount 'value' is unknown"):
        choose_mounts(("value",), KNOWN, role="t5", share="block")


def test_maps_that_ranks_mean():
    known = {"attention.0": 96, "feedforward.0": 96, "attention.1": 64}
    assert choose_maps(known, attention=0, feedforward=0, role="clip_l") == {}
    assert choose_maps(known, attention=2, feedforward=1, role="clip_l") == {
        "attention.0": (2, 96), "feedforward.0": (1, 96), "attention.1": (2, 64),
    }  # fmt: skip
    assert choose_maps(known, attention=64, feedforward=0, role="clip_l")["attention.1"] == (64, 64)
    with pytest.raises(TinyEngramError, match="attention_rank is 33, but attention.1 of clip_l has 64 channels; expected at most 32"):
        choose_maps(known, attention=33, feedforward=1, role="clip_l")
    with pytest.raises(TinyEngramError, match="feedforward_rank is 1, but this pipeline has no feedforward maps at t5"):
        choose_maps({"attention.0": 96}, attention=0, feedforward=1, role="t5")


@pytest.mark.parametrize(
    "change",
    [{"share": "width"}, {"share": None}, {"bands": 0}, {"bands": 5}, {"bands": 1.0}, {"attention_rank": -1}, {"feedforward_rank": True}],
)
def test_nonsense_in_what_groups_mean_is_refused(change):
    with pytest.raises(ConfigError, match=f"ConceptConfig.{next(iter(change))} is"):
        ConceptConfig(**change)


def test_the_token_embeddings_have_the_bound_of_the_encoder():
    config = ConceptConfig(mounts=("input", "value"), rho=2.0, context_rho=0.5, share="block", bands=2, attention_rank=2)
    assert config.rho_at("input") == 2.0 and config.rho_at("context.up.value.1of2") == 0.5
    assert ConceptConfig.from_dict(config.to_dict()) == config
