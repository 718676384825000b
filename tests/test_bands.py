"""Rows of blocks and of bands of timesteps: which of them each projection reads, when, and beside which others."""

import pytest
import torch
from diffusers import KarrasVeScheduler

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.residual import apply_concept

PROMPT = "a zqx bolo on a table"
SHARED = ConceptConfig(mounts=("context",), share="block")
BANDS = ConceptConfig(mounts=("context",), bands=2)
BOTH = ConceptConfig(mounts=("value",), share="block", bands=2)
# The cross-attentions of the tests' denoiser, as they run.
BLOCK = {0: "down1", 1: "mid", 2: "up0", 3: "up0"}


@pytest.fixture
def pipe(attached):
    return attached[0]


@pytest.fixture
def adapter(emptied):
    return emptied


def ids_of(pipe, *prompts):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def run(pipe, states, timestep=500, **options):
    noise = torch.randn(len(states), 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return pipe.unet(noise, timestep, states, **options).sample


def moved(pipe, adapter, concept, mount, states, prompt, strength=1.0):
    """The states of a prompt with what one mount's rows add."""
    rows = concept.mount_rows("clip_l", mount)
    spans = adapter.spans(concept, ids_of(pipe, prompt))
    return apply_concept(states, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho, strength=strength)


def test_a_block_reads_one_set_of_rows(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=SHARED)
    assert [f"context.{block}.{kind}" for block in ("down1", "mid", "up0") for kind in ("key", "value")] == list(
        concept.roles["clip_l"].mounts
    )
    adapter.load_concept(concept, strength=0.7)
    states, _ = adapter.encode(PROMPT)
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    for i, block in BLOCK.items():
        for kind in ("key", "value"):
            (read,) = seen[f"context.{i}.{kind}"]
            assert torch.equal(read, moved(pipe, adapter, concept, f"context.{block}.{kind}", states, PROMPT, 0.7))
    assert seen["context.2.key"][0] is seen["context.3.key"][0]


@pytest.mark.parametrize("form", ["number", "scalar", "one", "each", "keyword"])
def test_a_band_is_that_of_the_timestep(tiny, adapter, pipe, form):
    concept = tiny.concept(adapter, "zqx bolo", config=BANDS)
    adapter.load_concept(concept)
    states, _ = adapter.encode(PROMPT)
    noise = torch.zeros(1, 4, 8, 8)
    bands = {0: 1, 1: 1, 499: 1, 500: 2, 999: 2}
    with tiny.Reads(adapter) as seen, torch.no_grad():
        for t in bands:
            if form == "keyword":
                pipe.unet(sample=noise, timestep=torch.tensor(t), encoder_hidden_states=states)
            else:
                given = {"number": t, "scalar": torch.tensor(t), "one": torch.tensor([t]), "each": torch.tensor([float(t)])}[form]
                pipe.unet(noise, given, states)
    for name, reads in seen.items():
        assert len(reads) == len(bands)
        for read, band in zip(reads, bands.values(), strict=True):
            assert torch.equal(read, moved(pipe, adapter, concept, f"{name}.{band}of2", states, PROMPT))
        assert reads[0] is reads[1] and reads[3] is reads[4] and not torch.equal(reads[2], reads[3])


def test_each_row_has_its_own_timestep(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=BOTH)
    adapter.load_concept(concept)
    prompts = [PROMPT, "a tree", "zqx bolo", PROMPT]
    states, _ = adapter.encode(prompts)
    with tiny.Reads(adapter) as seen:
        run(pipe, states, torch.tensor([100, 100, 900, 900]))
        run(pipe, states, torch.tensor([900, 100, 900, 900]))
    for i, block in BLOCK.items():
        assert all(read is states for read in seen[f"context.{i}.key"])
        for read, bands in zip(seen[f"context.{i}.value"], ((1, 1, 2, 2), (2, 1, 2, 2)), strict=True):
            for row, (prompt, band) in enumerate(zip(prompts, bands, strict=True)):
                expected = moved(pipe, adapter, concept, f"context.{block}.value.{band}of2", states[row : row + 1], prompt)
                assert torch.equal(read[row : row + 1], expected)


def test_bands_that_hold_the_same_rows_are_as_one(tiny, adapter, pipe):
    plain = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("context",)))
    banded = adapter.new_concept("zqx bolo", config=ConceptConfig(mounts=("context",), bands=3))
    for mount, rows in plain.roles["clip_l"].mounts.items():
        for band in (1, 2, 3):
            banded = banded.with_rows("clip_l", rows.rows(), rows.gain, rows.bias, mount=f"{mount}.{band}of3")
    pictures = []
    for concept in (plain, banded):
        adapter.load_concept(concept)
        pictures.append(tiny.picture(pipe, [PROMPT, "a tree"], num_inference_steps=4))
        adapter.unload_concept()
    assert torch.equal(*pictures)


def test_a_single_band_changes_the_picture(tiny, adapter, pipe):
    base = tiny.picture(pipe, PROMPT, num_inference_steps=4)
    changed = []
    for band in (1, 2):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=(f"context.up0.value.{band}of2",))))
        states, _ = adapter.encode(PROMPT)
        with tiny.Reads(adapter) as seen:
            run(pipe, states, 100)
            run(pipe, states, 900)
        changed.append([read is not states for read in seen["context.3.value"]])
        assert not torch.equal(base, tiny.picture(pipe, PROMPT, num_inference_steps=4))
        adapter.unload_concept()
    assert changed == [[True, False], [False, True]]


def test_concepts_of_other_layouts_in_one_prompt(tiny, adapter, pipe):
    """By cross-attention, by block, in two bands and in three: a projection reads all of them, each where its trigger stands."""
    configs = {
        "zqx bolo": ConceptConfig(mounts=("context",)),
        "cat-toy": ConceptConfig(mounts=("context",), share="block", bands=2),
        "kelo vin": ConceptConfig(mounts=("value",), bands=3, heads=4),
    }
    prompt = "a zqx bolo, a cat-toy and a kelo vin"
    concepts = {trigger: tiny.concept(adapter, trigger, seed=k, config=config) for k, (trigger, config) in enumerate(configs.items())}
    for concept in concepts.values():
        adapter.load_concept(concept, strength=0.5)
    states, _ = adapter.encode(["a tree", prompt])
    for t, two, three in ((0, 1, 1), (400, 1, 2), (600, 2, 2), (700, 2, 3)):
        with tiny.Reads(adapter) as seen:
            run(pipe, states, t)
        for i, block in BLOCK.items():
            for kind in ("key", "value"):
                (read,) = seen[f"context.{i}.{kind}"]
                mounts = {"zqx bolo": f"context.{i}.{kind}", "cat-toy": f"context.{block}.{kind}.{two}of2"}
                if kind == "value":
                    mounts["kelo vin"] = f"context.{i}.value.{three}of3"
                expected = states[1:]
                for trigger, mount in mounts.items():
                    expected = moved(pipe, adapter, concepts[trigger], mount, expected, prompt, 0.5)
                assert torch.equal(read[1:], expected) and torch.equal(read[0], states[0])
    for t in (torch.tensor([0, 700]), torch.tensor([700, 0])):
        with tiny.Reads(adapter) as seen:
            run(pipe, states, t)
            run(pipe, states, int(t[1]))
        assert all(torch.equal(*reads) for reads in seen.values())


def test_without_a_trigger_the_very_same_tensor_is_read(tiny, adapter, pipe):
    plain = tiny.picture(pipe, "a tree")
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BOTH))
    states, _ = adapter.encode("a tree")
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    assert all(read is states for (read,) in seen.values()) and torch.equal(plain, tiny.picture(pipe, "a tree"))


def test_steps_look_nothing_up_again(tiny, adapter, pipe, monkeypatch):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BANDS))
    contexts, made = adapter.contexts["clip_l"], []
    real = contexts._make
    monkeypatch.setattr(contexts, "_make", lambda tensor: made.append(tensor.shape) or real(tensor))
    tiny.picture(pipe, PROMPT, num_inference_steps=4)
    assert made == [(2, 77, 128)] and not contexts._entries


def test_switches_for_kept_embeddings(tiny, adapter, pipe):
    base = tiny.picture(pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BOTH))
    embeds, negative = adapter.encode(PROMPT, "")
    kept = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    ours = tiny.picture(pipe, PROMPT)
    adapter.disable_concepts()
    assert torch.equal(base, tiny.picture(pipe, None, **kept))
    adapter.enable_concepts()
    assert torch.equal(ours, tiny.picture(pipe, None, **kept)) and not torch.equal(ours, base)


def test_another_scheduler_counts_its_own_timesteps(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=BANDS)
    adapter.load_concept(concept)
    states, _ = adapter.encode(PROMPT)
    own_pipe.scheduler = type(own_pipe.scheduler).from_config(own_pipe.scheduler.config, num_train_timesteps=200)
    with tiny.Reads(adapter) as seen:
        run(own_pipe, states, 150)
    expected = moved(own_pipe, adapter, concept, "context.0.key.2of2", states, PROMPT)
    assert torch.equal(seen["context.0.key"][0], expected)


def test_a_scheduler_that_counts_no_timesteps_is_told(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BANDS))
    states, _ = adapter.encode(PROMPT)
    own_pipe.scheduler = KarrasVeScheduler()
    with pytest.raises(MountError, match="KarrasVeScheduler says num_train_timesteps None, expected how many .* disable_concepts"):
        run(own_pipe, states)
    adapter.disable_concepts()
    run(own_pipe, states)


@pytest.mark.parametrize(
    "mounts",
    [
        ("context.3.value", "context.up0.value"),
        ("context.3.value", "context.3.value.1of2"),
        ("context.up0.value.2of2", "context.3.value.1of2"),
        ("context.up0.value.2of2", "context.up0.value.2of3"),
    ],
)
def test_one_concept_has_one_layout_at_a_place(tiny, adapter, mounts, tmp_path):
    path = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=mounts)).save(tmp_path / "both.safetensors")
    expected = f"has rows at mounts '{mounts[0]}' and '{mounts[1]}' of clip_l, which both add to what context.\\d.value reads; expected one"
    with pytest.raises(TinyEngramError, match=expected):
        adapter.load_concept(path)
    assert adapter.get_list_concepts() == []
    for beside in ("context.3.key", "context.up0.key", "context.1.value.1of3"):
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=(mounts[1], beside))), beside)
        adapter.unload_concept()


def test_reading_outside_of_a_call_is_told(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BANDS))
    states, _ = adapter.encode(PROMPT)
    attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    with pytest.raises(MountError, match="reads text states outside of a call that tells a timestep"):
        attention(torch.zeros(1, 4, 32), states)
    run(pipe, states)
    with pytest.raises(MountError, match="outside of a call"):
        attention(torch.zeros(1, 4, 32), states)


def test_a_concept_of_one_layout_passed_by_is_told(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=BOTH))
    own_pipe.fuse_qkv_projections(vae=False)
    with pytest.raises(MountError, match="ran without reading through context.0.value, context.1.value, .* undo fused projections"):
        tiny.picture(own_pipe, PROMPT)
