"""Concepts beside LoRA and textual inversion, loaded before or after them, and when these go again."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import tiny_engram
from tests.pipelines.conformance.cases import PLAIN, PROMPT, each_pipeline, family_named, has_lora, has_textual_inversion
from tests.pipelines.conformance.reading import embeds_of, moved, same, states_of
from tests.pipelines.tiny.base import TinyPipeline, picture
from tests.tiny_pipeline import unload_inversions
from tiny_engram.hooks import MountError


def lora_file(tiny: TinyPipeline, folder: Any) -> Any:
    """A LoRA of the denoiser's queries, in the family's own format. The peft that is pinned here is too old for transformers' encoders."""
    pipe, family = tiny.build(), family_named(tiny)
    torch.manual_seed(1)
    denoiser = getattr(pipe, family.denoiser)
    denoiser.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False))
    name = "unet_lora_layers" if family.denoiser == "unet" else "transformer_lora_layers"
    type(pipe).save_lora_weights(folder, **{name: get_peft_model_state_dict(denoiser)})
    return folder


def check(subject: Any, bare: Any, ours: Any) -> Any:
    """Beside a pipeline that had the same done to it, but no adapter: equal without the trigger, and it fires where it stands."""
    assert same(embeds_of(subject.family, bare, PLAIN), embeds_of(subject.family, ours, PLAIN))
    assert torch.equal(picture(subject.tiny, bare, PLAIN), picture(subject.tiny, ours, PLAIN))
    now = embeds_of(subject.family, ours, PROMPT)
    plain, after = (
        states_of(subject.family, pipe, embeds) for pipe, embeds in ((bare, embeds_of(subject.family, bare, PROMPT)), (ours, now))
    )
    expected = (states_of(subject.family, p, embeds_of(subject.family, p, PROMPT)) for p in (subject.twin, subject.pipe))
    for (role, one), other in zip(next(expected).items(), next(expected).values(), strict=True):
        if one.dim() == 1:
            assert not torch.equal(plain[role], after[role]), role
        else:
            assert moved(plain[role], after[role]) == moved(one, other) != [], role
    assert not torch.equal(picture(subject.tiny, bare, PROMPT), picture(subject.tiny, ours, PROMPT))
    return now


@each_pipeline(has_lora, default=("stable-diffusion-1", "flux:dev"))
def test_lora_before_and_after(subject, own, tmp_path):
    made, bare = subject.concept(subject.everywhere), subject.tiny.build()
    subject.adapter.load_concept(made)
    lora_file(subject.tiny, tmp_path)
    adapter = tiny_engram.attach(own)
    adapter.load_concept(made)
    for pipe in (own, bare):
        pipe.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    assert not torch.equal(picture(subject.tiny, subject.twin, PLAIN), picture(subject.tiny, bare, PLAIN))
    after, parts = check(subject, bare, own), [subject.family.denoiser]
    adapter.detach()
    adapter = tiny_engram.attach(own)
    adapter.load_concept(made)
    assert same(after, check(subject, bare, own))
    for pipe in (own, bare):
        pipe.fuse_lora(components=parts)
    check(subject, bare, own)
    for pipe in (own, bare):
        pipe.unfuse_lora(components=parts)
        pipe.unload_lora_weights()
    check(subject, bare, own)
    adapter.detach()
    assert torch.equal(picture(subject.tiny, bare, PROMPT), picture(subject.tiny, own, PROMPT))


@each_pipeline(has_textual_inversion, default=("stable-diffusion-1", "stable-diffusion-xl"))
@pytest.mark.parametrize("place", ["output", "embeddings"])
def test_textual_inversion_before_and_after(subject, place, own):
    made, bare = subject.concept(subject.everywhere if place == "output" else "input"), subject.tiny.build()
    adapter = tiny_engram.attach(own)
    adapter.load_concept(made)
    width = own.text_encoder.get_input_embeddings().weight.shape[1]
    learnt = torch.randn(1, width, generator=torch.Generator().manual_seed(3))
    options = {"token": "<zed>", "tokenizer": own.tokenizer, "text_encoder": own.text_encoder}

    def fires() -> None:
        """It does, or the pipeline says that it did not, and then does."""
        for text in (PROMPT, f"a <zed> beside {PROMPT}"):
            plain = picture(subject.tiny, bare, text)
            try:
                drawn = picture(subject.tiny, own, text)
            except MountError:
                drawn = picture(subject.tiny, own, text)
            assert not torch.equal(plain, drawn)
        for text in (PLAIN, "a <zed> on a table"):
            assert torch.equal(picture(subject.tiny, bare, text), picture(subject.tiny, own, text))

    for pipe in (own, bare):
        pipe.load_textual_inversion(learnt, **{**options, "tokenizer": pipe.tokenizer, "text_encoder": pipe.text_encoder})
    fires()
    adapter.detach()
    again = tiny_engram.attach(own)
    try:
        again.load_concept(made)
    except tiny_engram.TinyEngramError as error:
        assert "was made with tokenizer" in str(error)
    else:
        fires()
    for pipe in (own, bare):
        unload_inversions(pipe, tokenizer=pipe.tokenizer, text_encoder=pipe.text_encoder)
    if again.get_list_concepts():
        fires()
