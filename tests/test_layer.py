import pytest
import torch
from torch import nn
from torch.nn import functional

from tiny_engram.config import HashConfig, LayerConfig
from tiny_engram.layer import EngramLayer
from tiny_engram.quantization import quantize
from tiny_engram.table import EngramTable

HIDDEN, COPIES = 24, 4


def make(form, seed=0):
    n = 4 if form == "v41" else 3
    hashing = HashConfig(max_ngram=n, heads=2, vocab=50, pad_id=2, compressed_vocab=40, layer_ids=(1, 3))
    config = LayerConfig(hash=hashing, layer_id=3, hidden=HIDDEN, copies=COPIES, head_dim=32, form=form)
    torch.manual_seed(seed)
    layer = EngramLayer(config, EngramTable.virtual(32))
    layer.table = EngramTable.dense(*quantize(torch.randn(layer.hasher.rows_total, 32)))
    return layer


def batch(batch_size=2, length=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch_size, length, COPIES, HIDDEN, generator=generator).to(dtype)
    return x, torch.randint(0, 40, (batch_size, length), generator=generator)


def rows_of(layer, canonical, **kwargs):
    return layer.table.lookup(layer.hasher.rows(canonical, **kwargs)).flatten(-2)


def test_v41_is_the_written_rule():
    layer = make("v41")
    x, canonical = batch()
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "projections.wkv.weight": ((COPIES + 1) * HIDDEN, 6 * 32),
        "q_weight": (COPIES, HIDDEN),
        "k_weight": (COPIES, HIDDEN),
    }
    nn.init.normal_(layer.q_weight)
    nn.init.normal_(layer.k_weight)
    x64 = x.double()
    key_value = rows_of(layer, canonical).double() @ layer.projections.wkv.weight.double().T
    key, value = key_value[..., : COPIES * HIDDEN].unflatten(-1, (COPIES, HIDDEN)), key_value[..., COPIES * HIDDEN :]
    dot = (x64 * (layer.q_weight * layer.k_weight).double() * key).sum(-1)
    dot = dot * torch.rsqrt(x64.square().mean(-1) + 1e-20) * torch.rsqrt(key.square().mean(-1) + 1e-20) / HIDDEN**0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    torch.testing.assert_close(layer(x, canonical).double(), x64 + gate.unsqueeze(-1) * value.unsqueeze(-2), rtol=1e-5, atol=1e-5)


def test_paper_form_is_the_written_rule():
    layer = make("paper")
    x, canonical = batch()
    for parameter in (layer.q_weight, layer.k_weight, layer.conv_weight, layer.conv_norm_weight):
        nn.init.normal_(parameter)
    rows = rows_of(layer, canonical)
    value = layer.projections.value_proj(rows)
    gated = []
    for copy in range(COPIES):
        key = functional.rms_norm(layer.projections.key_projs[copy](rows), (HIDDEN,), layer.k_weight[copy])
        query = functional.rms_norm(x[:, :, copy], (HIDDEN,), layer.q_weight[copy])
        dot = (key * query).sum(-1) / HIDDEN**0.5
        gated.append(torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * dot.sign()).unsqueeze(-1) * value)
    v = torch.stack(gated, dim=2)
    normed = functional.rms_norm(v, (HIDDEN,)) * layer.conv_norm_weight
    channels = functional.pad(normed.flatten(2).transpose(1, 2), (3 * 3, 0))
    mixed = functional.conv1d(channels, layer.conv_weight.flatten(0, 1).unsqueeze(1), dilation=3, groups=COPIES * HIDDEN)
    expected = x + v + functional.silu(mixed).transpose(1, 2).reshape(v.shape)
    torch.testing.assert_close(layer(x, canonical), expected, rtol=1e-5, atol=1e-5)


def test_paper_form_has_biases_and_starts_without_its_convolution():
    layer = make("paper")
    assert layer.projections.value_proj.bias is not None and len(layer.projections.key_projs) == COPIES
    x, canonical = batch()
    out = layer(x, canonical)
    alone = layer(x[:, 3:4], canonical[:, 3:4], history=canonical[:, 1:3], history_blocked=torch.zeros(2, 2, dtype=torch.bool))
    torch.testing.assert_close(out[:, 3:4], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["v41", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_rows_are_bit_identical(form, dtype):
    layer = make(form)
    if form == "paper":
        nn.init.normal_(layer.conv_weight)
    layer = layer.to(dtype)
    x, canonical = batch(dtype=dtype)
    blocked = torch.tensor([[0, 0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0]]).bool()
    out = layer(x, canonical, blocked=blocked)
    assert out.dtype == dtype
    assert torch.equal(out[blocked], x[blocked])
    assert not torch.equal(out[~blocked], x[~blocked])


@pytest.mark.parametrize("form", ["v41", "paper"])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_and_empty_blocks(form, length):
    layer = make(form)
    x, canonical = batch(length=7)
    torch.testing.assert_close(layer(x[:, :length], canonical[:, :length]), layer(x, canonical)[:, :length], rtol=1e-6, atol=1e-6)


def test_left_padding_does_not_move_the_text():
    layer = make("v41")
    x, canonical = batch()
    padded = torch.cat((torch.full((2, 3), 2), canonical), dim=1)
    blocked = torch.cat((torch.ones(2, 3), torch.zeros(2, 7)), dim=1).bool()
    out = layer(torch.cat((x[:, :3], x), dim=1), padded, blocked=blocked)
    torch.testing.assert_close(out[:, 3:], layer(x, canonical), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["v41", "paper"])
def test_every_link_is_live(form):
    layer = make(form)
    x, canonical = batch()
    before = layer(x, canonical)
    multipliers, table = layer.hasher, layer.table
    layer.hasher = type(multipliers)(layer.config.hash, 1)
    assert not torch.equal(layer(x, canonical), before)
    layer.hasher = multipliers
    assert isinstance(table, EngramTable)
    layer.table = EngramTable.dense(table.storage.payload, torch.full_like(table.storage.scale, 100))
    assert not torch.equal(layer(x, canonical), before)
    layer.table = table
    assert torch.equal(layer(x, canonical), before)


@pytest.mark.parametrize("form", ["v41", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_come_in_the_layers_type_with_the_bits_of_a_cast(form, dtype):
    layer = make(form).to(dtype)
    x, canonical = batch(dtype=dtype)
    asked, lookup = [], layer.table.lookup

    class Watched:
        def lookup(self, row_ids, *, dtype=torch.float32):
            asked.append(dtype)
            return lookup(row_ids, dtype=dtype)

    expected = layer(x, canonical, rows=rows_of(layer, canonical).to(dtype))
    layer.table = Watched()
    assert torch.equal(layer(x, canonical), expected)
    assert asked == [dtype if dtype != torch.float64 else torch.float32]


@pytest.mark.parametrize("form", ["v41", "paper"])
def test_rows_read_ahead_give_the_same_bits_and_the_table_is_not_asked(form):
    layer = make(form)
    x, canonical = batch()
    context = dict(
        blocked=torch.rand(2, 7, generator=torch.Generator().manual_seed(2)) < 0.3,
        history=torch.randint(0, 40, (2, layer.config.hash.max_ngram - 1), generator=torch.Generator().manual_seed(3)),
        history_blocked=torch.zeros(2, layer.config.hash.max_ngram - 1, dtype=torch.bool),
    )
    expected = layer(x, canonical, **context)
    row_ids = layer.row_ids(canonical, **context)
    assert row_ids.shape == (2, 7, layer.config.hash.columns) and not torch.equal(row_ids, layer.row_ids(canonical))
    rows = layer.table.lookup(row_ids).flatten(-2)
    layer.table = EngramTable.virtual(32)  # has no row, and says so when asked
    assert torch.equal(layer(x, canonical, rows=rows, **context), expected)
    assert not torch.equal(layer(x, canonical, rows=rows.flip(0), **context), expected)
    with pytest.raises(ValueError, match="rows .*expected"):
        layer(x, canonical, rows=rows[:, :5], **context)


def test_a_table_or_ids_that_do_not_fit_are_named():
    layer = make("v41")
    x, canonical = batch()
    with pytest.raises(ValueError, match=r"rows \[2, 5, 192\]: expected \[B, T, row_width\] = \[2, 7, 192\], of x \[2, 7, 4, 24\]"):
        layer(x, canonical[:, :5])
    layer.table = EngramTable.dense(*quantize(torch.randn(layer.hasher.rows_total, 64)))
    with pytest.raises(ValueError, match=r"rows \[2, 7, 384\]: expected .* = \[2, 7, 192\], .* a table with head_dim 32"):
        layer(x, canonical)


def test_the_table_is_not_in_the_state():
    assert not [name for name in make("v41").state_dict() if "table" in name]


@pytest.mark.parametrize("form", ["v41", "paper"])
def test_gradients_reach_every_parameter(form):
    layer = make(form)
    x, canonical = batch()
    layer(x.requires_grad_(), canonical).square().sum().backward()
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        # Behind a convolution that is still zero its norm has no gradient yet.
        assert parameter.grad is not None and (name == "conv_norm_weight" or parameter.grad.abs().sum() > 0), name
