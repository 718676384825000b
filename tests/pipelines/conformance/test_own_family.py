"""A pipeline of nobody's, which its user describes in a few lines; and what is refused."""

import inspect
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, PixArtTransformer2DModel
from transformers import T5EncoderModel, T5Tokenizer

import tiny_engram
from tests.pipelines.conformance.cases import PLAIN, PROMPT, TRIGGER
from tests.pipelines.conformance.reading import embeds_of, moved, same
from tests.pipelines.tiny.base import t5_encoder, t5_tokenizer
from tests.tiny_pipeline import concept
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.pipelines import families
from tiny_engram.pipelines.families import family_of, known_pipelines, register_family
from tiny_engram.pipelines.family import EncoderSpec, Family

WIDTH = 24


class HarbourPipeline(DiffusionPipeline):
    """T5 behind a line of its own, and a transformer with cross-attention."""

    def __init__(self, words: T5EncoderModel, reader: T5Tokenizer, painter: PixArtTransformer2DModel, scheduler: DDPMScheduler) -> None:
        super().__init__()
        self.register_modules(words=words, reader=reader, painter=painter, scheduler=scheduler)

    def encode_prompt(self, prompt: list[str], max_sequence_length: int = 40) -> torch.Tensor:
        read = self.reader(prompt, padding="max_length", max_length=max_sequence_length, truncation=True, return_tensors="pt")
        return self.words(read.input_ids, read.attention_mask)[0]

    @torch.no_grad()
    def __call__(self, prompt: list[str], max_sequence_length: int = 40, prompt_embeds: Any = None) -> torch.Tensor:
        states = self.encode_prompt(prompt, max_sequence_length) if prompt_embeds is None else prompt_embeds
        noise = torch.randn(len(states), 4, 8, 8, generator=torch.Generator().manual_seed(0))
        return self.painter(noise, encoder_hidden_states=states, timestep=torch.tensor([500] * len(states))).sample


class UnknownPipeline(HarbourPipeline):
    pass


def made(kind: Any = HarbourPipeline) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    painter = PixArtTransformer2DModel(
        **sizes, in_channels=4, out_channels=4, cross_attention_dim=16, caption_channels=WIDTH, use_additional_conditions=False
    )
    return kind(t5_encoder(WIDTH).eval(), t5_tokenizer(), painter.eval(), DDPMScheduler())


HARBOUR = Family(
    name="harbour",
    pipelines=("HarbourPipeline",),
    encoders=(EncoderSpec("t5", "words", "reader", window=lambda pipe: 40),),
    returns=("prompt_embeds",),
    denoisers=("painter",),
    probe_length=None,
)


def check(pipe: Any, adapter: Any) -> None:
    bare = made()
    adapter.load_concept(concept(adapter, TRIGGER))
    before, after = (embeds_of(HARBOUR, p, PROMPT)["prompt_embeds"][0] for p in (bare, pipe))
    at = [span for one in adapter.explain(PROMPT).prompts for span in one.fired]
    assert moved(before, after) == list(range(at[0].start, at[0].end)) and len(at) == 1
    assert same(bare([PLAIN]), pipe([PLAIN])) and not same(bare([PROMPT]), pipe([PROMPT]))
    assert same(pipe([PROMPT]), pipe([], **adapter.embeds(PROMPT)))
    adapter.detach()
    assert same(bare([PROMPT]), pipe([PROMPT]))


def test_a_family_that_is_given():
    pipe = made()
    check(pipe, tiny_engram.attach(pipe, family=HARBOUR))


def test_a_family_that_is_registered(monkeypatch):
    monkeypatch.setattr(families, "_added", {})
    pipe = made(UnknownPipeline)
    assert family_of(pipe) is None
    register_family(HARBOUR)
    assert family_of(pipe) is HARBOUR and "HarbourPipeline" in known_pipelines()
    check(pipe, tiny_engram.attach(pipe))


def test_an_unknown_class_is_refused_with_the_list():
    with pytest.raises(TinyEngramError, match="HarbourPipeline is no pipeline that concepts can be attached to") as caught:
        tiny_engram.attach(made())
    said = str(caught.value)
    assert "\n" not in said and all(name in said for name in ("FluxPipeline", "WanPipeline", "StableDiffusionPipeline"))


@pytest.mark.parametrize(
    ("consumed", "words"),
    [
        (lambda pipe, embeds: {"t5": embeds["prompt_embeds"] * 0}, r"t5 \(changed positions \[\]"),
        (lambda pipe, embeds: {"t5": embeds["prompt_embeds"].mean(1, keepdim=True)}, r"t5 \(changed positions \[0\]"),
        (lambda pipe, embeds: {"t5": embeds["prompt_embeds"].flip(1)}, r"t5 \(changed positions \[3\d\]"),
    ],
)
def test_a_family_that_is_wrong_about_what_is_consumed_fails_at_attach(consumed, words):
    wrong = {name: getattr(HARBOUR, name) for name in inspect.signature(Family).parameters}
    pipe = made()
    with pytest.raises(MountError, match=f"what HarbourPipeline consumes does not follow the concepts at: {words}"):
        tiny_engram.attach(pipe, family=Family(**{**wrong, "consumed": consumed}))
    assert not pipe.words._forward_hooks and not pipe.painter._forward_pre_hooks


def test_a_mode_that_a_family_refuses_is_refused_in_one_line():
    about = {name: getattr(HARBOUR, name) for name in inspect.signature(Family).parameters}
    pipe = made()
    adapter = tiny_engram.attach(pipe, family=Family(**{**about, "refuses": {"deep": "its layers run twice"}}))
    with pytest.raises(TinyEngramError, match="ask for 'deep', which this pipeline does not have: its layers run twice") as caught:
        adapter.new_concept(TRIGGER, config=tiny_engram.ConceptConfig(mounts=("deep",)))
    assert "\n" not in str(caught.value)
