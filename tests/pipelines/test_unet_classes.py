"""All pipeline classes around the UNets of Stable Diffusion: with ControlNet, perturbed attention, panoramas, consistency models."""

from inspect import signature

import diffusers
import pytest
import torch
from diffusers import ControlNetModel, LCMScheduler, UNet2DConditionModel
from PIL import Image

import tiny_engram
from tests.pipelines.tiny.every import EVERY
from tests.tiny_pipeline import concept
from tiny_engram.config import ConceptConfig
from tiny_engram.pipelines.families import FAMILIES

TRIGGER, PROMPT, PLAIN = "vortex cat", "a photo of a vortex cat on a table", "a photo of a green dog on a table"
CLASSES = {name: family.name for family in FAMILIES if family.denoisers == ("unet",) for name in family.pipelines}
DEFAULT = ("StableDiffusionControlNetPipeline", "StableDiffusionPAGPipeline", "LatentConsistencyModelPipeline")


def built(name):
    """The class on a tiny pipeline's parts, with a ControlNet where it takes one."""
    base = next(entry for entry in EVERY if entry.name == CLASSES[name]).build()
    made, takes = getattr(diffusers, name), signature(getattr(diffusers, name)).parameters
    parts = {key: value for key, value in base.components.items() if key in takes}
    if name.startswith("LatentConsistency"):
        torch.manual_seed(0)
        parts["unet"] = UNet2DConditionModel(**{**base.unet.config, "time_cond_proj_dim": 16}).eval()
        parts["scheduler"] = LCMScheduler()
    if "controlnet" in takes:
        torch.manual_seed(1)
        control = ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=(8, 8, 8, 8)).eval()
        for parameter in control.controlnet_down_blocks.parameters():
            torch.nn.init.normal_(parameter, std=0.1)  # zero at first, as if it were not there
        parts["controlnet"] = control
    others = {"requires_safety_checker": False, "add_watermarker": False, "safety_checker": None, "feature_extractor": None}
    pipe = made(**parts, **{key: value for key, value in others.items() if key in takes and key not in parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe, prompt):
    takes = signature(type(pipe).__call__).parameters
    shown, mask = Image.new("RGB", (64, 64), (200, 30, 30)), Image.new("L", (64, 64), 255)
    pictures = {"image": shown, "control_image": shown, "mask_image": mask, "height": 64, "width": 64}
    given = {key: value for key, value in pictures.items() if key in takes}
    torch.manual_seed(0)  # some draw noise without their generator
    steps = 8 if "strength" in takes else 2
    return pipe(prompt, num_inference_steps=steps, output_type="pt", generator=torch.Generator().manual_seed(0), **given).images


def each_class():
    names = [name for name in CLASSES if name != "StableDiffusionPipeline"]
    return [pytest.param(name, marks=() if name in DEFAULT else (pytest.mark.families,)) for name in names]


@pytest.mark.parametrize("name", each_class())
def test_what_has_the_trigger_moves_and_all_else_keeps_its_bits(name):
    pipe = built(name)
    plain = {prompt: drawn(pipe, prompt) for prompt in (PROMPT, PLAIN)}
    adapter = tiny_engram.attach(pipe)
    for mounts in (("span",), ("input", "context")):
        loaded = adapter.load_concept(concept(adapter, TRIGGER, config=ConceptConfig(mounts=mounts)))
        assert not torch.equal(drawn(pipe, PROMPT), plain[PROMPT])
        assert torch.equal(drawn(pipe, PLAIN), plain[PLAIN])
        adapter.unload_concept(loaded)
    adapter.detach()
    assert torch.equal(drawn(pipe, PROMPT), plain[PROMPT])
