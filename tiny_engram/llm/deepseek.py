"""The Engram layers of DeepSeek-V4.1 checkpoints, over the checkpoint's own files.

Imports torch, numpy, the core (config, hashing, layer, quantization, table) and, of this package, deepseek_config. What is read for an
Engram layer L, under any prefix, from one file or from shards with an index:

    layers.L.engram.embed.weight, .scale   F8_E4M3 [rows, head_dim], F8_E8M0 [rows, head_dim / 32]: the table, never copied unless asked
    layers.L.engram.wkv.weight, .scale     F8_E4M3 [(copies + 1) * hidden, columns * head_dim], F8_E8M0, one for each 32 x 32 block
    layers.L.engram.q_weight, k_weight     BF16 [copies, hidden]

The rows of wkv are a key for each hyper-connection copy, then the value that all copies share. Everything else of a checkpoint is left
alone, so that its Engram shards, the index and config.json are enough.
"""

import re
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import torch

from tiny_engram.config import LayerConfig
from tiny_engram.errors import ConfigError, TableError
from tiny_engram.hashing import NgramHasher
from tiny_engram.kernels.block_quant import BLOCK
from tiny_engram.kernels.row_gather import Bounds
from tiny_engram.layer import EngramLayer
from tiny_engram.quantization import dequantize
from tiny_engram.table import EngramTable
from tiny_engram.table.header import TensorSpan, clipped
from tiny_engram.table.index_file import INDEX_SUFFIX, read_index
from tiny_engram.table.open_file import OpenFile
from tiny_engram.table.storage import Home, device_memory
from tiny_engram.table.table_file import TableFile

from .deepseek_config import DeepSeekConfig

__all__ = ["DeepSeekConfig", "open_layers"]

_STRIP = 8 * BLOCK  # rows of wkv that are dequantised at a time, few enough for caches
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_NAME = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>0|[1-9]\d{0,5})\.engram\.embed\.weight(?:\.rows\.\d+)?")


def open_layers(
    path: str | PathLike[str],
    tokenizer: Any,
    *,
    config: DeepSeekConfig | None = None,
    layers: Sequence[int] | None = None,
    home: Home = "mapped",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    prefix: str | None = None,
    bounds: Bounds = "fatal",
    progress: Callable[[int, int], object] | None = None,
) -> dict[int, EngramLayer]:
    """The Engram layers of a checkpoint, frozen. All headers are checked before a tensor is read.

    Args:
        path: the checkpoint's folder, its index, or one .safetensors file; shards without Engram need not be there.
        tokenizer: the checkpoint's, as in :meth:`DeepSeekConfig.tokenizer`.
        config: None reads the config.json beside the files, and without one takes DeepSeek-V4.1-Flash's values.
        layers: which of them; None is all.
        home: of the rows, as in `EngramTable.open`: "mapped" reads them from the files, another one copies 94 GiB a layer there.
        device: of the weights, and of the rows in home "device", whose default is the current GPU; else the CPU.
        dtype: of the weights. bfloat16 holds wkv exactly, which has 3 bits of fraction and scales that are powers of two, save in
            blocks whose scale is below 2**-124.
        prefix: of the names, such as "model."; None finds it.
        bounds, progress: of the tables, as in `EngramTable.open`.

    Returns:
        Layer -> its EngramLayer, which adds to hidden states ``[B, T, copies, hidden]``; rows, hash and gate are the checkpoint's.

    Raises:
        ConfigError: no such layer, or a configuration that makes no sense.
        TokenizerError: not the checkpoint's tokenizer.
        TableError: a missing shard or tensor, another type or shape, a damaged file, or values that are not finite.
    """
    place = _place(Path(path))
    if config is None:
        beside = place.parent / "config.json"
        config = DeepSeekConfig.read(beside) if beside.exists() else DeepSeekConfig()
    wanted = config.layers if layers is None else tuple(layers)
    unknown = [layer for layer in wanted if layer not in config.layers]
    if unknown or not wanted:
        raise ConfigError(f"layers {list(wanted)}: expected one or more of {list(config.layers)}, the checkpoint's Engram layers")
    if dtype not in _DTYPES or home not in get_args(Home):
        raise ConfigError(
            f"dtype {dtype!r}, home {home!r}: expected one of {', '.join(map(str, _DTYPES))}, and of {', '.join(get_args(Home))}"
        )
    rows_device = device if home == "device" else None
    device = device or ("cuda" if home == "device" else "cpu")
    with _Checkpoint(place, prefix, config) as checkpoint:
        for layer in wanted:
            checkpoint.check(layer)
        pad_id = config.tokenizer(tokenizer).pad_id
        opened = {}
        for layer in wanted:
            weights = checkpoint.weights(layer, dtype)
            with device_memory(f"the weights of layer {layer}", device, "open them on another device"):
                weights = {name: tensor.to(device) for name, tensor in weights.items()}
            table = EngramTable.open(place, home, prefix=checkpoint.base(layer), device=rows_device, bounds=bounds, progress=progress)
            opened[layer] = _layer(config.layer_config(layer, pad_id), table, weights)
    return opened


def _place(path: Path) -> Path:
    """The index or file that a folder means."""
    if not path.is_dir():
        return path
    for ending in (INDEX_SUFFIX, ".safetensors"):
        found = sorted(path.glob(f"*{ending}"))
        if len(found) == 1:
            return found[0]
        if found:
            usual = path / f"model{ending}"
            if usual in found and ending == INDEX_SUFFIX:
                return usual
            what = "indexes" if ending == INDEX_SUFFIX else "files .safetensors and no index"
            raise TableError(f"{path}: holds {len(found)} {what}, expected one; name it, such as {found[0].name}")
    raise TableError(f"{path}: holds neither an index nor a file .safetensors, expected a DeepSeek-V4.1 checkpoint")


def _layer(config: LayerConfig, table: EngramTable, weights: dict[str, torch.Tensor]) -> EngramLayer:
    with torch.device("meta"):  # 157 million values need not be drawn to be replaced
        layer = EngramLayer(config, table)
    layer.hasher = NgramHasher(config.hash, config.layer_id)  # whose constants are real
    layer.load_state_dict(weights, assign=True)
    return layer.requires_grad_(False).eval()


class _Checkpoint:
    """The files of a checkpoint, as far as they hold Engram layers; a context manager."""

    def __init__(self, path: Path, prefix: str | None, config: DeepSeekConfig) -> None:
        self.path, self.config = path, config
        self._files: dict[Path, OpenFile] = {}
        try:
            if path.name.endswith(".json"):
                self.places = read_index(path)[1]
            else:
                self.places = dict.fromkeys(self._file(path).header.tensors, path)
            self.prefix = self._prefix(prefix)
        except BaseException:
            self.close()
            raise

    def base(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self.prefix}layers.{layer}.engram."

    def check(self, layer: int) -> None:
        """Are all tensors of a layer there, of the types and shapes that the configuration asks for? Reads headers alone.

        Raises:
            TableError: they are not.
        """
        config, base = self.config, self.base(layer)
        self._need_shards(base)
        hasher = NgramHasher(config.hash_config(0), layer)
        with TableFile(self.path, prefix=base) as table:
            if (table.rows, table.head_dim) != (hasher.rows_total, config.head_dim):
                raise self._refuse(
                    f"{base}embed.weight is [{table.rows}, {table.head_dim}], expected [{hasher.rows_total}, {config.head_dim}], "
                    f"the sum of the primes of layer {layer}; use the config.json of this checkpoint"
                )
        out, into = (config.copies + 1) * config.hidden, config.hash_config(0).columns * config.head_dim
        self._need(f"{base}wkv.weight", ("F8_E4M3",), (out, into))
        self._need(f"{base}wkv.scale", ("F8_E8M0", "U8"), (-(-out // BLOCK), into // BLOCK))
        for name in ("q_weight", "k_weight"):
            self._need(base + name, ("BF16",), (config.copies, config.hidden))

    def weights(self, layer: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The state of an EngramLayer, in its names. Raises TableError where a value is not finite."""
        base = self.base(layer)
        found = {"projections.wkv.weight": self._dequantized(f"{base}wkv", dtype)}
        for name in ("q_weight", "k_weight"):
            found[name] = self._read(base + name).view(torch.bfloat16).to(dtype)
            self._need_finite(base + name, found[name])
        return found

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _refuse(self, what: str) -> TableError:
        return TableError(f"{self.path}: {clipped(what)}")

    def _file(self, path: Path) -> OpenFile:
        if path not in self._files:
            self._files[path] = OpenFile(path)
        return self._files[path]

    def _prefix(self, prefix: str | None) -> str:
        found = sorted({match["prefix"] for name in self.places if name.isprintable() and (match := _NAME.fullmatch(name))})
        there = ", ".join(map(repr, found[:6]))
        if not found:
            raise self._refuse("has no tensor layers.N.engram.embed.weight; expected a DeepSeek-V4.1 checkpoint with its Engram shards")
        if prefix is None and len(found) > 1:
            raise self._refuse(f"has Engram layers under {there}: expected one prefix; pass prefix=")
        wanted = found[0] if prefix is None else prefix if not prefix or prefix.endswith(".") else f"{prefix}."
        if wanted not in found:
            raise self._refuse(f"has no Engram layers under {wanted!r}: expected {there}; pass that as prefix=, or None")
        return wanted

    def _need_shards(self, base: str) -> None:
        """Raises TableError: a shard that the index names is not there."""
        shards = {place.name: place for name, place in self.places.items() if name.startswith(base)}
        missing = sorted(name for name, place in shards.items() if not place.exists())
        if not shards:
            raise self._refuse(f"holds no tensor {base}*, expected those of every Engram layer; name the layers that are there in layers=")
        if missing:
            raise self._refuse(f"{', '.join(missing)} not found beside it, expected all {len(shards)} files with {base}*; download them")

    def _span(self, name: str) -> tuple[OpenFile, TensorSpan]:
        if name not in self.places:
            raise self._refuse(f"lacks {name!r}, expected it beside the layer's table; copy or convert the checkpoint again")
        file = self._file(self.places[name])
        if name not in file.header.tensors:
            raise self._refuse(f"{self.places[name].name} lacks {name!r}, which the index places there; copy it again")
        return file, file.header.tensors[name]

    def _need(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        _, span = self._span(name)
        if span.dtype not in dtypes or span.shape != shape:
            raise self._refuse(
                f"{name} is {span.dtype} {list(span.shape)}, expected {' or '.join(dtypes)} {list(shape)}; "
                "use a DeepSeek-V4.1 checkpoint as published, and its own config.json"
            )

    def _read(self, name: str) -> torch.Tensor:
        """uint8 ``[..., bytes of the last dimension]``."""
        file, span = self._span(name)
        out = np.empty((*span.shape[:-1], span.nbytes // max(1, int(np.prod(span.shape[:-1])))), np.uint8)
        file.read_into(span.offset, out)
        return torch.from_numpy(out)

    def _dequantized(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """``[out, in]`` of an e4m3 weight with an e8m0 scale for each block of 32 x 32, rounded once."""
        file, span = self._span(f"{name}.weight")
        rows, width = span.shape
        scale = self._read(f"{name}.scale")
        out = torch.empty(rows, width, dtype=dtype)
        for first in range(0, rows, _STRIP):  # the float32 of all of it would be 629 MB
            payload = np.empty((min(_STRIP, rows - first), width), np.uint8)
            file.read_into(span.offset + first * width, payload)
            scales = scale[first // BLOCK :][: _STRIP // BLOCK].repeat_interleave(BLOCK, dim=0)[: len(payload)]
            strip = out[first : first + len(payload)]
            strip.copy_(dequantize(torch.from_numpy(payload).view(torch.float8_e4m3fn), scales))
            self._need_finite(f"{name}.weight", strip)
        return out

    def _need_finite(self, name: str, values: torch.Tensor) -> None:
        if not all(bound.isfinite() for bound in values.aminmax()):  # NaN among them is both
            raise self._refuse(f"{name} holds values that are NaN or infinite in {values.dtype}; copy the checkpoint again")
