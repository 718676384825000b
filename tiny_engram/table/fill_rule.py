"""A rule that fills a table so that any row can be checked without the table: row id -> bytes, by integer arithmetic alone.

Tables of real size are too large to keep a second copy of. Imports torch, kernels, tiny_engram.errors and
storage.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK, dequantize_blocks
from tiny_engram.kernels.hot_gather.reference import FIRST, SECOND, STEP

from .storage import RowStorage

_WORD = 8  # bytes of one mixed integer
_WORDS_PER_ROW = 1 << 12  # numbers set aside for each row; the upper half makes scale bytes
_FIRST_SCALE_WORD = _WORDS_PER_ROW // 2


def _signed(number: int) -> int:
    """The int64 with the same bits as this 64-bit number."""
    return number - (1 << 64) if number >= 1 << 63 else number


_PAYLOAD_MASK = _signed(0xBFBFBFBFBFBFBFBF)
_SCALE_MASK, _SCALE_BASE = 0x0707070707070707, 0x7878787878787878


def _mix(state: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser on int64, in place: a bijection, so no two words of a table come from one number."""
    state.mul_(STEP)
    # torch shifts int64 arithmetically; the mask makes that a logical shift.
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        state.bitwise_xor_((state >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        state.mul_(factor)
    return state


class FillRule:
    """Bytes of every row of a table, as a function of its id.

    Payload bytes take every e4m3 code below 2 in magnitude, -0 included and NaN left out; scale bytes 120..127 (2^-7..1).

    Args:
        head_dim: values per row, a multiple of 32 up to 16,384.
        seed: other seeds give other tables.

    Raises:
        TableError: a head_dim that no row can have.
    """

    def __init__(self, head_dim: int, seed: int = 0):
        if head_dim < 1 or head_dim % BLOCK or head_dim // _WORD > _FIRST_SCALE_WORD:
            raise TableError(f"head_dim is {head_dim}: expected a multiple of {BLOCK} up to {_FIRST_SCALE_WORD * _WORD}")
        self.head_dim = head_dim
        self.row_bytes = head_dim + head_dim // BLOCK
        self.seed = seed

    def records(self, row_ids: torch.Tensor) -> torch.Tensor:
        """uint8 ``[..., head_dim + head_dim / 32]``, payload then scales, on the device of ``row_ids`` (int64 ``[...]``, 0 or more)."""
        payload_words = self.head_dim // _WORD
        scale_bytes = self.head_dim // BLOCK
        scale_words = -(-scale_bytes // _WORD)
        words = torch.arange(payload_words + scale_words, device=row_ids.device)
        words[payload_words:] += _FIRST_SCALE_WORD - payload_words
        mixed = _mix(row_ids.unsqueeze(-1) * _WORDS_PER_ROW + words + self.seed * STEP % (1 << 62))
        mixed[..., :payload_words].bitwise_and_(_PAYLOAD_MASK)
        mixed[..., payload_words:].bitwise_and_(_SCALE_MASK).add_(_SCALE_BASE)
        return mixed.view(torch.uint8)[..., : self.row_bytes]

    def rows(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload float8_e4m3fn ``[..., head_dim]`` and scale uint8 ``[..., head_dim / 32]`` of int64 ``[...]``."""
        records = self.records(row_ids)
        return records[..., : self.head_dim].contiguous().view(torch.float8_e4m3fn), records[..., self.head_dim :].contiguous()

    def values(self, row_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What a lookup of these ids must return, ``[..., head_dim]``: id -1 gives zeros."""
        payload, scale = self.rows(row_ids.clamp(min=0))
        return dequantize_blocks(payload, scale).masked_fill(row_ids.unsqueeze(-1) < 0, 0.0).to(dtype)

    def fill(
        self,
        storage: RowStorage,
        *,
        first_row: int = 0,
        device: torch.device | str | None = None,
        chunk_rows: int = 1 << 19,
        threads: int = 1,
    ) -> None:
        """Write every row of ``storage``; its row 0 gets the bytes of row ``first_row``.

        Args:
            storage: rows of this rule's head_dim in any home that can be written, in either layout.
            first_row: where a shard begins.
            device: computes the bytes; None takes the storage's own. A CUDA device fills registered host memory at the
                speed of the bus: two chunks are in flight, one computed, one copied.
            chunk_rows: rows computed at once; 512 Ki rows of 256 values take about 140 MB, and twice that while mixing.
            threads: compute chunks in this many threads, when the device is the CPU.

        Raises:
            TableError: the storage holds rows of another width, or is read-only.
        """
        payload, records = storage.payload, storage.records
        if payload.shape[1] != self.head_dim:
            raise TableError(f"storage has rows of {payload.shape[1]} values: expected {self.head_dim}, the rule's head_dim")
        if storage.read_only:
            raise TableError(f"home {storage.home!r} is read-only: expected another; fill one and write it to a file with write_table")
        where = payload.device if device is None else torch.device(device)
        starts = range(0, payload.shape[0], chunk_rows)

        def write(start: int) -> None:
            stop = min(start + chunk_rows, payload.shape[0])
            made = self.records(torch.arange(start + first_row, stop + first_row, device=where))
            if records is not None:
                _copy(made, records[start:stop])
                return
            # Contiguous on their own device first: only a contiguous copy crosses the bus in one piece.
            _copy(made[:, : self.head_dim].contiguous(), payload.view(torch.uint8)[start:stop])
            _copy(made[:, self.head_dim :].contiguous(), storage.scale[start:stop])

        if where.type == "cuda":
            self._write_on_streams(starts, write, where)
        elif threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(write, starts))
        else:
            for start in starts:
                write(start)

    @staticmethod
    def _write_on_streams(starts: range, write: Callable[[int], None], device: torch.device) -> None:
        with torch.cuda.device(device):
            streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream(device))
            for number, start in enumerate(starts):
                with torch.cuda.stream(streams[number % 2]):
                    write(start)
            torch.cuda.synchronize(device)


def _copy(made: torch.Tensor, target: torch.Tensor) -> None:
    """Enqueue a copy of bytes ``[N, B]``; by halves where the driver refuses, as it does across a seam of two registrations."""
    try:
        target.copy_(made, non_blocking=True)
    except RuntimeError:
        if len(made) == 1:
            target.copy_(made.cpu())  # the seam's own row, by the processor
            return
        half = len(made) // 2
        _copy(made[:half], target[:half])
        _copy(made[half:], target[half:])


def ids_to_check(rows: int, row_bytes: int) -> torch.Tensor:
    """Row ids int64 ``[N]`` where a table breaks first: both ends, and where offsets in bytes or elements pass 2^31 and 2^32."""

    def near() -> Iterator[int]:
        yield from (0, 1, rows - 2, rows - 1)
        for limit in (1 << 31, 1 << 32, 1 << 33):
            for unit in (row_bytes, row_bytes - row_bytes // (BLOCK + 1), 1):
                yield from range(limit // unit - 1, limit // unit + 2)

    return torch.tensor(sorted({row for row in near() if 0 <= row < rows}), dtype=torch.int64)
