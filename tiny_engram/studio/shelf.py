"""The shelf: which concepts are in use, in the order in which they were put there. On disk, so that it outlives the app.

May import workspace. A base has a shelf of its own: its concepts are no other's.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.workspace import check_id, read_json, write_json

__all__ = ["Shelf"]

logger = logging.getLogger(__name__)

MOST_IDS, MOST_BASES = 1_000, 64


class Shelf:
    """Ids of concepts. Threads may share it; a change is on disk when its verb returns.

    A file that is damaged, or a disk that is full, costs no more than what is in use after the next start: it is logged, and no error.
    """

    def __init__(self, path: Path, base: str) -> None:
        """path: the file of all shelves, which need not be there. base: whose this one is."""
        self._path, self._base = path, base
        self._lock = threading.Lock()
        self._ids = dict.fromkeys(self._read().get(base, ()))

    @property
    def ids(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._ids)

    def __contains__(self, id: str) -> bool:
        with self._lock:
            return id in self._ids

    def put(self, id: str) -> None:
        """Last; one that is there stays where it is."""
        with self._lock:
            if id not in self._ids:
                self._ids[id] = None
                self._write()

    def take(self, id: str) -> None:
        """Away; one that is not there is no error."""
        with self._lock:
            if id in self._ids:
                del self._ids[id]
                self._write()

    def _read(self) -> dict[str, list[str]]:
        """base -> ids; what is no id is left out."""
        try:
            told: Any = read_json(self._path) if self._path.exists() else {}
        except StudioError as error:
            logger.warning("what was in use is not known: %s", error)
            return {}
        found: dict[str, list[str]] = {}
        for base, ids in told.items() if isinstance(told, dict) else ():
            try:
                found[base] = [check_id("concept", id) for id in ids[:MOST_IDS]]
            except (StudioError, TypeError):
                logger.warning("what was in use with the base %r is not known: the file is damaged", base[:80])
        return found

    def _write(self) -> None:
        shelves = {base: ids for base, ids in self._read().items() if base != self._base}
        while len(shelves) >= MOST_BASES:
            shelves.pop(next(iter(shelves)))
        try:
            write_json(self._path, {**shelves, self._base: list(self._ids)})
        except StudioError as error:
            logger.warning("what is in use is not kept for the next start: %s", error)
