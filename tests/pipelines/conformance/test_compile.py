"""Compiled encoders and denoisers: concepts that come, change and go are honoured."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny_engram
from tests.pipelines.conformance.cases import PROMPT, each_pipeline
from tests.pipelines.conformance.reading import embeds_of, same
from tests.pipelines.tiny.base import picture
from tiny_engram.hooks import MountError


def quick(tiny: Any) -> bool:
    """Tracing takes minutes where an encoder has dozens of layers or a denoiser two copies."""
    return tiny.name not in ("flux-2", "flux-2-klein", "wan:2.2-a14b")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_encoders(subject: Any, pipe: Any) -> None:
    for spec in subject.specs.values():
        getattr(pipe, spec.encoder).compile(backend="eager")


@each_pipeline(quick, default=("stable-diffusion-1",))
def test_a_compiled_encoder_follows_swaps(subject, own):
    adapter = tiny_engram.attach(own)
    compile_encoders(subject, own)
    plain = embeds_of(subject.family, subject.twin, PROMPT)
    assert same(plain, embeds_of(subject.family, own, PROMPT))
    for mode, seed in (("span", 1), ("span", 2), ("input", 1)):
        made = subject.concept(mode, seed=seed)
        for each in (subject.adapter, adapter):
            each.load_concept(made)
        assert same(embeds_of(subject.family, subject.pipe, PROMPT), embeds_of(subject.family, own, PROMPT)), mode
        for each in (subject.adapter, adapter):
            each.unload_concept()
        assert same(plain, embeds_of(subject.family, own, PROMPT)), mode
    # what was compiled without hooks on the layers may have none: that is told, and mended by compiling again
    made = subject.concept("deep")
    for each in (subject.adapter, adapter):
        each.load_concept(made)
    expected = embeds_of(subject.family, subject.pipe, PROMPT)
    try:
        assert same(expected, embeds_of(subject.family, own, PROMPT))
    except MountError as error:
        assert "ran without its layer 1, so no concept reached it at the mount 'deep.1'; was it compiled" in str(error)
        torch._dynamo.reset()
    assert same(expected, embeds_of(subject.family, own, PROMPT))
    adapter.detach()
    assert same(plain, embeds_of(subject.family, own, PROMPT))


@each_pipeline(quick, default=("stable-diffusion-1",))
def test_a_wrapped_encoder_is_told(subject, own):
    """`torch.compile(encoder)` is another object than the encoder: concepts reach it, or the pipeline says that they do not."""
    adapter = tiny_engram.attach(own)
    adapter.load_concept(subject.concept(subject.everywhere))
    expected = picture(subject.tiny, own, PROMPT)
    spec = next(iter(subject.specs.values()))
    setattr(own, spec.encoder, torch.compile(getattr(own, spec.encoder), backend="eager"))
    try:
        drawn = picture(subject.tiny, own, PROMPT)
    except tiny_engram.TinyEngramError as error:
        assert f"{spec.encoder} of the pipeline was replaced after attach" in str(error)
    else:
        assert torch.equal(expected, drawn)


@each_pipeline(quick, default=("stable-diffusion-1",))
def test_a_compiled_denoiser_follows_swaps(subject, own):
    adapter = tiny_engram.attach(own)
    for name, denoiser in subject.family.present(own).items():
        setattr(own, name, torch.compile(denoiser, backend="eager"))
    base = picture(subject.tiny, own, PROMPT)
    assert torch.equal(base, picture(subject.tiny, subject.twin, PROMPT))
    for seed in (1, 2):
        made = subject.concept(subject.everywhere, seed=seed)
        subject.adapter.load_concept(made)
        adapter.load_concept(made)
        drawn = picture(subject.tiny, own, PROMPT)
        assert not torch.equal(base, drawn) and torch.equal(drawn, picture(subject.tiny, subject.pipe, PROMPT))
        for each in (subject.adapter, adapter):
            each.unload_concept()
        assert torch.equal(base, picture(subject.tiny, own, PROMPT))
    adapter.load_concept(subject.concept(subject.everywhere))
    adapter.detach()
    assert torch.equal(base, picture(subject.tiny, own, PROMPT))
