"""A real pool for tests: one mooncake_master, stores that lend memory, each an own process; and two network namespaces joined by a cable.

Nothing but loopback and own namespaces is written to, and all of it ends with the test.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.pool import PoolConfig
from tiny_engram.table.storage import RowStorage

_CLONE_NEWNET = 0x40000000
_BIN = Path(sys.executable).parent


def need_programs(*programs: str) -> None:
    """Fail, with the line that mends it, where the engine's libraries or programs are lacking."""
    lacking = [library for library in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1") if not _loads(library)]
    lacking += [program for program in programs if shutil.which(program) is None]
    assert not lacking, f"{', '.join(lacking)} not found: apt-get install libibverbs1 librdmacm1 libnuma1 iproute2"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def wait_for(what, condition, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


class Cluster:
    """A master and its stores. ``host`` is where they listen; they start in the network namespace of the calling thread."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", *, client_ttl: int = 10):
        self.folder, self.host, self.client_ttl = folder, host, client_ttl
        self.port, self.metrics_port = free_port(host), free_port(host)
        self.master: subprocess.Popen | None = None
        self.stores: list[subprocess.Popen] = []

    def start(self, stores: int = 1) -> "Cluster":
        self.start_master()
        for _ in range(stores):
            self.start_store()
        return self

    def start_master(self) -> None:
        flags = {
            "rpc_address": self.host,
            "rpc_port": self.port,
            "metrics_host": self.host,
            "metrics_port": self.metrics_port,
            "client_ttl": self.client_ttl,
            "logtostderr": "true",
        }
        self.master = self._spawn("master", "mooncake_master", flags)
        wait_for("mooncake_master", lambda: answers(self.host, self.port))

    def start_store(self, size: str = "96 MB") -> None:
        flags = {
            "host": self.host,
            "port": free_port(self.host),
            "global_segment_size": size,
            "local_buffer_size": "16 MB",
            "master_server_address": f"{self.host}:{self.port}",
            "metadata_server": "P2PHANDSHAKE",
            "logtostderr": "true",
        }
        before = self.mounted()
        self.stores.append(self._spawn(f"store{len(self.stores)}", "mooncake_client", flags))
        wait_for("the store's memory", lambda: self.mounted() > before)

    def mounted(self) -> int:
        """Stores that the master has mounted since it started."""
        return (self.folder / "master.log").read_text(errors="replace").count("action=mount_segment")

    def _spawn(self, name: str, program: str, flags: dict) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [_BIN / program, *(f"--{flag}={value}" for flag, value in flags.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "MC_TCP_BIND_ADDRESS": self.host},
            )

    def config(self, **changes) -> PoolConfig:
        """For a client on this host; a small staging, patient unless a test says otherwise."""
        where = {"master": f"{self.host}:{self.port}", "local_host": self.host}
        return PoolConfig(**(where | {"timeout_ms": 20_000, "staging_bytes": 4 << 20, "log": self.folder / "client.log"} | changes))

    def stop(self) -> None:
        for process in (*self.stores, self.master):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)
        self.stores.clear()


@contextlib.contextmanager
def stopped(process: subprocess.Popen) -> Iterator[None]:
    """Stalled: there, holding its connections, doing nothing."""
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for("the stop", lambda: _states(process.pid) == {"T"})  # threads stop one by one
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as in /proc."""
    return {task.read_text().rpartition(") ")[2][0] for task in Path(f"/proc/{pid}/task").glob("*/stat")}


class Cable:
    """Two network namespaces, "a" at 10.77.0.1 and "b" at 10.77.0.2, that see nothing but each other."""

    def __init__(self):
        self.names = {side: f"te-{os.getpid()}-{side}" for side in "ab"}
        self.hosts = {"a": "10.77.0.1", "b": "10.77.0.2"}

    def __enter__(self) -> "Cable":
        try:
            for name in self.names.values():
                _ip("netns", "add", name)
            _ip("link", "add", "veth-a", "netns", self.names["a"], "type", "veth", "peer", "name", "veth-b", "netns", self.names["b"])
            for side in self.names:
                self._ip(side, "addr", "add", f"{self.hosts[side]}/24", "dev", f"veth-{side}")
                self._ip(side, "link", "set", f"veth-{side}", "up")
                self._ip(side, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    @contextlib.contextmanager
    def at(self, side: str) -> Iterator[None]:
        """This thread, and every process that it starts, in one of the namespaces."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.names[side]}", os.O_RDONLY)
        try:
            _setns(there)
            try:
                yield
            finally:
                _setns(home)
        finally:
            os.close(there)
            os.close(home)

    def cut(self) -> None:
        """Packets vanish on the far side, and nobody is told."""
        self._ip("a", "route", "add", "blackhole", self.hosts["b"])

    def mend(self) -> None:
        self._ip("a", "route", "del", "blackhole", self.hosts["b"])

    def unplug(self) -> None:
        """The link is down on the far side: the near side loses its carrier."""
        self._ip("a", "link", "set", "veth-a", "down")

    def plug(self) -> None:
        self._ip("a", "link", "set", "veth-a", "up")

    def _ip(self, side: str, *arguments: str) -> None:
        _ip("-n", self.names[side], *arguments)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()} (network namespaces need root and iproute2)"


# -- what the tests look up

ROWS, HEAD_DIM, OBJECT_BYTES = 20_000, 256, 1 << 20
# What a lookup may take when it is told to wait for a second, on a machine whose cores are busy.
BOUND_S = 3.0


def filled(rows=ROWS, head_dim=HEAD_DIM, seed=0):
    storage = RowStorage.allocate(rows, head_dim, home="pageable")
    storage.write(0, *FillRule(head_dim, seed).rows(torch.arange(rows)))
    return storage


def random_ids(count, seed=0):
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed))


def failure(rows, ids):
    """The error of a lookup and the seconds it took."""
    started = time.monotonic()
    with pytest.raises(TableError) as caught:
        rows.lookup(ids)
    return str(caught.value), time.monotonic() - started


def until_it_answers(rows, ids, seconds=20.0):
    """Lookups until one is answered; every failure before is in time."""
    give_up = time.monotonic() + seconds
    while True:
        started = time.monotonic()
        try:
            return rows.lookup(ids)
        except TableError as error:
            assert time.monotonic() - started < BOUND_S
            assert time.monotonic() < give_up, error
            time.sleep(0.05)
