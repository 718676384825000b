"""Maps at cross-attentions of transformer denoisers, under their masks and behind their norms, against the attention that these pay."""

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.nn import functional

import tiny_engram
from tests.pipelines.stream_cases import PLAIN, PROMPT, STREAMS, TRIGGER, spans_of
from tests.pipelines.tiny.base import picture
from tiny_engram import map_mounts
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError

MAPS = ConceptConfig(mounts=("span",), attention_rank=1, feedforward_rank=1)
SITES = {"wan:2.1": ("attention", "feedforward"), "ltx": ("attention", "feedforward"), "sana": ("attention",)}


def build(name: str) -> Any:
    pipe = STREAMS[name].build()
    if name == "wan:2.1":  # as wide as maps can be: their channels come in blocks of 32
        torch.manual_seed(0)
        config = {key: value for key, value in pipe.transformer.config.items() if not key.startswith("_")}
        pipe.register_modules(transformer=WanTransformer3DModel(**{**config, "attention_head_dim": 16}).eval())
    return pipe


@pytest.fixture(scope="module", params=SITES)
def built(request):
    pipe = build(request.param)
    base = {prompt: picture(STREAMS[request.param], pipe, prompt) for prompt in (PROMPT, PLAIN)}
    return STREAMS[request.param], pipe, tiny_engram.attach(pipe), base


def silent(concept: Any) -> Any:
    """The concept with its maps alone."""
    for role, place in concept.roles.items():
        for mount, rows in place.mounts.items():
            concept = concept.with_rows(role, torch.zeros_like(rows.rows()), rows.gain, rows.bias, mount=mount)
    return concept


def test_the_mass_is_the_attention_that_the_processor_pays(built, tiny, monkeypatch):
    entry, pipe, adapter, base = built
    config = MAPS if "feedforward" in SITES[entry.name] else ConceptConfig(mounts=("span",), attention_rank=1)
    concept = silent(tiny.concept(adapter, TRIGGER, config=config))
    (role,) = concept.roles
    assert {name.partition(".")[0] for name in concept.roles[role].maps} == set(SITES[entry.name])
    adapter.load_concept(concept)
    attended: list[tuple[Any, ...]] = []
    masses: list[torch.Tensor] = []
    real, counted = functional.scaled_dot_product_attention, map_mounts.attention_mass

    def spy(query, key, value, attn_mask=None, **options):
        attended.append((query, key, attn_mask))
        return real(query, key, value, attn_mask=attn_mask, **options)

    def keep(*args, **options):
        masses.append(counted(*args, **options))
        return masses[-1]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(map_mounts, "attention_mass", keep)
    ours = picture(entry, pipe, PROMPT)
    monkeypatch.undo()
    ((start, size, _),) = spans_of(adapter, concept, PROMPT, entry)[role]
    # Denoisers have two heads, encoders more; texts are longer than pictures of so few places.
    cross = [(query, key, mask) for query, key, mask in attended if key.shape[1] == 2 and key.shape[2] >= 100]
    paid = []
    for query, key, mask in cross:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores if mask is None else scores + mask
        paid.append(scores.softmax(-1)[-1:, ..., start : start + size].sum(-1))
    if entry.family == "wan":  # its second call of each step is the one without the prompt
        paid = [mass for k, mass in enumerate(paid) if k // 2 % 2 == 0]
    assert len(masses) == len(paid) == 4
    for mass, expected in zip(masses, paid, strict=True):
        torch.testing.assert_close(mass, expected)
    assert not torch.equal(ours, base[PROMPT]) and torch.equal(picture(entry, pipe, PLAIN), base[PLAIN])
    adapter.disable_concepts()
    assert torch.equal(picture(entry, pipe, PROMPT), base[PROMPT])
    adapter.unload_concept()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipe.transformer.modules() if m is not pipe.transformer)


@pytest.mark.parametrize("name", ["flux:schnell", "hunyuandit"])
def test_where_there_are_none_they_are_refused(name):
    pipe = STREAMS[name].build()
    adapter = tiny_engram.attach(pipe)
    with pytest.raises(TinyEngramError, match="attention_rank is 1, but this pipeline has no attention maps at"):
        adapter.new_concept(TRIGGER, config=MAPS)
