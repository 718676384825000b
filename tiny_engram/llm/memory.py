"""One line where memory runs out, on a device or on the CPU. Imports torch and tiny_engram.errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiny_engram.errors import TinyEngramError

__all__ = ["memory_for"]


@contextmanager
def memory_for(what: str, way_out: str) -> Iterator[None]:
    """Within it, running out of memory is a TinyEngramError that says for what, and what to do about it."""
    try:
        yield
    except RuntimeError as error:  # of which torch's OutOfMemoryError is one; the CPU's allocator has none of its own
        said = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in said:
            raise
        raise TinyEngramError(f"out of memory for {what} ({' '.join(said.split())[:120]}); {way_out}") from error
