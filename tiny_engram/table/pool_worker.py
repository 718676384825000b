"""The process that holds one connection to Mooncake Store; pool_link.py starts it by its path. Imports the standard library and mooncake.

A process, because the engine's calls cannot be ended from outside: one that waits for a machine that went away may hold the interpreter's
lock (``setup`` does), and a late answer would still be written to memory. A process can be ended, and what it could write ends with it.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

_LOCAL_BUFFER = 16 << 20  # bytes that the engine wants for small objects
# Codes of the engine that say something to a reader of an error.
_MEANING = {
    -200: "no memory left in the stores",
    -600: "its store is not reached, or the request makes no sense",
    -703: "it is being written",
    -704: "it is not there",
    -800: "transfer failed",
    -900: "the master did not answer",
}
_MISSING = -704


def _told(code: int) -> str:
    return f"{_MEANING.get(code, 'error of the engine')} ({code})"


class Failed(Exception):
    """args: a kind ("unreachable", "import", "missing", "engine") and a reason in words."""


class Worker:
    """One connected client; every method answers one request."""

    def __init__(self, settings: dict, staging: mmap.mmap):
        host, _, port = settings["master"].rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=settings["connect_s"]).close()
        except OSError as error:
            raise Failed("unreachable", f"no master answers there ({error.strerror or error})") from error
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # pyright: ignore
        except ImportError as error:
            raise Failed("import", str(error)) from error
        self._staging = staging
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        self._replicate = ReplicateConfig
        self._store = MooncakeDistributedStore()
        # No segment: memory that this process lent would take objects with it when the process is ended.
        code = self._store.setup(
            settings["local_host"],
            "P2PHANDSHAKE",  # stores and clients tell each other: a metadata server would keep a name of every process that was ended
            0,
            _LOCAL_BUFFER,
            settings["protocol"],
            settings["rdma_devices"],
            settings["master"],
        )
        if code:
            raise Failed("unreachable", f"the engine could not be set up: {_told(code)}")
        code = self._store.register_buffer(self._address, len(staging))
        if code:
            raise Failed("engine", f"{len(staging):,} B could not be registered for {settings['protocol']}: {_told(code)}")

    def get(self, key: str) -> bytes | None:
        """A small object, None where there is none."""
        there = self._store.is_exist(key)
        if there == 0:
            return None
        blob = self._store.get(key) if there == 1 else b""
        if not blob:
            raise Failed("engine", f"{key} cannot be read" + (f": {_told(there)}" if there < 0 else ""))
        return bytes(blob)

    def size(self, key: str) -> int | None:
        """Bytes of an object, None where there is none."""
        size = self._store.get_size(key)
        if size < 0 and size != _MISSING:
            raise Failed("engine", f"{key}: {_told(size)}")
        return None if size < 0 else size

    def put(self, key: str, nbytes: int, replicas: int) -> None:
        """Write the first bytes of the staging as an object; nothing here is ever evicted."""
        code = self._store.put_from(key, self._address, nbytes, self._kept(replicas))
        # Putting an object that exists does nothing and is no error, so the size is what counts.
        found = self.size(key) if code == 0 else None
        if code or found != nbytes:
            raise Failed("engine", f"{key} of {nbytes:,} B was not stored: {_told(code) if code else f'it has {found} B'}")

    def _kept(self, replicas: int):
        config = self._replicate()
        config.replica_num = replicas
        config.with_hard_pin = True
        return config

    def remove(self, key: str) -> None:
        """Remove an object, whoever reads it."""
        code = self._store.remove(key, True)
        if code not in (0, _MISSING):
            raise Failed("engine", f"{key} could not be removed: {_told(code)}")

    def replace(self, key: str, blob: bytes, replicas: int) -> None:
        """Write a small object, over an older one if there is one."""
        code = self._store.upsert(key, blob, self._kept(replicas))
        if code:
            raise Failed("engine", f"{key} was not stored: {_told(code)}")

    def read(self, prefix: str, rows_per_object: int, row_bytes: int, count: int, rows_at: int) -> None:
        """Rows into the staging from byte ``rows_at`` on; their ids (int64, ascending, ``count``) stand at its start.

        One call of the engine for all; rows side by side in the table are one range.
        """
        with memoryview(self._staging) as whole:
            ids = whole[: 8 * count].cast("q").tolist()
        keys: list[str] = []
        targets: list[list[int]] = []
        sources: list[list[int]] = []
        sizes: list[list[int]] = []
        part, before = -1, -2
        for place, row in enumerate(ids):
            index, offset = divmod(row, rows_per_object)
            if index != part:
                part = index
                keys.append(f"{prefix}/part-{index:06d}")
                for lists in (targets, sources, sizes):
                    lists.append([])
            elif row == before + 1:
                sizes[-1][-1] += row_bytes
                before = row
                continue
            targets[-1].append(rows_at + place * row_bytes)
            sources[-1].append(offset * row_bytes)
            sizes[-1].append(row_bytes)
            before = row
        results = self._store.get_into_ranges([self._address], [keys], [targets], [sources], [sizes])
        if len(results) != 1 or len(results[0]) != len(keys):
            raise Failed("engine", f"{len(keys)} objects were asked for and {[len(found) for found in results]} answered")
        for key, found, wanted in zip(keys, results[0], sizes, strict=True):
            if found == wanted:
                continue
            code = next((code for code in found if code < 0), None)
            if code == _MISSING:
                raise Failed("missing", f"{key} is not in the pool")
            raise Failed("engine", f"{key}: " + (_told(code) if code is not None else f"read {sum(found)} of {sum(wanted)} B"))


def serve(channel: Connection, staging: mmap.mmap) -> None:
    """Connect, then answer requests (method, arguments, seconds) until the other side closes (EOFError)."""
    settings, seconds = channel.recv()
    worker, method, arguments = None, "", ()
    while True:
        # The kernel's own alarm, with no handler, ends this process even where a call holds the interpreter and nobody is left to do it.
        signal.alarm(int(seconds) + 5)
        try:
            if worker is None:
                worker, answer = Worker(settings, staging), None
            else:
                answer = getattr(worker, method)(*arguments)
            reply = ("done", answer)
        except Failed as failure:
            reply = failure.args
        except Exception as error:  # what the engine raises: said on the other side, where it can be acted on
            reply = ("engine", f"{type(error).__name__}: {error}")
        signal.alarm(0)
        channel.send(reply)
        method, arguments, seconds = channel.recv()


if __name__ == "__main__":
    descriptor, memory, nbytes = (int(argument) for argument in sys.argv[1:])
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(Connection(descriptor), mmap.mmap(memory, nbytes))
    sys.stdout.flush()
    # The engine's own threads may still wait for machines that are gone: nothing here is worth their time.
    os._exit(0)
