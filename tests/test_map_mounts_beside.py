"""Maps beside what else is done to a denoiser: processors, fused projections, LoRA, compiling, copies, offloading, threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.hooks import MountError

PROMPT = "a zqx bolo on a table"
MAPS = ConceptConfig(mounts=("value",), attention_rank=2, feedforward_rank=1)
FED = ConceptConfig(mounts=("span",), feedforward_rank=2)
ALL = ConceptConfig(mounts=("input", "span", "context"), share="block", bands=2, attention_rank=1, feedforward_rank=1)


@pytest.fixture
def pipe(attached):
    return attached[0]


@pytest.fixture
def adapter(emptied):
    return emptied


def test_other_attention_processors(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    ours = tiny.picture(pipe, PROMPT)
    processors = dict(pipe.unet.attn_processors)
    pipe.enable_attention_slicing(1)
    sliced = tiny.picture(pipe, PROMPT)
    pipe.unet.set_attn_processor(processors)
    torch.testing.assert_close(ours, sliced, rtol=0, atol=1e-3)


def test_fused_projections_and_split_feedforwards_are_told(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=FED))
    ours = tiny.picture(own_pipe, PROMPT)
    own_pipe.fuse_qkv_projections(vae=False)
    adapter.set_strength("zqx bolo", 1.0)
    with pytest.raises(MountError, match=r"without reading through feedforward.0, .* undo fused projections .* calls to_q, to_k, to_v and"):
        tiny.picture(own_pipe, PROMPT)
    own_pipe.unfuse_qkv_projections(vae=False)
    assert torch.equal(ours, tiny.picture(own_pipe, PROMPT))
    for block in tiny.blocks_of(own_pipe.unet):
        block.set_chunk_feed_forward(4, dim=1)
    with pytest.raises(MountError, match=r"runs feed-forward layers on \[2, 4, 32\], expected 2 x 16 places .*disable_forward_chunking"):
        tiny.picture(own_pipe, PROMPT)
    for block in tiny.blocks_of(own_pipe.unet):
        block.set_chunk_feed_forward(None)
    assert torch.equal(ours, tiny.picture(own_pipe, PROMPT))


def test_a_lora_on_the_same_layers(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=MAPS)
    adapter.load_concept(concept)
    ours = tiny.picture(own_pipe, PROMPT)
    targets = ["to_q", "to_k", "to_out.0", "ff.net.0.proj"]
    own_pipe.unet.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in own_pipe.unet.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.cos(torch.arange(parameter.numel()) * 0.3).reshape(parameter.shape) * 0.1)
    with_lora = tiny.picture(own_pipe, PROMPT)
    layer = tiny.blocks_of(own_pipe.unet)[1].attn2.to_out[0]
    assert layer._forward_pre_hooks and not layer.base_layer._forward_pre_hooks
    adapter.unload_concept()
    alone = tiny.picture(own_pipe, PROMPT)
    adapter.load_concept(concept)
    assert torch.equal(with_lora, tiny.picture(own_pipe, PROMPT))
    assert not torch.equal(with_lora, ours) and not torch.equal(with_lora, alone)
    own_pipe.unload_lora_weights()
    assert torch.equal(ours, tiny.picture(own_pipe, PROMPT))


def test_a_layer_that_does_not_follow_its_hook_fails_at_loading(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    stubborn = tiny.blocks_of(own_pipe.unet)[1].ff
    stubborn.__class__ = type("Stubborn", (type(stubborn),), {"__call__": type(stubborn).forward})
    with pytest.raises(MountError, match="UNet2DConditionModel does not follow the concepts at feedforward.1; detach what wraps it"):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    assert adapter.get_list_concepts() == [] and not adapter.contexts["clip_l"].hooks


def test_weights_kept_in_8_bits(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    own_pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    base = tiny.picture(own_pipe, [PROMPT, "a tree"])
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    ours = tiny.picture(own_pipe, [PROMPT, "a tree"])
    assert not torch.equal(ours[0], base[0]) and torch.equal(ours[1], base[1])


def test_compiled_before_maps_were_loaded_is_refused(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=ConceptConfig(mounts=("value",))))
    own_pipe.unet.mid_block.compile(backend="eager")
    with pytest.raises(MountError, match="was compiled before a concept with maps was loaded.* before torch.compile"):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    assert adapter.get_list_concepts() == ["cat-toy"]


def test_compiled_after_loading(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    expected = {prompt: tiny.picture(own_pipe, prompt) for prompt in (PROMPT, "a tree")}
    torch.compiler.reset()
    own_pipe.unet.mid_block.compile(backend="eager")
    for prompt, picture in expected.items():
        torch.testing.assert_close(tiny.picture(own_pipe, prompt), picture, rtol=0, atol=1e-3)
    adapter.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own_pipe.unet.modules())
    torch.compiler.reset()


def test_copies_are_told_and_pipelines_of_their_own(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    ours = tiny.picture(pipe, PROMPT)
    twin = copy.deepcopy(pipe)
    again = tiny_engram.attach(twin)
    assert not any(m._forward_hooks for m in twin.unet.modules() if m is not twin.unet)
    again.load_concept(tiny.concept(again, "zqx bolo", config=MAPS))
    assert torch.equal(ours, tiny.picture(twin, PROMPT))


def test_threads_do_not_mix(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ALL))
    prompts = [PROMPT, "a tree", "zqx bolo", "two zqx bolo, a cat"]
    given = [(adapter.encode(prompt)[0], t) for prompt, t in zip(prompts, (100, 900, 900, 100), strict=True)]

    def call(what):
        states, t = what
        with torch.no_grad():
            return pipe.unet(torch.ones(1, 4, 8, 8), t, states.clone()).sample

    alone = [call(what) for what in given]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(alone, pool.map(call, given), strict=True))


def test_maps_loaded_by_another_thread_in_the_middle_of_a_call(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=ConceptConfig(mounts=("value",))))
    states, _ = adapter.encode(PROMPT)
    concept = tiny.concept(adapter, "zqx bolo", config=MAPS)

    def load(*_):
        handle.remove()
        adapter.load_concept(concept)

    handle = pipe.unet.mid_block.register_forward_pre_hook(load)
    with torch.no_grad():
        pipe.unet(torch.ones(1, 4, 8, 8), 500, states)
        whole = pipe.unet(torch.ones(1, 4, 8, 8), 500, states).sample
        assert torch.equal(whole, pipe.unet(torch.ones(1, 4, 8, 8), 500, adapter.encode(PROMPT)[0]).sample)


def test_sequentially_offloaded_denoiser(tiny, own_pipe):
    from accelerate import cpu_offload

    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    ours = tiny.picture(own_pipe, PROMPT)
    adapter.unload_concept()
    cpu_offload(own_pipe.unet, execution_device=torch.device("cpu"))
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    assert torch.equal(tiny.picture(own_pipe, PROMPT), ours)
