"""Maps on a real denoiser: what each layer adds, where nothing may change, and what training gives."""

import pytest
import torch

import tiny_engram
from tiny_engram.config import ConceptConfig
from tiny_engram.maps import GivenMaps, attention_mass, map_attention, map_feedforward

PROMPT = "a zqx bolo on a table"
MAPS = ConceptConfig(mounts=("value",), attention_rank=2, feedforward_rank=1)
ONLY = {"attention": ConceptConfig(mounts=("span",), attention_rank=2), "feedforward": ConceptConfig(mounts=("span",), feedforward_rank=2)}
ALL = ConceptConfig(mounts=("input", "span", "context"), share="block", bands=2, attention_rank=1, feedforward_rank=1)


@pytest.fixture
def pipe(attached):
    return attached[0]


@pytest.fixture
def adapter(emptied):
    return emptied


class Layers:
    """Inside, of every layer: what queries, keys, `to_out` and the feed-forward layer read and give, without our hooks and with them."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.seen = [{} for _ in self.blocks]

    def __enter__(self):
        self.handles = []
        for block, seen in zip(self.blocks, self.seen, strict=True):
            attention = block.attn2

            def keep(name, seen=seen, output=False):
                return lambda _module, args, *rest: seen.update({name: rest[-1] if output else args[0]})

            self.handles += [
                attention.to_q.register_forward_hook(keep("query", output=True)),
                attention.to_k.register_forward_hook(keep("key", output=True)),
                attention.to_q.register_forward_pre_hook(keep("states")),
                attention.to_out[0].register_forward_pre_hook(keep("heads"), prepend=True),
                attention.to_out[0].register_forward_pre_hook(keep("heads with")),
                block.ff.register_forward_pre_hook(keep("fed")),
                block.ff.register_forward_hook(keep("output", output=True), prepend=True),
                block.ff.register_forward_hook(keep("output with", output=True)),
            ]
        return self.seen

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def run(pipe, states, timestep=500):
    noise = torch.randn(len(states), 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(pipe.unet.dtype)
    with torch.no_grad():
        return pipe.unet(noise, timestep, states).sample


def fired_of(pipe, adapter, concept, prompts):
    ids = pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    fired = torch.zeros(len(prompts), 77)
    fired[adapter.spans(concept, ids).flat()[:2]] = 1.0
    return fired


def bits(x):
    return x.contiguous().view(torch.int32)


# -- what is added -------------------------------------------------------------------------------------------------------------


def test_every_layer_adds_its_own_map_where_the_trigger_is_looked_at(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=MAPS)
    adapter.load_concept(concept, strength=0.5)
    prompts = ["a tree", PROMPT, "zqx bolo, zqx bolo"]
    states, _ = adapter.encode(prompts)
    with Layers(tiny.blocks_of(pipe.unet)) as layers:
        run(pipe, states)
    fired = fired_of(pipe, adapter, concept, prompts)
    assert len(layers) == 4 and fired.sum() == 9
    for i, (block, seen) in enumerate(zip(tiny.blocks_of(pipe.unet), layers, strict=True)):
        attention = block.attn2
        mass = attention_mass(seen["query"], seen["key"], fired, heads=attention.heads, scale=attention.scale)
        into, out = concept.roles["clip_l"].maps[f"attention.{i}"].factors()
        assert into.shape == (2, 32)
        torch.testing.assert_close(seen["heads with"], seen["heads"] + map_attention(seen["states"], mass, into, 0.5 * out))
        into, out = concept.roles["clip_l"].maps[f"feedforward.{i}"].factors()
        torch.testing.assert_close(seen["output with"], seen["output"] + map_feedforward(seen["fed"], mass, into, 0.5 * out))
        for name in ("heads", "output"):
            with_, without = seen[f"{name} with"], seen[name]
            assert torch.equal(bits(with_[0]), bits(without[0])) and not torch.equal(with_[1], without[1])


@pytest.mark.parametrize("site", ["attention", "feedforward"])
def test_one_site_alone(tiny, adapter, pipe, site):
    base = tiny.picture(pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ONLY[site], size=0.0))
    assert torch.equal(base, tiny.picture(pipe, PROMPT))  # zero rows and maps
    adapter.unload_concept()
    concept = tiny.concept(adapter, "zqx bolo", config=ONLY[site])
    rows = concept.mount_rows("clip_l")
    adapter.load_concept(concept.with_rows("clip_l", torch.zeros_like(rows.rows()), rows.gain, rows.bias))
    assert not torch.equal(base, tiny.picture(pipe, PROMPT))
    states, _ = adapter.encode(PROMPT)
    with Layers(tiny.blocks_of(pipe.unet)) as layers:
        run(pipe, states)
    for seen in layers:
        assert torch.equal(seen["heads"], seen["heads with"]) == (site != "attention")
        assert torch.equal(seen["output"], seen["output with"]) == (site != "feedforward")


def test_an_untrained_concept_adds_nothing(tiny, adapter, pipe):
    base = tiny.picture(pipe, PROMPT)
    adapter.load_concept(adapter.new_concept("zqx bolo", config=MAPS))
    assert torch.equal(base, tiny.picture(pipe, PROMPT))


@pytest.mark.parametrize("guidance", [1.0, 7.5], ids=["unguided", "guided"])
def test_without_a_trigger_all_is_the_base_to_the_bit(tiny, adapter, pipe, guidance):
    options = {"guidance_scale": guidance, "num_images_per_prompt": 2}
    states, base = adapter.encode(["a tree", "a zqx boloish thing"])[0], tiny.picture(pipe, ["a tree", "zqx bolos"], **options)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ALL))
    assert torch.equal(bits(states), bits(adapter.encode(["a tree", "a zqx boloish thing"])[0]))
    assert torch.equal(bits(base), bits(tiny.picture(pipe, ["a tree", "zqx bolos"], **options)))
    with_trigger = tiny.picture(pipe, ["a tree", PROMPT], **options)
    assert torch.equal(base[:2], with_trigger[:2])  # two pictures of the first prompt, beside two of the trigger
    adapter.disable_concepts()
    without = tiny.picture(pipe, ["a tree", PROMPT], **options)
    assert torch.equal(without[:2], base[:2]) and all(not torch.equal(a, b) for a, b in zip(without[2:], with_trigger[2:], strict=True))


def test_a_batch_keeps_the_rows_without_the_trigger(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=ALL))
    for t in (100, 900):
        adapter.disable_concepts()
        plain = run(pipe, adapter.encode(["a tree", PROMPT, "a house"])[0], t)
        adapter.enable_concepts()
        ours = run(pipe, adapter.encode(["a tree", PROMPT, "a house"])[0], t)
        assert torch.equal(bits(ours[[0, 2]]), bits(plain[[0, 2]])) and not torch.equal(ours[1], plain[1])


def test_the_trigger_in_the_negative_prompt(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=MAPS)
    adapter.load_concept(concept)
    with Layers(tiny.blocks_of(pipe.unet)) as layers:
        tiny.picture(pipe, ["a tree", PROMPT], negative_prompt=["zqx bolo", ""], num_images_per_prompt=2, num_inference_steps=1)
    for seen in layers:
        for name in ("heads", "output"):
            changed = (seen[name] != seen[f"{name} with"]).flatten(1).any(1)
            assert changed.tolist() == [True, True, False, False, False, False, True, True]


def test_two_concepts_in_one_prompt(tiny, adapter, pipe):
    """Each adds by its own mass; ranks and sites may differ."""
    first = tiny.concept(adapter, "zqx bolo", seed=1, config=ConceptConfig(mounts=("value",), attention_rank=2))
    second = tiny.concept(adapter, "cat-toy", seed=2, config=ConceptConfig(mounts=("value",), attention_rank=1, feedforward_rank=3))
    for concept in (first, second):
        adapter.load_concept(concept)
    prompts = ["a zqx bolo and a cat-toy", "a cat-toy"]
    states, _ = adapter.encode(prompts)
    with Layers(tiny.blocks_of(pipe.unet)) as layers:
        run(pipe, states)
    for i, (block, seen) in enumerate(zip(tiny.blocks_of(pipe.unet), layers, strict=True)):
        heads, output = seen["heads"], seen["output"]
        for concept in (first, second):
            maps, attention = concept.roles["clip_l"].maps, block.attn2
            fired = fired_of(pipe, adapter, concept, prompts)
            mass = attention_mass(seen["query"], seen["key"], fired, heads=attention.heads, scale=attention.scale)
            heads = heads + map_attention(seen["states"], mass, *maps[f"attention.{i}"].factors())
            if concept is second:
                output = output + map_feedforward(seen["fed"], mass, *maps[f"feedforward.{i}"].factors())
        torch.testing.assert_close(seen["heads with"], heads)
        torch.testing.assert_close(seen["output with"], output)


def test_strength_multiplies_what_is_added(tiny, adapter, pipe):
    """Half of it is what a file with half the factors adds: e4m3 halves exactly."""
    concept = tiny.concept(adapter, "zqx bolo", config=MAPS)
    halved = concept
    for name, rows in concept.roles["clip_l"].maps.items():
        into, out = rows.factors()
        halved = halved.with_map("clip_l", name, into, 0.5 * out)
    states, _ = adapter.encode(PROMPT)

    def silent(one):
        for mount, rows in one.roles["clip_l"].mounts.items():
            one = one.with_rows("clip_l", torch.zeros_like(rows.rows()), rows.gain, rows.bias, mount=mount)
        return one

    found = []
    for one, strength in ((concept, 0.5), (halved, 1.0), (concept, 1.0), (concept, 0.0)):
        adapter.load_concept(silent(one), strength=strength)
        states, _ = adapter.encode(PROMPT)
        found.append(run(pipe, states))
        adapter.unload_concept()
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[3], run(pipe, states)) and not torch.equal(found[0], found[3])


def test_switches_and_files(tiny, own_pipe, tmp_path):
    base = tiny.picture(own_pipe, PROMPT)
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("value",), attention_rank=1, feedforward_rank=1))
    adapter.load_concept(concept)
    embeds, negative = adapter.encode(PROMPT, "")
    kept = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    ours = tiny.picture(own_pipe, PROMPT)
    for off, on in [
        (lambda: adapter.set_strength("zqx bolo", 0.0), lambda: adapter.set_strength("zqx bolo", 1.0)),
        (adapter.disable_concepts, adapter.enable_concepts),
        (lambda: adapter.set_concepts([]), lambda: adapter.set_concepts("zqx bolo")),
    ]:
        off()
        assert torch.equal(tiny.picture(own_pipe, PROMPT), base) and torch.equal(tiny.picture(own_pipe, None, **kept), base)
        on()
        assert torch.equal(tiny.picture(own_pipe, None, **kept), ours)
    adapter.set_strength("zqx bolo", 0.5)
    assert not torch.equal(tiny.picture(own_pipe, None, **kept), ours)
    adapter.unload_concept()
    adapter.load_concept(concept.save(tmp_path / "c.safetensors"))
    assert torch.equal(tiny.picture(own_pipe, PROMPT), ours)
    adapter.detach()
    assert torch.equal(tiny.picture(own_pipe, PROMPT), base)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in own_pipe.unet.modules())


def test_hooks_go_with_the_last_concept_that_needs_them(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "cat-toy", config=ConceptConfig(mounts=("value",))))
    plain = set(adapter.contexts["clip_l"].hooks)
    assert all(name.startswith("context") for name in plain)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    more = set(adapter.contexts["clip_l"].hooks) - plain
    assert more == {f"attention.{i}.{part}" for i in range(4) for part in ("to_q", "to_k", "to_out")} | {
        f"feedforward.{i}" for i in range(4)
    }
    adapter.unload_concept("zqx bolo")
    assert set(adapter.contexts["clip_l"].hooks) == plain
    assert not any(m._forward_hooks for m in pipe.unet.modules() if m is not pipe.unet)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(tiny, dtype):
    pipe = tiny.build(dtype=dtype)
    adapter = tiny_engram.attach(pipe)
    plain = tiny.picture(pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=MAPS))
    states, _ = adapter.encode(["a tree", PROMPT])
    with Layers(tiny.blocks_of(pipe.unet)) as layers:
        run(pipe, states)
    assert all(seen["heads with"].dtype == dtype and torch.equal(seen["heads"][0], seen["heads with"][0]) for seen in layers)
    ours = tiny.picture(pipe, PROMPT)
    assert not torch.equal(plain, ours) and bool(ours.isfinite().all())


# -- training's side -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "gradient checkpoints"])
def test_given_maps_are_what_is_served_and_take_gradients(tiny, own_pipe, checkpoints):
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("span",), attention_rank=2, feedforward_rank=1))
    prompts = ["a tree", PROMPT]
    adapter.load_concept(concept)
    states, _ = adapter.encode(prompts)
    served = run(own_pipe, states)
    adapter.unload_concept()
    leaves = {name: tuple(f.clone().requires_grad_() for f in rows.factors()) for name, rows in concept.roles["clip_l"].maps.items()}
    given = GivenMaps(fired_of(own_pipe, adapter, concept, prompts), leaves)
    contexts = adapter.contexts["clip_l"]
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    own_pipe.unet.requires_grad_(False)
    if checkpoints:
        own_pipe.unet.enable_gradient_checkpointing()
        own_pipe.unet.train()
    with contexts.held():
        assert all(name.startswith("context") for name in contexts.hooks)
        with contexts.giving(states, {}, given):
            out = own_pipe.unet(noise, 500, states).sample
        assert torch.equal(out.detach(), served) or checkpoints
        torch.testing.assert_close(out.detach(), served)
        out.square().sum().backward()
        again = states.clone()
        with contexts.giving(again, {}):
            plain = own_pipe.unet(noise, 500, again).sample
        with contexts.giving(again, {}, GivenMaps(torch.zeros(2, 77), leaves)):
            assert torch.equal(plain, own_pipe.unet(noise, 500, again).sample)
    assert not contexts.hooks and not torch.equal(plain[1], out[1])
    gradients = [leaf.grad for pair in leaves.values() for leaf in pair]
    assert len(gradients) == 16 and all(g is not None and bool(g.isfinite().all()) and bool(g.ne(0).any()) for g in gradients)


def test_checkpoints_give_the_same_gradients(tiny, own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    concept = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("value",), attention_rank=1, feedforward_rank=1))
    states, _ = adapter.encode(["a tree", PROMPT])
    fired, noise = fired_of(own_pipe, adapter, concept, ["a tree", PROMPT]), torch.zeros(2, 4, 8, 8)
    contexts, found = adapter.contexts["clip_l"], []
    own_pipe.unet.requires_grad_(False).train()
    for checkpoints in (False, True):
        leaves = {name: tuple(f.clone().requires_grad_() for f in rows.factors()) for name, rows in concept.roles["clip_l"].maps.items()}
        if checkpoints:
            own_pipe.unet.enable_gradient_checkpointing()
        with contexts.held():
            given = states.clone()
            moved = {"context.0.key": given + 1.0}
            with contexts.giving(given, moved, GivenMaps(fired, leaves)):
                loss = own_pipe.unet(noise, 500, given).sample.square().sum()
            loss.backward()
        found.append([leaf.grad for pair in leaves.values() for leaf in pair])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
