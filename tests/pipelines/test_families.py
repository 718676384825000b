"""What the families say of their denoisers, against what really runs."""

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

import tiny_engram
from tests.pipelines.tiny import t5
from tiny_engram.pipelines.families import family_of
from tiny_engram.triggers import compile_trigger

EMBEDDED = "assets/bases/emoji-sd/unet"


def embedded_unet(repo_root) -> Any:
    """The embedded base's denoiser with random weights."""
    config = UNet2DConditionModel.load_config(repo_root / EMBEDDED)
    return UNet2DConditionModel.from_config(config)


@pytest.mark.parametrize("which", ["tiny", "embedded"])
def test_context_mounts_are_named_in_running_order(pipe, repo_root, which):
    unet = pipe.unet if which == "tiny" else embedded_unet(repo_root)
    family = family_of(pipe)
    assert family is not None
    places = family.contexts(unet, "clip_l")
    modules = {id(getattr(owner, attribute)): name for name, (owner, attribute) in places.items()}
    states = torch.zeros(1, 3, unet.config.cross_attention_dim)
    ran: list[str | None] = []

    def note(module, args):
        if args[0] is states:
            ran.append(modules.get(id(module)))

    handles = [m.register_forward_pre_hook(note) for m in unet.modules() if isinstance(m, torch.nn.Linear)]
    try:
        with torch.no_grad():
            unet(torch.zeros(1, unet.config.in_channels, 16, 16), 1, states)
    finally:
        for handle in handles:
            handle.remove()
    # Every projection that reads the text states is a mount, once, and there is no mount that reads nothing.
    assert ran == list(places) and len(ran) == {"tiny": 8, "embedded": 14}[which]
    assert ran[:3] == ["context.0.key", "context.0.value", "context.1.key"]


@pytest.mark.parametrize(
    ("which", "blocks"), [("tiny", ("down1", "mid", "up0", "up0")), ("embedded", ("down0", "down1", "mid", "up0", "up0", "up1", "up1"))]
)
def test_cross_attentions_have_a_block_and_a_feed_forward_layer_behind_them(pipe, repo_root, which, blocks):
    unet = pipe.unet if which == "tiny" else embedded_unet(repo_root)
    family = family_of(pipe)
    assert family is not None
    assert family.attentions is not None
    attentions = family.attentions(unet, "clip_l")
    assert tuple(a.block for a in attentions) == blocks
    names: dict[Any, str] = {module: name for name, module in unet.named_modules()}
    layers: list[Any] = [m for a in attentions for m in (a.module, a.feedforward)]
    ran: list[torch.nn.Module] = []
    reads: dict[torch.nn.Module, int] = {}

    def note(module, args):
        ran.append(module)
        reads[module] = args[0].shape[-1]

    handles = [m.register_forward_pre_hook(note) for m in layers]
    try:
        with torch.no_grad():
            unet(torch.zeros(1, unet.config.in_channels, 16, 16), 1, torch.zeros(1, 3, unet.config.cross_attention_dim))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == layers
    assert all(names[a.feedforward] == names[a.transformer] + ".ff" for a in attentions)
    parts = [names[a.module].split(".") for a in attentions]
    assert all(
        a.block == part[0].partition("_")[0] + (part[1] if a.block != "mid" else "") for a, part in zip(attentions, parts, strict=True)
    )
    assert all(reads[a.module] == reads[a.feedforward] == a.channels for a in attentions)


def test_where_prompts_are_written_in_lower_case_a_trigger_needs_no_other_rows(tiny):
    pipe = next(one for one in t5.PIPELINES if one.name == "pixart:sigma").build()
    adapter = tiny_engram.attach(pipe)
    try:
        compiled = adapter.compile("Tako-Blip")["t5"]
        whole = compile_trigger("Tako-Blip", pipe.tokenizer, compressed=adapter.mounts["t5"].store.compressed)
        assert {v.text for v in compiled.variants} == {"tako-blip"} and compiled.positions < whole.positions / 2
        adapter.load_concept(tiny.concept(adapter, "Tako-Blip", name="tako"))
        for prompt in ("a Tako-Blip", "a TAKO-BLIP on red", "tako-blip, tako-blip"):
            assert {f.name for f in adapter.explain(prompt).fired} == {"tako"}
    finally:
        adapter.detach()
