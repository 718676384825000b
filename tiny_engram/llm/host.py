"""One frozen decoder and whatever reads its token ids: hooks around its call, and in front of its layers.

Imports torch, tiny_engram.errors and, of this package, decoders, history, masks and packing. What a call carries travels with it, as a
keyword argument from the decoder to its layers: two calls that interleave, on one thread or several, share nothing.
"""

import copy
import inspect
import sys
import threading
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
from .masks import padding
from .packing import Packed, packed_texts

__all__ = ["Call", "DecoderHost", "Reader", "reading_as"]

_PASS = "engram_pass"
_owners: ContextVar[torch.Tensor | None] = ContextVar("tiny_engram_owners", default=None)
_owning = 0  # contexts of `reading_as` that are open, in any thread: a graph cannot look into a ContextVar, and need not without one
_owning_lock = threading.Lock()


@contextmanager
def reading_as(owners: torch.Tensor) -> Iterator[None]:
    """Caches that are nobody's yet take these owners, int64 ``[B]``, one for each row, or for each run of equally many rows (beams)."""
    global _owning
    with _owning_lock:
        _owning += 1
    token = _owners.set(owners)
    try:
        yield
    finally:
        _owners.reset(token)
        with _owning_lock:
            _owning -= 1


@dataclass(slots=True)
class Call:
    """What one call of the decoder brings to one reader.

    Attributes:
        ids: int64 ``[B, T]`` raw token ids; where `blocked` is true they mean nothing.
        blocked: bool ``[B, T]``: padding, and the reader's blocked tokens.
        before: int64 ``[B, reach]`` raw ids of the tokens in front, oldest first, `BLOCKED` where there is none that the reader may read.
        owners: int64 ``[B]`` or None.
        history: of the cache, and `past`, its length as the call began; None without one.
        packed: where the texts lie, if there are several in a row; none reads what is in front of it in another. They come without a cache.
    """

    ids: torch.Tensor
    blocked: torch.Tensor
    before: torch.Tensor
    owners: torch.Tensor | None
    history: TokenHistory | None = None
    past: "int | torch.Tensor" = 0
    packed: Packed | None = None


class Reader(Protocol):
    """What is attached to a decoder: it changes hidden states in front of layers, from the ids of a call.

    One that changes all tokens has a `cache_key` too, a string of its own: a cache that began with it is read with it, and no other is.
    """

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


@dataclass(slots=True)
class _Pass:
    """One call on its way through the layers: readers with what they made of it, and the layers that it came to."""

    readings: list[tuple[Reader, Call, Any]]
    passed: list[int] = field(default_factory=list)


class DecoderHost:
    """The hooks of one decoder, shared by its readers; there are none while nobody reads.

    A deep copy of the model has a host of its own, with copies of the readers. With hooks in it a model cannot be pickled.
    """

    _hosts: "weakref.WeakKeyDictionary[nn.Module, DecoderHost]" = weakref.WeakKeyDictionary()

    def __init__(self, decoder: Decoder) -> None:
        """Use `of`."""
        self._model, self._module = weakref.ref(decoder.model), weakref.ref(decoder.module)
        self._layers = [weakref.ref(layer) for layer in decoder.layers]
        self._cache_argument = decoder.cache_argument
        self._names = tuple(inspect.signature(decoder.module.forward).parameters)
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

    @classmethod
    def model_of(cls, reader: Reader) -> nn.Module | None:
        """The causal LM that a reader is attached to."""
        return next((host._model() for host in list(cls._hosts.values()) if any(each is reader for each in host.readers)), None)

    @classmethod
    def release(cls, reader: Reader) -> None:
        """Detach a reader from whatever it is attached to."""
        for host in list(cls._hosts.values()):
            host.remove(reader)

    def add(self, reader: Reader) -> None:
        """Attach a reader behind those that are there. Raises TinyEngramError for a layer that the decoder does not have."""
        count = len(self._layers)
        wrong = [layer for layer in reader.layers if not 0 <= layer < count]
        if wrong or not reader.layers:
            raise TinyEngramError(f"layers are {list(reader.layers)}: expected one or more of 0 to {count - 1}, of this model")
        self.readers = [*self.readers, reader]
        self._hook()

    def remove(self, reader: Reader) -> None:
        """Detach a reader, where it is attached here; the last one takes the hooks with it."""
        if any(each is reader for each in self.readers):
            self.readers = [each for each in self.readers if each is not reader]
            self._hook()

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if "torch._dynamo" in sys.modules:
            # What was compiled keeps the hooks that it was compiled with, and nothing in it asks whether they are still those.
            torch.compiler.reset()
        module = self._module()
        if not self.readers or module is None:
            return
        self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        # In front of all, so that none passes on to its attention what it does not know.
        for number, reference in enumerate(self._layers):
            layer = reference()
            assert layer is not None
            self._handles.append(layer.register_forward_pre_hook(_LayerHook(self, number), with_kwargs=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecoderHost":
        module = self._module()
        copied = memo[id(module)]  # the decoder, whose hooks are being copied
        host = memo[id(self)] = object.__new__(type(self))
        host._module = weakref.ref(copied)
        host._model = weakref.ref(memo.get(id(self._model()), copied))  # the decoder alone may be copied
        host._cache_argument, host._names = self._cache_argument, self._names
        host._layers = [weakref.ref(copy.deepcopy(layer(), memo)) for layer in self._layers]
        host.readers = copy.deepcopy(self.readers, memo)
        host._handles = copy.deepcopy(self._handles, memo)
        self._hosts[copied] = host
        return host

    def __reduce__(self) -> Any:
        raise TinyEngramError("a model with Engram attached cannot be pickled: call detach first, and attach in the other process")

    # -- a call of the decoder -----------------------------------------------------------------------------------------------

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = _ids_of(kwargs)
        name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), self._cache_argument)
        cache = kwargs.get(name)
        wanted = kwargs.get("use_cache")
        if cache is None and (module.config.use_cache if wanted is None else wanted) and not _checkpointed(module):
            from transformers import DynamicCache

            cache = kwargs[name] = DynamicCache(config=module.config)  # pyright: ignore[reportArgumentType]
        kwargs[_PASS] = _Pass(self._readings(ids, kwargs.get("attention_mask"), kwargs.get("position_ids"), cache))
        return (), kwargs

    def _readings(self, ids: torch.Tensor, mask: Any, positions: Any, cache: Any) -> list[tuple[Reader, Call, Any]]:
        past, keys, history = 0, ids.shape[1], None
        if cache is not None:
            history = track(cache)
            past = cache.get_seq_length()
            if not cache.is_compileable:
                past = int(past)  # a window's length may be a tensor after a crop
            if isinstance(past, int):
                keys += past
            else:
                past = past.clone()  # it is the cache's own counter, which the first layer moves on
                keys = cache.get_max_length()
        hidden = padding(mask, ids, past, keys)
        padded = ids < 0 if hidden is None else hidden | (ids < 0)
        reach = max(reader.reach for reader in self.readers)
        begun = history is not None and history.begun
        owners = history.owners if begun else None  # pyright: ignore[reportOptionalMemberAccess]
        # What nobody in particular began, such as a prefix for everybody, is whoever's that goes on with it. Not in a graph, which
        # would be broken at every step for it; its first call is none, as generate makes it.
        if owners is None and not (begun and torch.compiler.is_compiling()) and _owning:
            owners = _current_owners(ids)  # pyright: ignore[reportArgumentType]
        if history is None:
            before = ids.new_full((ids.shape[0], reach), BLOCKED)
        else:
            reading = tuple(key for reader in self.readers if reader.enabled and (key := getattr(reader, "cache_key", None)))
            history.read_by(reading, past if begun else 0)
            history.owners, history.begun = owners, True  # pyright: ignore[reportAttributeAccessIssue]
            history.extend(torch.where(padded, BLOCKED, ids), past)
            before = history.before(past, reach)
        packed = None
        if mask is None and cache is None and positions is not None:
            packed = packed_texts(positions, ids)  # pyright: ignore[reportCallIssue]
        readings = []
        for reader in self.readers:
            if reader.enabled:
                blocked, seen = padded, before
                for token in reader.blocked_ids:
                    blocked, seen = blocked | (ids == token), torch.where(seen == token, BLOCKED, seen)
                call = Call(ids, blocked, seen, owners, history, past, packed)  # pyright: ignore[reportArgumentType]
                readings.append((reader, call, reader.prepare(call)))
        return readings

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        flow = kwargs[_PASS]
        # A model that drafts for itself leaves its later layers out.
        wanted = {layer for reader, _, _ in flow.readings for layer in reader.layers if layer < module.config.num_hidden_layers}
        lacking = wanted - set(flow.passed)
        if lacking:
            raise TinyEngramError(
                f"layers {sorted(lacking)} of the {type(module).__name__} were not called, or without the call's ids: expected all that "
                "Engram reads at; detach and attach again after changing the model's layers"
            )

    def _at(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        flow = kwargs.pop(_PASS, None)
        if flow is None:
            raise TinyEngramError(f"layer {number} was called by itself: expected a call of the whole decoder, which brings the token ids")
        flow.passed.append(number)
        hidden = args[0] if args else kwargs["hidden_states"]
        for reader, call, prepared in flow.readings:
            if number in reader.layers:
                hidden = reader.at(number, hidden, call, prepared)
        if args:
            return (hidden, *args[1:]), kwargs
        kwargs["hidden_states"] = hidden
        return args, kwargs


class _LayerHook:
    """The host's hook in front of one layer."""

    def __init__(self, host: DecoderHost | None, number: int) -> None:
        self.host, self.number = host, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.host is None:
            raise TinyEngramError(f"layer {self.number} was copied without its model while Engram was attached: copy it after detach")
        return self.host._at(self.number, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_LayerHook":
        whole = self.host is not None and id(self.host._module()) in memo
        return _LayerHook(copy.deepcopy(self.host, memo) if whole else None, self.number)


def _ids_of(kwargs: dict[str, Any]) -> torch.Tensor:
    """Token ids int64 ``[B, T]`` of a call by its arguments, out of which `engram_ids` is taken; below 0 where there is no token."""
    told, ids = kwargs.pop("engram_ids", None), kwargs.get("input_ids")
    if ids is None:
        shape = list(kwargs["inputs_embeds"].shape[:2])
        if told is None:
            raise TinyEngramError(
                "the model was called with inputs_embeds alone: n-grams need token ids; pass engram_ids=, int64 [B, T], beside them. "
                "generate takes none: call the model so with all but the last token and a cache=, then generate(ids, cache=) with it"
            )
        if told.ndim != 2 or told.shape[0] != shape[0] or told.shape[1] < shape[1]:
            raise TinyEngramError(f"engram_ids are {list(told.shape)}, inputs_embeds of {shape} tokens: expected as many")
        ids = told[:, told.shape[1] - shape[1] :]  # as transformers takes the last of what a whole text came with
    return ids.to(torch.int64)


def _checkpointed(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training and torch.is_grad_enabled()


@torch.compiler.disable
def _current_owners(ids: torch.Tensor) -> torch.Tensor | None:
    """Owners of the rows of a batch; beams of a prompt lie behind each other."""
    owners, rows = _owners.get(), ids.shape[0]
    if owners is None:
        return None
    if not len(owners) or rows % len(owners):
        raise TinyEngramError(f"{len(owners)} users for a batch of {rows} rows: expected one for each row, or for each prompt")
    return owners.to(ids.device).repeat_interleave(rows // len(owners))
