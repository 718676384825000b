"""DeepSeek-V4.1 checkpoints in the published names, types and shapes: small ones by safetensors, and sparse ones of the real size."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tiny_engram.errors import ConfigError, TableError, TinyEngramError, TokenizerError
from tiny_engram.layer import EngramLayer
from tiny_engram.llm.deepseek import open_layers
from tiny_engram.llm.deepseek_config import DeepSeekConfig
from tiny_engram.table import EngramTable
from tiny_engram.table.header import build_header
from tiny_engram.table.table_writer import write_table
from tiny_engram.tokenizer import CompressedTokenizer

E8M0, E4M3, BF16 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16
# As published, of which Engram is a part.
FLASH = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "hc_mult": 4,
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_vocab_size": 16000000,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    },
}
HIDDEN, COPIES, HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 64, 50
SMALL = {
    "hidden_size": HIDDEN,
    "hc_mult": COPIES,
    "engram_n_heads": HEADS,
    "engram_head_dim": HEAD_DIM,
    "engram_vocab_size": VOCAB,
    "engram_num_embeddings": [384, 552],
}
# From 50 on, ascending over layers, n-gram sizes and heads.
PRIMES = {1: [53, 59, 61, 67, 71, 73], 14: [79, 83, 89, 97, 101, 103]}


@pytest.fixture(scope="module")
def compressed(deepseek_backend) -> CompressedTokenizer:
    """The canonical ids of the real vocabulary."""
    return DeepSeekConfig().tokenizer(deepseek_backend)


def config_of(**changes) -> dict:
    return {**FLASH, "text_config": {**FLASH["text_config"], **SMALL, **changes}}


def layer_tensors(layer: int, *, hidden=HIDDEN, copies=COPIES, seed=0) -> dict[str, torch.Tensor]:
    """The tensors of one layer, drawn; every block has a scale of its own."""
    generator = torch.Generator().manual_seed(100 * seed + layer)
    rows, width, out = sum(PRIMES[layer]), 6 * HEAD_DIM, (copies + 1) * hidden

    def scales(*shape):
        return torch.randint(120, 131, shape, generator=generator, dtype=torch.uint8).view(E8M0)

    return {
        "embed.weight": torch.randn(rows, HEAD_DIM, generator=generator).mul(40).to(E4M3),
        "embed.scale": scales(rows, HEAD_DIM // 32),
        "wkv.weight": torch.randn(out, width, generator=generator).mul(3).to(E4M3),
        "wkv.scale": scales(-(-out // 32), width // 32),
        "q_weight": torch.randn(copies, hidden, generator=generator).to(BF16),
        "k_weight": torch.randn(copies, hidden, generator=generator).to(BF16),
    }


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """A checkpoint of these files, which hold the tensors of these whole names."""
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in shards.items() for name in tensors}
    places["head.weight"] = "model-00046-of-00048.safetensors"  # a shard that nobody here has
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config or config_of()))
    return folder


def named(tensors: dict[str, torch.Tensor], layer: int, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}layers.{layer}.engram.{name}": tensor for name, tensor in tensors.items()}


SHARDS = {1: "model-00047-of-00048.safetensors", 14: "model-00048-of-00048.safetensors"}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Both layers, each in its own shard, as published."""
    return write(tmp_path, {SHARDS[layer]: named(layer_tensors(layer), layer) for layer in (1, 14)})


def table_of(layer: EngramLayer) -> EngramTable:
    assert isinstance(layer.table, EngramTable)
    return layer.table


# -- the rule, as it is written, in plain Python and float64


def plain_rows(layer: int, ids: list[int], blocked: list[bool]) -> list[list[int]]:
    """Row ids of a text: running XOR of canonical(t - s) * m[s], modulo each prime, plus the column's offset."""
    bound = (2**63 - 1) // 99092 // 2
    multipliers = [2 * int(m) + 1 for m in np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64)]
    offsets = np.cumsum([0, *PRIMES[layer]])
    out = []
    for place in range(len(ids)):
        running, columns, stopped = 0, [], blocked[place]
        for back in range(4):
            here = place - back
            stopped = stopped or here < 0 or blocked[here]
            token = 2 if stopped else ids[here]
            running ^= token * multipliers[back]
            if back:
                columns += [running % PRIMES[layer][(back - 1) * HEADS + head] for head in range(HEADS)]
        out.append([int(offset) + column for offset, column in zip(offsets, columns, strict=False)])
    return out


def by_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float64 of an e4m3 weight, whose value (i, j) has the scale (i // block[0], j // block[1])."""
    power = 2.0 ** (scale.view(torch.uint8).double() - 127)
    i, j = (torch.arange(size) // step for size, step in zip(weight.shape, block, strict=True))
    return weight.double() * power[i][:, j]


def plain_layer(x, rows, wkv, q_weight, k_weight):
    """The gate as it is written, every step in x's type; rows ``[B, T, width]``, wkv ``[(copies + 1) * D, width]``."""
    copies, size = x.shape[-2:]
    projected = rows @ wkv.T
    key, value = projected[..., : copies * size].unflatten(-1, (copies, size)), projected[..., copies * size :]
    dot = (x * (q_weight * k_weight) * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + 1e-20) * torch.rsqrt(key.square().mean(-1) + 1e-20) / math.sqrt(size)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return x + gate.unsqueeze(-1) * value.unsqueeze(-2)


def expected(tensors, layer, x, canonical, blocked):
    ids = torch.tensor([plain_rows(layer, row, stop) for row, stop in zip(canonical.tolist(), blocked.tolist(), strict=True)])
    table = by_blocks(tensors["embed.weight"], tensors["embed.scale"], (1, 32))
    wkv = by_blocks(tensors["wkv.weight"], tensors["wkv.scale"], (32, 32))
    parts = [part.to(x.dtype) for part in (table[ids].flatten(-2), wkv, tensors["q_weight"], tensors["k_weight"])]
    return ids, torch.where(blocked[..., None, None], x, plain_layer(x, *parts))


def batch(dtype=torch.float64, hidden=HIDDEN, copies=COPIES):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, copies, hidden, generator=generator, dtype=torch.float64).to(dtype)
    canonical = torch.randint(0, 99092, (2, 9), generator=generator)
    return x, canonical, torch.rand(2, 9, generator=generator) < 0.2


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_is_the_written_rule(tmp_path, compressed, prefix, split):
    tensors = {layer: layer_tensors(layer) for layer in (1, 14)}
    if split:  # a table apart from its scales, weights apart from both
        shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}, "c.safetensors": {}}
        for layer in (1, 14):
            for number, (name, tensor) in enumerate(named(tensors[layer], layer, prefix).items()):
                shards["abc"[number % 3] + ".safetensors"][name] = tensor
    else:
        shards = {SHARDS[layer]: named(tensors[layer], layer, prefix) for layer in (1, 14)}
    folder = write(tmp_path, shards)
    layers = open_layers(folder, compressed, dtype=torch.float64, prefix=prefix.rstrip(".") if split else None)
    assert list(layers) == [1, 14]
    x, canonical, blocked = batch()
    for number, layer in layers.items():
        assert table_of(layer).storage.home == "mapped" and not any(p.requires_grad for p in layer.parameters())
        ids, out = expected(tensors[number], number, x, canonical, blocked)
        assert torch.equal(layer.row_ids(canonical, blocked=blocked), ids)
        torch.testing.assert_close(layer(x, canonical, blocked=blocked), out, rtol=1e-12, atol=1e-12)
        # A block that continues reads the ids in front of it.
        tail = layer(x[:, 4:], canonical[:, 4:], blocked=blocked[:, 4:], history=canonical[:, 1:4], history_blocked=blocked[:, 1:4])
        torch.testing.assert_close(tail, out[:, 4:], rtol=1e-12, atol=1e-12)


def test_bfloat16_holds_the_weights_exactly_and_errs_no_more_than_plain_torch(checkpoint, compressed):
    x, canonical, blocked = batch(BF16)
    tensors = layer_tensors(1)
    layer = open_layers(checkpoint, compressed, layers=[1])[1]
    wkv = by_blocks(tensors["wkv.weight"], tensors["wkv.scale"], (32, 32))
    assert layer.projections.wkv.weight.dtype == BF16 and torch.equal(layer.projections.wkv.weight.double(), wkv)
    out = layer(x, canonical, blocked=blocked)
    _, exact = expected(tensors, 1, x.double(), canonical, blocked)
    _, plain = expected(tensors, 1, x, canonical, blocked)
    assert out.dtype == BF16 and torch.equal(out[blocked], x[blocked])
    assert (out.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


def test_golden_gate_out_of_a_file(tmp_path, compressed, golden):
    """Keys and value of the golden gate as a weight whose first column is read by rows of (1, 0, 0, ...)."""
    gate = golden["gate_v41"]
    copies, hidden = np.shape(gate["x"])
    tensors = layer_tensors(1, hidden=hidden, copies=copies)
    one = torch.zeros(sum(PRIMES[1]), HEAD_DIM)
    one[:, 0] = 1
    wkv = torch.zeros((copies + 1) * hidden, 6 * HEAD_DIM)
    wkv[:, 0] = torch.tensor([*sum(gate["key"], []), *gate["value"]])
    tensors |= {"embed.weight": one.to(E4M3), "wkv.weight": wkv.to(E4M3)}
    tensors |= {name: torch.full_like(tensors[name].view(torch.uint8), 127).view(E8M0) for name in ("embed.scale", "wkv.scale")}
    tensors |= {name: torch.tensor(gate[name]).to(BF16) for name in ("q_weight", "k_weight")}
    config = config_of(hidden_size=hidden, hc_mult=copies, engram_layer_ids=[1], engram_num_embeddings=[sum(PRIMES[1])])
    folder = write(tmp_path, {"model.safetensors": named(tensors, 1)}, config)
    layer = open_layers(folder, compressed, dtype=torch.float32)[1]
    out = layer(torch.tensor(gate["x"])[None, None], torch.tensor([[17]]))
    torch.testing.assert_close(out[0, 0], torch.tensor(gate["out"]), rtol=0, atol=2e-7)


def test_homes_and_parts_give_the_same_bits(tmp_path, checkpoint, compressed):
    x, canonical, _ = batch(torch.float32)
    mapped = open_layers(checkpoint, compressed, dtype=torch.float32)
    said = []
    copied = open_layers(
        checkpoint, compressed, dtype=torch.float32, home="pageable", progress=lambda done, total: said.append((done, total))
    )
    assert said == [(384 * 66, 384 * 66), (552 * 66, 552 * 66)]
    # The table as `tiny-engram table convert --shard-bytes` leaves it, beside the weights.
    write_table(tmp_path / "rows.safetensors", table_of(mapped[1]).storage, prefix="layers.1.engram.", shard_bytes=1)
    index = json.loads((tmp_path / "rows.safetensors.index.json").read_text())
    rest = {name: tensor for name, tensor in named(layer_tensors(1), 1).items() if ".embed." not in name}
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
    (checkpoint / SHARDS[1]).unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    x, canonical, blocked = batch()
    config = DeepSeekConfig.read(checkpoint / "config.json")
    (checkpoint / "config.json").unlink()
    for place in (checkpoint, checkpoint / SHARDS[14]):
        layer = open_layers(place, compressed, config=config, layers=[14], dtype=torch.float64)[14]
        out = expected(layer_tensors(14), 14, x, canonical, blocked)[1]
        torch.testing.assert_close(layer(x, canonical, blocked=blocked), out, rtol=1e-12, atol=1e-12)


def test_block_scales_at_the_ends_of_e8m0(checkpoint, compressed):
    """Byte 0 is 2**-127, as the OCP specification says; byte 255 is NaN, and no weight."""
    tensors = layer_tensors(1)
    scale = tensors["wkv.scale"].view(torch.uint8)
    scale[3, 5] = 0
    save_file(named(tensors, 1), checkpoint / SHARDS[1])
    weight = open_layers(checkpoint, compressed, layers=[1], dtype=torch.float32)[1].projections.wkv.weight
    block = tensors["wkv.weight"][96:128, 160:192].double()
    assert torch.equal(weight[96:128, 160:192].double(), block * 2.0**-127) and bool(block.any())
    scale[3, 5] = 255
    save_file(named(tensors, 1), checkpoint / SHARDS[1])
    with pytest.raises(TableError, match=r"layers\.1\.engram\.wkv\.weight holds values that are NaN or infinite in torch.bfloat16; copy"):
        open_layers(checkpoint, compressed)


# -- refusals


def edited(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    """Layer 1's shard with other tensors, `__` for a dot in a name; None takes one out of the file, though not out of the index."""
    tensors = load_file(checkpoint / SHARDS[1])
    for name, tensor in changes.items():
        whole = f"layers.1.engram.{name.replace('__', '.')}"
        del tensors[whole]
        if tensor is not None:
            tensors[whole] = tensor
    save_file(tensors, checkpoint / SHARDS[1])


GOOD = layer_tensors(1)
WRONG = {
    "a missing scale": (
        {"wkv__scale": None},
        r"00047-of-00048.safetensors lacks 'layers.1.engram.wkv.scale', which the index places there",
    ),
    "a missing table": (
        {"embed__weight": None},
        r"00047-of-00048.safetensors lacks 'layers.1.engram.embed.weight', which the index places",
    ),
    "wkv in bfloat16": ({"wkv__weight": GOOD["wkv.weight"].to(BF16)}, r"wkv.weight is BF16 \[320, 384\], expected F8_E4M3 \[320, 384\]"),
    "wkv on its side": (
        {"wkv__weight": GOOD["wkv.weight"].view(384, 320)},
        r"wkv.weight is F8_E4M3 \[384, 320\], expected F8_E4M3 \[320, 38",
    ),
    "float scales": ({"wkv__scale": torch.ones(10, 12)}, r"wkv.scale is F32 \[10, 12\], expected F8_E8M0 or U8 \[10, 12\]"),
    "blocks of 128": (
        {"wkv__scale": GOOD["wkv.scale"][:3, :3].clone()},
        r"wkv.scale is F8_E8M0 \[3, 3\], expected F8_E8M0 or U8 \[10, 12\]",
    ),
    "another width": (
        {"q_weight": torch.ones(4, 60, dtype=BF16)},
        r"q_weight is BF16 \[4, 60\], expected BF16 \[4, 64\]; use a DeepSeek-V4.1",
    ),
    "a float gate": ({"k_weight": torch.ones(4, 64)}, r"k_weight is F32 \[4, 64\], expected BF16 \[4, 64\]"),
    "a table in bytes": ({"embed__weight": GOOD["embed.weight"].view(torch.uint8)}, r"embed.weight' is U8 \[384, 64\], expected F8_E4M3"),
    "a row too few": (
        {"embed__weight": GOOD["embed.weight"][1:].clone(), "embed__scale": GOOD["embed.scale"][1:].clone()},
        r"layers.1.engram.embed.weight is \[383, 64\], expected \[384, 64\], the sum of the primes of layer 1; use the config.json of this",
    ),
    "rows without scales": ({"embed__scale": GOOD["embed.scale"][1:].clone()}, r"expected one scale per 32 values"),
    "NaN in wkv": (
        {"wkv__weight": torch.full((320, 384), math.nan).to(E4M3)},
        r"wkv.weight holds values that are NaN or infinite in torch.bf",
    ),
    "infinity in the gate": ({"q_weight": torch.full((4, 64), math.inf, dtype=BF16)}, r"q_weight holds values that are NaN or infinite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_are_not_the_published_ones(checkpoint, compressed, case):
    changes, message = WRONG[case]
    edited(checkpoint, **changes)
    with pytest.raises(TableError, match=message) as caught:
        open_layers(checkpoint, compressed)
    assert "\n" not in str(caught.value) and str(checkpoint) in str(caught.value)


def test_shards_that_are_missing_or_cut(checkpoint, compressed):
    whole = (checkpoint / SHARDS[14]).read_bytes()
    (checkpoint / SHARDS[14]).write_bytes(whole[:-100])
    with pytest.raises(TableError, match="00048-of-00048.safetensors: not a sound safetensors file .*truncated"):
        open_layers(checkpoint, compressed)
    (checkpoint / SHARDS[14]).unlink()
    with pytest.raises(
        TableError, match=r"json: model-00048-of-00048.safetensors not found beside it, expected all 1 files with layers.14.eng"
    ):
        open_layers(checkpoint, compressed)
    assert list(open_layers(checkpoint, compressed, layers=[1])) == [1]
    index = checkpoint / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: file for name, file in names.items() if "wkv.weight" not in name}}))
    with pytest.raises(TableError, match=r"json: lacks 'layers.1.engram.wkv.weight', expected it beside the layer's table; copy"):
        open_layers(checkpoint, compressed)
    index.write_text(json.dumps({"weight_map": {name: file for name, file in names.items() if "layers.14" not in name}}))
    with pytest.raises(
        TableError, match=r"holds no tensor layers.14.engram.\*, expected those of every Engram layer; name the layers that are"
    ):
        open_layers(checkpoint, compressed)
    index.write_text(json.dumps({"weight_map": {"head.weight": "x.safetensors"}}))
    with pytest.raises(TableError, match=r"has no tensor layers.N.engram.embed.weight; expected a DeepSeek-V4.1 checkpoint"):
        open_layers(checkpoint, compressed)


def test_folders_and_prefixes_that_leave_a_choice(checkpoint, compressed, tmp_path):
    with pytest.raises(TableError, match=r"has no Engram layers under 'model\.': expected ''; pass that as prefix=, or None"):
        open_layers(checkpoint, compressed, prefix="model")
    both = named(layer_tensors(1), 1) | named(layer_tensors(1, seed=1), 1, "draft.")
    save_file(both, checkpoint / "both.safetensors")
    with pytest.raises(TableError, match=r"has Engram layers under '', 'draft\.': expected one prefix; pass prefix="):
        open_layers(checkpoint / "both.safetensors", compressed)
    x, canonical, blocked = batch()
    layer = open_layers(checkpoint / "both.safetensors", compressed, layers=[1], prefix="draft.", dtype=torch.float64)[1]
    torch.testing.assert_close(
        layer(x, canonical), expected(layer_tensors(1, seed=1), 1, x, canonical, blocked & False)[1], rtol=1e-12, atol=0
    )
    (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(TableError, match="holds 3 files .safetensors and no index, expected one; name it, such as both.safetensors"):
        open_layers(checkpoint, compressed)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="holds neither an index nor a file .safetensors"):
        open_layers(tmp_path / "empty", compressed)
    with pytest.raises(TableError, match="cannot open the table"):
        open_layers(tmp_path / "none.safetensors", compressed)


def test_layers_and_types_that_are_not_there(checkpoint, compressed):
    with pytest.raises(ConfigError, match=r"layers \[1, 2\]: expected one or more of \[1, 14\], the checkpoint's Engram layers"):
        open_layers(checkpoint, compressed, layers=[1, 2])
    with pytest.raises(ConfigError, match=r"layers \[\]: expected"):
        open_layers(checkpoint, compressed, layers=[])
    with pytest.raises(ConfigError, match=r"dtype torch.int8, home 'mapped': expected one of torch.bfloat16"):
        open_layers(checkpoint, compressed, dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"home 'disk': expected .* and of device, pinned, mapped, pageable"):
        open_layers(checkpoint, compressed, home="disk")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TableError, match=r"the weights of layer 1 on cuda:99 cannot be had .*; open them on another device"):
        open_layers(checkpoint, compressed, device="cuda:99")


def test_another_tokenizer(checkpoint, compressed):
    words = Tokenizer(models.WordLevel({"a": 0, "A": 1, "b": 2}, unk_token="a"))
    with pytest.raises(TokenizerError, match="the tokenizer has 2 canonical ids: expected 99092; use the tokenizer of the trained base"):
        open_layers(checkpoint, words)
    with pytest.raises(TokenizerError, match="the tokenizer has 2 canonical ids and pads with canonical id 0: expected 99092 ids"):
        open_layers(checkpoint, CompressedTokenizer(words, pad_id=0))
    with pytest.raises(TokenizerError, match="dict has no Rust backend: pass a fast tokenizer"):
        open_layers(checkpoint, {})
    (checkpoint / "config.json").write_text(json.dumps(config_of(engram_compressed_vocab_size=99093)))
    with pytest.raises(TokenizerError, match="the tokenizer has 99092 canonical ids .* expected 99093 ids"):
        open_layers(checkpoint, compressed)
    (checkpoint / "config.json").write_text(json.dumps(config_of(engram_pad_token_id=3)))
    with pytest.raises(TokenizerError, match="pads with canonical id 2: expected 99092 ids, and that of raw id 3"):
        open_layers(checkpoint, compressed)


def test_configurations(tmp_path, golden):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))
    config = DeepSeekConfig.read(path)
    assert config == DeepSeekConfig(rows=(384_006_168, 384_016_682)) and config.image_id == 129_264
    assert DeepSeekConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path.write_text(json.dumps(FLASH["text_config"]))  # flat, as some conversions leave it
    assert DeepSeekConfig.read(path) == DeepSeekConfig(rows=config.rows, image_id=None)
    wrong = [
        ({"model_type": "llama"}, "has no engram_layer_ids; expected the config.json of a DeepSeek-V4.1 checkpoint"),
        ({"text_config": {"engram_layer_ids": [1]}}, "lacks engram_num_embeddings, engram_max_ngram_size, .*hc_mult, rms_norm_eps"),
        ({**FLASH, "quantization_config": {"weight_block_size": [128, 128]}}, r"weight_block_size is \[128, 128\], expected \[32, 32\]"),
        (config_of(engram_num_embeddings=[384, 553]), r"rows is \(384, 553\): expected \(384, 552\), the sums of the primes of layers"),
        (config_of(engram_layer_ids=[1, 14, 20]), r"rows is \(384, 552\): expected \(384, 552, 724\)"),
        (config_of(engram_layer_ids=[1, 1]), "layer_ids is .* expected one or more different integers"),
        (config_of(engram_layer_ids="1, 14"), "layer_ids is '1, 14': expected"),
        (config_of(engram_head_dim=100), "head_dim is 100: expected a multiple of 32"),
        (config_of(hidden_size=None), "hidden is None: expected an integer of 1 or more"),
        (config_of(rms_norm_eps=0), "eps is 0: expected a finite number above 0"),
        (config_of(engram_pad_token_id=-1), "pad_id is -1: expected an integer of 0 or more"),
        ([], "has no engram_layer_ids"),
    ]
    for data, message in wrong:
        path.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=message):
            DeepSeekConfig.read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read"):
        DeepSeekConfig.read(path)


# -- the real size


def sparse_shard(path: Path, layer: int, rows: int, q_shape=(4, 5120)):
    """One Engram shard as published, 94.6 GiB, of which only what somebody writes takes room."""
    base = f"layers.{layer}.engram."
    tensors = [
        (f"{base}embed.scale", "F8_E8M0", (rows, 8)),
        (f"{base}embed.weight", "F8_E4M3", (rows, 256)),
        (f"{base}k_weight", "BF16", (4, 5120)),
        (f"{base}q_weight", "BF16", q_shape),
        (f"{base}wkv.scale", "F8_E8M0", (800, 192)),
        (f"{base}wkv.weight", "F8_E4M3", (25600, 6144)),
    ]
    header, placed = build_header(tensors, {})
    spans = {name.removeprefix(base): span for name, span in placed.tensors.items()}
    with open(path, "wb") as file:
        file.truncate(max(span.offset + span.nbytes for span in spans.values()))
        file.write(header)
    return spans


def flash(folder: Path, **shapes):
    spans = {layer: sparse_shard(folder / SHARDS[layer], layer, rows, **shapes) for layer, rows in ((1, 384_006_168), (14, 384_016_682))}
    names = {f"layers.{layer}.engram.{name}": SHARDS[layer] for layer in (1, 14) for name in spans[layer]}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**names, "head.weight": "model-00046-of-00048.safetensors"}})
    )
    (folder / "config.json").write_text(json.dumps(FLASH))
    return spans


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_a_checkpoint_of_the_real_size(tmp_path, compressed, golden):
    """Golden row ids lead to the rows at those places of 94 GiB, and through wkv [25600, 6144] to keys and values of 5,120."""
    spans = flash(tmp_path)
    entry = golden["hash_layer1"]
    ids = torch.tensor(entry["rows"] + [[384_006_167] * 24])  # the last row of all, too
    generator = torch.Generator().manual_seed(3)
    payload = torch.randn(*ids.shape, 256, generator=generator).to(E4M3)
    scale = torch.randint(124, 131, (*ids.shape, 8), generator=generator, dtype=torch.uint8)
    # wkv is zero but for a few inputs of the first, a middle and the last value of every key and of the value.
    places = [(part * 5120 + at, column) for part in range(5) for at in (0, 2111, 5119) for column in (0, 3333, 6143)]
    weights = torch.randn(len(places), generator=generator).to(E4M3)
    gates = {name: torch.randn(4, 5120, generator=generator).to(BF16) for name in ("q_weight", "k_weight")}
    with open(tmp_path / SHARDS[1], "r+b") as file:

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
    assert sum((tmp_path / file).stat().st_blocks for file in SHARDS.values()) * 512 < 2**23

    second = open_layers(tmp_path, compressed, layers=[14])[14]
    assert (len(table_of(second)), second.projections.wkv.weight.shape, table_of(second).storage.home) == (
        384_016_682,
        (25600, 6144),
        "mapped",
    )
    assert not second.projections.wkv.weight.any() and not table_of(second).lookup(torch.tensor([384_016_681])).any()
    layer = open_layers(tmp_path, compressed, layers=[1], dtype=torch.float32)[1]
    assert len(table_of(layer)) == 384_006_168 and table_of(layer).nbytes + table_of(second).nbytes == 768_022_850 * 264
    assert layer.hasher.primes.tolist() == golden["v41"]["primes_layer1"]
    assert layer.hasher.multipliers.tolist() == golden["v41"]["multipliers_layer1"]
    canonical = torch.tensor([entry["ids"]])
    assert torch.equal(layer.row_ids(canonical)[0], ids[:-1])
    stored = by_blocks(payload.flatten(0, 1), scale.flatten(0, 1), (1, 32)).view(*ids.shape, 256)
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


def test_headers_are_checked_before_anything_large_is_read(tmp_path, deepseek_backend, compressed):
    flash(tmp_path, q_shape=(5120, 4))
    before = bytes_read()
    with pytest.raises(TableError, match=r"layers.1.engram.q_weight is BF16 \[5120, 4\], expected BF16 \[4, 5120\]"):
        open_layers(tmp_path, deepseek_backend)
    flash(tmp_path)
    with pytest.raises(TinyEngramError, match="expected 99092 ids"):
        open_layers(tmp_path, CompressedTokenizer(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_id=0))
    assert bytes_read() - before < 2**18
