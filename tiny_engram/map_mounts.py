"""Maps on a denoiser: hooks that read a cross-attention and add what fires there. May import following, hooks, maps and mount_names.

What fires is told from outside, at the moment when the attention's key projection reads the text states.
"""

import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tiny_engram.following import FollowingHooks
from tiny_engram.hooks import CallHook, MountError
from tiny_engram.maps import GivenMaps, attention_mass, map_attention, map_feedforward

__all__ = ["MapMounts"]

_Hooked = tuple[tuple[Any, ...], dict[str, Any]]


class _Layer(threading.local):
    """What the hooks at one cross-attention and at the feed-forward layer behind it tell each other, in one thread."""

    def __init__(self) -> None:
        self.given: Sequence[GivenMaps] = ()
        self.states: torch.Tensor | None = None
        self.query: torch.Tensor | None = None
        self.key: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.attended = False
        self.masses: list[tuple[GivenMaps, torch.Tensor]] = []


class _Thread(threading.local):
    """`seen` are the maps that could add something in this thread's denoiser call; `probing` is what each hook gives meanwhile."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.probing: torch.Tensor | None = None


class MapMounts:
    """The maps of one role on one denoiser.

    Args:
        attentions: of each denoiser, by what stands in front of its hooks' names, in running order: `.module` with `to_q`, `to_k`, `to_out`
            and `heads`, `.transformer` around it with its feed-forward layer under the name `.feed`; `.masked` where an attention is given
            a mask over the text.
        maps: names of those that the role can have.
        denoiser: what errors call it.
        owner: of the hooks.
    """

    def __init__(self, attentions: Mapping[str, Sequence[Any]], maps: Container[str], *, denoiser: Callable[[], str], owner: Any) -> None:
        self.seconds = 0.0
        self.following = FollowingHooks(owner)
        self._masks = FollowingHooks(owner)
        self._denoiser = denoiser
        self._thread = _Thread()
        self._layers: dict[int, _Layer] = {}
        for prefix, each in attentions.items():
            for i, attention in enumerate(each):
                if f"attention.{i}" in maps:
                    self._layers.setdefault(i, _Layer())
                    self._add(prefix, i, attention, f"feedforward.{i}" in maps)

    def _add(self, prefix: str, i: int, attention: Any, feedforward: bool) -> None:
        module, name = attention.module, f"{prefix}attention.{i}"
        normed = (("norm_q", self._normed_query), ("norm_k", self._keyed))
        # Where queries and keys are normed, they are what the norms give. `to_out` is a list whose first entry projects.
        places = [
            ("to_q", module, "to_q", self._queried, False),
            ("to_k", module, "to_k", self._keyed, False),
            *((norm, module, norm, call, False) for norm, call in normed if getattr(module, norm, None) is not None),
            ("to_out", module.to_out, "0", partial(self._attended, module.heads, getattr(module, "scale", None)), True),
        ]
        for part, parent, attribute, call, pre in places:
            self.following.add(f"{name}.{part}", parent, attribute, self._hook(call, i), pre=pre)
        if attention.masked:
            attribute = next(k for k, child in attention.transformer.named_children() if child is module)
            self._masks.add(f"{name}.mask", attention.transformer, attribute, partial(self._masked, i), pre=True)
        if feedforward:
            self.following.add(f"{prefix}feedforward.{i}", attention.transformer, attention.feed, self._hook(self._fed, i), pre=False)

    @property
    def numbers(self) -> Sequence[int]:
        """Of the cross-attentions that can have maps."""
        return tuple(self._layers)

    @property
    def hooks(self) -> Mapping[str, CallHook]:
        """The hooks that are in place, by name."""
        return {**self.following.hooks, **self._masks.hooks}

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    @property
    def seen(self) -> set[str]:
        """Names of the maps that this thread's call of the denoiser has gone through."""
        return self._thread.seen

    def begin(self) -> None:
        """Before a call of the denoiser."""
        if self.following:
            self.following.follow()
            self._masks.follow()
            self._thread.seen = set()

    def settled(self) -> None:
        """The hooks were brought in line with what is loaded: so are those that read masks."""
        if not self.following:
            self._masks.drop()

    def drop(self) -> None:
        """Take all hooks out, and what they kept for each other."""
        self.following.drop()
        self._masks.drop()
        self._layers = {i: _Layer() for i in self._layers}

    def enter(self, i: int, given: Sequence[GivenMaps]) -> None:
        """The i-th cross-attention reads text states in which these fire."""
        self._layers[i].given = given

    @property
    def probing(self) -> bool:
        """Are the hooks being probed in this thread?"""
        return self._thread.probing is not None

    def probe(self) -> list[str]:
        """Names of the hooks whose module does not give what they give, or does not take it."""

        def arm(name: str, read: torch.Tensor, other: torch.Tensor) -> None:
            self._thread.probing = other

        try:
            return self.following.dead(arm)
        finally:
            self._thread.probing = None

    def _hook(self, call: Callable[..., Any], i: int) -> Callable[..., Any]:
        """One hook: `call` with the layer's number, timed; while it is probed, it gives what it is told to."""

        def hook(args: tuple[Any, ...], *rest: Any) -> Any:
            probing = self._thread.probing
            if probing is not None:
                return ((probing, *args[1:]), rest[0]) if len(rest) == 1 else probing
            begin = time.perf_counter()
            result = call(i, args, *rest)
            self.seconds += time.perf_counter() - begin
            return result

        return hook

    def _queried(self, i: int, args: tuple[Any, ...], _kwargs: Any, output: torch.Tensor) -> None:
        layer = self._layers[i]
        layer.states, layer.query = args[0], output
        layer.attended, layer.masses = False, []

    def _normed_query(self, i: int, _args: Any, _kwargs: Any, output: torch.Tensor) -> None:
        self._layers[i].query = output

    def _masked(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the whole attention: the mask over the text, a bias `[batch, 1, time]`, or None."""
        self._layers[i].mask = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)

    def _keyed(self, i: int, _args: Any, _kwargs: Any, output: torch.Tensor) -> None:
        self._layers[i].key = output

    def _attended(self, heads: int, scale: float | None, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Hooked | None:
        """Before `to_out`: the heads' outputs `[batch, places, channels]` with what the maps add."""
        layer, x = self._layers[i], args[0]
        states, query, key, given, mask = layer.states, layer.query, layer.key, layer.given, layer.mask
        layer.states, layer.query, layer.key, layer.given, layer.mask = None, None, None, (), None
        if states is None or query is None or key is None:
            return None  # said after the call, by what was not seen
        layer.attended = True
        self._thread.seen.add(f"attention.{i}")
        for one in given:
            names = [name for name in (f"attention.{i}", f"feedforward.{i}") if name in one.factors]
            if not names or not len(one.rows):
                continue
            if x.shape[:2] != query.shape[:2] or query.shape[0] != len(one.fired) or key.shape[:2] != one.fired.shape:
                raise MountError(
                    f"{self._denoiser()} attends with queries {list(query.shape)}, keys {list(key.shape)} and outputs {list(x.shape)}, "
                    f"expected those of {list(one.fired.shape)} text states, so maps cannot follow; use attention that keeps them"
                )
            bias = None if mask is None else one.at_rows(self._bias(mask, one.fired.shape))
            by = (query.shape[-1] // heads) ** -0.5 if scale is None else scale
            mass = attention_mass(one.at_rows(query), one.at_rows(key), one.at_rows(one.fired), heads=heads, scale=by, bias=bias)
            if f"attention.{i}" in one.factors:
                x = one.add_at_rows(x, map_attention(one.at_rows(states), mass, *one.factors_at_rows(f"attention.{i}")))
            if f"feedforward.{i}" in one.factors:
                layer.masses.append((one, mass))
        return None if x is args[0] else ((x, *args[1:]), kwargs)

    def _bias(self, mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the mask adds to the scores of a text, `[batch, time]`."""
        if list(mask.shape) != [shape[0], 1, shape[1]] or not mask.is_floating_point():
            raise MountError(
                f"{self._denoiser()} attends with a mask {mask.dtype} {list(mask.shape)}, expected a bias of {[shape[0], 1, shape[1]]}, so "
                "maps cannot follow; use attention that keeps it, or disable_concepts()"
            )
        return mask[:, 0]

    def _fed(self, i: int, args: tuple[Any, ...], _kwargs: Any, output: torch.Tensor) -> torch.Tensor | None:
        """After the feed-forward layer: its output `[batch, places, channels]` with what the maps add."""
        layer, states, x = self._layers[i], args[0], output
        attended, masses = layer.attended, layer.masses
        layer.attended, layer.masses = False, []
        if attended:
            self._thread.seen.add(f"feedforward.{i}")
        for one, mass in masses:
            if states.shape[:2] != (len(one.fired), mass.shape[-1]):
                raise MountError(
                    f"{self._denoiser()} runs feed-forward layers on {list(states.shape)}, expected {len(one.fired)} x {mass.shape[-1]} "
                    "places at once, so maps cannot follow; undo what splits them (unet.disable_forward_chunking())"
                )
            x = one.add_at_rows(x, map_feedforward(one.at_rows(states), mass, *one.factors_at_rows(f"feedforward.{i}")))
        return None if x is output else x
