"""The header of a safetensors file, read with bounds and checked before anything is believed. Imports errors.

Every table file, published or ours, single, sharded or a pool, begins with this header: eight bytes of length, JSON, then the data.
Ours is padded so that the data begins on a page.
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_engram.errors import TableError

__all__ = ["MAX_HEADER", "PAGE", "Header", "TensorSpan", "WRITING", "build_header", "clipped", "parse_header", "parse_json"]

PAGE = 4096
MAX_HEADER = 32 * 2**20  # digests of the blocks of 94 GiB of rows take 0.4 MB
# Where the length of a header stands, these eight bytes and the writer's process id stand while a file is being written:
# as a length they are absurd, so that every reader of safetensors refuses the file.
WRITING = b"\xffWRITING"

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16,
         "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}  # fmt: skip
_MAX_SIDE = 2**48
_MAX_WORDS = 400  # characters of what a file says, in a message


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor in a file: ``offset`` counts from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says it holds, found to fit its size."""

    tensors: dict[str, TensorSpan]
    metadata: dict[str, str]
    data_start: int


def clipped(what: str) -> str:
    """A message of bounded length, whatever a file says."""
    return what if len(what) <= _MAX_WORDS else f"{what[:_MAX_WORDS]} ..."


def parse_json(text: bytes, refuse: Callable[[str], TableError], what: str) -> dict[str, Any]:
    """A JSON object without a key given twice; ``refuse`` makes the error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        for text in (*found, *found.values()):
            if isinstance(text, str):
                text.encode()  # half of a surrogate pair is no text, and could not be printed
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{what} is no sound JSON: {error}") from error
    if not isinstance(found, dict):
        raise refuse(f"{what} is no JSON object")
    return found


def parse_header(path: object, size: int | None, read: Callable[[int, int], bytes]) -> Header:
    """Read and check a header.

    Args:
        path: for messages.
        size: bytes of the file; None where the system does not tell (some devices), then offsets are bounded by the mapping alone.
        read: ``(offset, count) -> bytes``, fewer at the end of the file.

    Raises:
        TableError: the header is too long, cut, no JSON, or says what cannot be; the file is only read.
    """

    def refuse(what: str) -> TableError:
        return TableError(f"{path}: not a sound safetensors file ({clipped(what)}); copy, download or convert it again")

    if size is not None and size < 10:
        raise refuse(f"{size} bytes, expected at least a header")
    (length,) = struct.unpack("<Q", read(0, 8))
    if not 2 <= length <= MAX_HEADER:
        raise refuse(f"header of {length} bytes, expected 2 to {MAX_HEADER}")
    if size is not None and length > size - 8:
        raise refuse(f"header of {length} bytes in a file of {size}: truncated")
    text = read(8, length)
    if len(text) != length:
        raise refuse(f"header of {length} bytes, {len(text)} found: truncated")
    found = parse_json(text, refuse, "its header")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("metadata is not text to text")
    start = 8 + length
    tensors = {name: _span(name, about, start, size, refuse) for name, about in found.items()}
    end, last = start, ""
    for name, span in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if span.nbytes and span.offset < end:
            raise refuse(f"tensor {name!r} begins at byte {span.offset}, inside {last!r}, which ends at {end}")
        end, last = max(end, span.offset + span.nbytes), name
    return Header(tensors, metadata, start)


def _span(name: str, about: Any, start: int, size: int | None, refuse: Callable[[str], TableError]) -> TensorSpan:
    try:
        if not isinstance(about, dict):
            raise ValueError(f"{str(about)[:60]!r} describes none")
        dtype, shape, (low, high) = about["dtype"], about["shape"], about["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise ValueError(f"type {dtype!r} is unknown")
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(side) is int and 0 <= side <= _MAX_SIDE for side in shape):
            raise ValueError(f"shape {str(shape)[:60]} is none")
        if type(low) is not int or type(high) is not int or not 0 <= low <= high:
            raise ValueError(f"offsets {low}..{high} are none")
        if size is not None and start + high > size:
            raise ValueError(f"offsets {low}..{high} in {size - start} bytes of data: truncated")
        needed = math.prod(shape) * _BITS[dtype] // 8
        if high - low != needed:
            raise ValueError(f"{high - low} bytes for {dtype} {shape}, expected {needed}")
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise refuse(f"tensor {name!r}: {what}") from error
    return TensorSpan(dtype, tuple(shape), start + low, high - low)


def build_header(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, Header]:
    """The bytes of a header, padded to whole pages, and what it says; tensors ``(name, dtype, shape)`` follow each other without gaps."""
    found: dict[str, Any] = {"__metadata__": metadata}
    spans, end = {}, 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * _BITS[dtype] // 8
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        spans[name] = TensorSpan(dtype, shape, end, nbytes)
        end += nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > MAX_HEADER:
        raise TableError(f"the header would take {len(text)} bytes, expected at most {MAX_HEADER}: split the table into shards")
    start = 8 + len(text)
    placed = {name: TensorSpan(s.dtype, s.shape, s.offset + start, s.nbytes) for name, s in spans.items()}
    return struct.pack("<Q", len(text)) + text, Header(placed, metadata, start)
