"""Every tiny pipeline takes a concept: it moves the encoders' states where the trigger stands, and no bit of a prompt without it."""

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny.every import EVERY, cases
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.families import family_of

PROMPT, PLAIN = "a photo of a zqx bolo on a table", "a photo of an old dog on a table"


@torch.no_grad()
def states(adapter, pipe, prompt):
    """What the denoiser is given of each encoder of which it reads states."""
    found = adapter.family.states(pipe, adapter.family.embeds(pipe, [prompt]))
    return {spec.role: found[spec.role] for spec in adapter.family.encoders if not spec.pooled and spec.role in adapter.mounts}


def moved(one, other):
    one, other = (x[0] for x in (one, other))  # a batch, or a list of one
    return (one != other).any(-1).nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", cases())
def test_it_moves_what_stands_at_the_trigger(tiny, kind):
    pipe = kind.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("input", "span"))))
    ours, same = states(adapter, pipe, PROMPT), states(adapter, pipe, PLAIN)
    adapter.disable_concepts()
    plain = states(adapter, pipe, PROMPT)
    assert ours
    for role, found in ours.items():
        at = moved(found, plain[role])
        assert at and at == list(range(at[0], at[-1] + 1)) and len(at) < 12
        assert not moved(same[role], states(adapter, pipe, PLAIN)[role])
    adapter.detach()


def test_options_that_nobody_takes_are_named(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    for told in (adapter.embeds, adapter.scheduled):
        with pytest.raises(TinyEngramError, match="StableDiffusionPipeline takes no option 'clip_skp'; did you mean 'clip_skip'"):
            told("a cat", clip_skp=1)
    assert adapter.embeds("a cat", guidance_scale=3.0).keys() == adapter.embeds("a cat").keys()


def test_options_of_a_pipeline_that_takes_no_others():
    pipe = next(entry for entry in EVERY if entry.name == "flux:dev").build()
    family = family_of(pipe)
    assert family is not None
    with pytest.raises(TinyEngramError, match="FluxPipeline takes no option 'zzz'; leave it out"):
        family.check_options(pipe, ["guidance_scale", "zzz"])
