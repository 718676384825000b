"""The adapter's verbs: load, switch, list, unload, rename; what is refused and in which words; copies and shared encoders."""

import copy
import dataclasses
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

import tiny_engram
from tiny_engram import addressing
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError


def encode(pipe, prompt):
    with torch.no_grad():
        return pipe.encode_prompt(prompt, "cpu", 1, False)[0]


def test_load_from_a_file_and_from_memory_are_equal(tiny, adapter, pipe, tmp_path):
    concept = tiny.concept(adapter, "cat-toy", aliases=["cat-toys"])
    assert adapter.load_concept(concept.save(tmp_path / "c.safetensors")) == "cat-toy"
    file = encode(pipe, ["a cat-toy", "two cat-toys"])
    adapter.unload_concept("cat-toy")
    adapter.load_concept(concept, name="mine")
    assert torch.equal(file, encode(pipe, ["a cat-toy", "two cat-toys"])) and adapter.get_list_concepts() == ["mine"]
    assert adapter.concept("mine") is concept


def test_switches_lists_and_strengths(tiny, adapter, pipe):
    for seed, trigger in enumerate(["zqx", "bolo", "my_dog"]):
        adapter.load_concept(tiny.concept(adapter, trigger, seed=seed), strength=0.5)
    assert adapter.get_list_concepts() == adapter.get_active_concepts() == ["zqx", "bolo", "my_dog"]
    adapter.set_concepts(["bolo", "zqx"], [0.25, 2.0])
    assert adapter.get_active_concepts() == ["zqx", "bolo"] and adapter.strength("bolo") == 0.25
    assert [f.name for f in adapter.explain("zqx bolo my_dog").fired] == ["zqx", "bolo"]
    adapter.disable_concepts()
    assert adapter.get_active_concepts() == [] and adapter.get_list_concepts() == ["zqx", "bolo", "my_dog"]
    adapter.enable_concepts()
    adapter.set_strength("zqx", 0)
    assert adapter.get_active_concepts() == ["bolo"]
    adapter.delete_concept(["zqx", "bolo"])
    assert adapter.get_list_concepts() == ["my_dog"]
    adapter.unload_concept()
    assert adapter.get_list_concepts() == []


def test_strength_scales_the_residual_and_leaves_no_memory(tiny, adapter, pipe):
    plain = encode(pipe, "a zqx")
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    full = encode(pipe, "a zqx")
    adapter.set_strength("zqx", 0.5)
    torch.testing.assert_close(encode(pipe, "a zqx") - plain, (full - plain) / 2)
    for value in (0.0, 2.5, -1.0):
        adapter.set_strength("zqx", value)
        encode(pipe, "a zqx")
    adapter.set_strength("zqx", 1.0)
    assert torch.equal(full, encode(pipe, "a zqx"))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.unload_concept("nope"),
        lambda a: a.delete_concept(["zqx", "nope"]),
        lambda a: a.set_concepts(["zqx", "nope"]),
        lambda a: a.set_strength("nope", 1.0),
        lambda a: a.concept("nope"),
    ],
)
def test_unknown_names_raise_and_list_the_known_ones(tiny, adapter, call):
    with pytest.raises(TinyEngramError, match="no concept 'nope'; known: none loaded|no concept 'zqx'"):
        call(adapter)
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    adapter.load_concept(tiny.concept(adapter, "bolo"))
    with pytest.raises(TinyEngramError, match="no concept 'nope'; known: 'zqx', 'bolo'"):
        call(adapter)
    assert adapter.get_list_concepts() == adapter.get_active_concepts() == ["zqx", "bolo"]


@pytest.mark.parametrize("value", [float("nan"), 10**400, float("inf"), "1", True, None])
def test_a_strength_is_a_finite_number(tiny, adapter, value):
    with pytest.raises(TinyEngramError, match="expected a finite number"):
        adapter.load_concept(tiny.concept(adapter, "zqx"), strength=value)
    assert adapter.get_list_concepts() == []
    with pytest.raises(TinyEngramError, match="strength is '1', expected a finite number"):  # text shows as text
        adapter.load_concept(tiny.concept(adapter, "zqx"), strength="1")
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    with pytest.raises(TinyEngramError, match="expected a finite number"):
        adapter.set_strength("zqx", value)


def test_a_strength_may_be_a_number_of_numpys(tiny, adapter):
    adapter.load_concept(tiny.concept(adapter, "zqx"), strength=np.float32(0.5))
    adapter.set_concepts("zqx", np.float64(0.25))
    assert adapter.strength("zqx") == 0.25
    adapter.set_concepts(["zqx"], np.array([2]))
    assert adapter.strength("zqx") == 2.0


def test_counts_of_names_and_strengths_must_agree(tiny, adapter):
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    with pytest.raises(TinyEngramError, match="2 strengths for 1 concepts"):
        adapter.set_concepts(["zqx"], [1.0, 2.0])
    assert adapter.get_active_concepts() == ["zqx"]


def test_two_files_with_one_trigger_or_name(tiny, adapter, pipe):
    first, second = tiny.concept(adapter, "zqx", seed=1), tiny.concept(adapter, "ZQX", name="other", seed=2)
    adapter.load_concept(first)
    one = encode(pipe, "a zqx")
    with pytest.raises(TinyEngramError, match="trigger 'ZQX' of concept 'other' is already registered by concept 'zqx'"):
        adapter.load_concept(second)
    with pytest.raises(TinyEngramError, match="'zqx' is already loaded; give name="):
        adapter.load_concept(tiny.concept(adapter, "bolo", name="zqx"))
    assert adapter.get_list_concepts() == ["zqx"] and torch.equal(one, encode(pipe, "a zqx"))
    # Renamed on request: another name, another word of as many tokens.
    assert adapter.load_concept(tiny.concept(adapter, "bolo", name="zqx"), rename=True) == "zqx-2"
    adapter.load_concept(second, trigger="my tree")
    assert [f.name for f in adapter.explain("zqx, bolo and my tree").fired] == ["zqx", "zqx-2", "other"]
    adapter.unload_concept("other")
    with pytest.raises(TinyEngramError, match="takes \\[3\\] tokens, expected \\[2\\]"):
        adapter.load_concept(second, trigger="my_dog")


def test_concepts_of_another_base_are_refused(tiny, adapter):
    concept = tiny.concept(adapter, "zqx")
    place = concept.roles["clip_l"]
    wider = tiny_engram.Concept.new(adapter.compile("zqx"), widths={"clip_l": 160}, fingerprints={"clip_l": place.fingerprint})
    with pytest.raises(TinyEngramError, match="width 160 at clip_l, expected 128"):
        adapter.load_concept(wider)
    for change, expected in [
        ({"fingerprint": "0" * 64}, "tokenizer 000000000000 at clip_l, expected"),
        ({"variants": (dataclasses.replace(place.variants[0], ids=(1, 2)),)}, "the file says 'zqx' is \\[1, 2\\], this tokenizer says"),
    ]:
        other = dataclasses.replace(concept, roles={"clip_l": dataclasses.replace(place, **change)})
        with pytest.raises(TinyEngramError, match=expected):
            adapter.load_concept(other)
    with pytest.raises(TinyEngramError, match="is for encoders \\['t5'\\], this pipeline has \\['clip_l'\\]"):
        adapter.load_concept(dataclasses.replace(concept, roles={"t5": place}))
    assert adapter.get_list_concepts() == []


def test_row_collisions_move_rows_and_not_values(tiny, adapter, pipe):
    # 4,999 addresses per column: some of thirty concepts must collide.
    config = ConceptConfig(vocab=4999)
    crowd = [tiny.concept(adapter, f"zq{k}x", seed=k, config=config) for k in range(30)]
    alone = []
    for concept in crowd:
        adapter.load_concept(concept)
        alone.append(encode(pipe, f"a {concept.trigger}"))
        adapter.unload_concept(concept.name)
    for concept in crowd:
        adapter.load_concept(concept)
    store = adapter.mounts["clip_l"].store
    counters = [store.bank_of(concept.name).counter(concept.name) for concept in crowd]
    hashing = store.bank_of(crowd[0].name).hasher.config
    assert hashing.pad_id == int(store.compressed.compress([49407])[0]) and hashing.compressed_vocab == store.compressed.size
    assert max(counters) > 0 and adapter.register("one more", config=config).roles["clip_l"].collisions >= 0
    for concept, expected in zip(crowd, alone, strict=True):
        assert torch.equal(expected, encode(pipe, f"a {concept.trigger}"))


def test_a_full_address_space_is_an_error_and_loads_nothing(tiny, adapter, pipe):
    config = ConceptConfig(vocab=2)
    with pytest.raises(TinyEngramError, match="no free rows|use a larger vocab"):
        adapter.load_concept(tiny.concept(adapter, "a zqx bolo dog tree", config=config))
    assert adapter.get_list_concepts() == [] and not adapter.explain("a zqx bolo dog tree").fired


def test_addresses_depend_on_trigger_position_and_counter():
    salts = {addressing.salt_of(c, p, k) for c in ((1, 2), (1, 3), (2, 1)) for p in (0, 1) for k in (0, 1)}
    assert len(salts) == 12 and all(0 < s < 2**62 for s in salts)


def test_fifty_load_unload_cycles_are_flat(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo")

    def cycles(count):
        for _ in range(count):
            adapter.load_concept(concept)
            encode(pipe, "a zqx bolo")
            adapter.unload_concept()
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(type(o) is torch.Tensor for o in objects)

    cycles(2)
    objects, tensors = cycles(2)
    after = cycles(50)
    assert after[0] - objects < 50 and after[1] == tensors
    store = adapter.mounts["clip_l"].store
    assert len(store) == 0 and store.row_bytes == 0 and not store.index._owner and not store._banks
    assert len(pipe.text_encoder._forward_hooks) == 1


def test_second_attach_and_shared_encoders(tiny, adapter, pipe):
    with pytest.raises(TinyEngramError, match="already has an adapter; use tiny_engram.get_adapter"):
        tiny_engram.attach(pipe)
    shared = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    with pytest.raises(TinyEngramError, match="shares its encoder"):
        tiny_engram.attach(shared)
    assert tiny_engram.get_adapter(pipe) is adapter and tiny_engram.get_adapter(shared) is adapter


def test_an_img2img_pipeline_of_its_own(tiny, own_pipe):
    other = StableDiffusionImg2ImgPipeline.from_pipe(own_pipe)
    adapter = tiny_engram.attach(other)
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    assert not torch.equal(encode(other, "a zqx"), encode(other, "a tree"))


def test_without_an_adapter_the_functions_say_so(pipe):
    with pytest.raises(TinyEngramError, match="call tiny_engram.attach"):
        tiny_engram.load_concept(pipe, "x.safetensors")


def test_the_same_verbs_as_functions(tiny, adapter, pipe):
    assert tiny_engram.load_concept(pipe, tiny.concept(adapter, "zqx"), strength=0.5) == "zqx"
    tiny_engram.set_strength(pipe, "zqx", 2.0)
    tiny_engram.set_concepts(pipe, ["zqx"])
    assert tiny_engram.get_list_concepts(pipe) == tiny_engram.get_active_concepts(pipe) == ["zqx"]
    assert tiny_engram.explain(pipe, "a zqx").fired[0].strength == 2.0
    tiny_engram.disable_concepts(pipe)
    assert tiny_engram.get_active_concepts(pipe) == []
    tiny_engram.enable_concepts(pipe)
    assert tiny_engram.register(pipe, "zqx").taken_by == ("zqx",)
    tiny_engram.unload_concept(pipe, "zqx")
    tiny_engram.load_concept(pipe, tiny.concept(adapter, "zqx"))
    tiny_engram.delete_concept(pipe, "zqx")
    assert tiny_engram.get_list_concepts(pipe) == []


def test_a_pipeline_without_encoder(own_pipe):
    own_pipe.text_encoder = None
    with pytest.raises(TinyEngramError, match="has no text encoder \\(text_encoder\\)"):
        tiny_engram.attach(own_pipe)


def test_a_deep_copy_says_that_it_has_no_concepts(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    ours = encode(pipe, "a zqx")
    twin = copy.deepcopy(pipe)
    with pytest.raises(MountError, match="is a copy of a module with concepts attached"):
        encode(twin, "a tree")
    again = tiny_engram.attach(twin)
    again.load_concept(tiny.concept(again, "zqx"), strength=0.5)
    assert torch.equal(ours, encode(pipe, "a zqx")) and not torch.equal(ours, encode(twin, "a zqx"))
    again.detach()
    adapter.set_strength("zqx", 0.0)
    assert torch.equal(encode(twin, "a zqx"), encode(pipe, "a zqx"))


def test_a_detached_adapter_takes_no_concept(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx")
    adapter.detach()
    for attach in (None, tiny_engram.attach):
        if attach is not None:
            attach(own_pipe)
        with pytest.raises(TinyEngramError, match=r"this adapter was detached.*call tiny_engram.attach\(pipe\)"):
            adapter.load_concept(concept)
    tiny_engram.get_adapter(own_pipe).load_concept(concept)


def test_pickled_encoders_lose_the_concepts_aloud(own_pipe, tmp_path):
    # not the session's pipeline: transformers leaves hooks of its own, which cannot be pickled, where hidden states were asked for
    tiny_engram.attach(own_pipe)
    torch.save(own_pipe.text_encoder, tmp_path / "encoder.pt")
    encoder = torch.load(tmp_path / "encoder.pt", weights_only=False)
    with pytest.raises(MountError, match="is a copy"):
        encoder(torch.tensor([[1, 2]]))


def test_copies_of_the_denoiser_stay_usable(adapter, pipe):
    unet = copy.deepcopy(pipe.unet)
    assert unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 3, 128)).sample.shape == (1, 4, 8, 8)


def test_nothing_is_kept_alive(tiny):
    pipe = tiny.build()
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    alive = [weakref.ref(pipe), weakref.ref(pipe.text_encoder), weakref.ref(pipe.unet)]
    del pipe
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    with pytest.raises(TinyEngramError, match="the pipeline of this adapter is gone"):
        adapter.encode("a zqx")


def test_attach_leaves_the_random_state_and_modes(tiny, own_pipe):
    own_pipe.text_encoder.train()
    state = torch.get_rng_state()
    adapter = tiny_engram.attach(own_pipe)
    assert torch.equal(state, torch.get_rng_state()) and own_pipe.text_encoder.training
    assert adapter.get_list_concepts() == [] and len(adapter.mounts["clip_l"].store) == 0 and adapter.mounts["clip_l"].calls == 0


def test_encode_gives_what_the_pipeline_would(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    embeds, negative = adapter.encode("a zqx", "tree", num_images_per_prompt=2)
    assert negative is not None and embeds.shape == negative.shape == (2, 77, 128)
    whole = tiny.picture(pipe, "a zqx", negative_prompt="tree")
    assert torch.equal(whole, tiny.picture(pipe, None, prompt_embeds=embeds[:1], negative_prompt_embeds=negative[:1]))
    assert adapter.encode(["a", "b"])[1] is None


def test_new_concepts_draw_nothing_until_they_are_trained(tiny, adapter, pipe):
    plain = encode(pipe, "a zqx")
    adapter.load_concept(adapter.new_concept("zqx"))
    assert torch.equal(plain, encode(pipe, "a zqx"))


def test_register_reports_and_changes_nothing(tiny, adapter, pipe):
    report = adapter.register("vortex-9", aliases=["vortex-9000"])
    role = report.roles["clip_l"]
    assert role.tokens[0] == ("vortex</w>", "-</w>", "9</w>") and role.positions == 9 and role.rows == 36 and role.window == 75
    seen = {n.text: n.fires for n in role.near_misses}
    assert seen["vortex-9s"] is False and seen["vortex-99"] is False and seen["vortex-9's"] is True
    assert any("digit" in w for w in report.warnings) and adapter.get_list_concepts() == []
    assert report.to_dict()["roles"]["clip_l"]["tokens"][0] == ["vortex</w>", "-</w>", "9</w>"]
    assert "vortex</w> -</w> 9</w>" in str(report)
    assert "tasks" in {n.text for n in adapter.register("sks").roles["clip_l"].near_misses}


@pytest.mark.parametrize("trigger", ["a", "photo", "table"])
def test_near_misses_agree_with_what_explain_says(adapter, trigger):
    seen = {n.text: n.fires for n in adapter.register(trigger).roles["clip_l"].near_misses}
    assert not seen[trigger + "ish"] and not seen["x" + trigger] and seen[trigger + "'s"]
    adapter.load_concept(adapter.new_concept(trigger))
    assert {word: bool(adapter.explain(f"some {word} here").fired) for word in seen} == seen


def test_a_plain_pipeline_is_a_plain_pipeline(pipe):
    assert type(pipe) is StableDiffusionPipeline and not pipe.text_encoder._forward_hooks


def test_an_alias_added_later_starts_as_a_copy(tiny, adapter, pipe, tmp_path):
    concept = tiny.concept(adapter, "cat-toy", aliases=["toycat"])
    wider = adapter.add_alias(concept, "cat-toys")
    assert wider.aliases == ("toycat", "cat-toys") and wider.untrained == ("cat-toys",) and concept.untrained == ()
    old, new = concept.mount_rows("clip_l"), wider.mount_rows("clip_l")
    count = concept.roles["clip_l"].positions
    assert torch.equal(new.rows()[:count], old.rows()) and torch.equal(new.rows()[count:], old.rows()[:3])
    adapter.load_concept(wider.save(tmp_path / "c.safetensors"))
    assert [f.text for f in adapter.explain("a cat-toy, a toycat and two cat-toys").fired] == ["cat-toy", "toycat", "cat-toys"]
    with pytest.raises(TinyEngramError, match="no alias is needed"):
        adapter.add_alias(concept, "CAT-TOY")


@pytest.mark.parametrize("base", ["assets/bases/emoji-sd", Path("assets/bases/emoji-sd")])
def test_attach_to_a_path_says_how_to_load_it(base):
    with pytest.raises(TinyEngramError, match="given 'assets/bases/emoji-sd', expected a loaded pipeline.*EngramPipeline.from_pretrained"):
        tiny_engram.attach(base)


def test_attach_to_what_is_no_pipeline(pipe):
    for other, name in ((torch.nn.Linear(2, 2), "Linear"), (None, "NoneType"), (5, "int"), (pipe.unet, "UNet2DConditionModel")):
        with pytest.raises(TinyEngramError, match=f"an object of {name}, expected a loaded diffusers pipeline, whole$"):
            tiny_engram.attach(other)


def test_a_file_of_another_kind_is_told(adapter, tmp_path):
    (tmp_path / "notes.md").write_text("# notes on a concept")
    with pytest.raises(TinyEngramError, match=r"notes.md: not a sound safetensors file .*; a concept is a file that ends in .safetensors$"):
        adapter.load_concept(tmp_path / "notes.md")
