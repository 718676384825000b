import dataclasses
import json

import pytest

from tiny_engram.config import PAPER_EPS, V41_EPS, ConceptConfig, HashConfig, LayerConfig
from tiny_engram.errors import ConfigError, TinyEngramError

HASH = HashConfig(max_ngram=3, heads=2, vocab=1000, pad_id=2, compressed_vocab=500, layer_ids=(1, 2))


@pytest.mark.parametrize(
    "config",
    [HASH, LayerConfig(hash=HASH, layer_id=1, hidden=64), LayerConfig(hash=HASH, layer_id=2, hidden=8, form="paper"), ConceptConfig()],
)
def test_json_round_trip(config):
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


@pytest.mark.parametrize("config", [HASH, ConceptConfig()])
def test_frozen_and_keyword_only(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 3
    with pytest.raises(TypeError):
        type(config)(3)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_ngram", 1),
        ("heads", 0),
        ("vocab", "1000"),
        ("seed", -1),
        ("pad_id", 500),
        ("compressed_vocab", True),
        ("layer_ids", ()),
        ("layer_ids", (1, 1)),
        ("layer_ids", 3),
        ("vocab", 2**61),
    ],
)
def test_hash_config_refuses_nonsense(field, value):
    with pytest.raises(ConfigError, match=field):
        HashConfig.from_dict({**HASH.to_dict(), field: value})


@pytest.mark.parametrize("field, value", [("head_dim", 48), ("layer_id", 3), ("form", "v4"), ("eps", 0), ("copies", 0), ("hash", 5)])
def test_layer_config_refuses_nonsense(field, value):
    with pytest.raises(ConfigError, match=field):
        LayerConfig.from_dict({**LayerConfig(hash=HASH, layer_id=1, hidden=64).to_dict(), field: value})


@pytest.mark.parametrize("field, value", [("rho", float("nan")), ("rho", 0), ("heads", 0), ("head_dim", 31), ("basis_seed", 1.5)])
def test_concept_config_refuses_nonsense(field, value):
    with pytest.raises(ConfigError, match=field):
        ConceptConfig(**{field: value})


def test_unknown_and_missing_fields_are_named_in_one_line():
    with pytest.raises(ConfigError, match="no field hedas: known are max_ngram") as caught:
        ConceptConfig.from_dict({"hedas": 3})
    assert "\n" not in str(caught.value) and isinstance(caught.value, TinyEngramError)
    with pytest.raises(ConfigError, match="compressed_vocab"):
        HashConfig.from_dict({k: v for k, v in HASH.to_dict().items() if k != "compressed_vocab"})
    with pytest.raises(ConfigError, match="expected a dict"):
        HashConfig.from_dict([1])


def test_layer_eps_follows_the_form():
    assert LayerConfig(hash=HASH, layer_id=1, hidden=8).eps == V41_EPS
    assert LayerConfig(hash=HASH, layer_id=1, hidden=8, form="paper").eps == PAPER_EPS
    assert LayerConfig(hash=HASH, layer_id=1, hidden=8, eps=1e-3).eps == 1e-3


@pytest.mark.parametrize("width, heads, five_token_bytes", [(160, 3, 990), (768, 12, 3960)])
def test_concept_sizes(width, heads, five_token_bytes):
    config = ConceptConfig()
    assert config.heads_at(width) == heads
    hashing = config.hash_config(width=width, compressed_vocab=500, pad_id=2, mounts=2)
    assert hashing.layer_ids == (0, 1) and hashing.columns * config.head_dim >= width
    assert 5 * hashing.columns * (config.head_dim + config.head_dim // 32) == five_token_bytes


def test_too_few_heads_are_refused():
    with pytest.raises(ConfigError, match="width 160 needs 3"):
        ConceptConfig(heads=2).heads_at(160)
    assert ConceptConfig(max_ngram=2).heads_at(160) == 5


@pytest.mark.parametrize(
    "options",
    [{"max_ngram": 130, "heads": 1}, {"heads": 65}, {"heads": 10**9}, {"head_dim": 65_536}],
    ids=lambda options: next(iter(options)),
)
def test_rows_without_end_are_refused(options):
    with pytest.raises(ConfigError, match="rows of .* values a position: expected at most 128 rows and 65536 values at width 768"):
        ConceptConfig(**{"heads": 12, **options}).heads_at(768)
    assert ConceptConfig(heads=64).heads_at(768) == 64 and ConceptConfig().heads_at(65_536) == 1024
