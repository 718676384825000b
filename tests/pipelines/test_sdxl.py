"""Stable Diffusion XL: two encoders whose next to last states stand side by side, and a pooled vector that nothing moves."""

import copy
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, UNet2DConditionModel

import tiny_engram
from tests.pipelines.tiny import stable_diffusion
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError

TRIGGER, PROMPT, PLAIN = "vortex cat", "a photo of a vortex cat on a table", "a photo of a cat on a table"
WIDTHS = {"clip_l": stable_diffusion.CLIP_L, "clip_g": stable_diffusion.CLIP_G}


@pytest.fixture(scope="module")
def xl():
    """A real pipeline of random weights, the widths of its encoders unlike."""
    return stable_diffusion.xl()


@pytest.fixture
def adapted(xl, tiny):
    """An adapter with one concept of random rows at the output and the token embeddings."""
    adapter = tiny_engram.attach(xl)
    config = tiny_engram.ConceptConfig(mounts=("input", "span"))
    adapter.load_concept(tiny.concept(adapter, TRIGGER, name="vortex", config=config))
    yield adapter
    adapter.detach()
    assert not xl.text_encoder._forward_hooks and not xl.text_encoder_2._forward_hooks and not xl.unet._forward_pre_hooks


@torch.no_grad()
def encoded(pipe: Any, prompt: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    return pipe.encode_prompt(prompt, device="cpu", **options)


def picture(pipe: Any, **options: Any) -> torch.Tensor:
    options = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "latent", **options}
    return pipe(generator=torch.Generator().manual_seed(0), **options).images


def moved(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    return (one != other).any(-1)[0].nonzero().flatten().tolist()


def test_both_halves_move_at_the_span_and_only_there(xl, adapted):
    after = encoded(xl, [PROMPT])
    with_strength = {}
    for strength in (0.0, 1.0):
        adapted.set_strength("vortex", strength)
        with_strength[strength] = encoded(xl, [PROMPT])
    adapted.disable_concepts()
    base = encoded(xl, [PROMPT])
    assert moved(after[0][..., :32], base[0][..., :32]) == moved(after[0][..., 32:], base[0][..., 32:]) == [5, 6]
    for k in range(4):
        assert torch.equal(with_strength[0.0][k], base[k]) and torch.equal(with_strength[1.0][k], after[k])
    assert torch.equal(after[2], base[2])  # the pooled vector


def test_what_has_no_trigger_keeps_its_bits(xl, adapted):
    found = encoded(xl, [PLAIN], negative_prompt=["ugly"]), picture(xl, prompt=PLAIN, negative_prompt="ugly")
    adapted.detach()
    base = encoded(xl, [PLAIN], negative_prompt=["ugly"]), picture(xl, prompt=PLAIN, negative_prompt="ugly")
    assert all(torch.equal(one, other) for one, other in zip(found[0], base[0], strict=True)) and torch.equal(found[1], base[1])


def test_the_picture_follows_the_concept(xl, adapted):
    drawn = picture(xl, prompt=PROMPT)
    adapted.disable_concepts()
    assert not torch.equal(drawn, picture(xl, prompt=PROMPT))


def test_a_trigger_in_the_second_prompt_or_the_negative_one(xl, adapted):
    second = encoded(xl, [PLAIN], prompt_2=[PROMPT])[0]
    negative = encoded(xl, [PLAIN], negative_prompt=[PROMPT])
    adapted.disable_concepts()
    base = encoded(xl, [PLAIN], prompt_2=[PROMPT])[0]
    assert not moved(second[..., :32], base[..., :32]) and moved(second[..., 32:], base[..., 32:]) == [5, 6]
    plain = encoded(xl, [PLAIN], negative_prompt=[PROMPT])
    assert torch.equal(negative[0], plain[0]) and moved(negative[1], plain[1]) == [5, 6]


def test_rows_of_a_batch_and_images_of_a_prompt(xl, adapted):
    alone = encoded(xl, [PROMPT])[0]
    batch = encoded(xl, [PLAIN, PROMPT], num_images_per_prompt=2)[0]
    torch.testing.assert_close(batch[2:3], alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(batch[2], batch[3])
    adapted.disable_concepts()
    assert torch.equal(encoded(xl, [PLAIN, PROMPT], num_images_per_prompt=2)[0][:2], batch[:2])


@pytest.mark.parametrize("skip", (1, 2))
def test_clip_skip_reads_an_earlier_layer_with_the_concept_in(xl, adapted, skip):
    found = encoded(xl, [PROMPT], clip_skip=skip)[0]
    adapted.disable_concepts()
    assert moved(found, encoded(xl, [PROMPT], clip_skip=skip)[0]) == [5, 6]


def test_the_refiner_has_the_second_encoder_alone(xl, tiny):
    parts = {**xl.components, "text_encoder": None, "tokenizer": None}
    small = UNet2DConditionModel.from_config(
        {**xl.unet.config, "cross_attention_dim": WIDTHS["clip_g"], "projection_class_embeddings_input_dim": 5 * 8 + 32}
    )
    refiner = StableDiffusionXLImg2ImgPipeline(**{**parts, "unet": small}, requires_aesthetics_score=True, add_watermarker=False)
    adapter = tiny_engram.attach(refiner)
    try:
        assert adapter.absent == ("clip_l",) and set(adapter.mounts) == {"clip_g"}
        adapter.load_concept(tiny.concept(adapter, TRIGGER, name="vortex"))
        found = encoded(refiner, [PROMPT])[0]
        adapter.disable_concepts()
        assert moved(found, encoded(refiner, [PROMPT])[0]) == [5, 6]
    finally:
        adapter.detach()


def test_a_copy_says_that_it_has_none_of_it(xl, adapted):
    with pytest.raises(MountError, match=r"this CLIPTextModel is a copy of a module with concepts attached"):
        encoded(copy.deepcopy(xl), [PROMPT])


def test_what_does_not_fit_is_refused(xl, adapted, pipe, tiny):
    with pytest.raises(TinyEngramError):
        adapted.new_concept("zq", config=tiny_engram.ConceptConfig(mounts=("context.value",)))
    other = tiny_engram.attach(pipe)
    try:
        with pytest.raises(TinyEngramError):
            other.load_concept(adapted.concept("vortex"))
    finally:
        other.detach()
