"""Encoders that would take long to run are not probed at attach: their first prompts are looked at instead."""

from typing import Any

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny import flux, language, t5
from tests.pipelines.tiny.base import picture
from tiny_engram import probe
from tiny_engram.hooks import MountError

PROMPT = "a photo of a vortex cat on a table"


@pytest.fixture
def costly(monkeypatch):
    """Any encoder counts as one of billions of values."""
    monkeypatch.setattr(probe, "MOST_ON_CPU", 0)


def entry(entries: Any, name: str) -> Any:
    return next(one for one in entries if one.name == name)


@pytest.fixture(params=["pixart:sigma", "flux:dev"])
def built(request):
    one = entry((*t5.PIPELINES, *flux.PIPELINES), request.param)
    return one, one.build()


def runs_of(pipe: Any) -> list[str]:
    """Filled with the name of each encoder that runs."""
    ran: list[str] = []
    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and part is not None:
            layer = next(m for m in part.modules() if isinstance(m, torch.nn.Linear))
            layer.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    return ran


def test_no_encoder_runs_at_attach_and_the_first_picture_proves_the_mount(built, costly, tiny):
    one, pipe = built
    ran = runs_of(pipe)
    adapter = tiny_engram.attach(pipe)
    assert not ran and adapter.mounts["t5"].proof == []
    picture(one, pipe, "a photo of a cat")
    assert adapter.mounts["t5"].proof == []
    adapter.load_concept(tiny.concept(adapter, "vortex cat", name="vortex"))
    drawn = picture(one, pipe, PROMPT)
    assert adapter.mounts["t5"].proof is None
    adapter.disable_concepts()
    assert not torch.equal(drawn, picture(one, pipe, PROMPT))
    adapter.detach()


def test_states_that_the_denoiser_does_not_get_are_told(built, costly, tiny):
    one, pipe = built
    encoder = pipe.text_encoder_2 if one.family == "flux" else pipe.text_encoder
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "vortex cat", name="vortex"))
    # behind our hook: what the pipeline reads is not what the concepts are in
    encoder.register_forward_hook(lambda _module, _args, output: type(output)(last_hidden_state=output[0] * 1.5))
    with pytest.raises(MountError, match="does not hold the concepts of role 't5', although they fired in its encoder"):
        picture(one, pipe, PROMPT)
    adapter.detach()


def test_a_trigger_in_the_negative_prompt_alone_is_no_error(costly, tiny):
    one = entry(flux.PIPELINES, "flux:dev")
    pipe = one.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "vortex cat", name="vortex"))
    picture(one, pipe, "a photo of a cat", negative_prompt=PROMPT, true_cfg_scale=2.0)
    assert adapter.mounts["t5"].proof is None
    adapter.detach()


def test_templates_are_learnt_without_running(costly):
    pipe = entry(language.LANGUAGE, "z-image").build()
    ran = runs_of(pipe)
    adapter = tiny_engram.attach(pipe)
    assert not ran and [(len(before), len(behind)) for before, behind in adapter.mounts["llm"].templates.known] == [(2, 5)]
    adapter.detach()
