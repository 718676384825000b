"""Pipelines that share encoders, copies, siblings of a family, and families that a user describes."""

import copy
from typing import Any

import diffusers
import pytest

import tiny_engram
from tests.pipelines.conformance.cases import PROMPT, TRIGGER, each_pipeline
from tests.pipelines.conformance.reading import embeds_of, same
from tests.tiny_pipeline import concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.pipelines.families import family_of

# Another class of the same family that the parts of a pipeline make. Wan's others call ftfy unasked, which is not there.
SIBLINGS = {
    "stable-diffusion-1": "StableDiffusionImg2ImgPipeline",
    "stable-diffusion-2": "StableDiffusionImg2ImgPipeline",
    "stable-diffusion-xl": "StableDiffusionXLImg2ImgPipeline",
    "stable-diffusion-3": "StableDiffusion3Img2ImgPipeline",
    "flux": "FluxImg2ImgPipeline",
    "chroma": "ChromaImg2ImgPipeline",
    "pixart": "PixArtAlphaPipeline",
    "hunyuandit": "HunyuanDiTPAGPipeline",
    "sana": "SanaPAGPipeline",
    "z-image": "ZImageImg2ImgPipeline",
    "qwen-image": "QwenImageImg2ImgPipeline",
    "flux-2-klein": "Flux2KleinInpaintPipeline",
    "ltx": "LTXImageToVideoPipeline",
    "cogvideox": "CogVideoXVideoToVideoPipeline",
}


@each_pipeline(lambda tiny: tiny.family in SIBLINGS)
def test_a_sibling_made_from_a_pipeline_has_its_concepts(subject):
    name = subject.load(subject.everywhere)
    sibling = getattr(diffusers, SIBLINGS[subject.tiny.family]).from_pipe(subject.pipe)
    assert tiny_engram.get_adapter(sibling) is subject.adapter and family_of(sibling) is subject.family
    if subject.tiny.family != "pixart":  # Alpha reads 120 tokens, Sigma 300
        assert same(embeds_of(subject.family, sibling, PROMPT), embeds_of(subject.family, subject.pipe, PROMPT))
    own = embeds_of(subject.family, sibling, PROMPT)
    subject.adapter.set_strength(name, 0.5)
    half = embeds_of(subject.family, sibling, PROMPT)
    subject.adapter.disable_concepts()
    assert not any(same(one, embeds_of(subject.family, sibling, PROMPT)) for one in (own, half)) and not same(own, half)


@each_pipeline()
def test_a_second_adapter_is_refused(subject):
    for pipe in (subject.pipe, type(subject.pipe)(**subject.pipe.components)):
        with pytest.raises(TinyEngramError, match="already has an adapter"):
            tiny_engram.attach(pipe)
    assert tiny_engram.get_adapter(subject.pipe) is subject.adapter


@each_pipeline()
def test_a_copy_says_that_it_has_no_concepts_and_takes_its_own(subject):
    subject.load(subject.everywhere)
    copied = copy.deepcopy(subject.pipe)
    with pytest.raises(MountError, match="is a copy of a module with concepts attached, and the copy has none"):
        embeds_of(subject.family, copied, PROMPT)
    adapter = tiny_engram.attach(copied)
    assert same(embeds_of(subject.family, copied, PROMPT), embeds_of(subject.family, subject.twin, PROMPT))
    adapter.load_concept(subject.adapter.concept(TRIGGER), strength=0.5)
    ours, theirs = (embeds_of(subject.family, pipe, PROMPT) for pipe in (subject.pipe, copied))
    assert not same(ours, theirs)
    adapter.set_strength(TRIGGER, 1.0)
    assert same(ours, embeds_of(subject.family, copied, PROMPT))


@each_pipeline()
def test_a_concept_acts_as_if_it_were_alone(subject):
    subject.load(subject.everywhere)
    alone = embeds_of(subject.family, subject.pipe, PROMPT)
    other: Any = concept(subject.adapter, "vortex dog", seed=7)
    subject.adapter.load_concept(other)
    assert same(alone, embeds_of(subject.family, subject.pipe, PROMPT))
    assert not same(embeds_of(subject.family, subject.twin, "a vortex dog"), embeds_of(subject.family, subject.pipe, "a vortex dog"))
