"""Maps of ours against their formula, on the embedded base."""

import pytest
import torch

from benchmarks.personalization.methods.maps import ranks_of
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.methods.spans import hooked
from tiny_engram.config import BLOCK
from tiny_engram.quantization import fake_quantize

MAPS = "attention:2+feedforward:1"
LORA_R8 = 132_608 * 2  # bytes of LoRA r8 on this denoiser, float16


@pytest.fixture
def make(base, run):
    """Ours with maps on these subjects; `fill` moves them away from where they start, each run by its subject."""

    def build(*subjects: str, fill: float = 0.3, **options) -> Ours:
        made = Ours(base, [run("ours", name, **{"mounts": "value", "maps": MAPS} | options) for name in subjects or ("disc",)])
        with torch.no_grad():
            for name, p in made.maps.factors.items():
                for i, one in enumerate(made.runs):
                    p[i] += fill * torch.randn(p.shape[1:], generator=torch.Generator().manual_seed(len(name) * 31 + len(one.subject)))
        return made

    return build


def predict(base, adapters, rows, watched=()):
    """The denoiser's prediction, and (arguments, output) of each watched module."""
    seen = {}
    hooks = [(m, lambda module, args, _kwargs, out: seen.update({module: (args[0], out)}), False) for m in watched]
    latents = torch.randn(1, *base.latent_shape, generator=torch.Generator().manual_seed(3)).expand(len(rows.ids), -1, -1, -1)
    # the watching hooks come second: they see what the maps have made of it
    with adapters.attached(base, rows, rows.states), hooked(hooks):
        return base.denoiser(latents, torch.full((len(rows.ids),), 400), rows.states, return_dict=False)[0], seen


def triggers(base, *names):
    return tuple(base.subject(name).trigger for name in names)


def test_ranks_are_read():
    assert ranks_of("none") == {} and ranks_of(MAPS) == {"attention": 2, "feedforward": 1}
    for wrong in ("", "attention", "attention:0", "attention:1+attention:2", "query:1", "attention:1,feedforward:1"):
        with pytest.raises(ValueError, match=r"maps .*expected none, or attention:RANK"):
            ranks_of(wrong)


@torch.no_grad()
def test_a_prompt_without_the_trigger_keeps_its_bits(base, make):
    ours = make("disc")
    plain, moved = (base.rows([text], [triggers(base, "disc")], torch.tensor([[0]])) for text in ("a 3d fox", "a 3d {0}"))
    both = plain.joined(moved)
    without, _ = predict(base, make("disc", fill=0.0), both)
    with_maps, _ = predict(base, ours, both)
    assert torch.equal(with_maps[0], without[0]) and not torch.equal(with_maps[1], without[1])
    ours.strength = 0.0
    assert torch.equal(predict(base, ours, both)[0], without)


@torch.no_grad()
def test_the_formula(base, make):
    """Two subjects in one prompt, each with its own map where the picture looks at it."""
    ours = make("disc", "spot")
    rows = base.rows(["a 3d {0} next to a {1}"], [triggers(base, "disc", "spot")], torch.tensor([[0, 1]]))
    modules = dict(base.denoiser.named_modules())
    names = {module: name for name, module in modules.items()}
    for i, (_, attention) in enumerate(base.cross_attentions):
        feedforward = modules[names[attention].removesuffix("attn2") + "ff"]
        watched = (attention.to_q, attention.to_k, attention.to_out[0], feedforward)
        _, seen = predict(base, ours, rows, watched)
        (h, query), (_, key), (attended, _), (fed_in, fed_out) = (seen[module] for module in watched)
        value = attention.to_v(rows.states)
        size = query.shape[-1] // attention.heads
        expected, mass = [], []
        for head in range(attention.heads):
            part = slice(head * size, (head + 1) * size)
            share = (query[0, :, part] @ key[0, :, part].T * size**-0.5).softmax(-1)
            out = share @ value[0, :, part]
            for slot, (_, _, start, length) in enumerate(rows.spans):
                w, u = (ours.maps.factors[f"attention-{i}-{end}"][slot] for end in ("in", "out"))
                w, u = (fake_quantize(x.unflatten(-1, (-1, BLOCK))).flatten(-2) for x in (w, u))
                here = share[:, start : start + length].sum(-1)
                mass.append(here)
                out = out + here[:, None] * ((h[0] @ w.T) @ u[:, part])
            expected.append(out)
        torch.testing.assert_close(attended[0], torch.cat(expected, -1), rtol=2e-4, atol=2e-4)
        beside = feedforward(fed_in)[0]
        for slot in range(2):
            w, u = (ours.maps.factors[f"feedforward-{i}-{end}"][slot] for end in ("in", "out"))
            w, u = (fake_quantize(x.unflatten(-1, (-1, BLOCK))).flatten(-2) for x in (w, u))
            beside = beside + torch.stack(mass[slot::2]).mean(0)[:, None] * ((fed_in[0] @ w.T) @ u)
        torch.testing.assert_close(fed_out[0], beside, rtol=2e-4, atol=2e-4)


def test_gradients_reach_every_factor(base, make):
    ours = make("disc")
    rows = base.rows(["a 3d {0} on a red background"], [triggers(base, "disc")], torch.tensor([[0]]))
    predict(base, ours, rows)[0].square().sum().backward()
    gradients = ours.maps.values_of.grad
    assert gradients is not None and all(part.abs().max() > 0 for part in ours.maps.parts(gradients).values())


@torch.no_grad()
def test_what_starts_at_zero_adds_nothing(base, make):
    rows = base.rows(["a 3d {0}"], [triggers(base, "disc")], torch.tensor([[0]]))
    begun, none = (predict(base, make("disc", fill=0.0, maps=maps), rows)[0] for maps in (MAPS, "none"))
    assert torch.equal(begun, none)


def test_the_payload(make):
    ours = make("disc", mounts="input+value", bands=2, share="stage")
    held = ours.values(0)
    assert sum(x.numel() * x.element_size() for x in held.values()) <= LORA_R8 / 25
    assert held["map.attention-0-in.payload"].dtype == torch.float8_e4m3fn and "map.feedforward-6-out.scale" in held


def test_an_anchor_leaves_the_denoisers_rows_at_zero(make):
    ours = make("disc", mounts="input+value", init="anchor", maps="none")
    assert ours.rows["input"].abs().max() > 0 and not ours.rows["value"].any() and not ours.bias["value"].any()


def test_a_rank_that_does_not_fit_says_so(make):
    with pytest.raises(ValueError, match="maps of rank 97 at 96 channels; expected 96 at most"):
        make("disc", maps="attention:97")
