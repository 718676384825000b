"""DeepSeek-V4.1's layers are the written rule: small checkpoints that safetensors wrote, and sparse ones of the real size."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tiny_engram.errors import TableError
from tiny_engram.layer import EngramLayer
from tiny_engram.llm.deepseek import open_layers
from tiny_engram.llm.deepseek_config import DeepSeekConfig
from tiny_engram.table import EngramTable
from tiny_engram.table.table_writer import write_table
from tiny_engram.tokenizer import CompressedTokenizer

_spec = importlib.util.spec_from_file_location("deepseek_checkpoint", Path(__file__).with_name("deepseek_checkpoint.py"))
assert _spec is not None and _spec.loader is not None
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
E8M0, E4M3, BF16 = made.E8M0, made.E4M3, made.BF16


@pytest.fixture(scope="module")
def compressed(deepseek_backend) -> CompressedTokenizer:
    """The canonical ids of the real vocabulary."""
    return DeepSeekConfig().tokenizer(deepseek_backend)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Both layers, each in its own shard, as published."""
    return made.write(tmp_path, {made.SHARDS[layer]: made.named(made.layer_tensors(layer), layer) for layer in (1, 14)})


def table_of(layer: EngramLayer) -> EngramTable:
    assert isinstance(layer.table, EngramTable)
    return layer.table


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_is_the_written_rule(tmp_path, compressed, prefix, split):
    tensors = {layer: made.layer_tensors(layer) for layer in (1, 14)}
    if split:  # a table apart from its scales, weights apart from both
        shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}, "c.safetensors": {}}
        for layer in (1, 14):
            for number, (name, tensor) in enumerate(made.named(tensors[layer], layer, prefix).items()):
                shards["abc"[number % 3] + ".safetensors"][name] = tensor
    else:
        shards = {made.SHARDS[layer]: made.named(tensors[layer], layer, prefix) for layer in (1, 14)}
    folder = made.write(tmp_path, shards)
    layers = open_layers(folder, compressed, dtype=torch.float64, prefix=prefix.rstrip(".") if split else None)
    assert list(layers) == [1, 14]
    x, canonical, blocked = made.batch()
    for number, layer in layers.items():
        assert table_of(layer).storage.home == "mapped" and not any(p.requires_grad for p in layer.parameters())
        ids, out = made.expected(tensors[number], number, x, canonical, blocked)
        assert torch.equal(layer.row_ids(canonical, blocked=blocked), ids)
        torch.testing.assert_close(layer(x, canonical, blocked=blocked), out, rtol=1e-12, atol=1e-12)
        # A block that continues reads the ids in front of it.
        tail = layer(x[:, 4:], canonical[:, 4:], blocked=blocked[:, 4:], history=canonical[:, 1:4], history_blocked=blocked[:, 1:4])
        torch.testing.assert_close(tail, out[:, 4:], rtol=1e-12, atol=1e-12)


def test_bfloat16_holds_the_weights_exactly_and_errs_no_more_than_plain_torch(checkpoint, compressed):
    x, canonical, blocked = made.batch(BF16)
    tensors = made.layer_tensors(1)
    layer = open_layers(checkpoint, compressed, layers=[1])[1]
    wkv = made.by_blocks(tensors["wkv.weight"], tensors["wkv.scale"], (32, 32))
    assert layer.projections.wkv.weight.dtype == BF16 and torch.equal(layer.projections.wkv.weight.double(), wkv)
    out = layer(x, canonical, blocked=blocked)
    _, exact = made.expected(tensors, 1, x.double(), canonical, blocked)
    _, plain = made.expected(tensors, 1, x, canonical, blocked)
    assert out.dtype == BF16 and torch.equal(out[blocked], x[blocked])
    assert (out.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


def test_golden_gate_out_of_a_file(tmp_path, compressed, golden):
    """Keys and value of the golden gate as a weight whose first column is read by rows of (1, 0, 0, ...)."""
    gate = golden["gate_v41"]
    copies, hidden = np.shape(gate["x"])
    tensors = made.layer_tensors(1, hidden=hidden, copies=copies)
    one = torch.zeros(sum(made.PRIMES[1]), made.HEAD_DIM)
    one[:, 0] = 1
    wkv = torch.zeros((copies + 1) * hidden, 6 * made.HEAD_DIM)
    wkv[:, 0] = torch.tensor([*sum(gate["key"], []), *gate["value"]])
    tensors |= {"embed.weight": one.to(E4M3), "wkv.weight": wkv.to(E4M3)}
    tensors |= {name: torch.full_like(tensors[name].view(torch.uint8), 127).view(E8M0) for name in ("embed.scale", "wkv.scale")}
    tensors |= {name: torch.tensor(gate[name]).to(BF16) for name in ("q_weight", "k_weight")}
    config = made.config_of(hidden_size=hidden, hc_mult=copies, engram_layer_ids=[1], engram_num_embeddings=[sum(made.PRIMES[1])])
    folder = made.write(tmp_path, {"model.safetensors": made.named(tensors, 1)}, config)
    layer = open_layers(folder, compressed, dtype=torch.float32)[1]
    out = layer(torch.tensor(gate["x"])[None, None], torch.tensor([[17]]))
    torch.testing.assert_close(out[0, 0], torch.tensor(gate["out"]), rtol=0, atol=2e-7)


def test_homes_and_parts_give_the_same_bits(tmp_path, checkpoint, compressed):
    x, canonical, _ = made.batch(torch.float32)
    mapped = open_layers(checkpoint, compressed, dtype=torch.float32)
    said = []
    copied = open_layers(
        checkpoint, compressed, dtype=torch.float32, home="pageable", progress=lambda done, total: said.append((done, total))
    )
    assert said == [(384 * 66, 384 * 66), (552 * 66, 552 * 66)]
    # The table as `tiny-engram table convert --shard-bytes` leaves it, beside the weights.
    write_table(tmp_path / "rows.safetensors", table_of(mapped[1]).storage, prefix="layers.1.engram.", shard_bytes=1)
    index = json.loads((tmp_path / "rows.safetensors.index.json").read_text())
    rest = {name: tensor for name, tensor in made.named(made.layer_tensors(1), 1).items() if ".embed." not in name}
    save_file(rest, tmp_path / "rest.safetensors")
    index["weight_map"] |= dict.fromkeys(rest, "rest.safetensors")
    (tmp_path / "converted.safetensors.index.json").write_text(json.dumps(index))
    parts = open_layers(tmp_path / "converted.safetensors.index.json", compressed, layers=[1], dtype=torch.float32)
    assert any(name.endswith("embed.weight.rows.0") for name in index["weight_map"])
    for number in (1, 14):
        out = mapped[number](x, canonical)
        assert torch.equal(copied[number](x, canonical), out)
        assert table_of(copied[number]).storage.home == "pageable"
    assert torch.equal(parts[1](x, canonical), mapped[1](x, canonical))


def test_one_shard_alone_is_enough_for_its_layer(checkpoint, compressed):
    (checkpoint / made.SHARDS[1]).unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    x, canonical, blocked = made.batch()
    config = DeepSeekConfig.read(checkpoint / "config.json")
    (checkpoint / "config.json").unlink()
    for place in (checkpoint, checkpoint / made.SHARDS[14]):
        layer = open_layers(place, compressed, config=config, layers=[14], dtype=torch.float64)[14]
        out = made.expected(made.layer_tensors(14), 14, x, canonical, blocked)[1]
        torch.testing.assert_close(layer(x, canonical, blocked=blocked), out, rtol=1e-12, atol=1e-12)


def test_block_scales_at_the_ends_of_e8m0(checkpoint, compressed):
    """Byte 0 is 2**-127, as the OCP specification says; byte 255 is NaN, and no weight."""
    tensors = made.layer_tensors(1)
    scale = tensors["wkv.scale"].view(torch.uint8)
    scale[3, 5] = 0
    save_file(made.named(tensors, 1), checkpoint / made.SHARDS[1])
    weight = open_layers(checkpoint, compressed, layers=[1], dtype=torch.float32)[1].projections.wkv.weight
    block = tensors["wkv.weight"][96:128, 160:192].double()
    assert torch.equal(weight[96:128, 160:192].double(), block * 2.0**-127) and bool(block.any())
    scale[3, 5] = 255
    save_file(made.named(tensors, 1), checkpoint / made.SHARDS[1])
    with pytest.raises(TableError, match=r"layers\.1\.engram\.wkv\.weight holds values that are NaN or infinite in torch.bfloat16; copy"):
        open_layers(checkpoint, compressed)


def test_a_checkpoint_of_the_real_size(tmp_path, compressed, golden):
    """Golden row ids lead to the rows at those places of 94 GiB, and through wkv [25600, 6144] to keys and values of 5,120."""
    spans = made.flash(tmp_path)
    entry = golden["hash_layer1"]
    ids = torch.tensor(entry["rows"] + [[384_006_167] * 24])  # the last row of all, too
    generator = torch.Generator().manual_seed(3)
    payload = torch.randn(*ids.shape, 256, generator=generator).to(E4M3)
    scale = torch.randint(124, 131, (*ids.shape, 8), generator=generator, dtype=torch.uint8)
    # wkv is zero but for a few inputs of the first, a middle and the last value of every key and of the value.
    places = [(part * 5120 + at, column) for part in range(5) for at in (0, 2111, 5119) for column in (0, 3333, 6143)]
    weights = torch.randn(len(places), generator=generator).to(E4M3)
    gates = {name: torch.randn(4, 5120, generator=generator).to(BF16) for name in ("q_weight", "k_weight")}
    with open(tmp_path / made.SHARDS[1], "r+b") as file:

        def put(name: str, at: int, data: torch.Tensor) -> None:
            file.seek(spans[1][name].offset + at)
            file.write(data.view(torch.uint8).numpy().tobytes())

        for row, values, scales in zip(ids.flatten().tolist(), payload.flatten(0, 1), scale.flatten(0, 1), strict=True):
            put("embed.weight", row * 256, values)
            put("embed.scale", row * 8, scales)
        for (out, column), value in zip(places, weights, strict=True):
            put("wkv.weight", out * 6144 + column, value[None])
            put("wkv.scale", out // 32 * 192 + column // 32, torch.tensor([125], dtype=torch.uint8))
        for name, tensor in gates.items():
            put(name, 0, tensor)
    assert sum((tmp_path / file).stat().st_blocks for file in made.SHARDS.values()) * 512 < 2**23

    second = open_layers(tmp_path, compressed, layers=[14])[14]
    assert len(table_of(second)) == 384_016_682 and table_of(second).storage.home == "mapped"
    assert second.projections.wkv.weight.shape == (25600, 6144)
    assert not second.projections.wkv.weight.any() and not table_of(second).lookup(torch.tensor([384_016_681])).any()
    layer = open_layers(tmp_path, compressed, layers=[1], dtype=torch.float32)[1]
    assert len(table_of(layer)) == 384_006_168 and table_of(layer).nbytes + table_of(second).nbytes == 768_022_850 * 264
    assert layer.hasher.primes.tolist() == golden["v41"]["primes_layer1"]
    assert layer.hasher.multipliers.tolist() == golden["v41"]["multipliers_layer1"]
    canonical = torch.tensor([entry["ids"]])
    assert torch.equal(layer.row_ids(canonical)[0], ids[:-1])
    stored = made.by_blocks(payload.flatten(0, 1), scale.flatten(0, 1), (1, 32)).view(*ids.shape, 256)
    assert torch.equal(table_of(layer).lookup(ids[-1, -1:])[0].double(), stored[-1, -1])
    assert torch.equal(table_of(layer).lookup(ids[:-1]).double(), stored[:-1])

    projected = torch.zeros(1, len(entry["ids"]), 25600, dtype=torch.float64)
    inputs = stored[:-1].flatten(-2)
    for (out, column), value in zip(places, weights.double(), strict=True):
        projected[0, :, out] += inputs[:, column] * value * 0.25
    key, value = projected[..., :20480].unflatten(-1, (4, 5120)), projected[..., 20480:]
    x = torch.randn(1, len(entry["ids"]), 4, 5120, generator=generator)
    dot = (x.double() * gates["q_weight"].double() * gates["k_weight"].double() * key).sum(-1)
    dot = dot * torch.rsqrt(x.double().square().mean(-1)) * torch.rsqrt(key.square().mean(-1)) / math.sqrt(5120)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    exact = x.double() + gate.unsqueeze(-1) * value.unsqueeze(-2)
    out = layer(x, canonical)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out[0, :, 3, 5119], x[0, :, 3, 5119])
