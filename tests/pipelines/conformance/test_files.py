"""What is written and read: concept files, the base's checkpoint, and loading and unloading over and over."""

import dataclasses
import gc
from typing import Any

import pytest
import torch

import tiny_engram
from tests.pipelines.conformance.cases import PROMPT, TRIGGER, each_mode, each_pipeline, family_named
from tests.pipelines.conformance.reading import embeds_of, same
from tests.pipelines.tiny.base import picture
from tests.pipelines.tiny.every import EVERY
from tests.tiny_pipeline import concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import hooks_of


def several_encoders(tiny: Any) -> bool:
    return sum(not spec.pooled for spec in family_named(tiny).encoders) > 1


@each_mode()
def test_a_saved_concept_gives_the_same_bits_on_a_rebuilt_pipeline(subject, mode, own, tmp_path):
    made = subject.concept(mode)
    made.save(tmp_path / "concept.safetensors")
    subject.adapter.load_concept(made)
    expected, drawn = embeds_of(subject.family, subject.pipe, PROMPT), picture(subject.tiny, subject.pipe, PROMPT)
    adapter = tiny_engram.attach(own)
    assert adapter.load_concept(tmp_path / "concept.safetensors") == TRIGGER
    assert same(expected, embeds_of(subject.family, own, PROMPT)) and torch.equal(drawn, picture(subject.tiny, own, PROMPT))
    adapter.unload_concept()
    assert same(embeds_of(subject.family, subject.twin, PROMPT), embeds_of(subject.family, own, PROMPT))


def tensors() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


@each_pipeline()
def test_twenty_loads_and_unloads_leave_nothing(subject):
    made = [subject.concept(mode) for mode in (subject.everywhere, "input", "deep")]
    plain = embeds_of(subject.family, subject.twin, PROMPT)
    counts, hooks = [], []
    for cycle in range(20):
        subject.adapter.load_concept(made[cycle % 3])
        if cycle < 6:
            assert not same(plain, embeds_of(subject.family, subject.pipe, PROMPT))
        subject.adapter.unload_concept()
        if cycle in (5, 19):
            assert same(plain, embeds_of(subject.family, subject.pipe, PROMPT))
            counts.append(tensors())
            hooks.append(sum(len(hooks_of(part)) for part in subject.pipe.components.values() if isinstance(part, torch.nn.Module)))
    assert counts[1] <= counts[0] and hooks[0] == hooks[1]  # of others, tensors may have gone meanwhile
    assert all(not mount.store.row_bytes for mount in subject.adapter.mounts.values())


@pytest.fixture(scope="session")
def foreign() -> Any:
    """Concepts made on Stable Diffusion 1 and PixArt, which are small: one of them is another family's anywhere."""
    made = {}
    for name in ("stable-diffusion-1", "pixart:sigma"):
        pipe = next(tiny for tiny in EVERY if tiny.name == name).build()
        made[name.partition(":")[0]] = concept(tiny_engram.attach(pipe), TRIGGER, name="foreign")
    return made


@each_pipeline()
def test_a_file_of_another_family_is_refused(subject, foreign, tmp_path):
    other = foreign["pixart" if subject.tiny.family.startswith("stable-diffusion") else "stable-diffusion-1"]
    other.save(tmp_path / "foreign.safetensors")
    with pytest.raises(TinyEngramError) as caught:
        subject.adapter.load_concept(tmp_path / "foreign.safetensors")
    said = str(caught.value)
    assert "\n" not in said and "foreign" in said and "load it into the base it was made for" in said
    assert str(sorted(other.roles)) in said and str(sorted(subject.adapter.mounts)) in said or "expected" in said
    assert not subject.adapter.get_list_concepts()


@each_pipeline(several_encoders)
def test_a_missing_role_is_named(subject):
    made = subject.concept()
    for role in made.roles:
        less = dataclasses.replace(made, roles={name: place for name, place in made.roles.items() if name != role})
        with pytest.raises(TinyEngramError, match=f"no rows for {role}"):
            subject.adapter.load_concept(less)


@each_pipeline()
def test_saving_the_pipeline_writes_a_clean_base(subject, tmp_path):
    subject.load(subject.everywhere)
    parts = {*subject.family.present(subject.pipe), *(spec.encoder for spec in subject.specs.values())}
    subject.pipe.save_pretrained(tmp_path)
    absent = {name: None for s in subject.family.encoders for name in (s.encoder, s.tokenizer) if getattr(subject.pipe, name) is None}
    again = type(subject.pipe).from_pretrained(tmp_path, **absent)
    for name in parts:
        before, after = subject.twin.components[name].state_dict(), again.components[name].state_dict()
        assert same(before, after), name
    assert not [path for path in tmp_path.rglob("*") if "engram" in path.name or "concept" in path.name]
    assert "engram" not in (tmp_path / "model_index.json").read_text()
