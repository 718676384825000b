"""Table files: safetensors with `embed.weight` (e4m3 ``[rows, head_dim]``) and `embed.scale` (e8m0 ``[rows, head_dim / 32]``).

That is the layout of DeepSeek-V4.1's checkpoints, with any prefix (`model.layers.1.engram.`). Imports numpy, torch, errors, and of
this package header, index_file, open_file and table_digest. Nothing here holds a table in memory: rows are read by range.

Forms that are read:

- one file that holds both tensors;
- a checkpoint with an index (`*.safetensors.index.json`, `weight_map`), where the two tensors may lie in different files;
- a table in parts: the index names `<prefix>embed.weight.rows.N` and `<prefix>embed.scale.rows.N`, where N is the part's first
  row; parts follow each other from row 0 without gaps or overlaps. Each such file is a sound safetensors file of its own; parts that
  we write begin on pages, for which the last may hold a tensor of padding, so that all of them can be mapped as one.

What we write also says, under `tiny_engram.table` in a file's (or the index's) metadata, JSON with `format` 1, `rows`, `head_dim`,
`digest` and `blocks` (the block digests of table_digest, in hex, one after the other).
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tiny_engram.errors import TableError

from .header import TensorSpan, clipped, parse_json
from .index_file import INDEX_SUFFIX, read_index
from .open_file import OpenFile
from .table_digest import BLOCK_ROWS, RowsProgress, table_digest, verify_rows

__all__ = ["FORMAT", "INDEX_SUFFIX", "KEY", "Part", "TableFile", "table_metadata"]

KEY = "tiny_engram.table"
FORMAT = 1
_BLOCK = 32  # values per scale byte
_WEIGHT = re.compile(r"(?P<prefix>(?:.*\.)?)embed\.weight(?:\.rows\.(?P<first>0|[1-9]\d{0,15}))?")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[first_row, first_row + rows)`` of a table: where their payload and their scales lie."""

    first_row: int
    rows: int
    payload: TensorSpan
    payload_file: OpenFile
    scale: TensorSpan
    scale_file: OpenFile


class TableFile:
    """A table on disk, open for reading by row ranges, from several threads; a context manager.

    Attributes:
        path: as given. prefix: of the tensor names. rows, head_dim, parts: what was found. files: all files that hold rows.
        digest, blocks: as stored, None where the file says none.
    """

    def __init__(self, path: str | os.PathLike[str], *, prefix: str | None = None):
        """Open, and check everything that the headers say.

        Args:
            path: a safetensors file, the index of a sharded one, a pool file, or a DAX device.
            prefix: of the tensor names, such as "model.layers.1.engram."; None where the file holds one table only.

        Raises:
            TableError: not sound, unfinished, no table, several tables, parts that do not fit.
        """
        self.path = Path(path)
        self._lock = threading.Lock()
        self._open: dict[str, OpenFile] = {}
        self.closed = False
        try:
            if self.path.name.endswith(".json"):
                metadata, places = read_index(self.path)
            else:
                single = self._file(self.path)
                metadata, places = dict(single.header.metadata), {name: self.path for name in single.header.tensors}
            self.prefix, names = self._choose(places, prefix)
            self.parts = self._find_parts(names, places)
            self.rows = self.parts[-1].first_row + self.parts[-1].rows
            self.head_dim: int = self.parts[0].payload.shape[1]
            self.digest, self.blocks = self._stored_digest(metadata.get(KEY))
        except BaseException:
            self.close()
            raise

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, payload and scales."""
        return self.head_dim + self.head_dim // _BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def files(self) -> list[Path]:
        """The files that hold rows, in row order."""
        return list(dict.fromkeys(file.path for part in self.parts for file in (part.payload_file, part.scale_file)))

    def read(self, first_row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload float8_e4m3fn ``[count, head_dim]`` and scale uint8 ``[count, head_dim / 32]`` of a range of rows, read now."""
        if not 0 <= first_row <= first_row + count <= self.rows:
            raise TableError(f"{self.path}: rows {first_row} to {first_row + count} are asked for, the table has {self.rows}")
        if self.closed:
            raise TableError(f"{self.path}: the table is closed; open it again")
        payload = np.empty((count, self.head_dim), np.uint8)
        scale = np.empty((count, self.head_dim // _BLOCK), np.uint8)
        for part in self.parts:
            low, high = max(first_row, part.first_row), min(first_row + count, part.first_row + part.rows)
            if low < high:
                for out, span, file in ((payload, part.payload, part.payload_file), (scale, part.scale, part.scale_file)):
                    offset = span.offset + (low - part.first_row) * out.shape[1]
                    file.read_into(offset, out[low - first_row : high - first_row])
        return torch.from_numpy(payload).view(torch.float8_e4m3fn), torch.from_numpy(scale)

    def verify(self, first_row: int = 0, count: int | None = None, *, progress: RowsProgress | None = None) -> int:
        """Compare rows with the stored digests, see :func:`verify_rows`; the headers were checked on opening."""
        if self.blocks is None:
            raise TableError(f"{self.path}: stores no digest, expected {KEY!r} in its metadata; `tiny-engram table convert` adds one")
        try:
            return verify_rows(self, self.blocks, first_row, count, progress=progress)
        except TableError as error:
            if str(error).startswith(f"{self.path}:"):
                raise
            raise TableError(f"{self.path}: {error}") from error

    def close(self) -> None:
        """Close its files; mappings made from them stay."""
        with self._lock:
            self.closed = True
            for file in self._open.values():
                file.close()
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _file(self, path: Path) -> OpenFile:
        key = str(path)
        if key not in self._open:
            self._open[key] = OpenFile(path)
        return self._open[key]

    def _refuse(self, what: str) -> TableError:
        return TableError(f"{self.path}: {clipped(what)}")

    def _choose(self, places: Mapping[str, Path], prefix: str | None) -> tuple[str, list[tuple[int | None, str, str]]]:
        """The prefix and, in row order, (first row or None, weight's name, scale's name)."""
        tables: dict[str, list[tuple[int | None, str, str]]] = {}
        lonely = []
        for name in places:
            found = _WEIGHT.fullmatch(name)
            if found is None or not name.isprintable():
                continue
            first = found["first"]
            scale = f"{found['prefix']}embed.scale" + (f".rows.{first}" if first is not None else "")
            if scale in places:
                tables.setdefault(found["prefix"], []).append((None if first is None else int(first), name, scale))
            else:
                lonely.append(name)
        wanted = prefix
        if wanted is not None:
            wanted = re.sub(r"(^|(?<=\.))embed(\.weight)?$", "", wanted)  # the name of the tensor is understood too
            wanted = wanted if not wanted or wanted.endswith(".") else f"{wanted}."
        elif len(tables) == 1:
            (wanted,) = tables
        elif tables:
            raise self._refuse(f"holds {len(tables)} tables, expected a prefix that names one: {', '.join(sorted(tables)[:6])}")
        if wanted is None or wanted not in tables:
            lacks = f"; {lonely[0]!r} has no scale beside it" if lonely else ""
            known = f"; tables are there under {', '.join(map(repr, sorted(tables)[:6]))}" if tables else lacks
            raise self._refuse(f"holds no table {'' if wanted is None else repr(wanted) + ' '}of embed.weight and embed.scale{known}")
        names = sorted(tables[wanted], key=lambda entry: -1 if entry[0] is None else entry[0])
        if names[0][0] is None and len(names) > 1:
            raise self._refuse(f"holds {names[0][1]!r} whole and in parts, expected one of both")
        return wanted, names

    def _find_parts(self, names: list[tuple[int | None, str, str]], places: Mapping[str, Path]) -> list[Part]:
        parts: list[Part] = []
        for first, weight, scale in names:
            files = []
            for name in (weight, scale):
                file = self._file(places[name])
                if name not in file.header.tensors:
                    raise self._refuse(f"{places[name].name} lacks {name!r}, which the index places there; copy it again")
                files.append(file)
            payload, scales = files[0].header.tensors[weight], files[1].header.tensors[scale]
            if payload.dtype != "F8_E4M3" or len(payload.shape) != 2:
                raise self._refuse(f"{weight!r} is {payload.dtype} {list(payload.shape)}, expected F8_E4M3 [rows, head_dim]")
            if scales.dtype not in ("F8_E8M0", "U8") or len(scales.shape) != 2:
                raise self._refuse(f"{scale!r} is {scales.dtype} {list(scales.shape)}, expected F8_E8M0 or U8 [rows, head_dim / 32]")
            rows, dim = payload.shape
            if dim < _BLOCK or dim % _BLOCK or scales.shape != (rows, dim // _BLOCK):
                raise self._refuse(
                    f"{weight!r} is {list(payload.shape)} and {scale!r} {list(scales.shape)}, expected one scale per {_BLOCK} values "
                    "of each row, with head_dim a multiple of that"
                )
            expected = parts[-1].first_row + parts[-1].rows if parts else 0
            if (first or 0) != expected:
                raise self._refuse(f"part {weight!r} begins at row {first}, expected {expected}: a part is missing or too much")
            if parts and dim != parts[0].payload.shape[1]:
                raise self._refuse(f"{weight!r} has {dim} values per row, other parts {parts[0].payload.shape[1]}")
            parts.append(Part(expected, rows, payload, files[0], scales, files[1]))
        return parts

    def _stored_digest(self, text: object) -> tuple[str | None, list[bytes] | None]:
        if text is None:
            return None, None
        if not isinstance(text, str):
            raise self._refuse(f"{KEY!r} in its metadata is no text")
        about = parse_json(text.encode(), self._refuse, f"{KEY!r} in its metadata")
        if about.get("format") != FORMAT:
            raise self._refuse(f"table format {about.get('format')!r}, expected {FORMAT}; update tiny-engram or convert the table again")
        if (about.get("rows"), about.get("head_dim")) != (self.rows, self.head_dim):
            raise self._refuse(
                f"its metadata says {about.get('rows')} rows of {about.get('head_dim')}, {self.rows} of {self.head_dim} are there; "
                "a shard is missing or the file was changed"
            )
        digest, blocks = about.get("digest"), about.get("blocks")
        if digest is None:
            return None, None  # one part of a table, which is all of it
        count = -(-self.rows // BLOCK_ROWS)
        try:
            if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest) or not isinstance(blocks, str):
                raise ValueError("no sha256")
            raw = bytes.fromhex(blocks)
            if len(raw) != 32 * count:
                raise ValueError(f"{len(raw) // 32} block digests for {count} blocks")
            found = [raw[at : at + 32] for at in range(0, len(raw), 32)]
            if table_digest(self.rows, self.head_dim, found) != digest:
                raise ValueError("it is not that of its blocks")
        except ValueError as error:
            raise self._refuse(f"the digest in its metadata cannot be read ({error}); convert the table again") from error
        return digest, found


def table_metadata(rows: int, head_dim: int, blocks: list[bytes] | None) -> str:
    """What stands under ``KEY``, of the whole table; None for a part, whose index holds the digests.

    Its length does not depend on the digests' values, so that a header can be written before they are known.
    """
    about: dict[str, Any] = {"format": FORMAT, "rows": rows, "head_dim": head_dim}
    if blocks is not None:
        about |= {"digest": table_digest(rows, head_dim, blocks), "blocks": b"".join(blocks).hex()}
    return json.dumps(about, separators=(",", ":"))
