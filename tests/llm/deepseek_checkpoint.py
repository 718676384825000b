"""DeepSeek-V4.1 checkpoints for tests, in the published names, types and shapes, and their layers' rule in plain Python and float64."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tiny_engram.table.header import build_header

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
SHARDS = {1: "model-00047-of-00048.safetensors", 14: "model-00048-of-00048.safetensors"}


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
