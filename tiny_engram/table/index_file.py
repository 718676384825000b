"""The index of a sharded safetensors file, `*.safetensors.index.json`, read with bounds. Imports errors and header."""

import os
from pathlib import Path
from typing import Any

from tiny_engram.errors import TableError

from .header import clipped, parse_json

__all__ = ["INDEX_SUFFIX", "read_index"]

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX = 64 * 2**20


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The metadata of an index, and the file in which each tensor lies; whether those files are there is not looked at.

    Raises:
        TableError: it cannot be read, is no index, or names a file of another folder.
    """

    def refuse(what: str) -> TableError:
        return TableError(f"{path}: {clipped(what)}")

    try:
        # A FIFO would wait for its other end for ever; like this it is empty.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            text = file.read(_MAX_INDEX + 1) or b""
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise refuse(f"cannot read the index ({why}); expected a .safetensors.index.json file") from error
    if len(text) > _MAX_INDEX:
        raise refuse(f"more than {_MAX_INDEX} bytes, expected an index of a sharded table")
    index = parse_json(text, refuse, "the index")
    names, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()) or not isinstance(metadata, dict):
        raise refuse("no index of a sharded file, expected 'weight_map' from tensor names to file names")
    files = {file: path.parent / file for file in set(names.values())}  # few, where names may be a hundred thousand
    for file in files:
        if not file or file != os.path.basename(file) or file in (".", ".."):
            raise refuse(f"names the file {file!r}, expected a file of the same folder")
    return metadata, {name: files[file] for name, file in names.items()}
