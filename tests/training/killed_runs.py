"""A process that imports everything once and then forks runs of training, for tests that kill them.

    python killed_runs.py MODEL

Reads lines of JSON from standard input: {"config": of TrainConfig, or a list of these, "seconds": of the run's own processor's time
after which it is killed, or null; a busy machine does not move the moment. Answers each with {"code": what the run ended with, negative
for a signal}.
"""

import json
import os
import signal
import sys
import time
import traceback

import psutil

from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.loop import train
from tiny_engram.training.many import train_concepts


def run(pipe, told: dict | list) -> None:
    try:
        if isinstance(told, list):
            train_concepts(pipe, [TrainConfig.from_dict(each) for each in told], concepts_together=2, progress=False)
        else:
            train(pipe, TrainConfig.from_dict(told), progress=False)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> int:
    pipe = load_pipeline(sys.argv[1], device="cpu")
    pipe.set_progress_bar_config(disable=True)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(pipe, asked["config"])
        if asked["seconds"] is not None:
            child = psutil.Process(pid)
            while child.status() != psutil.STATUS_ZOMBIE and child.cpu_times().user < asked["seconds"]:
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
