"""Host memory that the GPU reads in place: ranges are registered with the CUDA runtime, and taken back. Imports torch."""

import contextlib
from typing import Any

import torch

__all__ = ["PORTABLE_MAPPED", "READ_ONLY", "Pieces", "register_range", "unregister_all"]

PORTABLE_MAPPED, READ_ONLY = 1 | 2, 8  # flags of cudaHostRegister
_PIECE = 4 << 30  # bytes registered at a time where one call for all of it fails

Pieces = list[tuple[int, int]]  # (address, bytes) of each registration, usually one


def register_range(address: int, nbytes: int, pieces: Pieces, flags: int = PORTABLE_MAPPED) -> str:
    """Register memory and add what was registered to ``pieces``, which is empty before; an empty string, or why nothing was."""
    why = ""
    # One call where it works: the driver refuses plain copies across the seam of two registrations.
    for step in (nbytes, _PIECE):
        for offset in range(0, nbytes, step):
            size = min(step, nbytes - offset)
            if why := _host_register(address + offset, size, flags):
                unregister_all(pieces)
                break
            pieces.append((address + offset, size))
        if not why or nbytes <= _PIECE:
            break
    return why


def unregister_all(pieces: Pieces) -> None:
    """Take memory from the GPU again, after everything that may still read it has ended; empties ``pieces``."""
    taken = pieces[:]
    pieces.clear()
    if taken:
        with contextlib.suppress(Exception):  # at the interpreter's end the driver may be gone before us
            used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)
            for device in filter(used, range(torch.cuda.device_count())):  # waiting for one not in use would open it
                torch.cuda.synchronize(device)
        for address, _ in taken:
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(address)


def _host_register(address: int, nbytes: int, flags: int) -> str:
    why = "CUDA runtime"
    try:
        code = _cudart().cudaHostRegister(address, nbytes, flags)
        if int(code) == 0:
            return ""
        why = f"CUDA error {int(code)}"
        why += f", {_cudart().cudaGetErrorString(code)}"
    except (RuntimeError, TypeError) as error:
        why = f"{why}, {str(error).splitlines()[0]}"
    _clear_last_error()
    return why


def _clear_last_error() -> None:
    """The runtime keeps a failure as its last error, which the next launch would report as its own: let one do so here."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def _cudart() -> Any:
    """torch's door to the CUDA runtime, as the module that it is."""
    return torch.cuda.cudart()
