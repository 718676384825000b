"""Write tables: in pieces, whole or not at all, by one writer at a time. Imports torch, errors, files; of this package header, storage,
table_digest and table_file.

A file grows under the name `.<name>.writing`, which its writer holds locked, and takes its own name when it is complete and on disk.
The lock dies with its process: what a killed writer left is taken over by the next one. The digest is counted on the way and
put into room that the header keeps for it.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from tiny_engram.errors import TableError
from tiny_engram.files import sync_folder, write_atomically

from .header import PAGE, WRITING, Header, build_header
from .storage import check_rows
from .table_digest import (
    BLOCK_ROWS,
    RowSource,
    RowsProgress,
    as_bytes,
    block_digest,
    check_block,
    checked_source,
    each_block,
    table_digest,
)
from .table_file import INDEX_SUFFIX, KEY, TableFile, table_metadata

__all__ = ["Draft", "RowTensors", "Sink", "draft_path", "fill", "rows_of", "write_table", "writer_of"]


class RowTensors:
    """A table in memory as a source: payload float8_e4m3fn ``[R, D]``, scale uint8 ``[R, D / 32]``, on any device, strided or not."""

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor):
        check_rows(payload, scale)
        self._payload, self._scale = payload, scale
        self.rows, self.head_dim = payload.shape

    def read(self, first_row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(first_row, first_row + count)
        return self._payload[rows], self._scale[rows]


def rows_of(source: RowSource | tuple[torch.Tensor, torch.Tensor]) -> RowSource:
    """Something that reads ranges of rows: itself; (payload, scale): those."""
    return RowTensors(*source) if isinstance(source, tuple) else checked_source(source)


class Sink(Protocol):
    """Where the bytes of one file go."""

    path: Path

    def write(self, offset: int, data: bytes | memoryview) -> None: ...

    def sync(self) -> None: ...


def draft_path(path: Path) -> Path:
    """Where a file grows."""
    return path.with_name(f".{path.name[:240]}.writing")


def writer_of(path: Path) -> tuple[int, bool] | None:
    """(process id, whether it still runs) of whoever writes the file; None where nobody ever began or it is complete."""
    try:
        handle = os.open(draft_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):  # a name that no file can have
        return None
    try:
        head = os.pread(handle, 16, 0)
        pid = int.from_bytes(head[8:16], "little") if head[:8] == WRITING else 0
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return pid, True
        # Between our open and our lock it may have come to its end.
        return (pid, False) if pid and draft_path(path).exists() else None
    finally:
        os.close(handle)


class Draft:
    """A file that is being written, locked by this process; ends in :meth:`publish` or :meth:`abandon`."""

    def __init__(self, path: Path, *, replace: bool):
        """Raises TableError: there is a file (and ``replace`` is False), somebody else writes it, or it cannot be made."""
        self.path = path
        self._place = draft_path(path)
        if os.path.lexists(path) and not replace:
            raise TableError(f"{path}: is there already, expected a new file; pass replace=True (--force), or choose another name")
        try:
            self.handle = self._lock()
            try:
                if path.exists() and not replace:  # the writer before us has just ended
                    raise TableError(f"{path}: is there already, expected a new file; pass replace=True (--force), or choose another name")
                # What a killed writer left is of no use: its rows were not checked.
                os.ftruncate(self.handle, 0)
                self.write(0, WRITING + os.getpid().to_bytes(8, "little"))
            except BaseException:
                self.abandon()
                raise
        except OSError as error:
            way_out = "make the folder first" if isinstance(error, FileNotFoundError) else "choose another folder"
            raise TableError(f"{path}: cannot be made ({error.strerror or error}); {way_out}") from error

    def _lock(self) -> int:
        for attempt in range(40):
            handle = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), os.stat(self._place)):
                    return handle
            except (BlockingIOError, FileNotFoundError):
                # Readers that ask for the writer hold a lock for a moment: one failure says little.
                if attempt >= 4 and (found := writer_of(self.path)) and found[1]:
                    os.close(handle)
                    raise TableError(f"{self.path}: is being written by pid {found[0]}; wait for it, or stop it first") from None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            time.sleep(0.005)
        raise TableError(f"{self.path}: its writers come and go, no turn in 40 tries; stop them first")

    def write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self.handle, view, offset)
            view, offset = view[done:], offset + done

    def sync(self) -> None:
        os.fsync(self.handle)

    def reserve(self, nbytes: int) -> None:
        """Raises TableError where the file system has no room, before any row is written."""
        status = os.fstatvfs(self.handle)
        free = status.f_bavail * status.f_frsize
        if nbytes > free and status.f_blocks:  # a tmpfs without a limit says that it has no blocks at all
            raise TableError(f"{self.path}: needs {nbytes:,} bytes, {free:,} are free there; free space or choose another folder")

    def publish(self) -> None:
        """Give the file its name."""
        os.replace(self._place, self.path)
        os.close(self.handle)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            os.unlink(self._place)
        with contextlib.suppress(OSError):
            os.close(self.handle)


class Piece:
    """The rows ``[first_row, first_row + rows)`` in one file: its header, and where each block goes."""

    def __init__(self, sink: Sink, header: Header, names: tuple[str, str], first_row: int):
        self.sink, self.first_row = sink, first_row
        self.payload, self.scale = (header.tensors[name] for name in names)
        self.rows = self.payload.shape[0]

    def store(self, first_row: int, payload: memoryview, scale: memoryview) -> None:
        """Write the bytes of some rows."""
        for span, data in ((self.payload, payload), (self.scale, scale)):
            self.sink.write(span.offset + (first_row - self.first_row) * span.shape[1], data)


def fill(pieces: Sequence[Piece], source: RowSource, progress: RowsProgress | None) -> list[bytes]:
    """Write all rows, a block at a time on threads; every block lies in one piece. Returns the block digests.

    Raises:
        TableError: the source gives other rows than it should: of another shape, or not those of its stored digests.
    """
    step = pieces[0].rows or 1  # all but the last have as many
    known = source.blocks if isinstance(source, TableFile) else None

    def copy(first_row: int, count: int) -> bytes:
        payload, scale = source.read(first_row, count)
        expected = (count, source.head_dim), (count, source.head_dim // 32)
        if (payload.dtype, scale.dtype) != (torch.float8_e4m3fn, torch.uint8) or (tuple(payload.shape), tuple(scale.shape)) != expected:
            raise TableError(
                f"the source gave {payload.dtype} {list(payload.shape)} and {scale.dtype} {list(scale.shape)} for {count} rows at "
                f"{first_row}, expected float8_e4m3fn {list(expected[0])} and uint8 {list(expected[1])}"
            )
        payload_bytes, scale_bytes = as_bytes(payload), as_bytes(scale)
        pieces[first_row // step].store(first_row, payload_bytes, scale_bytes)
        digest = block_digest(payload_bytes, scale_bytes)
        if known is not None:
            # Damaged rows must not get a digest that calls them sound.
            try:
                check_block(first_row, count, digest, known)
            except TableError as error:
                raise TableError(f"{source.path}: {error}") from error  # pyright: ignore[reportAttributeAccessIssue]
        return digest

    return list(each_block(source.rows, copy, progress))


def plan_file(
    names: tuple[str, str], rows: int, head_dim: int, metadata: dict[str, str], padding: str | None = None
) -> tuple[bytes, Header]:
    """The header of a file that holds these rows; a tensor named ``padding`` puts the scales on a page where they are not."""
    if head_dim < 32 or head_dim % 32 or rows < 0:
        raise TableError(f"{rows} rows of {head_dim} values: expected rows of a multiple of 32 values")
    gap = -(rows * head_dim) % PAGE if padding else 0
    between = [(padding, "U8", (gap,))] if padding and gap else []
    return build_header([(names[0], "F8_E4M3", (rows, head_dim)), *between, (names[1], "F8_E8M0", (rows, head_dim // 32))], metadata)


def finish(sink: Sink, header: bytes) -> None:
    """Put the header before the rows, its length last: only then is the file one."""
    sink.write(16, header[16:])
    sink.sync()
    sink.write(0, header[:16])
    sink.sync()


def write_table(
    path: str | os.PathLike[str],
    source: RowSource | tuple[torch.Tensor, torch.Tensor],
    *,
    prefix: str = "",
    shard_bytes: int | None = None,
    progress: RowsProgress | None = None,
    replace: bool = False,
) -> str:
    """Write a table as safetensors, never more of it in memory than a block of rows per thread.

    Args:
        path: of the file (`x.safetensors`); with ``shard_bytes`` the files are `x-00001-of-00003.safetensors`, ... and the table's
            own path is `x.safetensors.index.json`, which is written last.
        source: what reads rows by range (a TableFile, a RowStorage, any :class:`RowSource`), or (payload, scale).
        prefix: of the tensor names, such as "model.layers.1.engram.".
        shard_bytes: bytes of rows per file, rounded down to whole blocks of 65,536 rows, at least one.
        progress: called with (rows done, rows in all) after each block.
        replace: write over files that are there; they stay whole until the new ones are. Shards of the old table that the new one
            has no use for are removed, where the old index names them and they hold nothing else.

    Returns:
        The digest.

    Raises:
        TableError: a file is there already or is being written by another process, no room, or rows that do not fit. Nothing of
            the new table is left then, and the old files are as they were.
    """
    rows, path = rows_of(source), Path(path)
    if not prefix.isprintable():
        raise TableError(f"prefix {prefix[:60]!r} of the tensor names: expected characters that print, such as 'model.layers.1.engram.'")
    if not path.name or "\0" in path.name:
        raise TableError(f"{str(path)!r}: is no name of a file, expected one such as 'table.safetensors'")
    if prefix and not prefix.endswith("."):
        prefix += "."
    try:
        if path.is_dir():
            raise TableError(f"{path}: is a folder, expected the name of a file")
        if shard_bytes is None:
            return _write_single(path, rows, prefix, progress, replace)
        return _write_shards(path, rows, prefix, shard_bytes, progress, replace)
    except OSError as error:
        raise TableError(f"{path}: cannot write the table ({error.strerror or error}); free space or choose another folder") from error


def single_header(rows: int, head_dim: int, prefix: str, blocks: list[bytes] | None = None) -> tuple[bytes, Header]:
    """The header of a table in one file, with room for its digests where they are not known yet."""
    known = [bytes(32)] * -(-rows // BLOCK_ROWS) if blocks is None else blocks
    names = (f"{prefix}embed.weight", f"{prefix}embed.scale")
    return plan_file(names, rows, head_dim, {"format": "pt", KEY: table_metadata(rows, head_dim, known)})


def write_into(sink: Sink, source: RowSource, prefix: str, progress: RowsProgress | None) -> str:
    """One table into one sink; it becomes valid with the last write."""
    _, planned = single_header(source.rows, source.head_dim, prefix)
    blocks = fill([Piece(sink, planned, (f"{prefix}embed.weight", f"{prefix}embed.scale"), 0)], source, progress)
    finish(sink, single_header(source.rows, source.head_dim, prefix, blocks)[0])
    return table_digest(source.rows, source.head_dim, blocks)


def _write_single(path: Path, source: RowSource, prefix: str, progress: RowsProgress | None, replace: bool) -> str:
    draft = Draft(path, replace=replace)
    try:
        draft.reserve(source.rows * (source.head_dim + source.head_dim // 32) + PAGE)
        digest = write_into(draft, source, prefix, progress)
        draft.publish()
    except BaseException:
        draft.abandon()
        raise
    return digest


def _write_shards(path: Path, source: RowSource, prefix: str, shard_bytes: int, progress: RowsProgress | None, replace: bool) -> str:
    if shard_bytes < 1:
        raise TableError(f"shards of {shard_bytes} bytes: expected at least 1")
    row_bytes = source.head_dim + source.head_dim // 32
    step = max(1, shard_bytes // (BLOCK_ROWS * row_bytes)) * BLOCK_ROWS
    starts = range(0, max(source.rows, 1), step)
    stem = path.name.removesuffix(".index.json").removesuffix(".safetensors")
    index = path.with_name(stem + INDEX_SUFFIX)
    if index.exists() and not replace:
        raise TableError(f"{index}: is there already, expected a new file; pass replace=True (--force), or choose another name")
    drafts: list[Draft] = []
    published: list[Path] = []
    pieces: list[Piece] = []
    headers: list[bytes] = []
    places: dict[str, str] = {}
    try:
        for number, first in enumerate(starts, 1):
            file = path.with_name(f"{stem}-{number:05d}-of-{len(starts):05d}.safetensors")
            count = min(step, source.rows - first)
            names = (f"{prefix}embed.weight.rows.{first}", f"{prefix}embed.scale.rows.{first}")
            metadata = {"format": "pt", KEY: table_metadata(source.rows, source.head_dim, None)}
            header, planned = plan_file(names, count, source.head_dim, metadata, f"{prefix}embed.padding.rows.{first}")
            drafts.append(Draft(file, replace=replace))
            headers.append(header)
            pieces.append(Piece(drafts[-1], planned, names, first))
            places |= dict.fromkeys(names, file.name)
        drafts[0].reserve(source.rows * row_bytes + (len(drafts) + 1) * PAGE)
        blocks = fill(pieces, source, progress)
        for draft, header in zip(drafts, headers, strict=True):
            finish(draft, header)
        about = table_metadata(source.rows, source.head_dim, blocks)
        text = json.dumps({"metadata": {"total_size": source.rows * row_bytes, KEY: about}, "weight_map": places}, indent=1)
        if index.exists() and not replace:  # of a writer with other shards, who has just ended
            raise TableError(f"{index}: is there already, expected a new file; pass replace=True (--force), or choose another name")
        surplus = _shards_named_by(index) if index.exists() else set()
        # Without an index there is no table: an end between two renames cannot leave a mixture of old and new.
        index.unlink(missing_ok=True)
        while drafts:
            drafts[0].publish()
            published.append(drafts.pop(0).path)
        write_atomically(index, text.encode())
    except BaseException:
        for draft in drafts:
            draft.abandon()
        for file in published:
            file.unlink(missing_ok=True)  # parts of no table
        raise
    for file in surplus.difference(published):
        with contextlib.suppress(OSError):  # one that stays takes room, and belongs to no table
            file.unlink()
    return table_digest(source.rows, source.head_dim, blocks)


def _shards_named_by(index: Path) -> set[Path]:
    """The files of a sharded table that hold nothing but its rows; none where the index is not that of a sound one."""
    try:
        with TableFile(index) as table:
            ours = re.compile(re.escape(table.prefix) + r"embed\.(weight|scale|padding)\.rows\.\d+")
            files = [file for part in table.parts for file in (part.payload_file, part.scale_file)]
            return {file.path for file in files if all(ours.fullmatch(name) for name in file.header.tensors)}
    except TableError:
        return set()
