"""What a choice of mounts means."""

import pytest

from tiny_engram.config import ConceptConfig
from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.mount_names import choose_mounts, describe_mounts

KNOWN = ("span", "context.0.key", "context.0.value", "context.1.key", "context.1.value")


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
    with pytest.raises(TinyEngramError, match=f"mount '{asked}' is unknown at t5; expected a group .* or one of: span, context.0.key,"):
        choose_mounts(("span", asked), KNOWN, role="t5")


def test_groups_of_a_pipeline_without_context_mounts():
    with pytest.raises(TinyEngramError, match="mount 'context' is unknown at t5; .* one of: span$"):
        choose_mounts(("context",), ("span",), role="t5")


def test_in_words():
    assert describe_mounts(KNOWN) == "span, 2 keys, 2 values"
    assert describe_mounts(("context.1.value",)) == "1 value" and describe_mounts(("span",)) == "span"


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
