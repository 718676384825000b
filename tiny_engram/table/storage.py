"""RowStorage: rows of a dense table, in one of two layouts and one of four homes.

Imports torch, kernels, errors, host_memory, report and shared.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Literal, Protocol, Self, get_args

import torch

from tiny_engram.errors import TableError
from tiny_engram.kernels.block_quant import BLOCK
from tiny_engram.kernels.row_gather import OUT_DTYPES

from .host_memory import HostBlock
from .report import TableReport
from .shared import SharedRows

__all__ = ["Home", "Layout", "RowStorage"]

Home = Literal["device", "pinned", "mapped", "pageable"]
Layout = Literal["record", "split"]

_COPY_BYTES = 256 << 20  # moved at a time between two homes


class _Block(Protocol):
    """What holds the memory of rows that were not allocated by torch: a HostBlock, or a mapped file."""

    @property
    def registered(self) -> bool: ...
    @property
    def locked(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def huge_page_share(self) -> float | None: ...
    def numa_nodes(self) -> tuple[tuple[int, ...] | None, str]: ...
    def close(self) -> None: ...


class RowStorage(SharedRows):
    """Rows by slot: e4m3 values and one e8m0 byte per 32 of them. Make one with :meth:`allocate`, or over memory that exists.

    ``copy.deepcopy`` shares it; :meth:`copy_to` copies the rows. It cannot be pickled.

    Attributes:
        layout: "record", where a row's payload and scales are one run of bytes, or "split", two arrays.
        home: "device", "pinned" (host memory that the GPU reads in place), "mapped" (a file, read-only) or "pageable".
        read_only: writing raises.
    """

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor, *, home: Home, layout: Layout, block: _Block | None = None):
        """Over existing memory, not copied.

        Args:
            payload: float8_e4m3fn ``[R, D]``; may be a strided view of records.
            scale: uint8 ``[R, D / 32]``, likewise; in layout "record" it follows the payload of its row.
            block: what holds the memory, closed with the storage.

        Raises:
            TableError: types, shapes, or memory and layout do not belong together.
        """
        _check_names(home, layout)
        check_rows(payload, scale)
        if payload.device != scale.device or (home == "device") == (payload.device.type == "cpu"):
            raise TableError(f"payload on {payload.device}, scale on {scale.device}: expected both where home {home!r} is")
        self.home: Home = home
        self.layout: Layout = layout
        self.read_only = home == "mapped"
        self.rows, self.head_dim = payload.shape
        self.device = payload.device
        self._block = block
        # A mapped file that was cut kills whoever reads past its end: every way to the rows looks first.
        self._check_length: Callable[[], None] | None = getattr(block, "check_length", None)
        self._notes: tuple[str, ...] = ()
        self._parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None
        self._parts = payload, scale, _records_of(payload, scale) if layout == "record" else None

    @classmethod
    def allocate(
        cls,
        rows: int,
        head_dim: int,
        *,
        home: Home,
        layout: Layout = "record",
        device: torch.device | str | None = None,
        path: str | PathLike[str] | None = None,
        lock: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """Zeroed rows. "pinned" becomes "pageable", with a note in the report and a warning, where the memory cannot be registered.

        Args:
            rows: R, 0 or more.
            head_dim: D, a multiple of 32.
            device: of home "device"; None is the current CUDA device.
            path: a new file, usually in /dev/shm, that holds rows of home "pinned" or "pageable"; the caller removes it.
            lock: keep host memory from being swapped out.
            progress: called with (bytes, bytes in all) while host memory is taken.

        Raises:
            TableError: sizes or homes that make no sense, or no such memory.
        """
        _check_names(home, layout)
        rows, head_dim = whole("rows", rows), whole("head_dim", head_dim)
        if head_dim < 1 or head_dim % BLOCK or rows < 0:
            raise TableError(f"{rows} rows of head_dim {head_dim}: expected 0 or more rows and a multiple of {BLOCK}")
        if home == "mapped":
            raise TableError("home 'mapped' is read-only: expected a file that exists; open it with EngramTable.open(path)")
        if (path is not None and home == "device") or (device is not None and home != "device"):
            raise TableError(f"home {home!r} with path {path!r}, device {device!r}: expected a path for host memory, a device for 'device'")
        if home == "device" and str(device).partition(":")[0] == "cpu":
            raise TableError("home 'device' with device 'cpu': expected a GPU; host memory is home 'pinned' or 'pageable'")
        nbytes = rows * (head_dim + head_dim // BLOCK)
        if home == "device":
            with device_memory(f"{nbytes:,} B", device or "cuda", "keep the rows in host memory"):
                buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device or "cuda")
            return cls(*_cut(buffer, rows, head_dim, layout), home=home, layout=layout)
        block = HostBlock.allocate(nbytes, shared=path, register=home == "pinned", lock=lock, progress=progress)
        real: Home = "pinned" if block.registered else "pageable"
        storage = cls(*_cut(block.tensor, rows, head_dim, layout), home=real, layout=layout, block=block)
        if real != home and rows:
            storage._notes = ("asked for pinned, and is pageable: the GPU cannot read these rows in place",)
        return storage

    def _open(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if self._parts is None:
            raise TableError("this table's storage is closed: expected an open one; allocate or open it again")
        return self._parts

    @property
    def payload(self) -> torch.Tensor:
        """float8_e4m3fn ``[R, D]``, a view."""
        parts, check = self._open(), self._check_length  # another thread may close meanwhile
        if check is not None:
            check()
        return parts[0]

    @property
    def scale(self) -> torch.Tensor:
        """uint8 ``[R, D / 32]``, a view."""
        return self._open()[1]

    @property
    def records(self) -> torch.Tensor | None:
        """uint8 ``[R, row_bytes]``, a view, in layout "record"; None in layout "split"."""
        return self._open()[2]

    @property
    def closed(self) -> bool:
        return self._parts is None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, payload and scales."""
        return self.head_dim + self.head_dim // BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @torch.no_grad()
    def write(self, first_row: int, payload: torch.Tensor, scale: torch.Tensor) -> None:
        """Replace rows ``first_row ...`` by payload float8_e4m3fn ``[N, D]`` and scale uint8 ``[N, D / 32]``, from any device.

        Raises:
            TableError: shapes do not fit, rows outside the table, or a read-only home. Nothing is written then.
        """
        if self.read_only:
            raise TableError(f"home {self.home!r} is read-only: expected another; copy the table with copy_to('pageable') and write there")
        check_rows(payload, scale, head_dim=self.head_dim)
        self._check_range(first_row, payload.shape[0])
        rows = slice(first_row, first_row + payload.shape[0])
        # As bytes: not every operation has a float8 kernel.
        self.payload.view(torch.uint8)[rows].copy_(payload.view(torch.uint8))
        self.scale[rows].copy_(scale)

    @torch.no_grad()
    def read(self, first_row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of ``count`` rows: payload float8_e4m3fn ``[count, D]``, scale uint8 ``[count, D / 32]``, contiguous, on the device.

        Raises:
            TableError: rows outside the table.
        """
        self._check_range(first_row, count)
        rows = slice(first_row, first_row + count)
        keep = torch.contiguous_format
        payload = self.payload.view(torch.uint8)[rows].clone(memory_format=keep)
        return payload.view(torch.float8_e4m3fn), self.scale[rows].clone(memory_format=keep)

    def copy_to(
        self,
        home: Home,
        *,
        layout: Layout = "record",
        device: torch.device | str | None = None,
        path: str | PathLike[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> "RowStorage":
        """The same rows in another home or layout; arguments and errors as in :meth:`allocate`, progress in bytes copied."""
        copy = RowStorage.allocate(self.rows, self.head_dim, home=home, layout=layout, device=device, path=path)
        try:
            step = max(_COPY_BYTES // self.row_bytes, 1)
            for first in range(0, self.rows, step):
                count = min(step, self.rows - first)
                # Through a copy of its own: memory registered in pieces cannot be copied across a seam.
                copy.write(first, *self.read(first, count))
                if progress is not None:
                    progress((first + count) * self.row_bytes, self.nbytes)
        except BaseException:
            copy.close()
            if path is not None:
                Path(path).unlink(missing_ok=True)
            raise
        return copy

    def report(self, *, out_of_bounds: int = 0) -> TableReport:
        """Where the rows are and how they are held, read from the system now; a table adds the ids that it counted."""
        self._open()
        block, notes = self._block, self._notes
        share = nodes = None
        if block is not None:
            notes += tuple(block.notes)
            try:
                getattr(block, "check", lambda: None)()
            except TableError as error:
                notes += (str(error),)
            if self.rows:
                share = block.huge_page_share()
                nodes, why = block.numa_nodes()
                if nodes is None:
                    notes += (f"NUMA nodes are not known: {why}",)
        return TableReport(
            rows=self.rows,
            head_dim=self.head_dim,
            row_bytes=self.row_bytes,
            nbytes=self.nbytes,
            layout=self.layout,
            home=self.home,
            device=str(self.device),
            registered=block is not None and block.registered,
            locked=block is not None and block.locked,
            huge_page_share=share,
            numa_nodes=nodes,
            out_of_bounds=out_of_bounds,
            notes=notes,
        )

    def close(self) -> None:
        """Let go of the rows; closing twice does nothing. Memory returns with the last view taken of it."""
        block, self._block, self._parts, self._check_length = self._block, None, None, None
        if block is not None:
            block.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_range(self, first_row: int, count: int) -> None:
        if first_row < 0 or count < 0 or first_row + count > self.rows:
            raise TableError(f"rows {first_row} to {first_row + count}: expected a range inside 0 to {self.rows}")


@contextmanager
def device_memory(what: str, device: torch.device | str, way_out: str) -> Iterator[None]:
    """Raises TableError where memory taken inside cannot be had: no such device, or not enough."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise TableError(f"{what} on {device} cannot be had ({str(error).splitlines()[0]}); {way_out}") from error


def room_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    """Where a lookup writes: ``out``, whose type then counts, or a new tensor. Raises TableError where ``out`` does not fit."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or not out.is_contiguous() or out.device != device:
        raise TableError(f"out {list(out.shape)} on {out.device}: expected contiguous {list(shape)} on {device}")
    return out


def whole(name: str, value: object) -> int:
    """The size that was given; raises TableError for what is no whole number: 1e6 is none, nor is "5"."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise TableError(f"{name} is {value!r} of type {type(value).__name__}: expected a whole number, an int") from error


def check_dtype(dtype: object) -> None:
    """Raises TableError: not one of the types that rows are returned in."""
    if not isinstance(dtype, torch.dtype) or dtype not in OUT_DTYPES:
        raise TableError(f"dtype {dtype!r}: expected torch.float32, torch.bfloat16 or torch.float16")


def check_ids(row_ids: torch.Tensor) -> None:
    """Raises TableError: not a tensor, or not of int64."""
    if not isinstance(row_ids, torch.Tensor):
        raise TableError(f"row ids are of type {type(row_ids).__name__}: expected a tensor of torch.int64, as torch.as_tensor makes it")
    if row_ids.dtype != torch.int64:
        raise TableError(f"row ids are {row_ids.dtype}: expected torch.int64")


def check_rows(payload: torch.Tensor, scale: torch.Tensor, *, lead: tuple[int, ...] | None = None, head_dim: int | None = None) -> None:
    """Do they hold rows: float8_e4m3fn ``[*lead, head_dim]`` and uint8 ``[*lead, head_dim / 32]``?

    lead and head_dim are what is asked for; None takes one dimension of the payload's own size, and its own width.

    Raises:
        TableError: they do not.
    """
    lead = tuple(payload.shape[:1]) if lead is None else lead
    width = payload.shape[-1] if head_dim is None and payload.ndim else head_dim or 0
    if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise TableError(f"payload is {payload.dtype}, scale {scale.dtype}: expected float8_e4m3fn and uint8")
    if tuple(payload.shape) != (*lead, width) or tuple(scale.shape) != (*lead, width // BLOCK) or width < 1 or width % BLOCK:
        raise TableError(
            f"payload {list(payload.shape)} and scale {list(scale.shape)}: expected {[*lead, width]} "
            f"and {[*lead, width // BLOCK]}, {BLOCK} values per scale, a multiple of {BLOCK} in a row"
        )


def _check_names(home: str, layout: str) -> None:
    if home not in get_args(Home) or layout not in get_args(Layout):
        raise TableError(f"home {home!r}, layout {layout!r}: expected one of {list(get_args(Home))} and {list(get_args(Layout))}")


def _cut(buffer: torch.Tensor, rows: int, head_dim: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scale as views of a buffer uint8 ``[rows * row_bytes]``."""
    scales = head_dim // BLOCK
    if layout == "record":
        records = buffer.view(rows, head_dim + scales)
        payload, scale = records[:, :head_dim], records[:, head_dim:]
    else:
        payload, scale = buffer[: rows * head_dim].view(rows, head_dim), buffer[rows * head_dim :].view(rows, scales)
    return payload.view(torch.float8_e4m3fn), scale


def _records_of(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, head_dim = payload.shape
    row_bytes = head_dim + scale.shape[1]
    adjacent = scale.data_ptr() == payload.data_ptr() + head_dim
    if rows and not (adjacent and payload.stride() == scale.stride() == (row_bytes, 1)):
        raise TableError(
            f"payload with strides {payload.stride()}, scale with {scale.stride()}: expected views of records of {row_bytes} B; "
            "use layout='split'"
        )
    return payload.view(torch.uint8).as_strided((rows, row_bytes), (row_bytes, 1))
