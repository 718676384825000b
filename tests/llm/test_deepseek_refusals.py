"""What is no DeepSeek-V4.1 checkpoint is refused in one line, before anything large is read."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tiny_engram.errors import ConfigError, TableError, TinyEngramError, TokenizerError
from tiny_engram.llm.deepseek import open_layers
from tiny_engram.llm.deepseek_config import DeepSeekConfig
from tiny_engram.tokenizer import CompressedTokenizer

_spec = importlib.util.spec_from_file_location("deepseek_checkpoint", Path(__file__).with_name("deepseek_checkpoint.py"))
assert _spec is not None and _spec.loader is not None
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
E4M3, BF16 = made.E4M3, made.BF16


@pytest.fixture(scope="module")
def compressed(deepseek_backend) -> CompressedTokenizer:
    """The canonical ids of the real vocabulary."""
    return DeepSeekConfig().tokenizer(deepseek_backend)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Both layers, each in its own shard, as published."""
    return made.write(tmp_path, {made.SHARDS[layer]: made.named(made.layer_tensors(layer), layer) for layer in (1, 14)})


def edited(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    """Layer 1's shard with other tensors, `__` for a dot in a name; None takes one out of the file, though not out of the index."""
    tensors = load_file(checkpoint / made.SHARDS[1])
    for name, tensor in changes.items():
        whole = f"layers.1.engram.{name.replace('__', '.')}"
        del tensors[whole]
        if tensor is not None:
            tensors[whole] = tensor
    save_file(tensors, checkpoint / made.SHARDS[1])


GOOD = made.layer_tensors(1)
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
    whole = (checkpoint / made.SHARDS[14]).read_bytes()
    (checkpoint / made.SHARDS[14]).write_bytes(whole[:-100])
    with pytest.raises(TableError, match="00048-of-00048.safetensors: not a sound safetensors file .*truncated"):
        open_layers(checkpoint, compressed)
    (checkpoint / made.SHARDS[14]).unlink()
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
    both = made.named(made.layer_tensors(1), 1) | made.named(made.layer_tensors(1, seed=1), 1, "draft.")
    save_file(both, checkpoint / "both.safetensors")
    with pytest.raises(TableError, match=r"has Engram layers under '', 'draft\.': expected one prefix; pass prefix="):
        open_layers(checkpoint / "both.safetensors", compressed)
    x, canonical, blocked = made.batch()
    layer = open_layers(checkpoint / "both.safetensors", compressed, layers=[1], prefix="draft.", dtype=torch.float64)[1]
    torch.testing.assert_close(
        layer(x, canonical), made.expected(made.layer_tensors(1, seed=1), 1, x, canonical, blocked & False)[1], rtol=1e-12, atol=0
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
    (checkpoint / "config.json").write_text(json.dumps(made.config_of(engram_compressed_vocab_size=99093)))
    with pytest.raises(TokenizerError, match="the tokenizer has 99092 canonical ids .* expected 99093 ids"):
        open_layers(checkpoint, compressed)
    (checkpoint / "config.json").write_text(json.dumps(made.config_of(engram_pad_token_id=3)))
    with pytest.raises(TokenizerError, match="pads with canonical id 2: expected 99092 ids, and that of raw id 3"):
        open_layers(checkpoint, compressed)


def test_configurations(tmp_path, golden):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made.FLASH))
    config = DeepSeekConfig.read(path)
    assert config == DeepSeekConfig(rows=(384_006_168, 384_016_682)) and config.image_id == 129_264
    assert DeepSeekConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path.write_text(json.dumps(made.FLASH["text_config"]))  # flat, as some conversions leave it
    assert DeepSeekConfig.read(path) == DeepSeekConfig(rows=config.rows, image_id=None)
    wrong = [
        ({"model_type": "llama"}, "has no engram_layer_ids; expected the config.json of a DeepSeek-V4.1 checkpoint"),
        ({"text_config": {"engram_layer_ids": [1]}}, "lacks engram_num_embeddings, engram_max_ngram_size, .*hc_mult, rms_norm_eps"),
        (
            {**made.FLASH, "quantization_config": {"weight_block_size": [128, 128]}},
            r"weight_block_size is \[128, 128\], expected \[32, ",
        ),
        (
            made.config_of(engram_num_embeddings=[384, 553]),
            r"rows is \(384, 553\): expected \(384, 552\), the sums of the primes",
        ),
        (made.config_of(engram_layer_ids=[1, 14, 20]), r"rows is \(384, 552\): expected \(384, 552, 724\)"),
        (made.config_of(engram_layer_ids=[1, 1]), "layer_ids is .* expected one or more different integers"),
        (made.config_of(engram_layer_ids="1, 14"), "layer_ids is '1, 14': expected"),
        (made.config_of(engram_head_dim=100), "head_dim is 100: expected a multiple of 32"),
        (made.config_of(hidden_size=None), "hidden is None: expected an integer of 1 or more"),
        (made.config_of(rms_norm_eps=0), "eps is 0: expected a finite number above 0"),
        (made.config_of(engram_pad_token_id=-1), "pad_id is -1: expected an integer of 0 or more"),
        ([], "has no engram_layer_ids"),
    ]
    for data, message in wrong:
        path.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=message):
            DeepSeekConfig.read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read"):
        DeepSeekConfig.read(path)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_headers_are_checked_before_anything_large_is_read(tmp_path, deepseek_backend, compressed):
    made.flash(tmp_path, q_shape=(5120, 4))
    before = bytes_read()
    with pytest.raises(TableError, match=r"layers.1.engram.q_weight is BF16 \[5120, 4\], expected BF16 \[4, 5120\]"):
        open_layers(tmp_path, deepseek_backend)
    made.flash(tmp_path)
    with pytest.raises(TinyEngramError, match="expected 99092 ids"):
        open_layers(tmp_path, CompressedTokenizer(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_id=0))
    assert bytes_read() - before < 2**18
