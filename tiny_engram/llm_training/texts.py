"""Texts of files, folders and datasets. Imports tiny_engram.errors, and the package datasets where a path asks for it."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError

__all__ = ["counted", "read_texts"]

logger = logging.getLogger(__name__)

PLAIN, LINES, TABLES = (".txt", ".md"), (".jsonl",), (".parquet", ".arrow")
COLUMN = "text"
# What save_to_disk leaves in a folder: of several splits, or of one.
_SAVED = ("dataset_dict.json", "state.json")


def counted(count: int, what: str) -> str:
    """ "1 text", "1,000 texts"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def read_texts(paths: Sequence[str | Path], *, tell: bool = False) -> Iterator[str]:
    """Texts of all paths in their order, files of a folder by name, those in folders of it too; blank ones are left out.

    Args:
        tell: log how many files of a folder are no texts.

    Raises:
        TinyEngramError: a path that is not there or holds no text, a file that is not UTF-8, a line that is no JSON object with a column
            "text", or a dataset while the package datasets is not installed.
    """
    for path in map(Path, paths):
        found = False
        for text in _texts_of(path, tell):
            if text.strip():
                found = True
                yield text
        if not found:
            raise TinyEngramError(f"{path}: no text in it; expected {_wanted()}")


def _wanted() -> str:
    return f"{', '.join(PLAIN + LINES)} files, or a folder of datasets"


def _texts_of(path: Path, tell: bool) -> Iterator[str]:
    if not path.exists():
        raise TinyEngramError(f"{path}: no such file or folder; expected {_wanted()}")
    if path.is_dir():
        if any((path / name).is_file() for name in _SAVED):
            yield from _saved(path)
            return
        files = sorted(each for each in path.rglob("*") if each.is_file() and not _hidden(each.relative_to(path)))
        known = [each for each in files if each.suffix.lower() in PLAIN + LINES + TABLES]
        if tell and len(known) < len(files):
            logger.info("%s in %s left alone", counted(len(files) - len(known), "other file"), path)
    else:
        known = [path]
    for file in known:
        yield from _texts_of_file(file)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _texts_of_file(path: Path) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        yield from _table(path)
    elif suffix in LINES:
        for number, line in enumerate(_read(path).split("\n"), start=1):
            if line.strip():
                yield _column(path, number, line)
    elif suffix in PLAIN:
        yield _read(path)
    else:
        raise TinyEngramError(f"{path}: a {suffix or 'nameless'} file; expected {_wanted()}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TinyEngramError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise TinyEngramError(f"{path}: cannot be read ({error.strerror or error})") from error


def _column(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TinyEngramError(f"{path}, line {number}: no JSON ({error}); expected an object with {COLUMN!r} in every line") from error
    return _text_of(row, f"{path}, line {number}")


def _text_of(row: Any, where: str) -> str:
    text = row.get(COLUMN) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = f"columns {', '.join(map(str, row))}" if isinstance(row, dict) and COLUMN not in row else f"{COLUMN} of another type"
        raise TinyEngramError(f"{where}: {has if isinstance(row, dict) else 'no object'}; expected a column {COLUMN!r} with a string")
    return text


def _datasets(path: Path) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TinyEngramError(f"{path}: the package datasets, which reads it, is not installed; run: pip install datasets") from error
    return datasets


def _saved(path: Path) -> Iterator[str]:
    datasets = _datasets(path)
    try:
        held = datasets.load_from_disk(str(path))
    except Exception as error:  # of whatever library is beneath it
        raise _unread(path, error) from error
    if isinstance(held, dict):
        if "train" not in held:
            raise TinyEngramError(f"{path}: splits {', '.join(held)}; expected one named train, or the folder of a single split")
        held = held["train"]
    yield from _rows(path, held)


def _table(path: Path) -> Iterator[str]:
    datasets = _datasets(path)
    try:
        make = datasets.Dataset.from_parquet if path.suffix.lower() == ".parquet" else datasets.Dataset.from_file
        held = make(str(path))
    except Exception as error:  # of whatever library is beneath it
        raise _unread(path, error) from error
    yield from _rows(path, held)


def _unread(path: Path, error: Exception) -> TinyEngramError:
    return TinyEngramError(f"{path}: datasets cannot read it ({' '.join(str(error).split())[:200]})")


def _rows(path: Path, held: Any) -> Iterator[str]:
    if COLUMN not in held.column_names:
        raise TinyEngramError(f"{path}: columns {', '.join(held.column_names)}; expected one named {COLUMN!r}")
    for number, row in enumerate(held.select_columns([COLUMN]), start=1):
        yield _text_of(row, f"{path}, row {number}")
