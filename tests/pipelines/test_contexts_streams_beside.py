"""Context mounts in transformer denoisers beside what else is done to a pipeline: near misses, other batches, a second denoiser, LoRA,
compiling, offloading, copies.
"""

import copy
import gc
from typing import Any

import pytest
import torch
from peft import LoraConfig

import tiny_engram
from tests.pipelines.stream_cases import PLAIN, PROMPT, STREAMS, TRIGGER, reads
from tests.pipelines.tiny.base import picture
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError

SIDES = ConceptConfig(mounts=("context",), share="block")


def made(name: str, tiny: Any, trigger: str = TRIGGER):
    """(entry, pipeline, adapter, what is drawn without the concept), with a concept loaded."""
    entry = STREAMS[name]
    pipe = entry.build()
    base = {prompt: picture(entry, pipe, prompt) for prompt in (PROMPT, PLAIN)}
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, trigger, name="vortex", config=SIDES))
    return entry, pipe, adapter, base


def kept(entry, adapter, *prompts) -> dict[str, Any]:
    """Embeds in the place of prompts."""
    return {**dict.fromkeys(entry.prompt_keys), "negative_prompt": None, **adapter.embeds(*prompts)}


@pytest.mark.parametrize("name", ["z-image", "qwen-image"])
def test_a_near_miss_in_an_encoder_that_reads_from_left_to_right(name, tiny):
    """Prompts that begin alike have equal states as far as they do; each keeps its own."""
    entry, pipe, adapter, _ = made(name, tiny, "vortex-9")
    adapter.disable_concepts()
    miss, hit = "a photo of vortex-90", "a photo of vortex-9"
    base = {prompt: picture(entry, pipe, prompt) for prompt in (miss, hit)}
    adapter.enable_concepts()
    for _ in range(2):  # whichever was encoded last
        assert not torch.equal(picture(entry, pipe, hit), base[hit])
        assert torch.equal(picture(entry, pipe, miss), base[miss])


@pytest.mark.parametrize("name", ["stable-diffusion-3", "pixart:sigma", "sana", "ltx", "z-image"])
def test_rows_without_the_trigger_keep_their_bits_and_kept_embeds_draw_the_same(name, tiny):
    entry, pipe, adapter, _ = made(name, tiny)

    def both() -> dict[str, Any]:
        return {"prompt": [PLAIN, PROMPT], "negative_prompt": ["a house", "a house"]}  # lists that some pipelines write to

    ours = picture(entry, pipe, **both())
    embeds = kept(entry, adapter, [PLAIN, PROMPT], ["a house", "a house"])
    assert torch.equal(ours, picture(entry, pipe, **embeds))
    adapter.disable_concepts()
    plain = picture(entry, pipe, **both())
    assert torch.equal(plain[0], ours[0]) and not torch.equal(plain[1], ours[1])
    assert torch.equal(plain, picture(entry, pipe, **embeds))
    adapter.enable_concepts()
    adapter.set_strength("vortex", 0.5)
    half = picture(entry, pipe, **embeds)
    assert not torch.equal(half[1], ours[1]) and torch.equal(half, picture(entry, pipe, **both()))


def test_two_denoisers_read_the_same_rows_and_either_is_looked_at(tiny):
    entry, pipe, adapter, _ = made("wan:2.2-a14b", tiny)
    with reads(adapter) as seen:
        picture(entry, pipe, PROMPT)
    one, other = ({name for name in seen if ("/" in name) == second} for second in (False, True))
    assert {f"transformer_2/{name}" for name in one} == other
    assert all(any(not torch.equal(*pair) for pair in calls) for calls in seen.values())
    for block in pipe.transformer_2.blocks:
        block.attn2.fuse_projections()
    adapter.set_strength("vortex", 0.9)
    with pytest.raises(MountError, match=r"ran without reading through context.0.key, .* undo fused projections"):
        picture(entry, pipe, PROMPT)
    pipe.transformer_2 = type(pipe.transformer_2).from_config(pipe.transformer_2.config)
    with pytest.raises(MountError, match="transformer_2 of the pipeline was replaced after attach"):
        picture(entry, pipe, PROMPT)


def test_a_lora_on_the_same_projections(tiny):
    entry, pipe, adapter, base = made("flux:schnell", tiny)
    ours = picture(entry, pipe, PROMPT)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["add_k_proj", "to_v"], init_lora_weights=False))
    with_lora = picture(entry, pipe, PROMPT)
    layer = pipe.transformer.transformer_blocks[0].attn.add_k_proj
    assert layer._forward_pre_hooks and not layer.base_layer._forward_pre_hooks
    adapter.disable_concepts()
    assert not torch.equal(with_lora, picture(entry, pipe, PROMPT)) and not torch.equal(with_lora, ours)
    pipe.unload_lora_weights()
    assert torch.equal(base[PROMPT], picture(entry, pipe, PROMPT))
    adapter.enable_concepts()
    assert torch.equal(ours, picture(entry, pipe, PROMPT))


def test_compiled_after_loading_and_before(tiny):
    entry, pipe, adapter, base = made("pixart:sigma", tiny)
    ours = picture(entry, pipe, PROMPT)
    torch.compiler.reset()
    pipe.transformer.compile(backend="eager")
    torch.testing.assert_close(picture(entry, pipe, PROMPT), ours, rtol=0, atol=1e-3)
    torch.testing.assert_close(picture(entry, pipe, PLAIN), base[PLAIN], rtol=0, atol=1e-3)
    adapter.detach()
    again = tiny_engram.attach(pipe)
    with pytest.raises(MountError, match="PixArtTransformer2DModel was compiled before a concept with context mounts was loaded"):
        again.load_concept(tiny.concept(again, TRIGGER, config=SIDES))
    torch.compiler.reset()


def test_sequentially_offloaded_and_copied(tiny):
    from accelerate import cpu_offload

    entry, pipe, adapter, _ = made("pixart:sigma", tiny)
    ours = picture(entry, pipe, PROMPT)
    twin = copy.deepcopy(pipe)
    with pytest.raises(TinyEngramError, match="copy of a module with concepts attached"):
        picture(entry, twin, PROMPT)
    concept = adapter.concept("vortex")
    adapter.unload_concept()
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
    adapter.load_concept(concept)
    assert torch.equal(picture(entry, pipe, PROMPT), ours)
    assert torch.equal(picture(entry, pipe, PROMPT), ours)


def test_a_half_type(tiny):
    entry = STREAMS["pixart:sigma"]
    pipe = entry.build().to(torch.bfloat16)
    adapter = tiny_engram.attach(pipe)
    base = {prompt: picture(entry, pipe, prompt) for prompt in (PROMPT, PLAIN)}
    adapter.load_concept(tiny.concept(adapter, TRIGGER, config=SIDES))
    ours = picture(entry, pipe, PROMPT)
    assert ours.isfinite().all() and not torch.equal(ours, base[PROMPT]) and torch.equal(picture(entry, pipe, PLAIN), base[PLAIN])
    pipe.transformer.float()
    embeds = adapter.embeds(PROMPT)
    states, mask = embeds["prompt_embeds"].float(), embeds["prompt_attention_mask"]
    with reads(adapter) as seen, torch.no_grad():
        options = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "encoder_attention_mask": mask}
        pipe.transformer(torch.zeros(1, 4, 4, 4), states, torch.tensor([500]), **options)
    assert all(before.dtype == torch.float32 and not torch.equal(before, after) for ((before, after),) in seen.values())


def test_two_concepts_in_one_prompt_do_not_share_state(tiny):
    entry, pipe, adapter, _ = made("stable-diffusion-3", tiny)
    alone = picture(entry, pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "blue dog", seed=3, config=ConceptConfig(mounts=("value",), bands=2)))
    assert torch.equal(alone, picture(entry, pipe, PROMPT))
    both = picture(entry, pipe, f"{PROMPT} and a blue dog")
    adapter.set_concepts("vortex")
    assert not torch.equal(both, picture(entry, pipe, f"{PROMPT} and a blue dog"))


def test_a_pipeline_that_shares_the_parts_of_one_that_is_gone(tiny):
    entry, pipe, adapter, _ = made("stable-diffusion-3", tiny)
    ours = picture(entry, pipe, PROMPT)
    other = type(pipe).from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    del pipe
    gc.collect()
    with pytest.raises(TinyEngramError, match="the pipeline of this adapter is gone"):
        _ = adapter.pipe
    assert torch.equal(ours, picture(entry, other, PROMPT))


def test_what_a_tensor_is_known_by_goes_with_it(tiny):
    """Nothing is kept of prompts that are gone, and steps after the first look nothing up."""
    entry, pipe, adapter, _ = made("pixart:sigma", tiny)
    contexts = adapter.contexts["t5"]
    looked: list[Any] = []
    real = contexts._make_streams
    contexts._make_streams = lambda call: looked.append(call) or real(call)
    picture(entry, pipe, PROMPT, num_inference_steps=4)
    assert len(looked) == 1
    looked.clear()
    gc.collect()
    assert not contexts._entries
