"""GatherThreads: rows of a table in host memory gathered by threads in C, which ask for rows ahead of time.

native_gather.c is compiled once on each machine and kept in the cache folder. Triton needs a C compiler on every machine with
CUDA, so there is one where it counts; elsewhere `shared_threads` gives None and a reason. TINY_ENGRAM_NATIVE=0 turns it off.
Imports torch, and tiny_engram.{files,table.costs,table.storage}.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from tiny_engram.files import write_atomically

from .costs import cache_path
from .storage import RowStorage

__all__ = ["GatherJob", "GatherThreads", "Tuning", "load", "reason", "shared_threads", "thread_count"]

VARIABLE = "TINY_ENGRAM_NATIVE"
SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-pthread")
_MOST_THREADS = 16  # the link to the device is busy with fewer
_DIGEST = 32  # bytes of sha256 behind the library: loading a damaged one could kill the process


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How threads read memory; benchmarks/host_lookup.py --tune compares.

    Attributes:
        ahead: rows asked for before they are copied.
        far: ask for them in the second cache, not the first.
    """

    ahead: int = 16
    far: bool = True


class _Job(ctypes.Structure):
    """te_job of native_gather.c."""

    _fields_ = [
        ("payload", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("payload_stride", ctypes.c_int64),
        ("payload_bytes", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("scale_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_int64),
        ("bays", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("far", ctypes.c_int64),
    ]


class GatherJob:
    """Rows of one lookup on their way into staging; see :meth:`GatherThreads.job`."""

    def __init__(self, library: ctypes.CDLL, pool: int):
        self._library, self._pool = library, pool

    def wait(self, chunk: int) -> None:
        """Work until the rows of this chunk are there; its bay must have been released."""
        if self._library.te_wait(self._pool, chunk):
            raise IndexError(f"chunk {chunk} waited for: expected one whose bay was released")

    def release(self, chunks: int) -> None:
        """The first so many chunks may be written, since what lay in their bays is no longer needed."""
        self._library.te_release(self._pool, chunks)


class GatherThreads:
    """Threads that gather rows, kept from job to job; one job at a time, others wait. After a fork the child has threads of its own.

    Attributes:
        count: how many work, the caller's among them.

    Args:
        library: what :func:`load` gave.
    """

    def __init__(self, library: ctypes.CDLL, count: int, tuning: Tuning | None = None):
        self._library = library
        self.count = count
        self.tuning = tuning or Tuning()
        self._lock = threading.Lock()
        self._pool: int | None = None
        _all.add(self)

    def _start_threads(self) -> int:
        if self._pool is None:
            self._pool = self._library.te_create(self.count)
            if not self._pool:
                raise MemoryError("no memory for a pool of threads")
        return self._pool

    def _forget(self) -> None:
        """In the child of a fork: the threads stayed with the parent."""
        self._pool, self._lock = None, threading.Lock()

    def alert(self) -> None:
        """A job comes within a millisecond: threads that sleep get up meanwhile."""
        if self._lock.acquire(blocking=False):  # else they are up
            try:
                self._library.te_alert(self._start_threads())
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the threads; the next job starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                self._library.te_destroy(pool)

    @contextlib.contextmanager
    def job(self, storage: RowStorage, ids: torch.Tensor, out: torch.Tensor, *, chunk_rows: int) -> Iterator[GatherJob]:
        """Gather rows as records, chunk after chunk, into a ring; threads work until the context is left.

        Chunk c goes to rows ``(c % S) * chunk_rows ...`` of ``out``. The first S may be written at once, others as they are released.

        Args:
            storage: a table in host memory, R rows.
            ids: int64 ``[N]`` on the CPU, contiguous, in ``[0, R)``.
            out: uint8 ``[S * chunk_rows, row_bytes]``, contiguous: payload bytes, then scale bytes of each row.
            chunk_rows: rows of a chunk, 1 or more.

        Raises:
            ValueError: types or shapes do not fit.
            IndexError: an id is outside the table, said when the context is left; nothing outside is read.
        """
        bays, left = divmod(out.shape[0], chunk_rows)
        fits = out.is_contiguous() and out.dtype == torch.uint8 and out.shape[1] == storage.row_bytes and not left and bays > 0
        if not fits or ids.dtype != torch.int64 or ids.ndim != 1 or not ids.is_contiguous() or ids.is_cuda or out.is_cuda:
            raise ValueError(
                f"ids {ids.dtype} {list(ids.shape)} on {ids.device}, out {out.dtype} {list(out.shape)} on {out.device}: "
                f"expected int64 [N] and uint8 [a multiple of {chunk_rows}, {storage.row_bytes}], contiguous, on the CPU"
            )
        payload, scale = storage.payload, storage.scale
        job = _Job(
            payload=payload.data_ptr(),
            payload_stride=payload.stride(0),
            payload_bytes=storage.head_dim,
            scale=scale.data_ptr(),
            scale_stride=scale.stride(0),
            scale_bytes=scale.shape[1],
            rows=storage.rows,
            ids=ids.data_ptr(),
            count=ids.numel(),
            out=out.data_ptr(),
            chunk_rows=chunk_rows,
            bays=bays,
            **dataclasses.asdict(self.tuning),
        )
        if storage.records is not None:
            job.payload_bytes, job.scale_bytes = storage.row_bytes, 0
        bad = ids.numel()
        with self._lock:
            pool = self._start_threads()
            if self._library.te_start(pool, ctypes.byref(job)):
                raise MemoryError(f"no memory to gather {ids.numel()} rows")
            process = os.getpid()
            try:
                yield GatherJob(self._library, pool)
            finally:
                if os.getpid() == process:  # a child forked in here has no threads to wait for
                    bad = self._library.te_finish(pool)
        if bad < ids.numel():
            raise IndexError(f"row id {int(ids[bad])} is outside [0, {storage.rows})")


_all: weakref.WeakSet[GatherThreads] = weakref.WeakSet()


def load() -> ctypes.CDLL:
    """The compiled library, built if it is not there.

    Raises:
        OSError: it cannot be had; the text says why.
    """
    compiler = _compiler()
    done = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=False)
    parts = (SOURCE.read_bytes(), done.stdout, " ".join((*compiler, *_FLAGS)).encode(), platform.platform().encode())
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    kept = cache_path().parent / f"native-gather-{platform.machine()}-{digest[:32]}.so"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_foreign(kept.parent)
        if not _whole(kept):
            write_atomically(kept, _build(compiler))
            kept.chmod(0o600)
        _refuse_foreign(kept)
        return _typed(kept)
    except PermissionError:
        pass  # a home that cannot be written, or not ours: build for this process alone
    except OSError as error:
        if not isinstance(error, NotADirectoryError | FileExistsError):
            raise
    with tempfile.TemporaryDirectory(prefix="tiny-engram-") as folder:
        alone = Path(folder) / kept.name
        alone.write_bytes(_build(compiler))
        return _typed(alone)


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise FileNotFoundError("no C compiler found (CC, cc, gcc, clang)")


def _build(compiler: list[str]) -> bytes:
    """The library, and its sha256."""
    with tempfile.TemporaryDirectory(prefix="tiny-engram-") as folder:
        made = Path(folder) / "gather.so"
        done = subprocess.run([*compiler, *_FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not made.exists():
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise OSError(f"{shlex.join(compiler)} failed: {said.strip()}")
        blob = made.read_bytes()
    return blob + hashlib.sha256(blob).digest()


def _whole(path: Path) -> bool:
    if not path.exists():
        return False
    _refuse_foreign(path)
    blob = path.read_bytes()
    return hashlib.sha256(blob[:-_DIGEST]).digest() == blob[-_DIGEST:]


def _refuse_foreign(path: Path) -> None:
    """Code that someone else may have written is not run."""
    held = path.stat()
    if held.st_uid != os.geteuid() or held.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} belongs to user {held.st_uid} with mode {stat.filemode(held.st_mode)}: expected ours alone to write")


def _typed(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, takes, gives in (
        ("te_create", [ctypes.c_int], pointer),
        ("te_destroy", [pointer], None),
        ("te_alert", [pointer], None),
        ("te_start", [pointer, pointer], ctypes.c_int),
        ("te_wait", [pointer, number], ctypes.c_int),
        ("te_release", [pointer, number], None),
        ("te_finish", [pointer], number),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = takes, gives
    return library


def thread_count() -> int:
    """The cores that this process may use, shared among a launcher's processes on this machine; 16 at most.

    OMP_NUM_THREADS does not count: launchers set it to 1 for all they start.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


_shared: GatherThreads | None = None
_reason: str | None = None
_loading = threading.Lock()


def shared_threads() -> GatherThreads | None:
    """Those of this process, or None where there is none, and :func:`reason` says why."""
    global _shared, _reason
    if os.environ.get(VARIABLE) == "0":
        return None
    with _loading:
        if _shared is None and _reason is None:
            try:
                _shared = GatherThreads(load(), thread_count())
            except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
                _reason = str(error)
        return _shared


def reason() -> str | None:
    """Why `shared_threads` gives None; None if it does not, or was not asked yet."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE) == "0" else _reason


def _after_fork() -> None:
    global _loading
    _loading = threading.Lock()
    for threads in list(_all):
        threads._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
