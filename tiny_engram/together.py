"""What the processes of one run do together. Imports torch, accelerate and errors."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from tiny_engram.errors import TinyEngramError

__all__ = ["lost_process", "on_main", "told_by_main"]

# How the libraries that carry gradients say that there is nobody at the other end.
_LOST = ("gloo", "nccl", "connection", "broken pipe", "peer", "socket")


def on_main(accelerator: Accelerator, act: Callable[[], Any]) -> None:
    """Do it on the main process while the others wait. Its error is raised on all: none waits for one that has stopped."""
    said: list[str | None] = [None]
    failed: TinyEngramError | None = None
    if accelerator.is_main_process:
        try:
            act()
        except TinyEngramError as error:
            failed, said = error, [str(error)]
    if accelerator.num_processes > 1:
        broadcast_object_list(said)
    if failed is not None:
        raise failed
    if said[0] is not None:
        raise TinyEngramError(said[0])


def told_by_main(accelerator: Accelerator, value: float) -> float:
    """The main process' value, so that all decide the same."""
    if accelerator.num_processes == 1:
        return value
    told = [value]
    broadcast_object_list(told)
    return told[0]


def lost_process(accelerator: Accelerator, error: RuntimeError) -> bool:
    """Does this error say that another process of the run is gone?"""
    if accelerator.num_processes == 1 or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.distributed.DistBackendError) or any(word in str(error).lower() for word in _LOST)
