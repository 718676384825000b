"""What one process does for all. Imports accelerate's utilities."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from tiny_engram.errors import TinyEngramError

__all__ = ["on_main"]


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
