"""What a config asks of a pipeline: mounts by group, block and band, and maps by rank; how it is reported, and what is refused."""

import dataclasses
import json

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny import flux
from tiny_engram.concept import Concept, MapFactors
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError

ALL = ConceptConfig(mounts=("input", "value"), share="block", bands=2, attention_rank=2, feedforward_rank=1, context_rho=0.8)
VALUES = tuple(f"context.{block}.value.{k}of2" for block in ("down1", "mid", "up0") for k in (1, 2))
MAPS = {f"{site}.{i}": (rank, 32) for i in range(4) for site, rank in (("attention", 2), ("feedforward", 1))}
PROMPT = "a zqx bolo on a table"


def test_groups_and_ranks_are_spread_over_the_pipeline(adapter):
    place = adapter.new_concept("zqx bolo", config=ALL).roles["clip_l"]
    assert tuple(place.mounts) == ("input", *VALUES)
    assert [rows.rho for rows in place.mounts.values()] == [2.5] + [0.8] * 6
    assert {name: (rows.rank, rows.channels) for name, rows in place.maps.items()} == MAPS
    assert not any(rows.rows().any() for rows in place.mounts.values()) and not any(rows.factors()[1].any() for rows in place.maps.values())
    plain = adapter.new_concept("zqx bolo", config=ConceptConfig(mounts=("key", "context.up0.value"), bands=4)).roles["clip_l"]
    keys = tuple(f"context.{i}.key.{k}of4" for i in range(4) for k in (1, 2, 3, 4))
    assert set(plain.mounts) == {*keys, "context.up0.value"} and not plain.maps


def test_what_the_pipeline_cannot_hold_is_refused(adapter):
    for config, expected in [
        (ConceptConfig(mounts=("context.low.key",)), "mount 'context.low.key' is unknown at clip_l; .*bands such as context.3.value.4of4"),
        (ConceptConfig(attention_rank=17, feedforward_rank=1), "attention_rank is 17, but attention.0 of clip_l has 32 channels; .* 16"),
    ]:
        for ask in (adapter.new_concept, adapter.register):
            with pytest.raises(TinyEngramError, match=expected) as caught:
                ask("zqx bolo", config=config)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_config_is_a_config(adapter):
    for ask in (adapter.new_concept, adapter.register):
        with pytest.raises(TinyEngramError, match=r"^config is .*, expected a ConceptConfig such as"):
            ask("zqx bolo", config={"mounts": ("span",)})


def test_pooled_rows_alone_leave_the_other_encoder_without(request):
    pipe = flux.flux()
    adapter = tiny_engram.attach(pipe)
    request.addfinalizer(adapter.detach)
    for ask in (adapter.new_concept, adapter.register):
        with pytest.raises(TinyEngramError, match=r"ask for nothing at t5, .*; ask for \['span', 'pooled'\]$"):
            ask("zqx", config=ConceptConfig(mounts=("pooled",)))
    adapter.load_concept(adapter.new_concept("zqx", config=ConceptConfig(mounts=("span", "pooled"))))
    assert {prompt.role for prompt in adapter.explain("a zqx").prompts if prompt.fired} == {"t5", "clip_l"}


def test_the_report_counts_maps(tiny, adapter):
    report = adapter.register("zqx bolo", config=ALL)
    role, concept = report.roles["clip_l"], tiny.concept(adapter, "zqx bolo", config=ALL)
    assert role.mounts == ("input", *VALUES) and role.maps == MAPS and role.nbytes == concept.nbytes
    assert "    mounts: input, 3 shared values in 2 bands\n    maps: 4 attention maps, 4 feedforward maps\n" in str(report)
    described = json.loads(json.dumps(report.to_dict()))["roles"]["clip_l"]
    assert described["maps"]["attention.3"] == [2, 32] and described["mounts"][-1] == "context.up0.value.2of2"
    assert adapter.register("zqx bolo").roles["clip_l"].maps == {} and "maps" not in str(adapter.register("zqx bolo"))


def test_explain_names_maps(tiny, adapter):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ALL))
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=ConceptConfig(attention_rank=1), seed=1))
    found = adapter.explain("a zqx bolo and a cat-toy")
    assert [f.maps for f in found.fired] == [tuple(MAPS), tuple(f"attention.{i}" for i in range(4))]
    assert "strength 1, at input, 3 shared values in 2 bands, 4 attention maps, 4 feedforward maps\n" in str(found)
    assert str(found).endswith("strength 1, at span, 4 attention maps")
    assert json.loads(json.dumps(found.to_dict()))["prompts"][0]["fired"][1]["maps"] == [f"attention.{i}" for i in range(4)]


def test_maps_of_another_base_are_refused(tiny, adapter):
    concept = tiny.concept(adapter, "zqx bolo", config=ALL)
    place, wide = concept.roles["clip_l"], MapFactors.quantized(torch.zeros(1, 64), torch.zeros(1, 64))
    for maps, expected in [
        ({"attention.1": wide}, "has map 'attention.1' of 64 channels at clip_l, expected 32 channels there; load it into the base"),
        (
            {"feedforward.4": wide},
            "has map 'feedforward.4' of 64 channels at clip_l, expected one of: attention.0, feedforward.0, attention",
        ),
    ]:
        with pytest.raises(TinyEngramError, match=expected):
            adapter.load_concept(dataclasses.replace(concept, roles={"clip_l": dataclasses.replace(place, maps=maps)}))
    assert adapter.get_list_concepts() == [] and not adapter.contexts["clip_l"].hooks


def test_the_file_serves_the_same_bits(tiny, adapter, pipe, tmp_path):
    concept = tiny.concept(adapter, "zqx bolo", config=ALL, size=0.5)
    path = concept.save(tmp_path / "c.safetensors")
    base = tiny.picture(pipe, PROMPT)
    adapter.load_concept(concept)
    memory = tiny.picture(pipe, PROMPT)
    adapter.unload_concept()
    assert torch.equal(tiny.picture(pipe, PROMPT), base) and not torch.equal(memory, base)
    adapter.load_concept(path)
    assert torch.equal(tiny.picture(pipe, PROMPT), memory) and Concept.load(path).describe() == concept.describe()


def test_another_spelling_keeps_the_maps(tiny, adapter):
    concept = tiny.concept(adapter, "zqx bolo", config=ALL)
    longer = adapter.add_alias(concept, "zqx bolos")
    assert longer.roles["clip_l"].maps == concept.roles["clip_l"].maps and longer.aliases == ("zqx bolos",)
    assert set(longer.roles["clip_l"].mounts) == {"input", *VALUES}
    adapter.load_concept(longer)
    (fired,) = adapter.explain("two zqx bolos").fired
    assert fired.maps == tuple(MAPS)
