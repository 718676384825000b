"""Encoders in half precision and with quantised weights: concepts follow what they give, and move and cast nothing."""

from typing import Any

import pytest
import torch
from torch import nn

import tiny_engram
from tests.pipelines.conformance.cases import PROMPT, each_mode, each_pipeline
from tests.pipelines.conformance.reading import embeds_of, moved, same, states_of


def encoders(subject: Any, pipe: Any) -> list[Any]:
    return [getattr(pipe, spec.encoder) for spec in subject.specs.values()]


def keep_wo_in_float32(encoder: nn.Module) -> None:
    """As transformers loads T5 in half precision."""
    for name, module in encoder.named_modules():
        if name.endswith(".wo"):
            module.float()


def check_spans(subject: Any, pipe: Any, plain: Any, mode: str) -> None:
    """The concept moves what it moves in float32, and the text states have the dtype that they had."""
    now = embeds_of(subject.family, pipe, PROMPT)
    assert all(now[name].dtype == value.dtype for name, value in plain.items() if isinstance(value, torch.Tensor))
    before32, after32 = (states_of(subject.family, p, embeds_of(subject.family, p, PROMPT)) for p in (subject.twin, subject.pipe))
    before, after = (states_of(subject.family, pipe, embeds) for embeds in (plain, now))
    for role, states in after.items():
        assert states.isfinite().all()
        if states.dim() == 1:
            assert torch.equal(states, before[role]) == (mode == "span")
        elif mode != "deep":
            assert moved(states, before[role]) == moved(before32[role], after32[role]), role
        else:
            assert moved(states, before[role]), role


@each_mode(modes=("span", "input", "deep"))
def test_encoders_in_half_precision(subject, mode, own):
    subject.load(mode)
    for dtype in (torch.bfloat16, torch.float16):
        for encoder in encoders(subject, own):
            encoder.to(dtype)
            keep_wo_in_float32(encoder)
        before = [{name: value.dtype for name, value in encoder.state_dict().items()} for encoder in encoders(subject, own)]
        plain = embeds_of(subject.family, own, PROMPT)
        adapter = tiny_engram.attach(own)
        try:
            adapter.load_concept(subject.adapter.concept(subject.adapter.get_list_concepts()[0]))
            check_spans(subject, own, plain, mode)
            adapter.disable_concepts()
            assert same(plain, embeds_of(subject.family, own, PROMPT))
        finally:
            adapter.detach()
        assert before == [{name: value.dtype for name, value in encoder.state_dict().items()} for encoder in encoders(subject, own)]


class Int8Linear(nn.Module):
    """A projection of integer weights that nobody may move or cast."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias, self.in_features, self.out_features = linear.bias, linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.to(x.dtype) * self.scale, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "Int8Linear":
        raise ValueError("`.to` is not supported for quantised models")


@each_pipeline()
def test_quantised_encoders(subject, own):
    subject.load(subject.everywhere)
    for encoder in encoders(subject, own):
        for parent in list(encoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Int8Linear(child))
        with pytest.raises(ValueError, match="not supported for quantised"):
            encoder.to(torch.float32)
    plain = embeds_of(subject.family, own, PROMPT)
    adapter = tiny_engram.attach(own)
    adapter.load_concept(subject.adapter.concept(subject.adapter.get_list_concepts()[0]))
    check_spans(subject, own, plain, subject.everywhere)
    adapter.detach()
    assert same(plain, embeds_of(subject.family, own, PROMPT))
