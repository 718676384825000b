"""Which of the processes that `accelerate launch` or torchrun started this is. Imports torch where a device is asked for."""

import os

from tiny_engram.errors import ConfigError

__all__ = ["DTYPES", "device_for", "dtype_for", "local_rank"]

DTYPES = ("float32", "float16", "bfloat16")


def local_rank() -> int:
    """Number of this process among those of its machine; 0 where nobody launched it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def dtype_for(asked: str | None) -> str:
    """The type of a model's weights that was asked for. Raises ConfigError."""
    if asked is not None and asked not in DTYPES:
        raise ConfigError(f"dtype is {asked!r}, expected one of {', '.join(DTYPES)}")
    return asked or DTYPES[0]


def device_for(asked: str | None) -> str:
    """The device that was asked for; without one this process' own CUDA device, where there is one and accelerate is not told otherwise."""
    if asked is not None:
        return asked
    import torch

    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.cuda.is_available()
    return "cpu" if on_cpu else f"cuda:{local_rank()}"
