"""Schedules on every family: a picture equals the one whose denoiser is handed, call by call, what other strengths had given it there.

That is recorded from runs of the plain pipeline at these strengths, by the number of the call and not by content.
"""

import inspect
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, HeunDiscreteScheduler, StableDiffusionXLControlNetPipeline

import tiny_engram
from tests.pipelines.tiny.base import TinyPipeline
from tests.pipelines.tiny.every import EVERY, cases
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError

PROMPT, NEGATIVE, PLAIN = "a photo of a vortex cat on a table", "a blurred vortex cat", "two green trees"
DEFAULT = ("stable-diffusion-1", "stable-diffusion-xl", "stable-diffusion-3:no-t5", "flux:schnell", "pixart:sigma", "wan:2.2-a14b")
CASES = cases(default=DEFAULT)
STEPS = 4
# Arguments of denoisers that hold text states or pooled vectors.
TEXT = ("encoder_hidden_states", "encoder_hidden_states_t5", "pooled_projections", "added_cond_kwargs", "cap_feats")
Tape = list[dict[str, Any]]


def named(name: str) -> TinyPipeline:
    return next(tiny for tiny in EVERY if tiny.name == name)


def attached(tiny: TinyPipeline, tiny_module: Any) -> tuple[Any, Any]:
    """A pipeline and its adapter, with a concept at the encoders' states, their token embeddings and their pooled vectors."""
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    pooled = any("pooled" in mount.store.mounts for mount in adapter.mounts.values())
    config = tiny_engram.ConceptConfig(mounts=("span", "input", "pooled") if pooled else ("span", "input"))
    adapter.load_concept(tiny_module.concept(adapter, "vortex cat", name="vortex", config=config))
    return pipe, adapter


def options_of(tiny: TinyPipeline, pipe: Any, negative: str = NEGATIVE) -> dict[str, Any]:
    """With guidance by a negative prompt, where the pipeline has that; and what it is to know of the encoding."""
    known = inspect.signature(type(pipe).__call__).parameters
    found: dict[str, Any] = {name: value for name, value in tiny.call.items() if name == "max_sequence_length"}
    if "negative_prompt" in known:
        found["negative_prompt"] = negative
    if "true_cfg_scale" in known:
        found["true_cfg_scale"] = 3.0
    return found


def picture(tiny: TinyPipeline, pipe: Any, **options: Any) -> torch.Tensor:
    return pipe(**{**tiny.call, "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0), **options})[0]


@contextmanager
def calls_of(adapter: Any, pipe: Any, replaced: Tape | None = None) -> Iterator[Tape]:
    """Inside, what the denoisers are given of the text, call by call; or `replaced` is given to them instead."""
    tape: Tape = []
    denoisers = list(adapter.family.present(pipe).values())

    def forward(*args: Any, original: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        tape.append({name: value for name, value in bound.arguments.items() if name in TEXT})
        if replaced is not None:
            bound.arguments.update(replaced[len(tape) - 1])
        return original(*bound.args, **bound.kwargs)

    for denoiser in denoisers:
        own = denoiser.forward
        denoiser.forward = lambda *args, own=own, **kwargs: forward(*args, original=own, **kwargs)
    try:
        yield tape
    finally:
        for denoiser in denoisers:
            del denoiser.forward


def recorded(tiny: TinyPipeline, pipe: Any, adapter: Any, strength: float, **options: Any) -> tuple[torch.Tensor, Tape]:
    adapter.set_strength("vortex", strength)
    with calls_of(adapter, pipe) as tape:
        drawn = picture(tiny, pipe, **options)
    adapter.set_strength("vortex", 1.0)
    return drawn, tape


def by_hand(tiny: TinyPipeline, pipe: Any, adapter: Any, tapes: list[Tape], **options: Any) -> torch.Tensor:
    """Each tape's share of the calls, one tape after the other."""
    total = len(tapes[0])
    assert all(len(tape) == total for tape in tapes) and total % len(tapes) == 0
    part = total // len(tapes)
    whole = [call for k, tape in enumerate(tapes) for call in tape[k * part : (k + 1) * part]]
    with calls_of(adapter, pipe, whole):
        return picture(tiny, pipe, **options)


@pytest.mark.parametrize("tiny_pipeline", CASES)
def test_each_step_is_drawn_at_its_own_strength(tiny_pipeline, tiny):
    pipe, adapter = attached(tiny_pipeline, tiny)
    options = options_of(tiny_pipeline, pipe)
    plain = options_of(tiny_pipeline, pipe, "bad")
    run = {"prompt": PROMPT, **options}
    on, tape = recorded(tiny_pipeline, pipe, adapter, 1.0, **run)
    off, silent = recorded(tiny_pipeline, pipe, adapter, 0.0, **run)
    first, last = (by_hand(tiny_pipeline, pipe, adapter, tapes, **run) for tapes in ([tape, silent], [silent, tape]))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations((on, off, first, last), 2))

    adapter.set_schedule("vortex", [(0.0, 1.0), (0.5, 0.0)])
    scheduled = adapter.scheduled(PROMPT, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        drawn = [picture(tiny_pipeline, pipe, **scheduled) for _ in range(2)]
    assert torch.equal(drawn[0], first) and torch.equal(drawn[1], first)
    adapter.set_schedule("vortex", start=0.5)
    assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(PROMPT, **options)), last)
    without = picture(tiny_pipeline, pipe, **adapter.scheduled(PLAIN, **plain))
    for factor, same in ((1.0, on), (0.0, off)):
        adapter.set_schedule("vortex", [(0.0, factor)])
        assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(PROMPT, **options)), same)
    adapter.detach()
    assert torch.equal(without, picture(tiny_pipeline, pipe, prompt=PLAIN, **plain))
    assert not any(part._forward_pre_hooks for part in pipe.components.values() if isinstance(part, torch.nn.Module))


@pytest.mark.parametrize("name", ["stable-diffusion-1", pytest.param("wan:2.1", marks=pytest.mark.families)])
def test_a_slope_has_a_strength_for_each_step(name, tiny):
    tiny_pipeline = named(name)
    pipe, adapter = attached(tiny_pipeline, tiny)
    run = {"prompt": PROMPT, **options_of(tiny_pipeline, pipe)}
    tapes = [recorded(tiny_pipeline, pipe, adapter, strength, **run)[1] for strength in (1.0, 0.75, 0.5, 0.25)]
    hand = by_hand(tiny_pipeline, pipe, adapter, tapes, **run)
    adapter.set_schedule("vortex", [(0.0, 1.0), (1.0, 0.0)], interpolation="linear")
    assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(**run, num_inference_steps=STEPS)), hand)
    assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(**run, steps=STEPS)), hand)
    with pytest.raises(TinyEngramError, match="schedule of concept 'vortex' is linear, .*num_inference_steps=..., or with steps="):
        adapter.scheduled(**run)
    with pytest.raises(TinyEngramError, match="this run has 4 steps, .*give steps=4"):
        picture(tiny_pipeline, pipe, **adapter.scheduled(**run, steps=7))
    assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(**run, steps=STEPS)), hand)
    adapter.detach()


@pytest.mark.families
@pytest.mark.parametrize("name", ["wan:2.2-a14b", "sana"])
def test_denoisers_of_another_type_than_the_encoder(name, tiny):
    tiny_pipeline = named(name)
    pipe, adapter = attached(tiny_pipeline, tiny)
    for denoiser in adapter.family.present(pipe).values():
        denoiser.to(torch.bfloat16)
    run = {"prompt": PROMPT, **options_of(tiny_pipeline, pipe)}
    tapes = [recorded(tiny_pipeline, pipe, adapter, strength, **run)[1] for strength in (1.0, 0.0)]
    assert tapes[0][0]["encoder_hidden_states"].dtype == torch.bfloat16
    hand = by_hand(tiny_pipeline, pipe, adapter, tapes, **run)
    adapter.set_schedule("vortex", end=0.5)
    assert torch.equal(picture(tiny_pipeline, pipe, **adapter.scheduled(**run)), hand)
    adapter.detach()


def test_states_that_were_not_encoded_for_the_schedule_are_told(tiny):
    tiny_pipeline = named("flux:schnell")
    pipe, adapter = attached(tiny_pipeline, tiny)
    adapter.set_schedule("vortex", end=0.5)
    longer = adapter.scheduled(PROMPT)  # of 512 positions, where the pipeline is to read 256
    with pytest.raises(MountError, match="reads no text states that adapter.step_callback encoded"):
        picture(tiny_pipeline, pipe, **longer)
    with pytest.raises(TinyEngramError, match="^prompt_2 is given, but schedules encode one prompt"):
        adapter.scheduled(PROMPT, prompt_2=PLAIN)
    adapter.detach()


@pytest.mark.families
def test_no_negative_prompt_where_the_pipeline_takes_none(tiny):
    _, adapter = attached(named("flux-2"), tiny)
    with pytest.raises(TinyEngramError, match="Flux2Pipeline takes no negative_prompt"):
        adapter.scheduled(PROMPT, NEGATIVE)


@pytest.mark.families
def test_guidance_that_ends_early(tiny):
    """Late calls of Z-Image then hold the prompts alone."""
    tiny_pipeline = named("z-image")
    pipe, adapter = attached(tiny_pipeline, tiny)
    run = {"prompt": [PROMPT, PLAIN], "negative_prompt": [NEGATIVE, "bad"], "cfg_truncation": 0.6}
    tapes = [recorded(tiny_pipeline, pipe, adapter, strength, **copied(run))[1] for strength in (1.0, 0.0)]
    assert [len(call["cap_feats"]) for call in tapes[0]] == [4, 4, 4, 2]
    with calls_of(adapter, pipe, [*tapes[0][:3], tapes[1][3]]):
        hand = picture(tiny_pipeline, pipe, **copied(run))
    adapter.set_schedule("vortex", [(0.0, 1.0), (0.75, 0.0)])
    drawn = picture(tiny_pipeline, pipe, **adapter.scheduled(**copied(run)))
    assert all(torch.equal(one, other) for one, other in zip(drawn, hand, strict=True))
    adapter.detach()


def copied(run: dict[str, Any]) -> dict[str, Any]:
    """Z-Image writes its template into the lists that it is given."""
    return {name: list(value) if isinstance(value, list) else value for name, value in run.items()}


@pytest.mark.families
def test_a_control_net_reads_the_same_states(tiny):
    tiny_pipeline = named("stable-diffusion-xl")
    parts = tiny_pipeline.build().components
    torch.manual_seed(1)
    control = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 8, 8, 8))
    for block in (*control.controlnet_down_blocks, control.controlnet_mid_block):
        torch.nn.init.normal_(block.weight)
    pipe = StableDiffusionXLControlNetPipeline(**{**parts, "controlnet": control.eval()}, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "vortex cat", name="vortex"))
    seen: list[torch.Tensor] = []
    control.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True)
    run = {"image": torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2)), "prompt": PROMPT, "negative_prompt": NEGATIVE}
    recorded(tiny_pipeline, pipe, adapter, 1.0, **run)
    recorded(tiny_pipeline, pipe, adapter, 0.0, **run)
    adapter.set_schedule("vortex", end=0.5)
    picture(tiny_pipeline, pipe, **adapter.scheduled(**run))
    assert len(seen) == 3 * STEPS and not torch.equal(seen[0], seen[STEPS])
    for step in range(STEPS):
        assert torch.equal(seen[2 * STEPS + step], seen[0 if step < 2 else STEPS])
    adapter.detach()


@pytest.mark.families
def test_a_pipeline_with_the_older_callback(tiny):
    """PixArt tells whole steps, of which Heun's scheduler takes two calls."""
    tiny_pipeline = named("pixart:sigma")
    pipe, adapter = attached(tiny_pipeline, tiny)
    pipe.register_modules(scheduler=HeunDiscreteScheduler())
    run = {"prompt": PROMPT, **options_of(tiny_pipeline, pipe)}
    tapes = [recorded(tiny_pipeline, pipe, adapter, strength, **run)[1] for strength in (1.0, 0.0)]
    assert len(tapes[0]) == 2 * STEPS - 1
    with calls_of(adapter, pipe, [*tapes[0][:4], *tapes[1][4:]]):
        hand = picture(tiny_pipeline, pipe, **run)
    told: list[int] = []
    adapter.set_schedule("vortex", end=0.5)
    made = adapter.scheduled(**run, callback_on_step_end=lambda step, timestep, latents: told.append(step))
    assert made["callback_steps"] == 1 and "callback_on_step_end" not in made
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(picture(tiny_pipeline, pipe, **made), hand)
    assert told == list(range(STEPS))
    adapter.detach()
