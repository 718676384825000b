"""What a run cost: time and memory. Imports torch where a CUDA device was used."""

import re
import resource
import sys
from pathlib import Path

__all__ = ["peak_device_memory", "peak_memory"]


def peak_memory() -> int:
    """Bytes, the most this process has held in host memory."""
    try:
        # of this program alone: what rusage says begins with what the process that started it held
        own = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        own = None
    if own is not None:
        return int(own[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_memory() -> int | None:
    """Bytes, the most that torch has held on the current CUDA device; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
