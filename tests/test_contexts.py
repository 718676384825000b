"""Context mounts on a real denoiser: what each projection reads, with whom, and what must keep its bits."""

import pytest
import torch

import tiny_engram
from tiny_engram import concept_file
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig
from tiny_engram.encoded import EncodedPrompts
from tiny_engram.errors import TinyEngramError
from tiny_engram.hooks import MountError
from tiny_engram.residual import apply_concept

PROMPT = "a zqx bolo on a table"
SIDES = ConceptConfig(mounts=("context",))
WHOLE = ConceptConfig(mounts=("span", "context"), context_rho=0.8)


@pytest.fixture
def pipe(attached):
    return attached[0]


@pytest.fixture
def adapter(emptied):
    return emptied


def names_of(adapter) -> tuple[str, ...]:
    return adapter.contexts["clip_l"].names


def ids_of(pipe, *prompts):
    return pipe.tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def run(pipe, states, **options):
    """One call of the denoiser at fixed noise."""
    noise = torch.randn(len(states), 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(pipe.unet.dtype)
    with torch.no_grad():
        return pipe.unet(noise, 500, states, **options).sample


# -- where and what ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SIDES, WHOLE], ids=["context", "span and context"])
def test_every_projection_reads_its_own_residual_at_the_span_only(tiny, adapter, pipe, config):
    concept = tiny.concept(adapter, "zqx bolo", config=config)
    adapter.load_concept(concept, strength=0.7)
    states, _ = adapter.encode([PROMPT, "a tree", "zqx bolo, zqx bolo"])
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    spans = adapter.spans(concept, ids_of(pipe, PROMPT, "a tree", "zqx bolo, zqx bolo"))
    fired = torch.zeros(3, 77, dtype=torch.bool)
    fired[spans.flat()[:2]] = True
    assert len(seen) == 8 and fired.sum() == 9
    for name, (read,) in seen.items():
        rows = concept.mount_rows("clip_l", name)
        expected = apply_concept(states, spans, rows.rows(), rows.gain, rows.bias, rho=rows.rho, strength=0.7)
        assert torch.equal(read, expected) and torch.equal((read != states).any(-1), fired)
    reads = [read for (read,) in seen.values()]
    assert all(not torch.equal(a, b) for k, a in enumerate(reads) for b in reads[:k])


def test_rows_of_each_mount_have_addresses_of_their_own(tiny, adapter):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    store = adapter.mounts["clip_l"].store
    ids = [store.bank_of("zqx bolo", mount).row_ids("zqx bolo") for mount in store.mounts_of("zqx bolo")]
    assert len(ids) == 9 and all(not torch.equal(a, b) for k, a in enumerate(ids) for b in ids[:k])
    for index, mount in enumerate(store.mounts_of("zqx bolo")):
        assert store.bank_of("zqx bolo", mount).hasher.layer_id == index
    rows = adapter.concept("zqx bolo").roles["clip_l"].mounts.values()
    assert store.row_bytes == sum(at.payload.numel() + at.scale.numel() for at in rows)


def test_without_a_trigger_the_very_same_tensor_is_read(tiny, adapter, pipe):
    plain = tiny.picture(pipe, "a tree and zqx bolos")
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    states, _ = adapter.encode(["a tree", "a zqx boloish thing"])
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    assert all(read is states for (read,) in seen.values())
    assert torch.equal(plain, tiny.picture(pipe, "a tree and zqx bolos")) and not torch.equal(plain, tiny.picture(pipe, PROMPT))


def test_mounts_without_rows_pass_the_tensor_on(tiny, adapter, pipe):
    concept = tiny.concept(adapter, "zqx bolo", config=ConceptConfig(mounts=("value", "context.2.key")))
    assert [m.removeprefix("context.") for m in concept.roles["clip_l"].mounts] == ["0.value", "1.value", "2.key", "2.value", "3.value"]
    adapter.load_concept(concept)
    states, _ = adapter.encode(PROMPT)
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    assert {name for name, (read,) in seen.items() if read is not states} == set(concept.roles["clip_l"].mounts)


def test_several_concepts_in_one_prompt(tiny, adapter, pipe):
    both = "a zqx bolo and a cat-toy"
    first = tiny.concept(adapter, "zqx bolo", seed=1, config=WHOLE)
    second = tiny.concept(adapter, "cat-toy", seed=2, config=ConceptConfig(mounts=("key",), heads=4))  # another shape of rows
    alone = {}
    for concept in (first, second):
        adapter.load_concept(concept)
        states, _ = adapter.encode(both)
        with tiny.Reads(adapter) as seen:
            run(pipe, states)
        alone[concept.name] = {name: read for name, (read,) in seen.items()}
        adapter.unload_concept()
    adapter.load_concept(first)
    adapter.load_concept(second)
    adapter.load_concept(tiny.concept(adapter, "bolo", seed=3, config=WHOLE))
    states, _ = adapter.encode(both)
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    for span in adapter.explain(both).fired:
        at = slice(span.start, span.end)
        assert all(torch.equal(read[:, at], alone[span.name][name][:, at]) for name, (read,) in seen.items())


# -- rows are matched by what they hold ----------------------------------------------------------------------------------------


def test_guidance_repeats_order_and_kept_embeddings(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    with tiny.Reads(adapter) as seen:
        pictures = tiny.picture(pipe, [PROMPT, "a tree"], negative_prompt=["", "zqx bolo"], num_images_per_prompt=2, num_inference_steps=3)
    span = slice(2, 5)
    read, again, _ = seen["context.0.key"]
    assert read is again and len(read) == 8
    key, negative = (adapter.encode(p)[0] for p in (PROMPT, "zqx bolo"))
    changed = (read != seen["context.0.value"][0]).any(-1)
    assert changed.any(-1).tolist() == [False, False, True, True, True, True, False, False]
    assert changed[4, span].all() and not torch.equal(read[4], key[0]) and not torch.equal(read[2], negative[0])
    # The same embeddings later, in another order and from another batch.
    embeds, negatives = adapter.encode([PROMPT, "a tree"], ["", "zqx bolo"], num_images_per_prompt=2)
    adapter.encode("something else")
    options = {"prompt_embeds": embeds, "negative_prompt_embeds": negatives, "num_inference_steps": 3}
    assert torch.equal(pictures, tiny.picture(pipe, None, **options))
    flipped = {**options, "prompt_embeds": embeds.flip(0).clone(), "negative_prompt_embeds": negatives.flip(0).clone()}
    with tiny.Reads(adapter) as seen:
        tiny.picture(pipe, None, **flipped)
    assert torch.equal(seen["context.0.key"][0][4:].flip(0), read[4:]) and torch.equal(seen["context.0.key"][0][:4].flip(0), read[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_cast_for_the_denoiser(tiny, dtype):
    pipe = tiny.build()
    pipe.unet.to(dtype)
    adapter = tiny_engram.attach(pipe)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    states, _ = adapter.encode([PROMPT, "a tree"])
    with tiny.Reads(adapter) as seen:
        for given in (states.to(dtype), states.to(torch.bfloat16).to(dtype), states.to(dtype).double().to(dtype)):
            run(pipe, given)
            assert all(reads[-1].dtype == dtype for reads in seen.values())
            changed = (seen["context.1.value"][-1] != given).any(-1)
            assert changed.nonzero().tolist() == [[0, 2], [0, 3], [0, 4]]
    half = tiny.build(dtype=dtype)
    adapter = tiny_engram.attach(half)
    plain = tiny.picture(half, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    assert not torch.equal(plain, tiny.picture(half, PROMPT))
    run(half.to(torch.float32), adapter.encode(PROMPT)[0])


def test_rows_of_no_known_prompt_are_told(tiny, adapter, pipe):
    unique = "a zqx bolo that nobody asked for before"
    before, _ = adapter.encode(unique)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    with pytest.raises(MountError, match="row 0 of the .1, 77, 128. text states .* make prompt embeds with adapter.encode"):
        run(pipe, before)
    states, _ = adapter.encode(unique)
    for strange in (torch.cat((states, states * 1.001)), torch.cat((states, states[:, :70].repeat(1, 2, 1)[:, :77]))):
        with pytest.raises(MountError, match="row 1 of the"):
            run(pipe, strange)
    with pytest.raises(MountError, match="row 0 of the .1, 70, 128."):
        run(pipe, states[:, :70])
    # Zeros are no prompt, and are often given in the negative one's place.
    assert run(pipe, torch.cat((torch.zeros_like(states), states))).isfinite().all()
    assert torch.equal(run(pipe, before), run(pipe, states))  # the text is the same, and is known now
    adapter.disable_concepts()
    run(pipe, states * 1.001)


def test_prompts_are_forgotten_oldest_first():
    known = EncodedPrompts(limit=4)
    states = torch.randn(6, 5, 8)
    for k in range(6):
        known.note(torch.full((1, 5), k), states[k : k + 1])
    found = known.find(states.half())
    assert [None if ids is None else int(ids[0]) for ids in found] == [None, None, 2, 3, 4, 5] and len(known) == 12


def test_states_that_were_written_to_are_looked_at_again(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    states, other = adapter.encode(PROMPT)[0].clone(), adapter.encode("a tree")[0]
    run(pipe, states)
    states.copy_(other)
    with tiny.Reads(adapter) as seen:
        run(pipe, states)
    assert all(read is states for (read,) in seen.values())
    states[0, 3] += 1
    with pytest.raises(MountError, match="row 0"):
        run(pipe, states)


def test_steps_after_the_first_look_nothing_up(tiny, adapter, pipe, monkeypatch):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    contexts, made = adapter.contexts["clip_l"], []
    real = contexts._make
    monkeypatch.setattr(contexts, "_make", lambda tensor: made.append(tensor.shape) or real(tensor))
    tiny.picture(pipe, PROMPT, num_inference_steps=4)
    assert made == [(2, 77, 128)] and not contexts._entries  # nothing is kept of tensors that are gone


def test_inference_mode_and_gradients_to_the_embeddings(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=WHOLE))
    states, _ = adapter.encode(PROMPT)
    plain = run(pipe, states)
    with torch.inference_mode():
        inside = pipe.encode_prompt(PROMPT, "cpu", 1, False)[0]
        assert torch.equal(run(pipe, inside), plain) and torch.equal(run(pipe, states), plain)
    leaf = states.clone().requires_grad_()
    noise = torch.randn(1, 4, 8, 8)
    for _ in range(2):
        leaf.grad = None
        pipe.unet(noise, 500, leaf).sample.square().sum().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert torch.equal(run(pipe, states), plain)


# -- switches ------------------------------------------------------------------------------------------------------------------


def test_every_way_of_switching_off_is_the_base_also_for_kept_embeddings(tiny):
    pipe = tiny.build()
    base = tiny.picture(pipe, PROMPT)
    adapter = tiny_engram.attach(pipe)
    try:
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
        embeds, negative = adapter.encode(PROMPT, "")
        kept = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
        ours = tiny.picture(pipe, PROMPT)
        assert not torch.equal(ours, base)
        for off, on in [
            (lambda: adapter.set_strength("zqx bolo", 0.0), lambda: adapter.set_strength("zqx bolo", 1.0)),
            (adapter.disable_concepts, adapter.enable_concepts),
            (lambda: adapter.set_concepts([]), lambda: adapter.set_concepts("zqx bolo")),
        ]:
            off()
            assert torch.equal(tiny.picture(pipe, PROMPT), base) and torch.equal(tiny.picture(pipe, None, **kept), base)
            on()
            assert torch.equal(tiny.picture(pipe, None, **kept), ours)
        adapter.set_strength("zqx bolo", 0.5)
        half = tiny.picture(pipe, None, **kept)
        assert not torch.equal(half, ours) and torch.equal(half, tiny.picture(pipe, PROMPT))
        adapter.unload_concept()
        assert torch.equal(tiny.picture(pipe, None, **kept), base) and not adapter.contexts["clip_l"].hooks
        adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    finally:
        adapter.detach()
    assert torch.equal(tiny.picture(pipe, PROMPT), base)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in pipe.unet.modules())


def test_a_silent_concept_is_as_if_it_were_not_loaded(tiny, adapter, pipe):
    adapter.load_concept(tiny.concept(adapter, "zqx", seed=1, config=SIDES))
    alone = tiny.picture(pipe, PROMPT)
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", seed=2, config=SIDES), strength=0.0)
    assert torch.equal(tiny.picture(pipe, PROMPT), alone)
    adapter.set_strength("zqx bolo", 1.0)
    assert not torch.equal(tiny.picture(pipe, PROMPT), alone)


def test_no_warning_of_kept_embeddings_where_they_hold_nothing(tiny, adapter, pipe, recwarn):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES))
    embeds, negative = adapter.encode(PROMPT, "")
    adapter.set_strength("zqx bolo", 0.5)
    tiny.picture(pipe, None, prompt_embeds=embeds, negative_prompt_embeds=negative)
    assert not [w for w in recwarn if "concepts" in str(w.message)]
    adapter.load_concept(tiny.concept(adapter, "cat-toy"))
    with pytest.warns(UserWarning, match="concepts .'cat-toy'. are active, but no prompt was encoded"):
        tiny.picture(pipe, None, prompt_embeds=embeds, negative_prompt_embeds=negative)


# -- files, reports ------------------------------------------------------------------------------------------------------------


def test_the_file_keeps_every_mount(tiny, adapter, pipe, tmp_path):
    concept = tiny.concept(adapter, "zqx bolo", aliases=["zqx bolos"], config=WHOLE)
    path = concept.save(tmp_path / "c.safetensors")
    loaded = Concept.load(path)
    assert loaded.describe() == concept.describe() and loaded.nbytes == concept.nbytes
    assert list(loaded.roles["clip_l"].mounts) == ["span", *names_of(adapter)]
    assert [rows.rho for rows in loaded.roles["clip_l"].mounts.values()] == [2.5] + [0.8] * 8
    adapter.load_concept(concept)
    memory = tiny.picture(pipe, PROMPT)
    adapter.unload_concept()
    adapter.load_concept(path)
    assert torch.equal(tiny.picture(pipe, PROMPT), memory)


def test_a_file_of_before_there_were_context_mounts(tiny, adapter, pipe, tmp_path):
    concept = tiny.concept(adapter, "zqx bolo")
    described = concept.describe()
    for key in ("mounts", "context_rho"):
        del described["config"][key]
    rows = concept.mount_rows("clip_l")
    tensors = {f"clip_l.span.{what}": getattr(rows, what) for what in ("payload", "scale", "gain", "bias")}
    path = concept_file.write(tmp_path / "old.safetensors", tensors, concept_file.pack_metadata(described, None))
    adapter.load_concept(concept)
    now = tiny.picture(pipe, PROMPT)
    adapter.unload_concept()
    adapter.load_concept(path)
    assert torch.equal(tiny.picture(pipe, PROMPT), now) and Concept.load(path).describe() == concept.describe()


def test_mounts_that_the_pipeline_has_not_are_refused(tiny, adapter):
    with pytest.raises(TinyEngramError, match="mount 'context.4.key' is unknown at clip_l; .*context.3.value"):
        adapter.new_concept("zqx", config=ConceptConfig(mounts=("context.4.key",)))
    place = adapter.new_concept("zqx").roles["clip_l"]
    about = {"widths": {"clip_l": 128}, "fingerprints": {"clip_l": place.fingerprint}, "mounts": {"clip_l": ("span", "context.4.key")}}
    foreign = Concept.new(adapter.compile("zqx"), **about)
    with pytest.raises(TinyEngramError, match="'zqx' has rows at mount 'context.4.key' of clip_l, expected one of: span, context.0.key"):
        adapter.load_concept(foreign)
    assert adapter.get_list_concepts() == [] and not adapter.contexts["clip_l"].hooks


def test_reports_count_rows_and_bytes_of_all_mounts(tiny, adapter):
    role = adapter.register("zqx bolo", config=WHOLE).roles["clip_l"]
    concept = tiny.concept(adapter, "zqx bolo", config=WHOLE)
    assert role.rows == 9 * 3 * 4 and role.nbytes == concept.nbytes and role.mounts == ("span", *names_of(adapter))
    report = str(adapter.register("zqx bolo", config=WHOLE))
    assert "108 rows, 3,780 bytes" in report and "mounts: span, 4 keys, 4 values" in report
    adapter.load_concept(concept)
    adapter.load_concept(tiny.concept(adapter, "cat-toy"))
    found = adapter.explain("a zqx bolo and a cat-toy")
    assert [f.mounts for f in found.fired] == [("span", *names_of(adapter)), ("span",)]
    assert found.to_dict()["prompts"][0]["fired"][0]["mounts"] == ["span", *names_of(adapter)]
    assert "strength 1, at span, 4 keys, 4 values\n" in str(found) and str(found).endswith("('cat-toy'), strength 1")


def test_fired_spans_are_logged_without_a_span_mount(tiny, adapter, caplog):
    adapter.load_concept(tiny.concept(adapter, "zqx bolo", config=SIDES), strength=0.5)
    with caplog.at_level("INFO", logger="tiny_engram"):
        adapter.encode(["a tree", PROMPT])
    assert "concept 'zqx bolo' fires at clip_l: prompt 1 tokens 2..4 (strength 0.5)" in caplog.text


def test_collisions_move_rows_at_every_mount(tiny, adapter, pipe):
    config = ConceptConfig(vocab=499, mounts=("context",))
    crowd = [tiny.concept(adapter, f"zq{k}x", seed=k, config=config) for k in range(12)]
    adapter.load_concept(crowd[-1])
    alone = tiny.picture(pipe, f"a {crowd[-1].trigger}")
    adapter.unload_concept()
    for concept in crowd:
        adapter.load_concept(concept)
    store = adapter.mounts["clip_l"].store
    counters = [store.bank_of(concept.name, mount).counter(concept.name) for concept in crowd for mount in names_of(adapter)]
    assert max(counters) > 0 and torch.equal(tiny.picture(pipe, f"a {crowd[-1].trigger}"), alone)
