"""Libraries on pipelines with several encoders, with T5 and with language models: a concept that one encoder calls is there for all."""

import warnings

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny.base import picture
from tests.pipelines.tiny.every import EVERY, cases
from tiny_engram.config import ConceptConfig
from tiny_engram.library import ConceptLibrary

CHOSEN = ("stable-diffusion-xl", "stable-diffusion-3", "flux:dev", "pixart:sigma", "z-image")
BOTH = ConceptConfig(mounts=("span", "context"))


@pytest.mark.parametrize("entry", cases([entry for entry in EVERY if entry.name in CHOSEN], CHOSEN))
def test_as_if_loaded(entry, tiny, tmp_path):
    pipe = entry.build()
    adapter = tiny_engram.attach(pipe)
    made = [tiny.concept(adapter, f"vor{letter}ex cat", seed=k, config=BOTH) for k, letter in enumerate("tq")]
    plain = picture(entry, pipe, "a photo of a cat")
    adapter.load_concept(made[0])
    by_hand = picture(entry, pipe, "a photo of a vortex cat")
    adapter.detach()
    with ConceptLibrary.create(tmp_path / "x.engrams") as library:
        library.add_many(made)
        assert [len(library.entry(concept.name).kind.roles) for concept in made] == [len(made[0].roles)] * 2
    adapter = tiny_engram.attach(pipe)
    adapter.open_library(tmp_path / "x.engrams")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*concepts .* are active, but")
        assert torch.equal(picture(entry, pipe, "a photo of a cat"), plain) and adapter.get_list_concepts() == []
        found = picture(entry, pipe, "a photo of a vortex cat")
    assert torch.equal(found, by_hand) and not torch.equal(found, plain) and adapter.get_list_concepts() == ["vortex cat"]
    assert torch.equal(picture(entry, pipe, "a photo of a cat"), plain)
    adapter.detach()
