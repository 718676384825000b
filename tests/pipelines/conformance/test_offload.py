"""Weights that are elsewhere until a module runs: accelerate's hooks, as far as a machine without a GPU has them."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

import tiny_engram
from tests.pipelines.conformance.cases import PROMPT, each_mode, each_pipeline
from tests.pipelines.conformance.reading import embeds_of, same
from tests.pipelines.tiny.base import picture

CPU = torch.device("cpu")
# Weights of a module's inside are read from outside it here, and are not there then, with or without concepts.
WHOLE = ("HunyuanDiT2DModel", "AutoencoderKLFlux2")


def networks(pipe: Any) -> list[Any]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


@each_mode()
def test_sequential_offload_gives_the_same_bits(subject, mode, own):
    made = subject.concept(mode)
    subject.adapter.load_concept(made)
    expected, drawn = embeds_of(subject.family, subject.pipe, PROMPT), picture(subject.tiny, subject.pipe, PROMPT)
    adapter = tiny_engram.attach(own)
    adapter.load_concept(made)
    spread = [network for network in networks(own) if type(network).__name__ not in WHOLE]
    for network in networks(own):
        if network in spread:
            cpu_offload(network, execution_device=CPU, offload_buffers=True)
            assert all(value.device.type == "meta" for value in network.parameters())
        else:
            cpu_offload_with_hook(network, execution_device=CPU)
    assert same(expected, embeds_of(subject.family, own, PROMPT))
    assert torch.equal(drawn, picture(subject.tiny, own, PROMPT))
    adapter.detach()
    assert same(embeds_of(subject.family, subject.twin, PROMPT), embeds_of(subject.family, own, PROMPT))
    again = tiny_engram.attach(own)  # on weights that are elsewhere
    again.load_concept(made)
    assert same(expected, embeds_of(subject.family, own, PROMPT))
    assert all(value.device.type == "meta" for network in spread for value in network.parameters())


@each_pipeline()
@pytest.mark.parametrize("first", ["attached", "offloaded"])
def test_model_offload_gives_the_same_bits_and_may_end(subject, own, first):
    made = subject.concept(subject.everywhere)
    subject.adapter.load_concept(made)
    expected, drawn = embeds_of(subject.family, subject.pipe, PROMPT), picture(subject.tiny, subject.pipe, PROMPT)
    adapter = tiny_engram.attach(own) if first == "attached" else None
    hook = None
    for network in networks(own):
        _, hook = cpu_offload_with_hook(network, execution_device=CPU, prev_module_hook=hook)
    adapter = adapter or tiny_engram.attach(own)
    adapter.load_concept(made)
    for _ in range(2):
        assert same(expected, embeds_of(subject.family, own, PROMPT)) and torch.equal(drawn, picture(subject.tiny, own, PROMPT))
        for network in networks(own):
            remove_hook_from_module(network, recurse=True)
    adapter.detach()
    assert same(embeds_of(subject.family, subject.twin, PROMPT), embeds_of(subject.family, own, PROMPT))
