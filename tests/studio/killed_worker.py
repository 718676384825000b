"""A process that loads a pipeline once and then forks children that teach a job and are killed at a file operation of their choice.

Started by the tests with one thread: `python killed_worker.py MODEL`. Reads lines of JSON from standard input, {"folder", "at"}: `at` is
the number of the operation within the job's folder (from 1) before which the child kills itself, 0 to let it finish, and -N to kill it
within the N-th pass of the denoiser. Answers each with a line: {"code": what the child ended with (-9 if it was killed), "operations": how
many there were, or None}.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.studio.job_folder import hold
from tiny_engram.studio.worker import Stop, teach

# What changes a folder. Opening a file to write is one; a kill before it and after it are different moments.
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def child(pipe, folder: Path, at: int, answer: int) -> None:
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

    if at < 0:
        pipe.unet.mid_block.register_forward_hook(die)
    assert hold(folder) is not None, "the lock of a killed process is free"
    sys.addaudithook(watch)
    teach(folder, lambda: pipe, Stop(folder))
    os.write(answer, str(count).encode())
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    pipe = load_pipeline(sys.argv[1], device="cpu")
    pipe.set_progress_bar_config(disable=True)
    import tiny_engram.training.loop  # noqa: F401 (once, not in every child)

    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        told, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(pipe, Path(asked["folder"]), asked["at"], answer)
            finally:
                os._exit(1)
        os.close(answer)
        operations = os.read(told, 100).decode()
        os.close(told)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "operations": int(operations) if operations else None}), flush=True)


if __name__ == "__main__":
    main()
