"""What a run cost: time and memory. Imports torch where a CUDA device was used."""

import resource
import sys

__all__ = ["peak_device_memory", "peak_memory"]


def peak_memory() -> int:
    """Bytes, the most this process has held in host memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_memory() -> int | None:
    """Bytes, the most that torch has held on the current CUDA device; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
