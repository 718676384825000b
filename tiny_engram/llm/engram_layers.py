"""EngramLayers: Engram layers in a frozen causal LM, which read all suffix n-grams of its text.

Imports torch, safetensors, the core (layer, tokenizer, table) and, of this package, ahead, config, decoders, history, host and rows.
"""

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.files import check_writable, sync_folder, write_atomically
from tiny_engram.layer import EngramLayer
from tiny_engram.table import EngramTable
from tiny_engram.table.hot import HotRows
from tiny_engram.table.prefetch import Rows
from tiny_engram.table.storage import Home
from tiny_engram.table.table_writer import write_table
from tiny_engram.tokenizer import CompressedTokenizer

from .ahead import Ahead, Coming, read_rows
from .config import EngramConfig
from .decoders import UnsupportedModelError, decoder_of
from .history import BLOCKED
from .host import Call, DecoderHost
from .rows import LearnedRows, check_tables, learned_rows, rows_total

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "EngramLayers"]

logger = logging.getLogger(__name__)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def _table_file(layer: int) -> str:
    return f"table_layer_{layer}.safetensors"


class EngramLayers(nn.Module):
    """Attached to a causal LM by :meth:`attach` or :meth:`from_pretrained`; a module of its own, never a part of the model's.

    Attributes:
        config: the completed configuration.
        layers: the model's layers that have one.
        enabled: False leaves the model as it is, bit for bit, for calls that begin then. A cache is read as it was begun, with Engram
            or without: the other way is refused.
    """

    def __init__(self, config: EngramConfig, tokenizer: CompressedTokenizer, tables: Mapping[int, Rows | LearnedRows]) -> None:
        """Use :meth:`attach`."""
        super().__init__()
        self.config = config
        self.layers = config.layers
        self.reach = config.max_ngram - 1
        self.blocked_ids = config.blocked_ids
        self.enabled = True
        self.tokenizer = tokenizer
        self.engrams = nn.ModuleDict({str(layer): EngramLayer(config.layer_config(layer), tables[layer]) for layer in config.layers})
        self._canonical: dict[torch.device, torch.Tensor] = {}
        stored = {layer: table for layer, table in tables.items() if not isinstance(table, LearnedRows)}
        self._ahead = {layer: Ahead(table, self._engram(layer).hasher.config.columns) for layer, table in stored.items()}
        self.cache_key = uuid.uuid4().hex  # what a cache keeps for these layers is nobody else's
        self._told = False

    @classmethod
    def attach(cls, model: Any, config: EngramConfig, tokenizer: Any, *, tables: Mapping[int, Rows] | None = None) -> Self:
        """New layers in front of a model's; with rows that learn, the model computes the same bits as before.

        Args:
            tables: rows that are there already, for each of the config's layers, in whatever home; they do not learn, and only
                `start` "values" leaves the model as it is. Without, rows learn.

        Raises:
            UnsupportedModelError: the model has no place for them.
            TinyEngramError: a tokenizer without a fast backend, a config made for another model or tokenizer, or tables for other
                layers, of another width or with too few rows.
        """
        config, compressed = _completed(model, config, tokenizer)
        generator = torch.Generator().manual_seed(config.seed)
        if tables is None:
            tables_made = learned_rows(config, generator)
        else:
            check_tables(config, tables)
            tables_made = tables
        made = cls(config, compressed, tables_made)
        made._draw(generator)
        made._mount(model)
        return made

    def _draw(self, generator: torch.Generator) -> None:
        """Draw the projections, so that what they add at first is zero."""
        for layer in self.layers:
            projections = self._engram(layer).projections
            for linear in (each for each in projections.modules() if isinstance(each, nn.Linear)):
                with torch.no_grad():
                    linear.weight.normal_(std=linear.in_features**-0.5, generator=generator)
                    if linear.bias is not None:
                        linear.bias.zero_()
            if self.config.start == "values":
                value = projections.wkv.weight[-projections.hidden :] if self.config.form == "v41" else projections.value_proj.weight
                with torch.no_grad():
                    value.zero_()

    @property
    def learned(self) -> dict[str, LearnedRows]:
        """Rows that learn, by their layer."""
        return {str(layer): table for layer in self.layers if isinstance(table := self._engram(layer).table, LearnedRows)}

    def _engram(self, layer: int) -> EngramLayer:
        return self.engrams[str(layer)]  # pyright: ignore[reportReturnType]

    def use_rows(self, layer: int, rows: Rows) -> None:
        """Read a layer's rows from somewhere else: hot rows before its table, or what has the same rows in another home.

        HotRows are told of the ids of every call; refresh them now and then. Rows that learned are kept by :meth:`stored`, which goes
        first. Of a batch that is under way, rows come from where they came from when it began.

        Raises:
            TinyEngramError: no Engram at this layer, or rows of another width.
        """
        if layer not in self.layers:
            raise TinyEngramError(f"layer {layer} has no Engram: expected one of {list(self.layers)}")
        if rows.head_dim != self.config.head_dim:
            raise TinyEngramError(f"rows have {rows.head_dim} values: expected {self.config.head_dim}, as EngramConfig.head_dim says")
        engram = self._engram(layer)
        del engram.table  # a module and a plain object are kept in different places
        engram.table = rows
        self._ahead[layer] = Ahead(rows, engram.hasher.config.columns)

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def _mount(self, model: Any) -> None:
        decoder = decoder_of(model)
        others = [reader for reader in DecoderHost.of(model).readers if isinstance(reader, EngramLayers)]
        if others:
            places = ", ".join(str(list(other.layers)) for other in others)
            logger.warning(
                "this model has Engram layers already, in front of layers %s: all of them add to its states; detach() those that are not "
                "meant to stay",
                places,
            )
        for layer in self.layers:
            if layer >= len(decoder.layers):
                raise TinyEngramError(
                    f"layer {layer}: expected 0 to {len(decoder.layers) - 1}, of this model; choose others in EngramConfig.layers"
                )
            place = next(decoder.layers[layer].parameters()).device
            if place.type != "meta":  # weights that are elsewhere until they are used; `at` follows the hidden states
                self.engrams[str(layer)].to(place)
        known = self.tokenizer.canonical
        # A model may have room for more ids than its tokenizer has tokens, and may even say one.
        size = max(len(known), int(decoder.config.vocab_size))
        # The last entry is for ids beyond these: embeddings may be added later.
        self._canonical = {known.device: torch.cat((known, known.new_full((size - len(known) + 1,), self.tokenizer.pad_id)))}
        DecoderHost.of(model).add(self)

    def detach(self) -> None:
        """Take all hooks out of the model; nothing happens where there are none.

        A cache that was filled before keeps what Engram put into it, and the model alone goes on in it without a word: begin with an
        empty one.
        """
        DecoderHost.release(self)

    def reattach(self, model: Any) -> None:
        """Put detached layers back, with the rows and weights that they have; nothing happens where they are attached to this model.

        Args:
            model: the one that they were attached to, or one of the same weights.

        Raises:
            UnsupportedModelError: a model without a place for them, or of another width.
            TinyEngramError: they are attached to another model.
        """
        decoder, where = decoder_of(model), DecoderHost.model_of(self)
        if where is decoder.model:
            return
        if where is not None:
            raise TinyEngramError(f"these Engram layers are attached to another {type(where).__name__}: expected none; call detach() first")
        if decoder.hidden != self.config.hidden:
            raise UnsupportedModelError(f"the model has width {decoder.hidden}: expected {self.config.hidden}, that of the layers")
        self._mount(model)

    # -- what learns ---------------------------------------------------------------------------------------------------------

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(those that learn, all), of these layers and of the model that they are attached to, as PEFT counts them."""
        model = DecoderHost.model_of(self)
        parameters = [*self.parameters(), *(model.parameters() if model is not None else ())]
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def print_trainable_parameters(self) -> None:
        """PEFT's line. A model that was not frozen counts in full: call its `requires_grad_(False)`."""
        learn, total = self.get_nb_trainable_parameters()
        print(f"trainable params: {learn:,d} || all params: {total:,d} || trainable%: {100 * learn / total:.4f}")

    def _tell_unfrozen(self) -> None:
        """Once, where a training step goes through a base that learns: an optimiser of model.parameters() has none of Engram's."""
        model: Any = DecoderHost.model_of(self)
        if model is None or not model.training or not model.get_input_embeddings().weight.requires_grad:
            return
        self._told = True
        logger.warning(
            "the model's own parameters require gradients: an optimiser of model.parameters(), such as Trainer's own, teaches these and "
            "not Engram; call model.requires_grad_(False) and train with tiny_engram.llm_training.EngramOptimizer(layers)"
        )

    def prepare(self, call: Call) -> dict[int, "torch.Tensor | Coming"]:
        """For every layer its rows, which are being read, or row ids int64 ``[B, T, columns]`` of rows that `at` will read."""
        if not self._told and not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.learned:
            self._tell_unfrozen()
        canonical = self._canonical_on(call.ids.device)
        beyond = len(canonical) - 1
        ids = canonical[torch.where(call.blocked, 0, call.ids).clamp(max=beyond)]
        before = call.before[:, call.before.shape[1] - self.reach :]
        stop = before == BLOCKED
        before = canonical[torch.where(stop, 0, before).clamp(max=beyond)]
        blocked, packed = call.blocked, call.packed
        if packed is not None:
            ids, blocked = packed.lay(ids, 0), packed.lay(blocked, True)
            before, stop = (x.new_full((len(ids), self.reach), 1) for x in (before, stop))
        prepared = {}
        for layer in self.layers:
            engram = self._engram(layer)
            row_ids = engram.row_ids(ids, blocked=blocked, history=before, history_blocked=stop)
            row_ids = row_ids if packed is None else packed.back(row_ids)
            prepared[layer] = self._read(layer, engram, row_ids.to(engram.q_weight.device))
        return prepared

    def _canonical_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._canonical:
            with torch.inference_mode(False):
                self._canonical[device] = next(iter(self._canonical.values())).to(device)
        return self._canonical[device]

    def _read(self, layer: int, engram: EngramLayer, row_ids: torch.Tensor) -> "torch.Tensor | Coming":
        if torch.compiler.is_compiling() or isinstance(engram.table, LearnedRows):
            return row_ids
        coming = self._ahead[layer].begin(row_ids, engram.row_dtype)
        return row_ids if coming is None else coming

    def at(self, layer: int, hidden: torch.Tensor, call: Call, prepared: dict[int, "torch.Tensor | Coming"]) -> torch.Tensor:
        """Hidden states ``[B, T, D]`` with what the table says about the last tokens; blocked positions keep their bits."""
        engram = self._engram(layer)
        if engram.q_weight.device != hidden.device:
            engram.to(hidden.device)
        found = prepared[layer]
        if isinstance(found, torch.Tensor):
            found = found.to(hidden.device)
            learns = isinstance(engram.table, LearnedRows)
            rows = engram.rows(found) if learns else read_rows(found, self._ahead[layer].handle, engram.row_dtype, self.config.head_dim)
            return self._added(layer, engram, hidden, rows, call)
        rows = found.wait()
        # A gradient would look at the rows later, when their memory has others.
        out = self._added(layer, engram, hidden, (rows.clone() if torch.is_grad_enabled() else rows).to(hidden.device), call)
        found.done()
        return out

    def _added(self, layer: int, engram: EngramLayer, hidden: torch.Tensor, rows: torch.Tensor, call: Call) -> torch.Tensor:
        blocked = call.blocked.to(hidden.device)
        if self.config.branches == 1 and self.config.form == "v41":
            return engram(hidden.unsqueeze(2), call.ids, rows=rows, blocked=blocked)[:, :, 0]
        copies = hidden.unsqueeze(2).expand(-1, -1, self.config.branches, -1)
        gated = engram.gated_values(copies, rows, blocked=blocked)
        before = None
        if call.history is not None and engram.conv_reach:
            before = call.history.extend_states(f"{self.cache_key}.{layer}", gated, call.past, engram.conv_reach)
        packed = call.packed
        mixed = engram.mixed(gated, before) if packed is None else packed.back(engram.mixed(packed.lay(gated, 0)))
        out = hidden + mixed.mean(dim=2)
        return torch.where(blocked.unsqueeze(-1), hidden, out)

    # -- files ---------------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """The adapter alone: its config, its weights in float32, and a table of stored rows for each layer.

        Files that were there stay as they are until all new ones are whole: tables of one adapter beside weights of another would be
        read without a word.

        Raises:
            TinyEngramError: the folder cannot be written to, or a row is not finite.
        """
        folder = Path(folder)
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = {layer: self.stored(layer) for layer in self.layers}
        state = {name: value for name, value in self.engrams.state_dict().items() if name.split(".")[1] != "table"}
        weights = {name: value.detach().float().cpu().contiguous() for name, value in state.items()}
        described = {"peft_type": "ENGRAM", "task_type": "CAUSAL_LM", **self.config.to_dict()}
        try:
            with tempfile.TemporaryDirectory(prefix=".saving.", dir=folder) as made:
                for layer, table in tables.items():
                    write_table(Path(made, _table_file(layer)), table.storage)
                write_atomically(Path(made, WEIGHTS_FILE), save(weights, {"format": "pt"}))
                write_atomically(Path(made, CONFIG_FILE), (json.dumps(described, indent=2) + "\n").encode())
                for name in (*map(_table_file, tables), WEIGHTS_FILE, CONFIG_FILE):
                    os.replace(Path(made, name), folder / name)
                sync_folder(folder)
        except OSError as error:
            reason = error.strerror or error
            raise TinyEngramError(f"{folder}: cannot write the adapter ({reason}); free space or choose another folder") from error

    def stored(self, layer: int) -> EngramTable:
        """A layer's table, as it is kept and served. Raises TinyEngramError where its rows are somewhere else, see `use_rows`."""
        table = self._engram(layer).table
        if isinstance(table, LearnedRows):
            return table.table()
        table = table.table if isinstance(table, HotRows) else table
        if not isinstance(table, EngramTable):
            raise TinyEngramError(f"layer {layer} reads from {type(table).__name__}: expected an EngramTable, which a file can hold")
        return table

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path, tokenizer: Any, *, home: Home = "mapped") -> Self:
        """Attach what `save_pretrained` wrote; rows are read from where `home` says (a mapped file, pinned memory, the device).

        Raises:
            TinyEngramError: no such folder, files that are missing or damaged, or made for another model or tokenizer.
        """
        folder = Path(folder)
        try:
            described = json.loads((folder / CONFIG_FILE).read_text())
        except (OSError, ValueError) as error:
            raise TinyEngramError(
                f"{folder / CONFIG_FILE}: cannot be read ({error}); expected a folder that save_pretrained wrote"
            ) from error
        if not isinstance(described, dict) or described.pop("peft_type", None) != "ENGRAM":
            raise TinyEngramError(f"{folder / CONFIG_FILE}: not of Engram layers; expected peft_type 'ENGRAM'")
        described.pop("task_type", None)
        config, compressed = _completed(model, EngramConfig.from_dict(described), tokenizer)
        _tell_another_base(config, decoder_of(model).config)
        device = next(decoder_of(model).module.parameters()).device
        # A hash is within a table of the right size, which is checked once: a lookup that asks again waits for the device.
        options = {"device": device if home == "device" else None, "bounds": "ignore"}
        tables = {layer: EngramTable.open(folder / _table_file(layer), home, **options) for layer in config.layers}
        for layer, table in tables.items():
            expected = rows_total(config, layer), config.head_dim
            if (table.storage.rows, table.storage.head_dim) != expected:
                found = f"{table.storage.rows} rows of {table.storage.head_dim}"
                wanted = f"{expected[0]} of {expected[1]}"
                raise TinyEngramError(f"{folder / _table_file(layer)}: {found} values, expected {wanted}; copy the folder again")
        made = cls(config, compressed, tables)
        try:
            made.engrams.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise TinyEngramError(f"{folder / WEIGHTS_FILE}: cannot be read ({reason}); expected what save_pretrained wrote") from error
        made.requires_grad_(False)
        made._mount(model)
        return made


def _completed(model: Any, config: EngramConfig, tokenizer: Any) -> tuple[EngramConfig, CompressedTokenizer]:
    """The config with what model and tokenizer say."""
    decoder = decoder_of(model)
    if not isinstance(config, EngramConfig):
        raise ConfigError(f"config is {type(config).__name__}: expected an EngramConfig")
    pad = getattr(tokenizer, "pad_token_id", None)
    compressed = CompressedTokenizer(tokenizer, pad_id=pad if pad is not None else getattr(tokenizer, "eos_token_id", None))
    completed = config.completed(
        compressed_vocab=compressed.size,
        pad_id=compressed.pad_id,
        fingerprint=compressed.fingerprint,
        hidden=decoder.hidden,
        base_model_name_or_path=getattr(decoder.model.config, "name_or_path", None) or None,
    )
    return completed, compressed


def _tell_another_base(config: EngramConfig, has: Any) -> None:
    """Widths and tokenizers are compared elsewhere; of weights only the name is known, and its last part where it is a path."""
    made, now = ((name or "").rstrip("/").rpartition("/")[2] for name in (config.base_model_name_or_path, getattr(has, "name_or_path", "")))
    if made and now and made != now:
        logger.warning("these Engram layers were made for %s, this model is %s: expected the weights that they were taught on", made, now)
