"""Run by test_library: does one verb of a library and kills itself before the N-th step on the disk, for N = 1, 2, ... in turn.

Arguments: a folder that holds the workspace "before" (concepts wumb and fwop, a third in its trash), and a concept's file. For each verb
and N a fork works in a copy of "before", "VERB-N"; "VERB N" is printed for every death, "VERB done N" when the verb got through.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from tiny_engram import files
from tiny_engram.concept import Concept
from tiny_engram.studio import library as module
from tiny_engram.studio.library import Library
from tiny_engram.studio.workspace import Workspace

STEPS = ("replace", "rename", "fsync", "unlink", "chmod", "utime")
assert files.os is module.os is os


def die_before(number: int) -> None:
    count = 0

    def counted(work):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **options)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def main(root: Path, file: Path) -> None:
    concept = Concept.load(file)
    with Workspace.open(root / "before") as workspace:
        ids = {card.name: card.id for card in Library(workspace).cards()}
    token = next(iter((root / "before" / "trash").iterdir())).name.partition(".")[0]
    verbs = {
        "add": lambda library: library.add(concept),
        "import": lambda library: library.import_file(file),
        "rename": lambda library: library.rename(ids["wumb"], "another name"),
        "delete": lambda library: library.delete(ids["fwop"]),
        "undo": lambda library: library.undo(token),
        "save_draft": lambda library: library.save_draft("zorblax"),
    }
    for verb, call in verbs.items():
        for number in range(1, 40):
            place = root / f"{verb}-{number}"
            shutil.copytree(root / "before", place)
            child = os.fork()
            if child == 0:
                library = Library(Workspace.open(place))
                die_before(number)
                call(library)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                print(verb, number, flush=True)
                continue
            print(verb, "done" if status == 0 else "failed", number, flush=True)
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
