"""A process that talks to a hub: runs Python lines from stdin, one JSON object each, and says what came of them.

Whether the client of the Hub is on, and where its Hub is, is read from the environment when it is imported: hence a process of its own.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# the trigger of a concept that is read from `source` with `options`
LOAD = "from tiny_engram.sources import load_source\nload_source(source, **options).trigger"
ROOT = Path(__file__).resolve().parents[2]


class HubClient:
    """`client(code)` is the value of the last expression; what `code` raises comes as ClientError with type and text."""

    def __init__(self, endpoint: str, home: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE")}
        ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))), "NO_PROXY": "127.0.0.1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**kept, **ours, **paths, **environment},
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, code: str, **names: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        names = {k: str(v) if isinstance(v, Path) else v for k, v in names.items()}
        self.process.stdin.write(json.dumps({"code": code, "names": names}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.said = answer["said"]
        if "error" in answer:
            raise ClientError(*answer["error"])
        return answer["value"]

    def end(self) -> None:
        """No more code comes; `close` waits for the process to be gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.process.wait(60)


class ClientError(Exception):
    """The type's name and the text of what was raised there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for name in ("tiny_engram.sharing", "tiny_engram.sources", "tiny_engram.hub"):  # while the tests make ready
        importlib.import_module(name)
    for line in sys.stdin:
        told = json.loads(line)
        names = {"Path": Path, **told["names"]}
        out = io.StringIO()
        try:
            *before, last = told["code"].strip().split("\n")
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                exec("\n".join(before), names)
                value = eval(last, names)
            answer = {"value": value}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps({**answer, "said": out.getvalue()}), file=answers, flush=True)


if __name__ == "__main__":
    serve()
