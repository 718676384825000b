"""A script as several processes of one run, on this machine's CPU."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["run_ranks"]

# Of a launcher that started the tests themselves.
OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def run_ranks(script: Path, words: Callable[[int], Iterable[object]], ranks: int, *, seconds: float = 180.0) -> list[tuple[int, str]]:
    """Exit code and output of each process; `words` are the script's, by rank. One alone is no group. All end after so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key not in OTHERS} | {"OMP_NUM_THREADS": "1"}
    if ranks > 1:
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, words(rank))],
            env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [child.communicate(timeout=seconds)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, text) for child, text in zip(children, said, strict=True)]
