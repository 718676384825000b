"""What a table says of itself, and what the kernel says of its memory: huge pages and NUMA nodes. Imports the standard library only."""

import ctypes
import dataclasses
import errno
import os
import platform
import re
from typing import Any

__all__ = ["TableReport", "huge_page_share", "numa_nodes"]

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # numbers of the system call, from the kernel's tables
_SAMPLE = 64  # pages asked for their node
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Where a table's rows are and how they are held.

    Attributes:
        rows, head_dim: the table's shape; head_dim in values.
        row_bytes: bytes of one row, payload and scales.
        nbytes: bytes of all rows.
        layout: "record" (payload and scales of a row in one run) or "split" (two arrays).
        home: "device", "pinned", "mapped" or "pageable": what it is, which is not always what was asked for (see notes).
        device: the torch device of the rows.
        registered, locked: whether the GPU may read the memory in place; whether it is kept from being swapped out.
        huge_page_share: 0..1 of the bytes that stand in huge pages; None on a device and where the kernel does not say.
        numa_nodes: nodes that hold the rows, from a sample of pages; None as above.
        out_of_bounds: ids outside the table that `bounds="warn"` counted since the last `check_bounds()`.
        notes: what was asked for and did not work, with the reason, one line each.
    """

    rows: int
    head_dim: int
    row_bytes: int
    nbytes: int
    layout: str
    home: str
    device: str
    registered: bool = False
    locked: bool = False
    huge_page_share: float | None = None
    numa_nodes: tuple[int, ...] | None = None
    out_of_bounds: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        where = self.home if self.home != "device" else self.device
        lines = [
            f"{self.rows:,} rows of {self.head_dim} values, {self.row_bytes} B each ({self.layout}): {self.nbytes / 2**30:,.2f} GiB",
            f"home {where}" + ", registered with the GPU" * self.registered + ", locked" * self.locked,
        ]
        if self.home != "device":
            huge = "not known" if self.huge_page_share is None else f"{self.huge_page_share:.0%}"
            nodes = "not known" if self.numa_nodes is None else ", ".join(map(str, self.numa_nodes)) or "none yet"
            lines.append(f"huge pages {huge}, NUMA nodes {nodes}")
        if self.out_of_bounds:
            lines.append(f"{self.out_of_bounds:,} row ids outside the table were read as zeros")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def huge_page_share(address: int, nbytes: int) -> float | None:
    """Share of ``[address, address + nbytes)`` in huge pages, 0..1; None where /proc does not say.

    The kernel may keep neighbouring ranges as one: a part of such a range counts with the whole's share.
    """
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return None
    huge, told, overlap, size = 0.0, False, 0, 1
    for line in lines:
        if bounds := _RANGE.match(line):
            first, last = int(bounds[1], 16), int(bounds[2], 16)
            overlap, size = min(last, address + nbytes) - max(first, address), last - first
        elif overlap > 0 and line.startswith(_HUGE):
            told = True
            huge += int(line.split()[1]) * 1024 * overlap / size
    return min(huge / nbytes, 1.0) if told and nbytes else None


def numa_nodes(address: int, nbytes: int) -> tuple[tuple[int, ...] | None, str]:
    """NUMA nodes of a sample of the pages in ``[address, address + nbytes)``, ascending.

    Returns:
        The nodes (pages that nobody touched yet have none) and an empty string, or None and the reason.
    """
    number, page = _MOVE_PAGES.get(platform.machine()), os.sysconf("SC_PAGE_SIZE")
    if number is None or not nbytes:
        return None, f"no call for it is known on {platform.machine()}" if nbytes else "no bytes"
    pages = (nbytes + page - 1) // page
    count = min(pages, _SAMPLE)
    addresses = (ctypes.c_void_p * count)(*(address // page * page + k * pages // count * page for k in range(count)))
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    # Without target nodes the call moves nothing and says where each page is, or a negative error number.
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(count), addresses, None, status, ctypes.c_int(0)):
        code = ctypes.get_errno()
        return None, f"the kernel says {errno.errorcode.get(code, code)} ({os.strerror(code)})"
    return tuple(sorted({node for node in status if node >= 0})), ""
