"""A real pool for tests: one mooncake_master, stores that lend memory, each an own process; and two network namespaces joined by a cable.

Everything listens on loopback or inside own namespaces, and ends with the test.
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

from tiny_engram.table.pool import PoolConfig

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
        self.port, self.metadata_port, self.metrics_port = free_port(host), free_port(host), free_port(host)
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
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": self.host,
            "http_metadata_server_port": self.metadata_port,
            "metrics_host": self.host,
            "metrics_port": self.metrics_port,
            "client_ttl": self.client_ttl,
            "logtostderr": "true",
        }
        self.master = self._spawn("master", "mooncake_master", flags)
        wait_for("mooncake_master", lambda: answers(self.host, self.port) and answers(self.host, self.metadata_port))

    def start_store(self, size: str = "96 MB") -> None:
        flags = {
            "host": self.host,
            "port": free_port(self.host),
            "global_segment_size": size,
            "local_buffer_size": "16 MB",
            "master_server_address": f"{self.host}:{self.port}",
            "metadata_server": self.metadata,
            "logtostderr": "true",
        }
        before = self._mounted()
        self.stores.append(self._spawn(f"store{len(self.stores)}", "mooncake_client", flags))
        wait_for("the store's memory", lambda: self._mounted() > before)

    @property
    def metadata(self) -> str:
        return f"http://{self.host}:{self.metadata_port}/metadata"

    def _mounted(self) -> int:
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
        told = {"local_host": self.host, "timeout_ms": 20_000, "staging_bytes": 4 << 20, "log": self.folder / "client.log"}
        return PoolConfig(master=f"{self.host}:{self.port}", metadata=self.metadata, **(told | changes))

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
        yield
    finally:
        process.send_signal(signal.SIGCONT)


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
            for side, name in self.names.items():
                _ip("-n", name, "addr", "add", f"{self.hosts[side]}/24", "dev", f"veth-{side}")
                _ip("-n", name, "link", "set", f"veth-{side}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
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
        """Packets vanish, and nobody is told."""
        self._loss("add")

    def mend(self) -> None:
        self._loss("del")

    def _loss(self, verb: str) -> None:
        # Not the link's end switched off, which the kernel would answer for: a firewall or a dead switch says nothing.
        _run("ip", "-n", self.names["b"], "route", verb, "blackhole", "10.77.0.1/32")
        _run("ip", "-n", self.names["a"], "route", verb, "blackhole", "10.77.0.2/32")


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()} (network namespaces need root and iproute2)"
