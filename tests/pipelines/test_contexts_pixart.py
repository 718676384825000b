"""Context mounts, bands and maps of PixArt, whose cross-attentions read projected states under a mask; served and taught."""

from functools import partial

import pytest
import torch

import tiny_engram
from tests.pipelines.tiny import t5
from tests.pipelines.tiny.base import finished, picture, picture_vae, t5_encoder, t5_tokenizer
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.maps import GivenMaps, map_attention, map_feedforward
from tiny_engram.residual import apply_concept
from tiny_engram.training.cache import CaptionBatch
from tiny_engram.training.rows import ConceptRows

TRIGGER, PROMPT, PLAIN = "vortex cat", "a photo of a vortex cat on a table", "a photo of a cat on a table"
(ENTRY,) = (entry for entry in t5.PIPELINES if entry.name == "pixart:sigma")
BANDS = ConceptConfig(mounts=("context",), share="block", bands=2)
ALL = ConceptConfig(mounts=("input", "context"), share="block", bands=2, attention_rank=1, feedforward_rank=1)
MAPPED = ConceptConfig(mounts=("span", "context"), attention_rank=1, feedforward_rank=1)
INNER = 64


def build():
    """Wide enough for maps, whose channels come in blocks of 32."""
    torch.manual_seed(0)
    options = {"num_attention_heads": 2, "attention_head_dim": INNER // 2, "in_channels": 4, "out_channels": 8, "num_layers": 3}
    transformer = t5.PixArtTransformer2DModel(
        **options, cross_attention_dim=INNER, caption_channels=t5.T5, sample_size=128, use_additional_conditions=False
    )
    parts = {"text_encoder": t5_encoder(t5.T5), "vae": picture_vae(4), "scheduler": t5.DPMSolverMultistepScheduler()}
    return finished(t5.PixArtSigmaPipeline(tokenizer=t5_tokenizer(), transformer=transformer, **parts))


@pytest.fixture(scope="module")
def pipe():
    return build()


@pytest.fixture
def adapter(pipe):
    adapter = tiny_engram.attach(pipe)
    yield adapter
    adapter.detach()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.transformer.modules())


def ids_of(pipe, *prompts, length=300):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")


def call(pipe, states, mask, timestep=500, noise=None):
    noise = torch.randn(len(states), 4, 8, 8, generator=torch.Generator().manual_seed(1)) if noise is None else noise
    timesteps = torch.as_tensor(timestep).expand(len(states))
    return pipe.transformer(noise, states, timesteps, {"resolution": None, "aspect_ratio": None}, encoder_attention_mask=mask).sample


def test_a_band_is_that_of_the_timestep_and_a_block_shares_its_rows(pipe, adapter, tiny):
    concept = tiny.concept(adapter, TRIGGER, config=BANDS)
    blocks = ("part0", "part1", "part2")
    assert list(concept.roles["t5"].mounts) == [f"context.{b}.{k}.{n}of2" for b in blocks for k in ("key", "value") for n in (1, 2)]
    adapter.load_concept(concept)
    embeds = adapter.embeds([PLAIN, PROMPT])
    spans = adapter.spans(concept, ids_of(pipe, PLAIN, PROMPT).input_ids)
    with torch.no_grad():
        projected = pipe.transformer.caption_projection(embeds["prompt_embeds"])
    for timestep, band in ((100, 1), (499, 1), (500, 2), (999, 2)):
        with seen_by(adapter) as seen, torch.no_grad():
            call(pipe, embeds["prompt_embeds"], embeds["prompt_attention_mask"], timestep)
        for i in range(3):
            for kind in ("key", "value"):
                rows = concept.mount_rows("t5", f"context.part{i}.{kind}.{band}of2")
                expected = apply_concept(projected, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho)
                assert torch.equal(seen[f"context.{i}.{kind}"], expected)
    with seen_by(adapter) as seen, torch.no_grad():
        call(pipe, embeds["prompt_embeds"].flip(0).repeat(2, 1, 1), embeds["prompt_attention_mask"].repeat(2, 1), [100, 0, 900, 0])
    for row, band in ((0, 1), (2, 2)):
        rows = concept.mount_rows("t5", f"context.part1.value.{band}of2")
        expected = apply_concept(projected, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho)[1]
        assert torch.equal(seen["context.1.value"][row], expected)


class seen_by:
    """Inside, what each place reads in the end, by name; the last call's."""

    def __init__(self, adapter):
        self.hooks = {name: hook for name, hook in adapter.contexts["t5"].hooks.items() if name.startswith("context")}

    def __enter__(self):
        found = {}
        self.handles = [h.module.register_forward_pre_hook(partial(self.keep, found, name)) for name, h in self.hooks.items()]
        return found

    @staticmethod
    def keep(found, name, _module, args):
        found[name] = args[0]

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def test_maps_weigh_by_the_attention_under_its_mask(pipe, adapter, tiny):
    """The mass is that of a softmax over the words alone: what is masked out takes none of it."""
    concept = tiny.concept(adapter, TRIGGER, config=ConceptConfig(mounts=("span",), attention_rank=2, feedforward_rank=1))
    rows = concept.mount_rows("t5", "span")
    adapter.load_concept(concept.with_rows("t5", torch.zeros_like(rows.rows()), rows.gain, rows.bias))
    embeds = adapter.embeds([PLAIN, PROMPT])
    block, seen = pipe.transformer.transformer_blocks[1], {}
    attention, ff = block.attn2, block.ff

    def keep(name, output=False):
        return lambda _module, args, *rest: seen.update({name: rest[-1] if output else args[0]})

    handles = [
        attention.to_q.register_forward_hook(keep("query", True)),
        attention.to_k.register_forward_hook(keep("key", True)),
        attention.to_q.register_forward_pre_hook(keep("states")),
        attention.to_out[0].register_forward_pre_hook(keep("heads"), prepend=True),
        attention.to_out[0].register_forward_pre_hook(keep("heads with")),
        ff.register_forward_pre_hook(keep("fed")),
        ff.register_forward_hook(keep("output", True), prepend=True),
        ff.register_forward_hook(keep("output with", True)),
    ]
    with torch.no_grad():
        call(pipe, embeds["prompt_embeds"], embeds["prompt_attention_mask"])
    for handle in handles:
        handle.remove()
    words = int(embeds["prompt_attention_mask"][1].sum())
    assert words < 300
    query, key = (seen[name][1].unflatten(-1, (2, -1)).transpose(0, 1) for name in ("query", "key"))
    share = (query @ key[:, :words].transpose(-1, -2) * attention.scale).softmax(-1)
    spans = adapter.spans(concept, ids_of(pipe, PROMPT).input_ids)
    start, size = int(spans.start[0]), int(spans.length[0])
    mass = share[..., start : start + size].sum(-1)[None]
    maps = concept.roles["t5"].maps
    added = map_attention(seen["states"][1:], mass, *maps["attention.1"].factors())
    torch.testing.assert_close(seen["heads with"][1:], seen["heads"][1:] + added)
    added = map_feedforward(seen["fed"][1:], mass, *maps["feedforward.1"].factors())
    torch.testing.assert_close(seen["output with"][1:], seen["output"][1:] + added)
    for name in ("heads", "output"):
        assert torch.equal(seen[name][0], seen[f"{name} with"][0]) and not torch.equal(seen[name][1], seen[f"{name} with"][1])


def test_a_mask_that_maps_cannot_follow_is_told(pipe, adapter, tiny):
    adapter.load_concept(tiny.concept(adapter, TRIGGER, config=ConceptConfig(mounts=("span",), attention_rank=1)))
    embeds = adapter.embeds([PROMPT])
    bias = torch.zeros(1, 8, 300)
    with pytest.raises(MountError, match=r"attends with a mask torch.float32 \[1, 16, 300\]|expected a bias of \[1, 1, 300\]"):
        call(pipe, embeds["prompt_embeds"], torch.cat([bias, bias], 1))


def test_everything_at_once_is_the_base_without_the_trigger(pipe, adapter, tiny, tmp_path):
    options = {"negative_prompt": "a house"}
    base = {prompt: picture(ENTRY, pipe, prompt, **options) for prompt in (PROMPT, PLAIN, "a vortex cat-o")}
    concept = tiny.concept(adapter, TRIGGER, config=ALL)
    place = concept.roles["t5"]
    assert place.width == t5.T5 and {place.width_at(m) for m in place.mounts} == {t5.T5, INNER} and len(place.maps) == 6
    report = adapter.register(TRIGGER, config=ALL)
    assert report.roles["t5"].nbytes == concept.nbytes
    loaded = Concept.load(concept.save(tmp_path / "c.safetensors"))
    assert loaded.describe() == concept.describe() and loaded.describe()["format"] == 3 and loaded.nbytes == concept.nbytes
    adapter.load_concept(loaded)
    ours = picture(ENTRY, pipe, PROMPT, **options)
    assert not torch.equal(ours, base[PROMPT])
    assert torch.equal(picture(ENTRY, pipe, PLAIN, **options), base[PLAIN])
    kept = dict(adapter.embeds(PROMPT, "a house"))
    both = picture(ENTRY, pipe, [PLAIN, PROMPT], negative_prompt=["a house"] * 2, num_images_per_prompt=2)
    adapter.disable_concepts()
    plain = picture(ENTRY, pipe, [PLAIN, PROMPT], negative_prompt=["a house"] * 2, num_images_per_prompt=2)
    assert torch.equal(both[:2], plain[:2]) and all(not torch.equal(a, b) for a, b in zip(both[2:], plain[2:], strict=True))
    assert torch.equal(picture(ENTRY, pipe, PROMPT, **options), base[PROMPT])
    adapter.enable_concepts()
    assert torch.equal(picture(ENTRY, pipe, None, negative_prompt=None, **kept), ours)
    adapter.unload_concept()
    adapter.load_concept(concept)
    assert torch.equal(picture(ENTRY, pipe, PROMPT, **options), ours)


def test_another_width_is_refused(pipe, adapter, tiny):
    concept = tiny.concept(adapter, TRIGGER, config=ConceptConfig(mounts=("context.0.value",)))
    narrow = ENTRY.build()
    foreign = tiny_engram.attach(narrow)
    with pytest.raises(TinyEngramError, match=r"has width 64 at mount 'context.0.value' of t5, expected 48; load it into the base it was"):
        foreign.load_concept(concept)
    assert foreign.get_list_concepts() == []


def test_states_of_nobody_and_blocks_called_alone_are_told(pipe, adapter, tiny):
    adapter.load_concept(tiny.concept(adapter, TRIGGER, config=BANDS))
    embeds = adapter.embeds([PLAIN, PROMPT])
    states, mask = embeds["prompt_embeds"], embeds["prompt_attention_mask"]
    changed = states.clone()
    changed[1, 2] *= 1.001  # one state among others that are known
    with pytest.raises(MountError, match=r"row 1 of the \[2, 300, 40\] text states .* make prompt embeds with adapter.encode"):
        call(pipe, changed, mask)
    attention = pipe.transformer.transformer_blocks[0].attn2
    with pytest.raises(MountError, match="reads text states outside of a call, so where the trigger of a concept stands is unknown"):
        attention(torch.zeros(2, 4, INNER), torch.zeros(2, 300, INNER))
    with torch.no_grad():  # cut short, in half, and back in float32; and zeros are no prompt
        whole = call(pipe, states, mask)
        short = call(pipe, states[:, :40].contiguous(), mask[:, :40])
        call(pipe, states.half().float(), mask)
        call(pipe, torch.zeros_like(states), mask)
    torch.testing.assert_close(short, whole)
    pipe.transformer.fuse_qkv_projections()
    with pytest.raises(MountError, match=r"ran without reading through context.0.key, .* undo fused projections"), torch.no_grad():
        adapter.set_strength(TRIGGER, 0.9)
        call(pipe, states, mask)
    pipe.transformer.unfuse_qkv_projections()


# -- training's side -----------------------------------------------------------------------------------------------------------


def captions_of(pipe, adapter, concept, prompts):
    given = ids_of(pipe, *prompts)
    spans = adapter.spans(concept, given.input_ids)
    states = adapter.embeds(list(prompts))["prompt_embeds"]
    return CaptionBatch(states, spans, pipe.text_encoder, given.input_ids, spans, tuple(range(len(prompts)))), given.attention_mask


@pytest.mark.parametrize("config", [BANDS, MAPPED], ids=["bands", "maps"])
def test_what_is_taught_is_what_is_served_and_checkpoints_give_the_same_gradients(adapter, tiny, config, tmp_path):
    pipe = build()
    adapter = tiny_engram.attach(pipe)
    start = tiny.concept(adapter, TRIGGER, config=config)
    prompts, timesteps = ("a vortex cat and a vortex cat", PROMPT), (100, 900)
    captions, mask = captions_of(pipe, adapter, start, prompts)
    contexts, found = adapter.contexts["t5"], []
    pipe.transformer.requires_grad_(False)
    for checkpoints in (False, True):
        module = ConceptRows(start, "t5", contexts.layout)
        if checkpoints:
            pipe.transformer.enable_gradient_checkpointing()
            pipe.transformer.train()
        with contexts.held():
            states, rows, factors = module(captions, timesteps, torch.float32)
            maps = GivenMaps(captions.fired, factors) if factors else None
            with contexts.giving(states, rows, maps):
                said = call(pipe, states, mask, timesteps)
            said.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())
        found.append((said.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}))
    pipe.transformer.disable_gradient_checkpointing()
    pipe.transformer.eval()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name])
        assert gradient.flatten(1).ne(0).any(1).all()
    made = module.concept(start, "t5", dict(module.named_parameters()))
    adapter.load_concept(made.save(tmp_path / "c.safetensors"))
    served = adapter.embeds(list(prompts))["prompt_embeds"]
    with torch.no_grad():
        assert torch.equal(call(pipe, served, mask, timesteps), found[0][0])
    adapter.detach()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.transformer.modules())


def test_other_states_than_were_given_are_told(pipe, adapter, tiny):
    start = tiny.concept(adapter, TRIGGER, config=BANDS)
    captions, mask = captions_of(pipe, adapter, start, (PROMPT,))
    contexts = adapter.contexts["t5"]
    with contexts.held():
        states, rows, _ = ConceptRows(start, "t5", contexts.layout)(captions, (100,), torch.float32)
        with pytest.raises(MountError, match="reads other text states than training gave it"), contexts.giving(states, rows):
            call(pipe, states.clone(), mask)
        with pytest.raises(MountError, match="ran without reading through context.0.key"), contexts.giving(states, rows):
            pass
        told = pytest.raises(MountError, match=r"reads \[2, 300, 64\] at context.0.key, expected 1 rows of width 64")
        with told, contexts.giving(states, rows):
            pipe.transformer.transformer_blocks[0].attn2(torch.zeros(2, 4, INNER), torch.zeros(2, 300, INNER))
