"""What a folder's metadata.jsonl or metadata.csv says of its pictures. Imports the standard library and the errors of pictures."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_engram.training.data.pictures import DataError, reason

__all__ = ["CAPTION_COLUMNS", "METADATA", "About", "read_metadata", "read_text"]

CAPTION_COLUMNS = ("text", "caption")
METADATA = ("metadata.jsonl", "metadata.csv")


@dataclass(slots=True)
class About:
    """What is said of one picture in all its lines; `mask` is a file's name as it is written there."""

    captions: list[str] = field(default_factory=list)
    mask: str | None = None
    repeats: int | None = None


def read_text(file: Path) -> str:
    """Raises DataError naming a file that is not UTF-8."""
    try:
        # newlines as they are: csv wants them so
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({reason(error)}); save it as UTF-8") from error


def _lines_of_json(file: Path) -> Iterator[tuple[int, Any]]:
    # not splitlines(): JSON text may hold separators that it would cut at
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number}: not JSON ({reason(error)}); expected one object a line") from error


def _lines_of_csv(file: Path) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise DataError(
                    f"{file}, line {reader.line_num}: more or fewer cells than the {count} columns of the first line; put text that holds "
                    "commas in double quotes"
                )
            # an empty cell says nothing
            yield reader.line_num, {name: cell for name, cell in row.items() if cell.strip()}
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not CSV ({reason(error)}); expected cells with commas between them") from error


def _repeats(value: Any, where: str) -> int:
    text = value.strip() if isinstance(value, str) else value
    count = int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 9 else text
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(f"{where}: repeats is {value!r}, expected a whole number from 1")
    return count


def read_metadata(file: Path, pictures: set[str]) -> dict[str, About]:
    """Picture name -> what is said of it; a picture may have several lines.

    Raises DataError naming file and line: other columns, a name that is none of `pictures`, lines that do not agree.
    """
    found: dict[str, About] = {}
    for number, row in (_lines_of_csv if file.suffix == ".csv" else _lines_of_json)(file):
        where = f"{file}, line {number}"
        caption = next((row[c] for c in CAPTION_COLUMNS if isinstance(row, dict) and isinstance(row.get(c), str)), None)
        told = isinstance(row, dict) and isinstance(row.get("file_name"), str)
        if not told or (caption is None and not (row.keys() & {"mask", "repeats"} and row.keys().isdisjoint(CAPTION_COLUMNS))):
            columns = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
            expected = " or ".join(CAPTION_COLUMNS)
            raise DataError(f"{where}: columns {columns}, expected file_name and {expected}, both text, and may be mask and repeats")
        about = found.setdefault(row["file_name"].removeprefix("./"), About())
        about.captions += [] if caption is None else [caption]
        mask, repeats = row.get("mask"), row.get("repeats")
        if mask is not None and not isinstance(mask, str):
            raise DataError(f"{where}: mask is {mask!r}, expected the name of a file beside the picture")
        count = None if repeats is None else _repeats(repeats, where)
        for name, value in (("mask", mask), ("repeats", count)):
            before = getattr(about, name)
            if value is not None and before not in (None, value):
                raise DataError(f"{where}: {name} is {value!r}, but {before!r} in a line before it; write the same in both or in one alone")
            setattr(about, name, before if value is None else value)
    missing = sorted(set(found) - pictures)
    if missing:
        raise DataError(
            f"{file} names {missing[0]!r}, which is no picture in this folder ({len(missing)} such); "
            "file_name is the plain name of a picture beside it, or its path from here with --recursive"
        )
    return found
