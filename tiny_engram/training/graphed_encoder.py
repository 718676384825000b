"""A frozen text encoder behind its token embeddings, forward and backward, as CUDA graphs: for training rows at `input`.

A small encoder's second pass launches some 150 kernels a step, which take longer to launch than to run; replayed, it is two launches and
four copies. What moves the embeddings stays outside, so that it may do anything. Wherever a graph cannot be had the encoder runs as it
is, with the same states and gradients. May import torch, warnings and the mount on token embeddings.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiny_engram.input_mount import encode_with_input, token_embeddings

__all__ = ["GraphedEncoder", "encode_graphed"]

_Function = Callable[[torch.Tensor], torch.Tensor]
# Calls of one shape before it is captured: shapes that come once or twice never pay for it.
_PATIENCE = 3
# Tokens of one call, batch * time: above, an encoder's kernels outlast their launches, and a graph keeps its activations for good.
_MOST = 4096


class _Lease:
    """One forward pass whose activations lie in a graph's own memory, until its backward pass is done or nothing can ask for it."""

    def __init__(self) -> None:
        self.done = False


class _Leased(torch.autograd.Function):
    """The embeddings as they are; on the way back, a copy of their gradient, since a graph's own is overwritten by its next replay."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lease: _Lease) -> torch.Tensor:
        ctx.lease = lease  # dies with this pass's backward graph
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.lease.done:
            raise RuntimeError("a captured pass of the encoder was walked back twice; its activations may be another's by now")
        ctx.lease.done = True
        return grads[0].clone(), None


def _capture(rest: _Function, sample: torch.Tensor) -> _Function:
    """`rest` as graphs of its forward and backward pass at the shape of `sample`, a leaf with a gradient. Raises what goes wrong."""

    def once() -> None:
        made = rest(sample)
        torch.autograd.grad(made, sample, torch.zeros_like(made))

    # of the sample's device, which need not be the current one: a stream of another would capture nothing
    with torch.cuda.device(sample.device):
        stream, before = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                torch.cuda.set_sync_debug_mode("default")
                once()
                # What waits for the device (`.item()`, a mask made on the host) cannot be captured: found here, no capture is left half
                # done.
                torch.cuda.set_sync_debug_mode("error")
                once()
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.current_stream().wait_stream(stream)
            return torch.cuda.make_graphed_callables(rest, (sample,))  # pyright: ignore[reportReturnType, reportArgumentType]
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Graph:
    """A captured shape, and the pass that its activations belong to."""

    def __init__(self, function: _Function, rest: _Function) -> None:
        # A graph keeps no tensor alive that it reads from outside: `rest` holds the ids, whose memory would be another's.
        self.function, self._rest = function, rest
        self._lease: Callable[[], _Lease | None] = lambda: None

    @property
    def busy(self) -> bool:
        """Does the last forward pass still wait for its backward pass?"""
        lease = self._lease()
        return lease is not None and not lease.done

    def __call__(self, moved: torch.Tensor) -> torch.Tensor:
        lease = _Lease()
        self._lease = weakref.ref(lease)
        return self.function(_Leased.apply(moved, lease)).clone()  # pyright: ignore[reportArgumentType]


class _Structure:
    """The modules, weights and hooks of an encoder. A walk through its modules at each step would cost as much as the graphs save."""

    def __init__(self, encoder: nn.Module) -> None:
        modules = list(encoder.modules())
        self.embedding = token_embeddings(encoder)[0]
        self.weights = list(encoder.parameters())
        self._held = [(named, name, x) for m in modules for named in (m._modules, m._parameters) for name, x in named.items()]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def holds(self) -> bool:
        """Is every module and weight still where it was?"""
        return all(named.get(name) is x for named, name, x in self._held)

    def signature(self) -> tuple[int, ...] | None:
        """The hooks' numbers and where the weights lie; None where a weight asks for a gradient."""
        if any(p.requires_grad for p in self.weights):
            return None
        return *(number for hooks in self._hooks for number in hooks), -1, *(p.data_ptr() for p in self.weights)


class GraphedEncoder:
    """A transformers text encoder, in evaluation mode and with no gradients of its own, whose token embeddings are changed on the way in.

    Args:
        encoder: held weakly.
        limit: shapes that are captured; calls of any other run as they are.
        capture: makes a function faster at one shape; the default makes CUDA graphs, on CUDA devices alone.
    """

    def __init__(
        self, encoder: nn.Module, *, limit: int = 4, capture: Callable[[_Function, torch.Tensor], _Function] | None = None
    ) -> None:
        self._encoder, self.limit, self._capture = weakref.ref(encoder), limit, capture
        self._graphs: dict[Any, _Graph] = {}
        self._seen: dict[Any, int] = {}
        self._structure: _Structure | None = None
        self.failed = False

    @property
    def captured(self) -> int:
        """How many shapes have been captured."""
        return len(self._graphs)

    def __call__(self, ids: torch.Tensor, move: _Function) -> torch.Tensor:
        """Last hidden states `[batch, time, width]` of ids int64 `[batch, time]`, differentiable by what `move` makes of the token
        embeddings `[batch, time, width]` (without their positions).

        A pass whose backward pass is still to come keeps its graph: another of its shape meanwhile runs as it is. A captured pass can be
        walked back once.
        """
        encoder = self._encoder()
        assert encoder is not None, "the encoder is gone"
        state = self._state(encoder, ids)
        if state is None or self._structure is None:
            return encode_with_input(encoder, ids, move)[0]
        moved = move(self._structure.embedding(ids))
        graph = self._graph(moved, state) if moved.requires_grad else None
        if graph is None or graph.busy:
            return encode_with_input(encoder, ids, lambda _: moved)[0]
        return graph(moved)

    def _state(self, encoder: nn.Module, ids: torch.Tensor) -> tuple[Any, ...] | None:
        """All but the embeddings that a graph would read or depend on; None where there can be none."""
        if self.failed or not torch.is_grad_enabled() or encoder.training or ids.numel() > _MOST:
            return None
        if self._capture is None and (ids.device.type != "cuda" or torch.cuda.is_current_stream_capturing()):
            return None
        if self._structure is None or not self._structure.holds():
            self._structure = _Structure(encoder)
            self._graphs, self._seen = {}, {}
        signature = self._structure.signature()
        if signature is None:
            return None
        kind = ids.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        exactness = (torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled())
        return ids.device, autocast, exactness, *signature

    def _graph(self, moved: torch.Tensor, state: tuple[Any, ...]) -> _Graph | None:
        key = (tuple(moved.shape), moved.dtype, *state)
        if key in self._graphs or len(self._graphs) >= self.limit:
            return self._graphs.get(key)
        if len(self._seen) > 64:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < _PATIENCE:
            return None
        kind, sample = moved.device.type, moved.detach().clone().requires_grad_()
        # what autocast keeps for a whole region would be freed memory to a graph
        dtype, on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        try:
            with torch.autocast(kind, dtype, enabled=on, cache_enabled=False):
                rest = self._rest(moved.shape[:2], moved.device)
                self._graphs[key] = _Graph((self._capture or _capture)(rest, sample), rest)
        except Exception as error:
            self.failed = True
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"the text encoder runs without CUDA graphs, which is slower: {type(error).__name__}: {reason}", stacklevel=4)
            return None
        return self._graphs[key]

    def _rest(self, shape: torch.Size, device: torch.device) -> _Function:
        """Embeddings to last hidden states. The ids are stand-ins: behind the embeddings, only the pooled vector would read them."""
        ids, encoder = torch.zeros(shape, dtype=torch.int64, device=device), self._encoder

        def rest(moved: torch.Tensor) -> torch.Tensor:
            module = encoder()
            assert module is not None, "the encoder is gone"
            return encode_with_input(module, ids, lambda _: moved)[0]

        return rest


_encoders: weakref.WeakKeyDictionary[nn.Module, GraphedEncoder] = weakref.WeakKeyDictionary()


def encode_graphed(encoder: nn.Module, ids: torch.Tensor, move: _Function) -> torch.Tensor:
    """What `GraphedEncoder(encoder)(ids, move)` gives, with one such object for each encoder as long as that lives."""
    if encoder not in _encoders:
        _encoders[encoder] = GraphedEncoder(encoder)
    return _encoders[encoder](ids, move)
