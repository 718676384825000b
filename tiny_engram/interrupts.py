"""Signals that stop a command: Ctrl-C, and SIGTERM, which schedulers and containers send. Imports the standard library."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Terminated", "interrupts_held", "terminable"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run as Ctrl-C does; a command ends with 143 after it."""


def _raise_terminated(*_: Any) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated within the block, where nobody else handles it and this is the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Both signals wait until the end of the block, where somebody handles them. Elsewhere than in the main thread none arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[Any, ...]] = []
    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            before[arrived[0][0]](*arrived[0])
