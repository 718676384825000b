"""One frozen decoder and whatever reads its token ids: hooks around its call, and in front of its layers.

Imports torch, tiny_engram.errors and, of this package, decoders and history. What a call carries travels with it, as a keyword
argument from the decoder to its layers: two calls that interleave, on one thread or several, share nothing.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tiny_engram.errors import TinyEngramError

from .decoders import Decoder, decoder_of
from .history import BLOCKED, TokenHistory, track

__all__ = ["Call", "DecoderHost", "Reader", "reading_as"]

_CALL = "engram_call"
_owners: ContextVar[torch.Tensor | None] = ContextVar("tiny_engram_owners", default=None)


@contextmanager
def reading_as(owners: torch.Tensor) -> Iterator[None]:
    """Caches that are begun within take these owners, int64 ``[B]``, one for each row, or for each run of equally many rows (beams)."""
    token = _owners.set(owners)
    try:
        yield
    finally:
        _owners.reset(token)


@dataclass(slots=True)
class Call:
    """What one call of the decoder brings.

    Attributes:
        ids: int64 ``[B, T]`` raw token ids; where `blocked` is true they mean nothing.
        blocked: bool ``[B, T]``: padding, and tokens that no n-gram may read.
        before: int64 ``[B, reach]`` raw ids of the tokens in front, oldest first, `BLOCKED` where there is none.
        owners: int64 ``[B]`` or None.
        history: of the cache, and `past`, its length; None without one.
        prepared: what each reader made of it.
        passed: layers that were called.
    """

    ids: torch.Tensor
    blocked: torch.Tensor
    before: torch.Tensor
    owners: torch.Tensor | None
    history: TokenHistory | None = None
    past: "int | torch.Tensor" = 0
    prepared: dict[int, Any] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)


class Reader(Protocol):
    """What is attached to a decoder: it changes hidden states in front of layers, from the ids of a call."""

    layers: tuple[int, ...]
    blocked_ids: tuple[int, ...]  # tokens that it may not read

    @property
    def reach(self) -> int:
        """Tokens that it looks back."""
        ...

    @property
    def enabled(self) -> bool: ...

    def prepare(self, call: Call) -> Any:
        """Before the first layer runs; what it returns is given to `at`."""
        ...

    def at(self, layer: int, hidden: torch.Tensor, call: Call, prepared: Any) -> torch.Tensor:
        """Hidden states ``[B, T, D]`` that go into a layer -> those that shall."""
        ...


def _unattended(mask: Any, past: "int | torch.Tensor", ids: torch.Tensor) -> torch.Tensor | None:
    """bool ``[B, T]``: the block's tokens that the attention mask hides, which are padding; None where there is no mask.

    A two-dimensional mask says so itself. In one of four dimensions a token that does not attend to itself is padding: so says the
    diagonal, whatever window a layer has.
    """
    if isinstance(mask, dict):
        mask = next(iter(mask.values()))
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        shown = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TinyEngramError(f"attention mask is {shown}: expected [B, T] or [B, heads, T, keys]; pass the tokenizer's own")
    place = torch.arange(ids.shape[1], device=ids.device) + past
    if mask.ndim == 2:
        if mask.shape[1] == ids.shape[1]:
            return mask == 0  # of this block alone, or nothing was before it
        return mask.index_select(1, place.to(mask.device)).to(ids.device) == 0
    seen = mask[:, 0].gather(2, place[None, :, None].expand(mask.shape[0], -1, 1).to(mask.device))[..., 0].to(ids.device)
    seen = seen if seen.dtype == torch.bool else seen == 0
    return (~seen).expand(ids.shape)


class DecoderHost:
    """The hooks of one decoder, shared by its readers; there are none while nobody reads."""

    _hosts: "weakref.WeakKeyDictionary[nn.Module, DecoderHost]" = weakref.WeakKeyDictionary()

    def __init__(self, decoder: Decoder) -> None:
        """Use `of`."""
        self._module = weakref.ref(decoder.module)
        self._layers = [weakref.ref(layer) for layer in decoder.layers]
        self._cache_argument = decoder.cache_argument
        self.readers: list[Reader] = []
        self._handles: list[Any] = []

    @classmethod
    def of(cls, model: Any) -> "DecoderHost":
        """The host of a model's decoder, made when first asked for."""
        decoder = decoder_of(model)
        host = cls._hosts.get(decoder.module)
        if host is None:
            host = cls._hosts[decoder.module] = cls(decoder)
        return host

    def add(self, reader: Reader) -> None:
        """Attach a reader behind those that are there. Raises TinyEngramError for a layer that the decoder does not have."""
        count = len(self._layers)
        wrong = [layer for layer in reader.layers if not 0 <= layer < count]
        if wrong or not reader.layers:
            raise TinyEngramError(f"layers are {list(reader.layers)}: expected one or more of 0 to {count - 1}, of this model")
        self.readers.append(reader)
        self._hook()

    def remove(self, reader: Reader) -> None:
        """Detach a reader; the last one takes the hooks with it."""
        self.readers = [each for each in self.readers if each is not reader]
        self._hook()

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        module = self._module()
        if not self.readers or module is None:
            return
        self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        for number in sorted({layer for reader in self.readers for layer in reader.layers}):
            layer = self._layers[number]()
            assert layer is not None
            self._handles.append(layer.register_forward_pre_hook(_LayerHook(self, number), with_kwargs=True))

    # -- a call of the decoder -----------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = args[0] if args else kwargs.get("input_ids")
        told = kwargs.pop("engram_ids", None)  # beside inputs_embeds
        ids = told if ids is None else ids
        if ids is None:
            raise TinyEngramError("the model was called with inputs_embeds alone: n-grams need token ids; pass engram_ids=, int64 [B, T], too")
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), self._cache_argument)
        cache = kwargs.get(name)
        wanted = kwargs.get("use_cache")
        if cache is None and (module.config.use_cache if wanted is None else wanted) and not _checkpointed(module):
            from transformers import DynamicCache

            cache = kwargs[name] = DynamicCache(config=module.config)  # pyright: ignore[reportArgumentType]
        kwargs[_CALL] = self._call(ids, mask, cache)
        return args, kwargs

    def _call(self, ids: torch.Tensor, mask: Any, cache: Any) -> Call:
        past = cache.get_seq_length() if cache is not None else 0
        hidden = _unattended(mask, past, ids)
        blocked = torch.zeros_like(ids, dtype=torch.bool) if hidden is None else hidden
        for token in sorted({token for reader in self.readers for token in reader.blocked_ids}):
            blocked = blocked | (ids == token)
        reach = max(reader.reach for reader in self.readers)
        owners = _owners.get()
        if owners is not None:
            owners = _spread(owners.to(ids.device), ids.shape[0])
        history = None
        if cache is None:
            before = ids.new_full((ids.shape[0], reach), BLOCKED)
        else:
            history = track(cache)
            if history.owners is None:
                history.owners = owners
            owners = history.owners
            history.extend(torch.where(blocked, BLOCKED, ids), past)
            before = history.before(past, reach)
        call = Call(ids, blocked, before, owners, history, past)
        for number, reader in enumerate(self.readers):
            if reader.enabled:
                call.prepared[number] = reader.prepare(call)
        return call

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = kwargs[_CALL]
        lacking = {layer for number in call.prepared for layer in self.readers[number].layers} - set(call.passed)
        if lacking:
            raise TinyEngramError(
                f"layers {sorted(lacking)} of the {type(module).__name__} were not called, or without the call's ids: expected all that Engram "
                "reads at; detach and attach again after changing the model's layers"
            )

    def _at(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = kwargs.pop(_CALL, None)
        if call is None:
            raise TinyEngramError(f"layer {number} was called by itself: expected a call of the whole decoder, which brings the token ids")
        call.passed.append(number)
        hidden = args[0] if args else kwargs["hidden_states"]
        for place, prepared in call.prepared.items():
            reader = self.readers[place]
            if number in reader.layers:
                hidden = reader.at(number, hidden, call, prepared)
        if args:
            return (hidden, *args[1:]), kwargs
        kwargs["hidden_states"] = hidden
        return args, kwargs


class _LayerHook:
    """The host's hook in front of one layer."""

    def __init__(self, host: DecoderHost, number: int) -> None:
        self.host, self.number = host, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.host._at(self.number, args, kwargs)


def _checkpointed(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


def _spread(owners: torch.Tensor, rows: int) -> torch.Tensor:
    """Owners of the rows of a batch; beams of a prompt lie behind each other."""
    if not len(owners) or rows % len(owners):
        raise TinyEngramError(f"{len(owners)} users for a batch of {rows} rows: expected one for each row, or for each prompt")
    return owners.repeat_interleave(rows // len(owners))
