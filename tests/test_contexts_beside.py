"""Context mounts beside what else is done to a denoiser: processors, LoRA, compiling, copies, shared parts, threads."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig
from PIL import Image

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.hooks import MountError

PROMPT = "a zqx bolo on a table"
SIDES = ConceptConfig(mounts=("context",))


@pytest.fixture
def loaded(tiny, attached):
    """(pipeline, adapter) with one concept at all context mounts; each test leaves the denoiser as it was."""
    pipe, adapter = attached
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    yield pipe, adapter
    adapter.unload_concept()
    assert not any(m._forward_pre_hooks for m in pipe.unet.modules() if m is not pipe.unet)


def test_other_attention_processors(tiny, loaded):
    pipe, adapter = loaded
    plain_processors = dict(pipe.unet.attn_processors)
    for processor in ("sliced", AttnProcessor()):
        if isinstance(processor, str):
            pipe.enable_attention_slicing(1)
        else:
            pipe.unet.set_attn_processor(processor)
        ours = tiny.picture(pipe, PROMPT)
        adapter.disable_concepts()
        base = tiny.picture(pipe, PROMPT)
        adapter.enable_concepts()
        pipe.unet.set_attn_processor(dict(plain_processors))  # which the call empties
        assert not torch.equal(ours, base)
        torch.testing.assert_close(ours, tiny.picture(pipe, PROMPT), rtol=0, atol=1e-3)


def test_attention_that_passes_the_mounts_by_is_told(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    ours = tiny.picture(pipe, PROMPT)
    pipe.fuse_qkv_projections(vae=False)  # after a picture that went well
    for _ in range(2):
        with pytest.raises(MountError, match=r"ran without reading through context.0.key, .* undo fused projections"):
            tiny.picture(pipe, PROMPT)
    pipe.unfuse_qkv_projections(vae=False)
    assert torch.equal(ours, tiny.picture(pipe, PROMPT))


def test_states_given_by_name_are_told(tiny, loaded, monkeypatch):
    """A hook does not see them."""
    pipe, _ = loaded

    def attend(attn, hidden_states, encoder_hidden_states=None, **_):
        return attn.to_out[0](attn.to_q(hidden_states) + attn.to_k(input=encoder_hidden_states).mean())

    for block in tiny.blocks_of(pipe.unet):
        monkeypatch.setattr(block.attn2, "processor", attend)
    with pytest.raises(MountError, match="ran without reading through context.0.key"):
        tiny.picture(pipe, PROMPT)


def test_sequentially_offloaded_denoiser(tiny):
    from accelerate import cpu_offload

    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    ours = tiny.picture(pipe, PROMPT)
    adapter.unload_concept()
    cpu_offload(pipe.unet, execution_device=torch.device("cpu"))
    assert next(pipe.unet.parameters()).is_meta
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    assert torch.equal(tiny.picture(pipe, PROMPT), ours)


def test_memory_format_and_lost_hooks(tiny, loaded):
    pipe, adapter = loaded
    ours = tiny.picture(pipe, PROMPT)
    pipe.unet.to(memory_format=torch.channels_last)
    torch.testing.assert_close(tiny.picture(pipe, PROMPT), ours, rtol=0, atol=1e-3)
    pipe.unet.to(memory_format=torch.contiguous_format)
    for spared in (pipe.unet, None):
        for module in pipe.unet.modules():
            if module is not spared:
                module._forward_pre_hooks.clear()
                module._forward_hooks.clear()
        # Put back before the denoiser reads anything: by the watch, and that by the encoder's mount.
        assert torch.equal(ours, tiny.picture(pipe, PROMPT))


def test_a_lora_on_the_same_projections(tiny, loaded):
    """It reads the concept's context too, whoever came first; taken out, nothing is left of it."""
    pipe, adapter = loaded
    ours = tiny.picture(pipe, PROMPT)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_k", "to_v"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in pipe.unet.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.cos(torch.arange(parameter.numel()) * 0.3).reshape(parameter.shape) * 0.2)
    with_lora = tiny.picture(pipe, PROMPT)
    adapter.unload_concept()
    lora_alone = tiny.picture(pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    assert torch.equal(with_lora, tiny.picture(pipe, PROMPT))
    assert not torch.equal(with_lora, ours) and not torch.equal(with_lora, lora_alone)
    # The projections that the denoiser calls are LoRA's now: the modified states go through both of their paths.
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k
    assert layer._forward_pre_hooks and not layer.base_layer._forward_pre_hooks
    pipe.unet.delete_adapters("default")
    pipe.unet.unload_lora() if hasattr(pipe.unet, "unload_lora") else pipe.unload_lora_weights()
    assert torch.equal(ours, tiny.picture(pipe, PROMPT))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a block", "whole"])
def test_compiled_after_loading(tiny, whole):
    """Hooks run outside the graphs, whatever the prompt; a concept that comes later finds them there."""
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    expected = {prompt: tiny.picture(pipe, prompt) for prompt in (PROMPT, "a tree")}
    torch.compiler.reset()
    denoiser = pipe.unet
    if whole:
        pipe.unet = torch.compile(denoiser, backend="eager")
    else:
        denoiser.mid_block.compile(backend="eager")
    for prompt, picture in expected.items():
        torch.testing.assert_close(tiny.picture(pipe, prompt), picture, rtol=0, atol=1e-3)
    tree = tiny.picture(pipe, "a cat-toy")
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=SIDES))
    assert (tiny.picture(pipe, "a cat-toy") - tree).abs().max() > 0.01
    # Another one may be swapped in: the hooks stay where the graphs have them.
    adapter.unload_concept()
    assert (tiny.picture(pipe, PROMPT) - expected[PROMPT]).abs().max() > 0.01
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    torch.testing.assert_close(tiny.picture(pipe, PROMPT), expected[PROMPT], rtol=0, atol=1e-3)
    adapter.detach()
    assert not any(m._forward_pre_hooks for m in denoiser.modules())
    torch.compiler.reset()


@pytest.mark.parametrize("whole", [True, False], ids=["torch.compile", "module.compile"])
def test_compiled_before_loading_is_refused(tiny, whole):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    if whole:
        pipe.unet = torch.compile(pipe.unet, backend="eager")
    else:
        pipe.unet.mid_block.compile(backend="eager")
    with pytest.raises(MountError, match="was compiled before a concept with context mounts was loaded.* before torch.compile"):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    assert adapter.get_list_concepts() == [] and len(adapter.mounts["clip_l"].store) == 0
    adapter.load_concept(tiny.concept(adapter, "zqx bolo"))


def test_a_projection_that_does_not_follow_its_hook_fails_at_loading(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    stubborn = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_v
    stubborn.__class__ = type("Stubborn", (torch.nn.Linear,), {"__call__": torch.nn.Linear.forward})
    with pytest.raises(MountError, match="UNet2DConditionModel does not follow the concepts at context.1.value; detach"):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    assert adapter.get_list_concepts() == [] and not adapter.contexts["clip_l"].hooks


def test_copies_and_replaced_denoisers_are_told(tiny, loaded):
    pipe, adapter = loaded
    ours = tiny.picture(pipe, PROMPT)
    twin = copy.deepcopy(pipe.unet)
    states, _ = adapter.encode(PROMPT)
    with pytest.raises(MountError, match="this Linear is a copy of a module with concepts attached"):
        twin(torch.zeros(1, 4, 8, 8), 1, states)
    old, pipe.unet = pipe.unet, UNet2DConditionModel.from_config(pipe.unet.config)
    with pytest.raises(MountError, match="unet of the pipeline was replaced after attach, so the context mounts"):
        tiny.picture(pipe, PROMPT)
    with pytest.raises(MountError, match="unet of the pipeline was replaced after attach.*; put it back, or detach, attach"):
        adapter.load_concept(tiny.concept(adapter, "kelo vin", config=SIDES))
    assert len(adapter.get_list_concepts()) == 1
    pipe.unet = old
    assert torch.equal(ours, tiny.picture(pipe, PROMPT))


def test_a_copied_pipeline_takes_an_adapter_of_its_own(tiny, loaded):
    pipe, adapter = loaded
    twin = copy.deepcopy(pipe)
    again = tiny_engram.attach(twin)
    again.load_concept(tiny.concept(again, "zqx bolo", config=SIDES))
    assert torch.equal(tiny.picture(twin, PROMPT), tiny.picture(pipe, PROMPT))


def test_pipelines_that_share_the_parts(tiny, loaded):
    pipe, adapter = loaded
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    options = {"image": Image.new("RGB", (64, 64), "red"), "strength": 1.0}

    def draw(prompt):
        return tiny.picture(other, prompt, **options)

    ours, tree = draw(PROMPT), draw("a tree")
    adapter.disable_concepts()
    assert not torch.equal(ours, draw(PROMPT)) and torch.equal(tree, draw("a tree"))
    adapter.enable_concepts()


def test_the_denoiser_is_known_when_the_first_pipeline_is_gone(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=SIDES)
    del pipe
    gc.collect()
    other.unet.mid_block.compile(backend="eager")
    with pytest.raises(MountError, match="UNet2DConditionModel was compiled before"):
        adapter.load_concept(concept)


def test_threads_do_not_mix(tiny, loaded):
    pipe, adapter = loaded
    prompts = [PROMPT, "a tree", "zqx bolo", "two zqx bolo, a cat"]
    states = [adapter.encode(prompt)[0] for prompt in prompts]

    def call(given):
        with torch.no_grad():
            return pipe.unet(torch.ones(1, 4, 8, 8), 500, given).sample

    alone = [call(given) for given in states]
    assert len({tuple(out.flatten()[:8].tolist()) for out in alone}) == 4
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(alone, pool.map(call, [s.clone() for s in states]), strict=True))


def test_saving_and_state_dicts_are_the_base_s(loaded, tmp_path):
    pipe, _ = loaded
    names = [name for name, _ in pipe.unet.named_modules()]
    pipe.unet.save_pretrained(tmp_path)
    again = UNet2DConditionModel.from_pretrained(tmp_path)
    assert [name for name, _ in again.named_modules()] == names and not any(m._forward_pre_hooks for m in again.modules())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), pipe.unet.state_dict().values(), strict=True))


def test_nothing_is_kept_alive(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    tiny.picture(pipe, PROMPT)
    alive = [weakref.ref(pipe), weakref.ref(pipe.unet), weakref.ref(pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k)]
    del pipe
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
