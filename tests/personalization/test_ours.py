"""Our method against the product's arithmetic, on the embedded base."""

from dataclasses import replace

import pytest
import torch

import tiny_engram
from benchmarks.personalization.draw import draw
from benchmarks.personalization.methods.method import Rows
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.methods.spans import BASES, CONFIG, hooked
from benchmarks.personalization.teach import teach
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept
from tiny_engram.training.class_word import CARRIERS

ROLE = "clip_l"
TEXTS = ("a 3d {0} on a red background", "flat {0}, blue background", "a {0}")
ALL = "input+layer-2+span+key+value"
LORA_R8 = 132_608 * 2  # bytes of LoRA r8 on this denoiser, float16


@pytest.fixture
def make(base, run):
    """Ours on the disc (and more subjects), its rows and gates filled by a seed."""

    def build(*subjects: str, fill: float = 0.1, kind: type[Ours] = Ours, plain: bool = True, **options) -> Ours:
        made = kind(base, [run("ours", name, plain=plain, **options) for name in subjects or ("disc",)])
        if fill:
            # one generator for each run, so that a run alone has the values it has in a stack
            with torch.no_grad():
                for name, p in made.named_parameters():
                    for i, one in enumerate(made.runs):
                        noise = torch.randn(p.shape[1:], generator=torch.Generator().manual_seed(len(name) * 31 + len(one.subject)))
                        p[i] += fill * noise
        return made

    return build


def prompts(base, runs, texts=TEXTS):
    """Each text once for each run of the stack."""
    words = [(base.subject(one.subject).trigger,) for one in runs for _ in texts]
    owner = torch.arange(len(runs)).repeat_interleave(len(texts))[:, None]
    return base.rows(list(texts) * len(runs), words, owner)


def denoise(base, adapters, rows, timesteps=None):
    """Prediction, and what each cross-attention's projections read: {"context.i.key": [batch, 77, width]}."""
    seen, hooks = {}, []
    for name, module in base.cross_attentions:
        for kind, projection in (("key", module.to_k), ("value", module.to_v)):
            put = lambda _m, args, _k, out, name=f"{name}.{kind}": seen.update({name: args[0]})  # noqa: E731
            hooks.append((projection, put, False))
    latents = torch.randn(1, *base.latent_shape, generator=torch.Generator().manual_seed(3)).expand(len(rows.ids), -1, -1, -1)
    timesteps = torch.full((len(rows.ids),), 400) if timesteps is None else timesteps
    states = rows.states if adapters is None else adapters.states(base, rows)
    with hooked(hooks):
        if adapters is None:
            out = base.denoiser(latents, timesteps, states, return_dict=False)[0]
        else:
            with adapters.attached(base, rows, states):
                out = base.denoiser(latents, timesteps, states, return_dict=False)[0]
    return out, seen


def spans_of(rows, slot=0):
    return Spans.of((row, start, length, 0) for row, at, start, length in rows.spans if at == slot)


def by_product(ours, kind, which, run, states, spans):
    """What `tiny_engram.residual` makes of one run's rows at one mount."""
    rows = fake_quantize(ours.held("rows", kind)[run, which])
    gain, bias = (ours.held(name, kind)[run, which] for name in ("gain", "bias"))
    return apply_concept(states, spans, rows, gain, bias, rho=ours.options.rho_of(kind), basis_seed=CONFIG.basis_seed)


@torch.no_grad()
def test_span_states_are_the_products(base, make):
    ours = make(mounts="span", rho_span=1.7)
    rows = prompts(base, ours.runs)
    assert torch.equal(ours.states(base, rows), by_product(ours, "span", 0, 0, rows.states, spans_of(rows)))


@torch.no_grad()
def test_every_projection_reads_what_the_product_would_give_it(base, make):
    ours = make(mounts="span+key+value", rho_key=0.9, rho_value=3.0)
    rows = prompts(base, ours.runs)
    states = ours.states(base, rows)
    _, seen = denoise(base, ours, rows)
    assert len(seen) == 14
    for i in range(7):
        for kind in ("key", "value"):
            read = seen[f"context.{i}.{kind}"]
            assert torch.equal(read, by_product(ours, kind, i, 0, states, spans_of(rows)))
            assert not torch.equal(read, states)
    assert not any(m._forward_pre_hooks for m in base.denoiser.modules())


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"mounts": "span", "columns": 3},
        {"mounts": "span+key+value", "rho_key": 1.2},
        {"mounts": "input+span+value", "deep_local": True, "bands": 3, "share": "stage"},
    ],
    ids=["span", "context", "all mounts"],
)
def test_the_shipped_pipeline_draws_the_same_bits(base, make, options):
    ours = make(**options)
    rows = prompts(base, ours.runs, TEXTS[:1])
    made = draw(base, ours, rows, [5], steps=2)
    adapter = tiny_engram.attach(base.pipe)
    try:
        adapter.load_concept(ours.concept(base, 0))
        text = TEXTS[0].format(base.subject("disc").trigger)
        shown = base.pipe(
            text, num_inference_steps=2, guidance_scale=4.0, generator=torch.Generator().manual_seed(5), output_type="pt", return_dict=False
        )[0]
    finally:
        adapter.detach()
    assert torch.equal((shown * 255).round().byte().permute(0, 2, 3, 1), torch.from_numpy(made))
    assert not (made == draw(base, None, rows, [5], steps=2)).all()


@torch.no_grad()
def test_the_shipped_pipeline_draws_maps_alike(base, make):
    """Maps are summed in another order there, so the last bits may differ; what the prompt asks for beside it must not."""
    ours = make("disc", "spot", plain=False, fill=0.3)
    rows = prompts(base, ours.runs[1:], TEXTS[:1])
    rows = replace(rows, run=torch.ones_like(rows.run))
    made, plain = (torch.from_numpy(draw(base, one, rows, [5], steps=3).astype(int)) for one in (ours, None))
    adapter = tiny_engram.attach(base.pipe)
    try:
        adapter.load_concept(ours.concept(base, 1))
        text = TEXTS[0].format(base.subject("spot").trigger)
        shown = base.pipe(
            text, num_inference_steps=3, guidance_scale=4.0, generator=torch.Generator().manual_seed(5), output_type="pt", return_dict=False
        )[0]
    finally:
        adapter.detach()
    apart = ((shown * 255).round().long().permute(0, 2, 3, 1) - made).abs()
    assert apart.max() <= 1 < (made - plain).abs().float().mean()
    without = make("disc", "spot", plain=False, fill=0.3)
    without.maps.ranks = {}
    assert (torch.from_numpy(draw(base, without, rows, [5], steps=3).astype(int)) - made).abs().float().mean() > 1


def test_a_concept_holds_the_rows_of_every_mount(base, make):
    ours = make("disc", "spot", mounts="span+key+value", share="stage", rho_key=1.5)
    concept = ours.concept(base, 1)
    held = concept.roles[ROLE].mounts
    assert concept.config.mounts == tuple(held) and concept.base == "emoji-sd" and concept.recipe["options"]["rho_key"] == 1.5
    assert sorted(held) == sorted(["span", *(f"context.{i}.{kind}" for i in range(7) for kind in ("key", "value"))])
    for i, group in enumerate(ours.groups):
        mount = held[f"context.{i}.key"]
        assert torch.equal(mount.rows(), fake_quantize(ours.held("rows", "key")[1, group]))
        assert torch.equal(mount.gain, ours.held("gain", "key")[1, group])
        assert mount.rho == 1.5
    assert make(mounts="key+value").concept(base, 0).nbytes == make(mounts="key+value").payload(0)
    for options in ({"mounts": "layer-1"}, {"deep_local": False, "mounts": "input"}, {"norm": "plain"}, {"quantise": False}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(**options).concept(base, 0)


def test_a_concept_of_ours_by_default(base, run):
    """What the comparison teaches by default is what a concept file can hold, byte for byte, within a 25th of LoRA's."""
    ours = Ours(base, [run("ours", plain=False)])
    concept = ours.concept(base, 0)
    blocks = ("down0", "down1", "mid", "up0", "up1")
    assert set(concept.roles[ROLE].mounts) == {"input", *(f"context.{block}.value.{k}of2" for block in blocks for k in (1, 2))}
    assert set(concept.roles[ROLE].maps) == {f"{site}.{i}" for site in ("attention", "feedforward") for i in range(7)}
    assert concept.nbytes == ours.payload(0) <= LORA_R8 / 25
    values = concept.roles[ROLE].mounts
    assert values["input"].rows().any() and not any(rows.rows().any() for name, rows in values.items() if name != "input")
    theirs = ours.values(0)["map.attention-6-in.payload"].flatten(1)
    assert torch.equal(concept.map_factors(ROLE, "attention.6").into_payload.float(), theirs.float())


@torch.no_grad()
@pytest.mark.parametrize("options", [{"mounts": ALL}, {"bands": 3, "share": "stage"}], ids=["all mounts", "bands"])
def test_nothing_changes_without_a_span(base, make, options):
    ours = make(**options)
    bare = base.rows(["a red ball", "a flat drawing of a fox"], [(), ()], torch.zeros(2, 1, dtype=torch.long))
    assert ours.states(base, bare) is bare.states
    assert torch.equal(denoise(base, ours, bare)[0], denoise(base, None, bare)[0])
    # in one batch with prompts that fire
    mixed = bare.joined(prompts(base, ours.runs))
    states = ours.states(base, mixed)
    assert torch.equal(states[:2], mixed.states[:2])
    moved, plain = denoise(base, ours, mixed)[0], denoise(base, None, mixed)[0]
    assert torch.equal(moved[:2], plain[:2])
    assert all(not torch.equal(a, b) for a, b in zip(moved[2:], plain[2:], strict=True))


@torch.no_grad()
def test_context_rows_change_the_trigger_alone_and_deep_ones_what_follows(base, make):
    shallow, deep = make(), make(mounts="layer-2")
    rows = prompts(base, shallow.runs, TEXTS[:1])
    _, _, start, length = rows.spans[0]
    for read in denoise(base, shallow, rows)[1].values():
        same = (read == rows.states).all(-1)[0]
        assert not same[start : start + length].any()
        assert same[:start].all() and same[start + length :].all()
    moved = (deep.states(base, rows) - rows.states).abs().amax(-1)[0]
    assert moved[:start].max() < 1e-5 < 1e-2 < moved[start:].min()


@torch.no_grad()
def test_deep_rows_may_stay_where_the_trigger_stands(base, make):
    rows = prompts(base, make().runs, TEXTS[:1])
    _, _, start, length = rows.spans[0]
    deep, local = (make(mounts="input", deep_local=keep).states(base, rows) for keep in (False, True))
    assert torch.equal(local[:, start : start + length], deep[:, start : start + length])
    same = (local == rows.states).all(-1)[0]
    assert same[:start].all() and same[start + length :].all() and not same[start : start + length].any()


@pytest.mark.parametrize(
    "options",
    [{"mounts": ALL}, {"bands": 2, "share": "width", "gate_shared": True, "columns": 3}, {"norm": "plain", "quantise": False}],
    ids=["all mounts", "bands and sharing", "plain"],
)
def test_gradients_reach_every_value(base, make, options):
    ours = make("disc", "spot", **options)
    rows = prompts(base, ours.runs, TEXTS[:2])
    denoise(base, ours, rows, torch.tensor([100, 900, 100, 900]))[0].square().sum().backward()
    for name, p in ours.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        lost = (p.grad.flatten(1) == 0).float().mean()
        assert lost < 0.01, (name, lost)


def test_rows_learn_from_zero(base, make):
    ours = make(fill=0.0, mounts=ALL)
    denoise(base, ours, prompts(base, ours.runs))[0].square().sum().backward()
    assert all((ours.held("rows", kind).grad != 0).all() for kind in ours.options.kinds)


@pytest.mark.parametrize("columns", [4, 3])
def test_training_is_the_products_arithmetic_up_to_rounding(base, make, columns):
    """States and gradients by the shorter way that training takes."""
    ours = make("disc", mounts="span", columns=columns, fill=0.03)
    rows = prompts(base, ours.runs)
    weights = torch.randn(rows.states.shape, generator=torch.Generator().manual_seed(1))
    own, plain = (Rows(rows.ids, rows.states.clone().requires_grad_(), rows.run, rows.spans) for _ in range(2))
    full = torch.nn.functional.pad(ours.held("rows", "span")[0, 0], (0, 0, 0, 4 - columns))
    gates = [ours.held(name, "span")[0, 0] for name in ("gain", "bias")]
    by_the_product = apply_concept(plain.states, spans_of(rows), fake_quantize(full), *gates, rho=ours.options.rho)
    moved = ours.states(base, own)
    torch.testing.assert_close(moved, by_the_product, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((moved * weights).sum(), [own.states, *ours.parameters()])
    wanted = torch.autograd.grad((by_the_product * weights).sum(), [plain.states, *ours.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@torch.no_grad()
def test_a_run_in_a_stack_is_the_run_alone(base, make):
    names = ("spot", "disc", "dot")
    stack = make(*names, mounts=ALL)
    rows = prompts(base, stack.runs)
    states, seen = stack.states(base, rows), denoise(base, stack, rows)[1]
    for i, name in enumerate(names):
        one = make(name, mounts=ALL)
        own = prompts(base, one.runs)
        # the encoder's products differ by their batch
        torch.testing.assert_close(states[3 * i : 3 * i + 3], one.states(base, own), rtol=1e-4, atol=1e-4)
        for mount, read in denoise(base, one, own)[1].items():
            torch.testing.assert_close(seen[mount][3 * i : 3 * i + 3], read, rtol=1e-4, atol=1e-4)
        assert one.payload(0) == stack.payload(i)


@torch.no_grad()
def test_two_subjects_in_one_prompt_each_read_their_own_rows(base, make):
    ours = make("disc", "spot", mounts="span+value")
    words = tuple(base.subject(name).trigger for name in ("spot", "disc"))
    rows = base.rows(["a {0} left of a {1}, red background"], [words], torch.tensor([[1, 0]]))
    expected = rows.states
    for slot, one in enumerate((1, 0)):
        expected = by_product(ours, "span", 0, one, expected, spans_of(rows, slot))
    states = ours.states(base, rows)
    assert torch.equal(states, expected)
    for i in range(7):
        read = expected
        for slot, one in enumerate((1, 0)):
            read = by_product(ours, "value", i, one, read, spans_of(rows, slot))
        assert torch.equal(denoise(base, ours, rows)[1][f"context.{i}.value"], read)


@torch.no_grad()
def test_each_timestep_reads_its_band(base, make):
    ours = make(bands=3, share="all", fill=0.0)
    ours.held("rows", "value")[:, 1] = 0.1  # the middle band alone
    rows = prompts(base, ours.runs)
    moved, seen = denoise(base, ours, rows, torch.tensor([10, 500, 990]))
    plain = denoise(base, None, rows, torch.tensor([10, 500, 990]))[0]
    assert [torch.equal(a, b) for a, b in zip(moved, plain, strict=True)] == [True, False, True]
    assert torch.equal(seen["context.0.value"], seen["context.6.value"])
    # while drawing, all rows are at one timestep
    latents = torch.zeros(3, *base.latent_shape)
    with ours.attached(base, rows, rows.states):
        ends, middle = (base.denoiser(latents, torch.tensor(t), encoder_hidden_states=rows.states)[0] for t in (990, 500))
    assert torch.equal(ends, base.denoiser(latents, 990, rows.states)[0])
    assert not torch.equal(middle, base.denoiser(latents, 500, rows.states)[0])


@torch.no_grad()
@pytest.mark.parametrize(("mount", "rho", "columns", "share"), [("span", 2.5, 4, 0.25), ("value", 2.5, 4, 0.25), ("layer-2", 4.0, 4, 0.25),
                                                               ("input", 4.0, 4, 0.25), ("span", 2.5, 3, 0.65)])  # fmt: skip
def test_the_class_word_is_where_rows_start(base, make, mount, rho, columns, share):
    """Of the way from the trigger's states to the class word's, at the trigger's last token, at most `share` is left on average.

    Not nothing: one set of rows serves all sentences, and three columns of four see three quarters of the width.
    """
    ours = make(fill=0.0, mounts=mount, init="class", rho=rho, columns=columns)
    rows = prompts(base, ours.runs, CARRIERS)
    there = base.rows(CARRIERS, [("ball",)] * len(CARRIERS), torch.zeros(len(CARRIERS), 1, dtype=torch.long))
    states = denoise(base, ours, rows)[1]["context.0.value"]
    row = torch.arange(len(CARRIERS))
    last, target = (torch.tensor([start + length - 1 for _, _, start, length in each.spans]) for each in (rows, there))
    left = (there.states[row, target] - states[row, last]).norm(dim=1) / (there.states[row, target] - rows.states[row, last]).norm(dim=1)
    assert left.mean() < share
    if mount == "span":
        values = ours.held("rows", mount)[0, 0].flatten(1)
        assert (values.norm(dim=1) <= 1 + 1e-5).all() and (values.norm(dim=1) > 0.1).all()


@torch.no_grad()
def test_the_class_word_stays_within_the_bound(base, make):
    ours = make(fill=0.0, mounts="span", init="class", rho=0.2)
    rows = prompts(base, ours.runs, CARRIERS)
    change = ours.states(base, rows) - rows.states
    for row, _, start, length in rows.spans:
        span = slice(start, start + length)
        assert (change[row, span].norm(dim=1) <= 0.2 * rows.states[row, span].norm(dim=1).mean()).all()
        assert (change[row, span].norm(dim=1) > 0.15 * rows.states[row, span].norm(dim=1).mean()).all()


def test_locked_keys_are_the_class_words_and_stay(base, make, taught):
    ours = make(fill=0.0, key_lock=True)
    keys = ours.held("rows", "key").clone()
    assert torch.equal(keys, make(fill=0.0, init="class").held("rows", "key"))
    assert (ours.held("rows", "value") == 0).all()
    teach(base, ours, [taught["disc"]], steps=1, batch_size=2)
    assert torch.equal(ours.held("rows", "key"), keys)
    assert ours.held("rows", "value").abs().sum() > 0
    assert "rows.key" not in dict(ours.named_parameters()) and "key.payload" in ours.values(0)


@torch.no_grad()
def test_without_the_bound_length_counts(base, make):
    bounded, plain = (make(mounts="span", fill=0.0, norm=norm, gate="removed") for norm in ("bounded", "plain"))
    for ours in (bounded, plain):
        ours.held("rows", "span")[:] = torch.linspace(-1, 1, 128).view(4, 32)
    value = fixed_basis(fake_quantize(torch.linspace(-1, 1, 128)), width=128, seed=BASES[1]).norm()
    rows = prompts(base, plain.runs, TEXTS[:1])
    short, long = (ours.states(base, rows) - rows.states for ours in (bounded, plain))
    torch.testing.assert_close(long, short * value, rtol=1e-4, atol=1e-4)


def test_what_is_saved_is_what_is_drawn(base, make, taught):
    """Training leaves the averaged rows, and `values` are those rows as the quantiser has them."""
    ours = make("disc", "spot", fill=0.0, mounts="span+key+value", gate_rate=0.1)
    seen = {}
    teach(
        base, ours, [taught["disc"], taught["spot"]], steps=3, batch_size=2, at=(3,),
        on_checkpoint=lambda step: seen.update({name: t.clone() for name, t in ours.values(1).items()}),
    )  # fmt: skip
    for name, tensor in ours.values(1).items():
        assert torch.equal(tensor.view(torch.uint8), seen[name].view(torch.uint8))
    assert seen["key.payload"].dtype == torch.float8_e4m3fn and seen["key.gain"].dtype == torch.float32


@torch.no_grad()
def test_runs_of_one_stack_may_have_bounds_of_their_own(base, run):
    stack = Ours(base, [run("ours", "disc", mounts="span", rho=rho) for rho in (1.0, 3.0)])
    stack.held("rows", "span")[:] = 0.05
    rows = prompts(base, stack.runs, TEXTS[:1])
    small, large = stack.states(base, rows) - rows.states
    torch.testing.assert_close(3 * small, large, rtol=1e-4, atol=1e-5)
