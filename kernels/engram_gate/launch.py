"""How rows of D values are cut into blocks, and how many programs walk over the tokens. Imports torch only.

A row is held in registers as ``chunks`` blocks of ``block`` lanes, so that D = 5120 takes five blocks of 1024 and not 8192
lanes. A program serves one copy and a strided set of tokens: the product of the two weights is read once for the set, and the
gradient of the weights leaves as one partial row of each program.

The rule for a launch, from bytes and registers:
- warps: at most 40 values of a row for a thread forward and 12 backward, where six rows are alive, but at least 4 of a block (8
  bytes of bf16);
- resident: as many programs as an SM's 65,536 registers hold, at 28 + 2 (forward) or 24 + 5 (backward) for each of those values,
  which is what ptxas takes for sm_90; fewer tokens than that in all get one program each;
- stages: forward the next token's rows are loaded while this one's are summed, which took D = 5120 on an H200 from 81 % of the
  copy rate with eight warps to 97 %. They wait in shared memory, three rows of up to 4 bytes a value: only where every device
  has that much. Backward has none to spare for it;
- rows: tokens for a program once there are more. Forward, reading the weights costs 4 D / rows bytes a row from L2 beside 6.5 D
  bytes from DRAM; backward, partial rows cost 8 D / rows beside 11 D.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

_SHARED_BYTES = 99 << 10  # shared memory of a program on the smallest devices in use; an H200 has 227 KiB
# What the interpreter takes for a number of SMs: few, so that programs walk over several tokens in tests too.
INTERPRETED_SMS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One way to launch a row kernel."""

    warps: int
    resident: int  # programs on an SM at a time
    rows: int  # tokens of one program, where there are enough
    stages: int = 1  # depth to which loads run ahead of the token loop


def power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(n - 1, 0).bit_length()


def row_blocks(size: int) -> tuple[int, int]:
    """(lanes of a block, number of blocks) for rows of `size`: blocks that fit exactly where eight or fewer do, else a mask."""
    cap = max(1024, power_of_two(-(-size // 8)))
    block = min(size & -size, cap)
    if block < 64 or size // block > 8:
        block = min(max(power_of_two(size), 32), cap)
    return block, -(-size // block)


def stages_within(wanted: int, row_bytes: int) -> int:
    """As many stages as are wanted, or as shared memory has room for; each but the first holds `row_bytes`."""
    return min(wanted, 1 + _SHARED_BYTES // row_bytes)


def launch_for(direction: str, size: int) -> Launch:
    """The rule above; direction is "forward" or "backward"."""
    block, chunks = row_blocks(size)
    held, rows = (40, 4) if direction == "forward" else (12, 128)
    stages = stages_within(2, 3 * 4 * block * chunks) if direction == "forward" else 1
    warps = max(1, min(power_of_two(-(-size // (32 * held))), block // (32 * 4), 16))
    values = -(-block * chunks // (32 * warps))
    registers = 28 + 2 * values if direction == "forward" else 24 + 5 * values
    resident = max(1, min(65536 // (32 * warps * registers), 64 // warps, 32))
    return Launch(warps=warps, resident=resident, rows=rows, stages=stages)


@lru_cache(maxsize=16)
def _on_cuda(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """SMs of the device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return _on_cuda(torch.cuda.current_device() if device.index is None else device.index)


def programs_for(launch: Launch, tokens: int, copies: int, device: torch.device) -> int:
    """Programs for each copy: between 1 and `tokens`."""
    filled = launch.resident * multiprocessors(device) // copies
    return max(1, min(tokens, filled), -(-tokens // launch.rows))


def as_rows(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The leading dimensions as one, the last `dims` kept and the very last contiguous; a view wherever strides allow it."""
    rows = tensor.reshape(-1, *tensor.shape[tensor.ndim - dims :])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
