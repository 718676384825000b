"""Descriptions of a pipeline that cannot be meant: one line each that names the field, and no adapter left behind."""

from dataclasses import replace
from typing import Any

import pytest

import tiny_engram
from tiny_engram.adapter import find_adapter
from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.families import family_of, register_family
from tiny_engram.pipelines.family import EncoderSpec, Family

SPEC = EncoderSpec(role="clip_l", encoder="text_encoder", tokenizer="tokenizer")
MINE = Family(
    name="mine",
    pipelines=("MyPipeline",),
    encoders=(SPEC,),
    returns=("prompt_embeds", "negative_prompt_embeds"),
    denoisers=("unet",),
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": ""}, r"^Family.name is '', expected a name$"),
        ({"pipelines": "MyPipeline"}, r"^Family\('mine'\).pipelines is 'MyPipeline', expected a tuple of names"),
        ({"returns": "prompt_embeds"}, r"^Family\('mine'\).returns is 'prompt_embeds', expected a tuple of names"),
        ({"denoisers": "unet"}, r"^Family\('mine'\).denoisers is 'unet', expected a tuple of names; of one name it is \('name',\)$"),
        ({"encoders": SPEC}, r"^Family\('mine'\).encoders is .*, expected a tuple of at least one EncoderSpec"),
        ({"encoders": ()}, r"^Family\('mine'\).encoders is '\(\)', expected a tuple of at least one EncoderSpec"),
        ({"encoders": (SPEC, SPEC)}, r"^roles of Family\('mine'\).encoders is 'clip_l, clip_l', expected .* a role of its own$"),
    ],
)
def test_fields_of_another_type(change: dict[str, Any], expected: str):
    with pytest.raises(TinyEngramError, match=expected):
        replace(MINE, **change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"role": None}, r"^EncoderSpec.role is 'None', expected a name$"),
        ({"window": 77}, r"^EncoderSpec\('clip_l'\).window is '77', expected a function such as"),
        ({"text": "clean"}, r"^EncoderSpec\('clip_l'\).text is 'clean', expected a function"),
    ],
)
def test_fields_of_an_encoder(change: dict[str, Any], expected: str):
    with pytest.raises(TinyEngramError, match=expected):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"returns": ("prompt_embeds",)}, r"gives 2 values, and Family.returns names 1 \(prompt_embeds\); name all of them in order"),
        ({"returns": ("negative_prompt_embeds", "prompt_embeds")}, r"no 'prompt_embeds'; check the order of Family.returns"),
        ({"denoisers": ("transformer",)}, r"has none of the denoisers of family 'mine' \(transformer\)"),
        ({"encoders": (replace(SPEC, encoder="vae"),)}, r"^AutoencoderKL has no hidden_size in its config.* EncoderSpec\(encoder=...\)"),
    ],
)
def test_what_the_pipeline_does_not_have(own_pipe, change: dict[str, Any], expected: str):
    with pytest.raises(TinyEngramError, match=expected):
        tiny_engram.attach(own_pipe, family=replace(MINE, **change))
    assert find_adapter(own_pipe) is None and not own_pipe.text_encoder._forward_hooks


def test_a_denoiser_may_be_left_out(own_pipe):
    own_pipe.unet = None
    adapter = tiny_engram.attach(own_pipe, family=MINE)
    adapter.load_concept(adapter.new_concept("zqx"))
    assert adapter.explain("a zqx").fired


def test_a_family_is_a_family(own_pipe):
    for call in (register_family, lambda family: tiny_engram.attach(own_pipe, family=family)):
        with pytest.raises(TinyEngramError, match=r"^family is 'mine', expected a tiny_engram.pipelines.family.Family"):
            call("mine")
    assert family_of(own_pipe) is not None
