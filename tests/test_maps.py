"""The arithmetic of maps: the written formula, the comparison's own, what keeps its bits, and gradients."""

import pytest
import torch
from diffusers.models.attention_processor import Attention

from benchmarks.personalization.methods import maps as bench
from tiny_engram.maps import GivenMaps, attention_mass, map_attention, map_feedforward

HEADS, WIDTH, CHANNELS, PLACES, TIME = 4, 24, 32, 9, 7


@pytest.fixture
def parts():
    """An attention, text states and picture states of three rows, where the trigger stands, and factors of rank 2 for both sites."""
    torch.manual_seed(0)
    attention = Attention(query_dim=CHANNELS, cross_attention_dim=WIDTH, heads=HEADS, dim_head=CHANNELS // HEADS).eval()
    fired = torch.zeros(3, TIME)
    fired[0, 2:4] = fired[2, 1] = fired[2, 5] = 1.0
    return attention, torch.randn(3, PLACES, CHANNELS), torch.randn(3, TIME, WIDTH), fired, torch.randn(2, 2, 2, CHANNELS)


def test_mass_and_maps_are_the_written_formula(parts):
    """mass(x) * sum_j <into_j, h(x)> out_j in float64, each head by its own mass, or all by their mean."""
    attention, states, text, fired, ((into, out), _) = parts
    with torch.no_grad():
        query, key = attention.to_q(states), attention.to_k(text)
        mass = attention_mass(query, key, fired, heads=HEADS, scale=attention.scale)
        added, fed = map_attention(states, mass, into, out), map_feedforward(states, mass, into, out)
    assert mass.shape == (3, HEADS, PLACES) and mass[1].eq(0).all() and mass[0].min() > 0 and mass.max() < 1
    for row in (0, 2):
        for x in range(PLACES):
            read = into.double() @ states[row, x].double()
            total = []
            for head in range(HEADS):
                own = slice(8 * head, 8 * head + 8)
                share = torch.softmax(key[row, :, own].double() @ query[row, x, own].double() * attention.scale, 0)
                total.append((share * fired[row].double()).sum())
                torch.testing.assert_close(mass[row, head, x].double(), total[-1], rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(added[row, x, own].double(), total[-1] * (read @ out[:, own].double()), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(fed[row, x].double(), torch.stack(total).mean() * (read @ out.double()), rtol=1e-4, atol=1e-5)


def test_the_comparison_of_methods_computes_the_same(parts):
    attention, states, text, fired, (here, behind) = parts
    # One slot: rows of the batch hold the same run's factors.
    factors = {site: tuple(f.expand(3, -1, -1) for f in pair) for site, pair in (("attention", here), ("feedforward", behind))}
    layer = bench._Layer(attention, fired[:, None, :, None].repeat(1, 1, 1, CHANNELS // HEADS), factors, 1, None)
    x, output = torch.randn(3, PLACES, CHANNELS), torch.randn(3, PLACES, CHANNELS)
    given = GivenMaps(fired, {})
    with torch.no_grad():
        layer._queried(attention.to_q, (states,), {}, attention.to_q(states))
        layer._keyed(attention.to_k, (text,), {}, attention.to_k(text))
        ((theirs, *_), _) = layer._attended(attention.to_out[0], (x,), {}) or ((x,), {})
        their_output = layer._fed(attention, (states,), {}, output)
        rows = given.rows
        mass = attention_mass(attention.to_q(states)[rows], attention.to_k(text)[rows], fired[rows], heads=HEADS, scale=attention.scale)
        ours = given.add_at_rows(x, map_attention(states[rows], mass, *here))
        our_output = given.add_at_rows(output, map_feedforward(states[rows], mass, *behind))
    assert rows.tolist() == [0, 2]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_output, their_output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [[0, 2], [1, 2], [3], [0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_rows_keep_their_bits(dtype, rows):
    x = torch.randn(4, 5, 6).to(dtype)
    x[:, 2], x[:, 0, 0] = -0.0, float("nan")
    kept, fired = x.clone(), torch.zeros(4, TIME)
    fired[rows, 3] = 1.0
    given = GivenMaps(fired, {})
    out = given.add_at_rows(x, torch.ones(len(rows), 5, 6))
    others = [row for row in range(4) if row not in rows]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert given.rows.tolist() == rows and torch.equal(given.at_rows(x).view(bits), x[rows].view(bits))
    assert out.dtype == dtype and torch.equal(out[others].view(bits), x[others].view(bits)) and torch.equal(x.view(bits), kept.view(bits))
    torch.testing.assert_close(out[rows], (x[rows] + 1).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_half_types_and_autocast_compute_in_float32(parts):
    attention, states, text, fired, ((into, out), _) = parts
    with torch.no_grad():
        query, key, half = attention.to_q(states).half(), attention.to_k(text).half(), states.half()
        plain = attention_mass(query, key, fired, heads=HEADS, scale=attention.scale)
        assert torch.equal(plain, attention_mass(query.float(), key.float(), fired, heads=HEADS, scale=attention.scale))
        added = map_attention(half, plain, into, out)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(plain, attention_mass(query, key, fired, heads=HEADS, scale=attention.scale))
            assert torch.equal(added, map_attention(half, plain, into, out)) and added.dtype == torch.float32
            assert torch.equal(map_feedforward(half, plain, into, out), map_feedforward(half.float(), plain, into, out))


def test_gradients_reach_all_that_takes_part(parts):
    attention, states, text, fired, ((into, out), _) = parts
    leaves = [x.double().requires_grad_() for x in (attention.to_q(states).detach(), attention.to_k(text).detach(), states, into, out)]

    def both(query, key, states, into, out):
        share = attention_mass(query, key, fired, heads=HEADS, scale=attention.scale)
        return map_attention(states, share, into, out), map_feedforward(states, share, into, out)

    for leaf, gradient in zip(
        leaves, torch.autograd.grad(sum(x.square().sum() for x in both(*(x.float() for x in leaves))), leaves), strict=True
    ):
        assert gradient.shape == leaf.shape and bool(gradient.isfinite().all()) and bool(gradient.ne(0).any())


def test_nothing_fires_nowhere():
    given = GivenMaps(torch.zeros(2, TIME), {})
    assert given.rows.tolist() == [] and given.at_rows(given.fired).shape == (0, TIME)
