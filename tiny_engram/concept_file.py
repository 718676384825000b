"""The file of one concept: safetensors with a JSON description in its metadata, written atomically and read with bounds.

Imports safetensors, torch, config, errors and files. The header is checked (length, JSON, metadata types, tensor types and offsets)
before any tensor is made.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from tiny_engram.config import FORMAT_VERSION
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import write_atomically

__all__ = ["ConceptFileError", "pack", "pack_metadata", "parse", "read", "read_bytes", "write"]

KEY = "tiny_engram"
THUMBNAIL = "modelspec.thumbnail"
DIGEST = "modelspec.hash_sha256"  # of all bytes behind the header, as kohya's tools write it
MAX_HEADER = 4 * 2**20
MAX_FILE = 256 * 2**20
DTYPES = {"F8_E4M3": 1, "U8": 1, "F32": 4}
# Of safetensors too, and of no file of ours: with them a file is sound, and something else.
FOREIGN = frozenset(
    ("BOOL", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "BF16", "F64", "C64", "F4", "F6_E2M3", "F6_E3M2")
    + ("F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
)


class ConceptFileError(TinyEngramError):
    """A file that cannot be read as a concept, or cannot be written; one line with its path."""


def pack_metadata(described: dict[str, Any], thumbnail: str | None) -> dict[str, str]:
    """str -> str: our JSON under one key, and the modelspec keys that model browsers show."""
    base = described["base"]
    packed = {
        KEY: json.dumps(described, ensure_ascii=False, separators=(",", ":")),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{base or 'unknown'}/tiny-engram",
        "modelspec.implementation": "tiny-engram",
        "modelspec.title": described["name"],
        "modelspec.trigger_phrase": described["trigger"],
    }
    if thumbnail is not None:
        if not thumbnail.startswith(("data:image/png;base64,", "data:image/webp;base64,", "data:image/jpeg;base64,")):
            raise ConceptFileError(f"thumbnail starts with {thumbnail[:24]!r}, expected a data URI such as 'data:image/webp;base64,...'")
        packed[THUMBNAIL] = thumbnail
    return packed


def pack(tensors: dict[str, torch.Tensor], metadata: dict[str, str], where: str | Path) -> bytes:
    """The whole file; `where` is its path, for errors. Raises ConceptFileError for more bytes than readers take."""
    digest = _digest(save_bytes(tensors))
    blob = save_bytes(tensors, metadata=metadata | {DIGEST: digest})
    if len(blob) > MAX_FILE or struct.unpack("<Q", blob[:8])[0] > MAX_HEADER:
        raise ConceptFileError(
            f"{where}: the concept takes {len(blob)} bytes, expected at most {MAX_FILE}; use a smaller thumbnail or recipe"
        )
    return blob


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write beside the target, flush to disk, rename over it; on any failure the old file stays and nothing is left behind."""
    try:
        return write_atomically(path, pack(tensors, metadata, path))
    except OSError as error:
        raise ConceptFileError(
            f"{path}: cannot write the concept ({error.strerror or error}); free space or choose another folder"
        ) from error


def read(path: Path, what: str = "concept") -> tuple[dict[str, torch.Tensor], dict[str, Any], str | None]:
    """Tensors, our JSON, thumbnail; `what` is what the file should hold, for errors.

    Raises ConceptFileError for whatever is not a sound file of ours of a known version.
    """
    return parse(read_bytes(path, what), path, what)


def read_bytes(path: Path, what: str = "concept") -> bytes:
    """All of a file of bounded size. Raises ConceptFileError where there is none."""
    try:
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is no regular file"
            raise ConceptFileError(f"{path}: {found}, expected a {what} file (.safetensors)")
        size = path.stat().st_size
        if size > MAX_FILE:
            raise ConceptFileError(f"{path}: {size} bytes, expected at most {MAX_FILE}; this is no {what} file")
        return path.read_bytes()
    except OSError as error:
        raise ConceptFileError(f"{path}: cannot read the file ({error.strerror or error})") from error


def parse(blob: bytes, path: str | Path, what: str = "concept") -> tuple[dict[str, torch.Tensor], dict[str, Any], str | None]:
    """What `read` gives, from the bytes of a file; `path` is where they are from, for errors."""
    metadata = _check_header(path, blob, what)
    if metadata.get(DIGEST, "") not in ("", _digest(blob)):
        raise ConceptFileError(f"{path}: its data is not what was saved ({DIGEST} differs); copy or download it again")
    if KEY not in metadata:
        raise ConceptFileError(_of_another_kind(path, what, f"no {KEY!r} in its metadata"))
    try:
        described = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise ConceptFileError(f"{path}: its description is no JSON; the file is damaged, save it again") from error
    version = described.get("format") if isinstance(described, dict) else None
    if version not in range(1, FORMAT_VERSION + 1):
        raise ConceptFileError(f"{path}: format version {version!r}, expected 1 to {FORMAT_VERSION}; update tiny-engram or save it again")
    try:
        tensors = load_bytes(blob)
    except Exception as error:
        raise ConceptFileError(f"{path}: not a sound safetensors file ({' '.join(str(error).split())})") from error
    return tensors, described, metadata.get(THUMBNAIL)


def _digest(blob: bytes) -> str:
    (length,) = struct.unpack("<Q", blob[:8])
    return "0x" + hashlib.sha256(memoryview(blob)[8 + length :]).hexdigest()


def _of_another_kind(path: str | Path, what: str, why: str) -> str:
    return f"{path}: {why}, expected a {what} file saved by tiny-engram (is this a LoRA or another model?)"


def _check_header(path: str | Path, blob: bytes, what: str) -> dict[str, str]:
    """The metadata, after length, JSON, types, shapes and offsets of the header were found sound."""

    other = Path(path).suffix not in ("", ".safetensors")

    def refuse(why: str) -> ConceptFileError:
        way = f"a {what} is a file that ends in .safetensors" if other else "copy or download it again"
        return ConceptFileError(f"{path}: not a sound safetensors file ({why}); {way}")

    if len(blob) < 10:
        raise refuse(f"{len(blob)} bytes")
    (length,) = struct.unpack("<Q", blob[:8])
    if length > MAX_HEADER:
        raise refuse(f"header of {length} bytes, expected at most {MAX_HEADER}")
    if length > len(blob) - 8:
        raise refuse(f"header of {length} bytes in a file of {len(blob)}: truncated")
    try:
        header = json.loads(blob[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse("its header is no JSON") from error
    if not isinstance(header, dict):
        raise refuse("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("metadata is not text to text")
    data = len(blob) - 8 - length
    for name, about in header.items():
        try:
            dtype, shape, (low, high) = about["dtype"], about["shape"], about["data_offsets"]
            count = 1
            for side in shape:
                if not isinstance(side, int) or not 0 <= side <= MAX_FILE:
                    raise ValueError(f"shape {shape}")
                count *= side
                if count > MAX_FILE:  # a long list of large sides would take minutes to multiply
                    raise ValueError(f"shape {shape[:4]}...")
            if dtype in FOREIGN:
                raise ConceptFileError(_of_another_kind(path, what, f"tensor {name!r} has type {dtype}"))
            if dtype not in DTYPES:
                raise ValueError(f"type {dtype}")
            if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= high <= data):
                raise ValueError(f"offsets {low}..{high} in {data} bytes: truncated")
            if high - low != count * DTYPES[dtype]:
                raise ValueError(f"{high - low} bytes for {dtype} {shape}")
        except ConceptFileError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise refuse(f"tensor {name!r}: {error}") from error
    return metadata
