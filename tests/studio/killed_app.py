"""Run by test_killed: the app, which kills itself in the middle of saving a picture, once the file KILL stands in its data folder.

Arguments: those of `tiny-engram app`, --data_dir first.
"""

import os
import signal
import sys
from pathlib import Path

from tiny_engram.cli import main

root = Path(sys.argv[2])


def watch(event: str, args: tuple) -> None:
    if event == "os.rename" and str(args[1]).startswith(str(root / "gallery")) and (root / "KILL").exists():
        # whole on the disk under its passing name, and nowhere under its own
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(watch)
    sys.exit(main(["app", *sys.argv[1:]]))
