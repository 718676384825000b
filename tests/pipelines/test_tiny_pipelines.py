"""The tiny pipelines themselves: each draws what its prompts say, the same again, and from encoders in which a concept could go wrong."""

import inspect
from typing import Any

import pytest
import torch

from tests.pipelines.tiny import language, videos, wan
from tests.pipelines.tiny.base import clip_tokenizer, mt5_tokenizer, picture, sentencepiece_tokenizer, t5_tokenizer
from tests.pipelines.tiny.every import cases

PROMPT, OTHER = "a photo of a vortex cat on a table", "a photo of an old dog on a table"


@pytest.fixture(scope="module", params=cases())
def built(request):
    return request.param, request.param.build()


def encoders(pipe: Any) -> dict[str, Any]:
    return {name: part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None}


def test_it_draws_the_same_again_whoever_built_it(built):
    tiny, pipe = built
    drawn = picture(tiny, pipe, PROMPT)
    assert drawn.isfinite().all() and len(drawn) == 1
    assert torch.equal(drawn, picture(tiny, pipe, PROMPT)) and torch.equal(drawn, picture(tiny, tiny.build(), PROMPT))


def test_it_draws_what_each_prompt_says(built):
    tiny, pipe = built
    drawn = picture(tiny, pipe, PROMPT)
    assert not torch.equal(drawn, picture(tiny, pipe, OTHER))
    same = dict.fromkeys(tiny.prompt_keys, PROMPT)
    assert torch.equal(drawn, picture(tiny, pipe, **same))
    for key in tiny.prompt_keys:
        assert not torch.equal(drawn, picture(tiny, pipe, **{**same, key: OTHER}))


def test_its_encoders_are_deep_and_unlike(built):
    _, pipe = built
    configs = {name: part.config.get_text_config() for name, part in encoders(pipe).items()}
    assert all(config.num_hidden_layers >= 4 for config in configs.values())
    assert len({config.hidden_size for config in configs.values()}) == len(configs)
    for name, config in configs.items():
        assert config.vocab_size >= len(getattr(pipe, name.replace("text_encoder", "tokenizer")))


@torch.no_grad()
def test_states_tell_tokens_apart_and_hear_other_words(built):
    _, pipe = built
    for name, encoder in encoders(pipe).items():
        tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"))
        inputs, others = (tokenizer(text, return_tensors="pt") for text in (PROMPT, PROMPT.replace("vortex", "fluffy")))
        states, changed = (encoder(**given, output_hidden_states=True).hidden_states[-1][0] for given in (inputs, others))
        size = states.norm(dim=-1).mean()
        unlike = inputs.input_ids[0][:, None] != inputs.input_ids[0]
        assert torch.cdist(states, states)[unlike].min() > 0.3 * size
        assert (states[-2] - changed[-2]).norm() > 0.01 * size


def test_the_second_denoiser_of_wan_draws_the_later_steps():
    tiny = next(tiny for tiny in wan.PIPELINES if "a14b" in tiny.name)
    pipe = tiny.build()
    ran = []
    for name in ("transformer", "transformer_2"):
        getattr(pipe, name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    picture(tiny, pipe, PROMPT, guidance_scale=1.0)
    assert ran == ["transformer", "transformer_2"]


def test_tokenizers_are_the_published_ones():
    assert clip_tokenizer()("a vortex cat").input_ids == [49406, 320, 30071, 2368, 49407]
    assert t5_tokenizer()("a photo of a Vortex cat").input_ids == [3, 9, 1202, 13, 3, 9, 1526, 10354, 1712, 1]
    # What the library sentencepiece makes of the same file, with its end token added.
    assert mt5_tokenizer()("a photo of a Vortex cat ﬁ  １,").input_ids == [
        *(259, 262, 9018, 304, 259, 262, 434, 188749, 10292, 1090, 3545),
        1,
    ]


def test_a_sentencepiece_file_read_here_is_the_tokenizer_published_beside_it():
    read, published = sentencepiece_tokenizer("flux/tokenizer_2", extra_ids=100), t5_tokenizer()
    text = "Zqx's café, naïve ﬁ № １２ 日本語 \t 🐈"
    assert read(text).input_ids == published(text).input_ids and len(read) == len(published)


def test_templates_of_language_models_are_as_long_as_the_pipelines_say():
    video, image = videos.hunyuan_video(), language.qwen_image()
    template = inspect.signature(video.encode_prompt).parameters["prompt_template"].default
    assert len(video.tokenizer(template["template"].partition("{}")[0]).input_ids) == template["crop_start"] == 95
    before = image.prompt_template_encode.partition("{}")[0]
    assert len(image.tokenizer(before).input_ids) == image.prompt_template_encode_start_idx == 34
    assert image.tokenizer("a photo of a vortex cat").input_ids == [64, 6548, 315, 264, 86527, 8251]
