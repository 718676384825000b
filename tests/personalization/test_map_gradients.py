"""Maps in few launches against their formula: values, gradients, types, and the product's maps."""

import pytest
import torch
from torch.autograd import gradcheck

from benchmarks.personalization.methods.map_gradients import add_attended, add_fed, wide_mass
from tiny_engram.maps import attention_mass, map_attention, map_feedforward

ROWS, HEADS, D, PLACES, TIME, RANK, SCALE = 2, 3, 4, 5, 6, 2, 0.6
CHANNELS = HEADS * D


def tensors(dtype=torch.float64, rank=RANK):
    """x, query, key, states, into and out with gradients, and where the trigger stands, `[rows, time]`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, PLACES, CHANNELS)] * 2 + [(ROWS, TIME, CHANNELS), (ROWS, PLACES, 7), (ROWS, rank, 7), (ROWS, rank, CHANNELS)]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    fired = torch.zeros(ROWS, TIME, dtype=dtype)
    fired[0, 2:4] = fired[1, 1] = 1
    return leaves, fired


def widened(fired):
    return fired[..., None].expand(-1, -1, D).contiguous()


def formula(query, key, fired, x, states, into, out, heads_out):
    """Both sites in plain operations; `heads_out` says whether each head adds by its own mass."""
    q, k, o = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, out))
    mass = ((q @ k.transpose(2, 3) * SCALE).softmax(-1) * fired[:, None, None]).sum(-1)
    read = states @ into.transpose(1, 2)
    if not heads_out:
        return x + (mass.mean(1)[..., None] * read) @ out
    return x + ((mass[..., None] * read[:, None]) @ o).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("site", ["attention", "feedforward"])
def test_values_and_gradients_are_the_formulas(site, rank):
    (x, query, key, states, into, out), fired = tensors(rank=rank)
    leaves = (x, query, key, states, into, out)
    mass = wide_mass(query, key, widened(fired), heads=HEADS, scale=SCALE)
    assert mass.shape == (ROWS, PLACES, HEADS, D) and mass.dtype == torch.float64
    fast, by_all = add_attended(x, mass, states, into, out)
    torch.testing.assert_close(by_all, mass.mean((2, 3))[..., None])
    fast = fast if site == "attention" else add_fed(x, by_all, states, into, out)
    plain = formula(query, key, fired, x, states, into, out, site == "attention")
    upstream = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=plain.dtype)
    torch.testing.assert_close(fast, plain)
    for one, other in zip(torch.autograd.grad(fast, leaves, upstream), torch.autograd.grad(plain, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_the_slopes():
    (x, query, key, states, into, out), fired = tensors()

    def both(x, query, key, states, into, out):
        made, by_all = add_attended(x, wide_mass(query, key, widened(fired), heads=HEADS, scale=SCALE), states, into, out)
        return made, add_fed(x, by_all, states, into, out)

    assert gradcheck(both, (x, query, key, states, into, out))


def test_what_needs_no_gradient_gets_none():
    (x, query, key, states, into, out), fired = tensors(torch.float32)
    mass = wide_mass(query.detach(), key.detach(), widened(fired), heads=HEADS, scale=SCALE)
    made, by_all = add_attended(x.detach(), mass, states.detach(), into, out)
    (made.sum() + add_fed(x.detach(), by_all.detach(), states, into, out).sum()).backward()
    assert not mass.requires_grad and into.grad is not None and out.grad is not None and x.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_and_autocast_compute_in_float32(dtype):
    (x, query, key, states, into, out), fired = tensors(torch.float32)
    halves = [part.detach().to(dtype).requires_grad_() for part in (x, query, key, states)]

    def both(x, query, key, states):
        mass = wide_mass(query, key, widened(fired), heads=HEADS, scale=SCALE)
        assert mass.dtype == torch.float32
        made, by_all = add_attended(x, mass, states, into, out)
        return made, add_fed(x, by_all, states, into, out)

    with torch.autocast("cpu", torch.bfloat16):
        made = both(*halves)
        gradients = torch.autograd.grad(sum(part.float().square().sum() for part in made), (*halves, into))
    exact = both(*(part.float() for part in halves))
    assert all(
        part.dtype == dtype and torch.allclose(part.float(), one, rtol=1e-2, atol=1e-2) for part, one in zip(made, exact, strict=True)
    )
    assert [part.dtype for part in gradients] == [dtype] * 4 + [torch.float32]


@torch.no_grad()
def test_the_products_maps_are_the_same():
    (x, query, key, states, into, out), fired = tensors(torch.float32)
    mass = attention_mass(query, key, fired, heads=HEADS, scale=SCALE)
    wide = wide_mass(query, key, widened(fired), heads=HEADS, scale=SCALE)
    torch.testing.assert_close(wide, mass.transpose(1, 2)[..., None].expand_as(wide), rtol=1e-6, atol=1e-6)
    factors = (into[:1].expand_as(into), out[:1].expand_as(out))
    made, by_all = add_attended(x, wide, states, *factors)
    fast = made, add_fed(x, by_all, states, *factors)
    plain = (formula(states, mass, into[0], out[0]) for formula in (map_attention, map_feedforward))
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, x + other, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused():
    (x, _, _, states, into, out), _ = tensors()
    mass = torch.rand(ROWS, PLACES, HEADS, D, dtype=torch.float64)
    made = add_attended(x, mass, states, into, out)[0].square().sum()
    (gradient,) = torch.autograd.grad(made, into, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
