"""One client of a pool in a process of its own, with a deadline for everything. Imports torch and tiny_engram.errors, not mooncake.

What the other process reads arrives in ``staging``, memory that both share.
"""

import contextlib
import mmap
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tiny_engram.errors import TableError

__all__ = ["Link", "LinkError", "PoolConfig"]

OnFailure = Literal["raise", "zero"]
_WORKER = Path(__file__).with_name("pool_worker.py")
_BACKOFF_S = (0.25, 8.0)  # before the second attempt to connect, and the longest
_INSTALL = "install Mooncake (pip install --editable '.[pool]' in the checkout), and Debian's libibverbs1 librdmacm1 libnuma1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Where a pool is and how long to wait for it.

    Attributes:
        master: "HOST:PORT" of mooncake_master.
        local_host: this machine's address, as the stores reach it.
        protocol: "tcp" or "rdma", which needs a device in /sys/class/infiniband.
        rdma_devices: for "rdma", names separated by commas; empty lets the engine choose.
        staging_bytes: memory that rows arrive in; larger lookups are read in turns. It lends nothing to the pool.
        timeout_ms: the longest that a lookup waits, a new connection included.
        connect_timeout_ms: the longest that attaching and publishing wait for a connection, or for one object to be written.
        on_failure: "raise", or "zero": rows that cannot be read in time are zeros, counted and warned of.
        log: a file that the engine's own messages are appended to; None drops them.
    """

    master: str
    local_host: str
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""
    staging_bytes: int = 64 << 20
    timeout_ms: int = 1000
    connect_timeout_ms: int = 20_000
    on_failure: OnFailure = "raise"
    log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise TableError(f"pool master {self.master!r}: expected HOST:PORT of mooncake_master")
        if not self.local_host:
            raise TableError("pool local_host is empty: expected this machine's address, as the stores reach it")
        if self.protocol not in ("tcp", "rdma") or self.on_failure not in get_args(OnFailure):
            raise TableError(f"pool protocol {self.protocol!r}, on_failure {self.on_failure!r}: expected tcp or rdma, raise or zero")
        if self.timeout_ms < 1 or self.connect_timeout_ms < 1:
            raise TableError(f"pool timeouts {self.timeout_ms} and {self.connect_timeout_ms} ms: expected 1 or more")
        if self.staging_bytes < 1 << 16 or self.staging_bytes % mmap.PAGESIZE:
            raise TableError(f"pool staging_bytes {self.staging_bytes}: expected 65,536 or more, whole pages of {mmap.PAGESIZE}")


def _check_rdma(wanted: str, folder: Path = Path("/sys/class/infiniband")) -> None:
    """Raises TableError where the machine has no RDMA device, or not those (names separated by commas)."""
    there = sorted(os.listdir(folder)) if folder.is_dir() else []
    missing = [name for name in wanted.split(",") if name and name not in there]
    if missing or not there:
        what = f"RDMA devices {missing}" if missing else "any RDMA device"
        raise TableError(f"pool protocol 'rdma': this machine lacks {what}, {folder} has {there}; mend rdma_devices, or use protocol='tcp'")


class LinkError(Exception):
    """The pool did not do what was asked; ``kind`` is "unreachable", "import", "timeout", "missing" or "engine"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Link:
    """Requests to a pool, one at a time; the caller keeps threads apart.

    Attributes:
        staging: uint8 ``[staging_bytes]``, what the worker reads into and writes from. A new tensor after a worker that could not be ended.
        generation: grows with every new connection.
    """

    def __init__(self, config: PoolConfig):
        """Raises TableError: "rdma" on a machine without such a device, where the engine would take another way and not say so."""
        if config.protocol == "rdma":
            _check_rdma(config.rdma_devices)
        self.config = config
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._ready = False
        self._owner = os.getpid()
        self._give_up = self._next_attempt = 0.0
        self._backoff = _BACKOFF_S[0]
        self._new_staging()

    def _new_staging(self) -> None:
        self._memory = os.memfd_create("tiny-engram-pool")
        os.ftruncate(self._memory, self.config.staging_bytes)
        self._map = mmap.mmap(self._memory, self.config.staging_bytes)
        self.staging = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = False

    def pin(self) -> None:
        """Let a GPU copy from the staging without a detour, where CUDA agrees; without it copies are slower, not wrong."""
        if not self._pinned:
            self._pinned = True
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostRegister(self.staging.data_ptr(), self.staging.numel(), 0)

    def _let_go(self) -> None:
        """Give the staging up; it is unmapped with its last view."""
        if self._pinned:
            with contextlib.suppress(RuntimeError):  # while the interpreter ends, CUDA may be gone
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(self.staging.data_ptr())
        os.close(self._memory)

    def request(self, deadline: float, method: str, *arguments: Any) -> Any:
        """Ask the worker, connecting first where there is no connection.

        Args:
            deadline: by time.monotonic().
            method: of pool_worker.Worker.

        Raises:
            LinkError: it could not, or not in time. After a timeout the worker is gone, and with it everything that could still write.
        """
        self.connect(deadline)
        left = deadline - time.monotonic()
        reply = self._ask((method, arguments, left), left)
        if reply[0] == "done":
            return reply[1]
        if reply[0] != "missing":
            self.drop()  # a client that saw a transfer fail goes on asking the machine it knew
        raise LinkError(*reply)

    def connect(self, deadline: float) -> None:
        """Have a connection by then; one that takes longer goes on, for the next call to find, up to connect_timeout_ms.

        Raises:
            LinkError: none by then.
        """
        if self._owner != os.getpid():  # after a fork: that worker, and the memory it writes to, are the parent's
            self._process = self._channel = None
            self._ready, self._owner = False, os.getpid()
            self._new_staging()
        if self._ready:
            return
        now = time.monotonic()
        if self._process is None:
            if now < self._next_attempt:
                raise LinkError("unreachable", f"no connection; the next attempt is due in {self._next_attempt - now:.1f} s")
            self._start(now)
        assert self._channel is not None
        try:
            reply = self._channel.recv() if self._channel.poll(max(0.0, min(deadline, self._give_up) - now)) else None
        except (EOFError, OSError):
            reply = ("engine", self._end())
        if reply is None:
            if time.monotonic() >= self._give_up:
                self.drop()
                raise LinkError("timeout", f"no connection within {self.config.connect_timeout_ms} ms")
            raise LinkError("timeout", "still connecting")
        if reply[0] != "done":
            self.drop()
            raise LinkError(*reply)
        self._ready = True
        self.generation += 1
        self._backoff = _BACKOFF_S[0]

    def _start(self, now: float) -> None:
        config = self.config
        ours, theirs = Pipe()
        log = None
        try:
            log = open(config.log, "ab") if config.log is not None else None  # noqa: SIM115
            # Its folder stays off the path (-P): modules there would hide others of the same name. A group of its own, since Ctrl-C is
            # for the program, and the program's end is what ends the worker.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno()), str(self._memory), str(config.staging_bytes)],
                pass_fds=(theirs.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                stdout=log or subprocess.DEVNULL,
                stderr=log or subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            ours.close()
            raise LinkError("engine", f"the connection's process or its log cannot be opened ({error})") from error
        finally:
            theirs.close()
            if log is not None:
                log.close()
        self._channel = ours
        seconds = config.connect_timeout_ms / 1000
        self._give_up = now + seconds
        # Counted from the start: attempts that end at once must not follow each other without a pause.
        self._next_attempt = now + self._backoff
        self._backoff = min(2 * self._backoff, _BACKOFF_S[1])
        settings = {name: getattr(config, name) for name in ("master", "local_host", "protocol", "rdma_devices")}
        with contextlib.suppress(OSError):  # it ended already: the answer says so
            ours.send(({**settings, "connect_s": seconds}, seconds))

    def _ask(self, message: tuple, seconds: float) -> tuple:
        assert self._channel is not None
        try:
            self._channel.send(message)
            if seconds > 0 and self._channel.poll(seconds):
                return self._channel.recv()
        except (EOFError, OSError):
            return "engine", self._end()
        self.drop()
        return "timeout", "no answer in time"

    def _end(self) -> str:
        """How a worker that closed its end came to it."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.2)
        return f"the connection's process ended (status {code})"

    def drop(self) -> None:
        """End the worker, whatever it does; waits until it cannot write any more."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        self._ready = False
        if channel is not None:
            channel.close()
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:  # stuck in the kernel: what it may still write must not be read by anyone
            self._let_go()
            self._new_staging()

    def close(self) -> None:
        """End the worker; a later request would start another."""
        self.drop()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.drop()
        if hasattr(self, "_pinned"):
            self._let_go()


def way_out(kind: str, config: PoolConfig) -> str:
    """What to do about a LinkError of that kind, in words."""
    if kind == "import":
        return _INSTALL
    if kind == "missing":
        return "its store ended, or its master restarted and forgot: publish the table again"
    return f"see that mooncake_master and the stores run and are reached from {config.local_host}"
