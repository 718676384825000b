"""A frozen denoiser in parts: each process of a run holds its share of every block, and has a block whole only while that runs.

`accelerate launch --use_fsdp` asks for it. Rows are small and stay whole on each process; torch's `fully_shard` is used for the denoiser
directly, since Accelerate's own preparation is for models that an optimiser sees. May import torch, accelerate and errors.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from tiny_engram.errors import TinyEngramError

__all__ = ["check_launch", "held_bytes", "is_sharded", "sharded", "wants_shards"]

logger = logging.getLogger(__name__)

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
FORWARD_HOOKS += ("_forward_hooks_always_called",)
# torch adds these when the module runs first
STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def check_launch() -> None:
    """Raises TinyEngramError under DeepSpeed."""
    if _asked("ACCELERATE_USE_DEEPSPEED"):
        raise TinyEngramError(
            "accelerate was launched with DeepSpeed, whose engine shards what an optimiser trains, and here that is a few rows; launch "
            "with --use_fsdp to shard the frozen denoiser, or with --multi_gpu"
        )


def wants_shards(accelerator: Accelerator) -> bool:
    """Was the run launched with --use_fsdp, on several processes? Told by the variable: on a CPU Accelerate's state keeps no plugin."""
    return accelerator.num_processes > 1 and _asked("ACCELERATE_USE_FSDP")


def is_sharded(denoiser: nn.Module) -> bool:
    """Does a call of it need all processes?"""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(denoiser, FSDPModule)


def held_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that this process holds: of a sharded module between its calls, its shares."""
    from torch.distributed.tensor import DTensor

    local = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return sum(p.numel() * p.element_size() for p in local)


@contextmanager
def sharded(denoiser: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """The denoiser in parts inside, if the launch asks for it: all processes must call it together, each as often as the others.

    Afterwards it is whole again, with its own parameters, bit for bit. After an exception it is not, as the other processes may be
    anywhere: it then refuses its calls.

    Raises:
        TinyEngramError: a denoiser that is quantised, offloaded or compiled, or whose class names no blocks.
    """
    if not wants_shards(accelerator):
        yield
        return
    parts = [*_blocks(denoiser), denoiser]
    places = [(m, name, p) for m in denoiser.modules() for name, p in m.named_parameters(recurse=False, remove_duplicate=False)]
    before, taken = held_bytes(denoiser), [_Taken(module) for module in denoiser.modules()]
    try:
        _shard(parts, accelerator)
        for _, _, p in places:
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)  # else the whole would stay beside the parts
        for each in taken:
            each.note()
        sizes = before / 2**20, held_bytes(denoiser) / 2**20
        logger.info("the denoiser is shared by %d processes: %.1f MiB of its %.1f MiB here", accelerator.num_processes, *sizes[::-1])
        yield
        for part in parts:
            part.reshard()  # pyright: ignore[reportCallIssue]
        _gather(places)
    except BaseException:
        denoiser.register_forward_pre_hook(_refuse, prepend=True)
        raise
    for each in taken:
        each.give_back()


def _blocks(denoiser: nn.Module) -> list[nn.Module]:
    """What is made whole at once, inner ones first."""
    called, what = type(denoiser).__name__, None
    names = set(getattr(denoiser, "_no_split_modules", None) or getattr(denoiser, "_repeated_blocks", None) or ())
    blocks = [m for m in denoiser.modules() if type(m).__name__ in names][::-1]
    if any(p.is_meta for p in denoiser.parameters()) or hasattr(denoiser, "_hf_hook"):
        what = "is offloaded"
    elif not all(p.is_floating_point() for p in denoiser.parameters()):
        what = "is quantised"
    elif any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in denoiser.modules()):
        what = "is compiled"
    elif not blocks:
        what = "names no blocks (_no_split_modules)"
    if what is not None:
        raise TinyEngramError(f"--use_fsdp shards the denoiser, but this {called} {what}; expected a plain one: launch with --multi_gpu")
    return blocks


def _shard(parts: list[nn.Module], accelerator: Accelerator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for part in parts:
        # torch puts its own hook between these two
        part.register_forward_pre_hook(_show, with_kwargs=True, prepend=True)
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        part.register_forward_pre_hook(_hide_from_root if part is parts[-1] else _hide, with_kwargs=True, prepend=True)


def _gather(places: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Each parameter whole again, in its old object."""
    whole: set[int] = set()
    for module, name, p in places:
        share: Any = module._parameters[name]
        if id(p) not in whole:
            p.data = share.full_tensor().to(p.device)
            whole.add(id(p))
        module._parameters[name] = p


def _refuse(module: nn.Module, _args: Any) -> None:
    name = type(module).__name__.removeprefix("FSDP")
    raise TinyEngramError(f"this {name} is in parts since a run on several processes ended early; load the pipeline again")


class _Hidden:
    """A tensor that torch's hook does not see: it would put another object in its place, and context mounts know the text states by
    their object. No dataclass, into which that hook looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


Given = tuple[tuple[Any, ...], dict[str, Any]]


def _hide(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """All but the first tensor, which is the picture's states: their gradient is a block's last, after which it is in parts again."""
    values = [*args, *kwargs.values()]
    first = next((k for k, value in enumerate(values) if isinstance(value, torch.Tensor)), None)
    values = [_Hidden(v) if isinstance(v, torch.Tensor) and k != first and v.requires_grad else v for k, v in enumerate(values)]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _hide_from_root(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The noisy picture has a gradient, so that on all processes the backward pass goes through all blocks, whichever rows their samples
    read: else one would wait for a block that another does not need."""
    if torch.is_grad_enabled():
        values = [*args, *kwargs.values()]
        first = next(k for k, value in enumerate(values) if isinstance(value, torch.Tensor))
        values[first] = values[first].detach().requires_grad_()
        args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
    return _hide(module, args, kwargs)


def _show(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    shown = [value.tensor if isinstance(value, _Hidden) else value for value in (*args, *kwargs.values())]
    return tuple(shown[: len(args)]), dict(zip(kwargs, shown[len(args) :], strict=True))


class _Taken:
    """Class, attributes and hooks of a module before `fully_shard`, which has no way back of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class, self._own = module, type(module), set(vars(module))
        self._new: set[str] = set()
        self._before = {name: set(getattr(module, name)) for name in (*FORWARD_HOOKS, *STATE_HOOKS)}
        self._added: dict[str, set[int]] = {}

    def note(self) -> None:
        """The attributes, and the hooks of the forward pass, that are new; later ones are not torch's."""
        self._new = set(vars(self._module)) - self._own
        self._added = {name: set(getattr(self._module, name)) - self._before[name] for name in FORWARD_HOOKS}

    def give_back(self) -> None:
        from torch.distributed._composable_state import _module_state_mapping

        module = self._module
        _module_state_mapping.pop(module, None)  # else no other run could shard it again
        module.__class__ = self._class
        added = self._added | {name: set(getattr(module, name)) - self._before[name] for name in STATE_HOOKS}
        for name, keys in added.items():
            for key in keys:
                getattr(module, name).pop(key, None)
        for name in self._new:
            vars(module).pop(name, None)
