"""What one process does for all, and what may not be cut in two. Imports accelerate's utilities."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from tiny_engram.errors import TinyEngramError

__all__ = ["interrupts_held", "on_main"]


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


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block. Elsewhere than in the main thread none arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(*arrived[0])
