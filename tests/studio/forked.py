"""A process that imports everything once, some seconds of work, and then forks apps and teaching processes for tests.

Started by the fixture `forked` with one thread. What a child runs is the real thing, from the command line's `main` on; that it can be
started from nothing is for test_server, and for every job of the other tests. Reads lines of JSON from standard input and answers each
with a line; when standard input ends, so do its children. What is asked:

{"app": [arguments of tiny-engram], "log": file, "dies": folder or null}: {"pid"} of an app, whose output goes to the file. It kills itself
    in the middle of saving a picture, once the file KILL stands in the folder `dies`.
{"wait": pid, "seconds"}: {"code"} that it ended with, negative for a signal, null if it goes on.
{"teach": job's folder, "at", "model"}: {"code", "operations"} of a child that taught a job: `at` is the number of the operation within
    the job's folder (from 1) before which it kills itself, 0 to let it finish, and -N to kill it within the N-th pass of the denoiser.
    operations: how many there were, or null.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import tiny_engram.studio.ui.page  # noqa: F401 (gradio)
import tiny_engram.training.loop  # noqa: F401
from tiny_engram.cli import main as command
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.studio.job_folder import hold
from tiny_engram.studio.worker import Stop, teach

# What changes a folder. Opening a file to write is one; a kill before it and after it are different moments.
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def run_app(arguments: list[str], log: str, dies: str | None) -> int:
    with open(os.devnull) as nothing, open(log, "ab") as out:
        for stream, number in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(stream.fileno(), number)

    def watch(event: str, args: tuple) -> None:
        if event == "os.rename" and str(args[1]).startswith(f"{dies}/gallery") and Path(f"{dies}/KILL").exists():
            # whole on the disk under its passing name, and nowhere under its own
            os.kill(os.getpid(), signal.SIGKILL)

    if dies is not None:
        sys.addaudithook(watch)
    return command(arguments)


@functools.cache
def pipeline(model: str):
    pipe = load_pipeline(model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_job(pipe, folder: Path, at: int, answer: int) -> None:
    count = 0

    def watch(event, args) -> None:
        nonlocal count
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or writes) and isinstance(args[0], str | os.PathLike) and str(args[0]).startswith(str(folder)):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    passes = 0

    def die(*_) -> None:
        nonlocal passes
        passes += 1
        if passes == -at:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if at < 0:
        pipe.unet.mid_block.register_forward_hook(die)
    assert hold(folder) is not None, "the lock of a killed process is free"
    sys.addaudithook(watch)
    teach(folder, lambda: pipe, Stop(folder))
    os.write(answer, str(count).encode())
    os._exit(0)


def taught(folder: Path, at: int, model: str) -> dict:
    pipe = pipeline(model)
    told, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_job(pipe, folder, at, answer)
        finally:
            os._exit(1)
    os.close(answer)
    operations = os.read(told, 100).decode()
    os.close(told)
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "operations": int(operations) if operations else None}


def waited(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.01)


def main() -> int:
    living: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        if "app" in asked:
            pid = os.fork()
            if pid == 0:
                return run_app(asked["app"], asked["log"], asked["dies"])
            living.add(pid)
            told = {"pid": pid}
        elif "wait" in asked:
            told = {"code": waited(asked["wait"], asked["seconds"])}
            if told["code"] is not None:
                living.discard(asked["wait"])
        else:
            told = taught(Path(asked["teach"]), asked["at"], asked["model"])
        print(json.dumps(told), flush=True)
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
