"""Everything behind the page, opened and closed as one. May import all of the Studio but ui and server; nothing of gradio."""

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tiny_engram.studio.engine import Engine
from tiny_engram.studio.gallery import Gallery
from tiny_engram.studio.jobs import JobStore
from tiny_engram.studio.library import Library
from tiny_engram.studio.registering import Registrar
from tiny_engram.studio.runner import Runner
from tiny_engram.studio.workspace import Workspace

__all__ = ["Studio"]

logger = logging.getLogger(__name__)


class Studio:
    """A folder of the user's, a base, and what works on them.

    Attributes:
        workspace, library, gallery: what is kept.
        engine, registrar: what draws and explains.
        jobs, runner: what teaches.
        base: what people call the model, such as "embedded base".
    """

    def __init__(self, workspace: Workspace, pipe: Any, *, model: str | None = None, dtype: str = "float32", device: str | None = None):
        """Takes over the workspace and the pipeline; `Studio.open` makes both. Raises TinyEngramError where concepts cannot be attached."""
        self.workspace = workspace
        self.base = "embedded base" if model is None else Path(model).name or str(model)
        with ExitStack() as opened:
            opened.callback(workspace.close)
            self.library = Library(workspace)
            self.gallery = Gallery(workspace)
            self.engine = Engine(pipe, self.library)
            opened.callback(self.engine.close)
            # what the first key press would wait for: a library of a thousand takes seconds
            warming = threading.Thread(target=self.engine.warm, name="warming", daemon=True)
            warming.start()
            opened.callback(warming.join)
            self.registrar = Registrar(self.engine)
            self.jobs = JobStore(workspace)
            self.runner = Runner(self.jobs, self.library, model=model, dtype=dtype, device=device)
            opened.callback(self.runner.close)
            self._opened = opened.pop_all()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls, folder: str | Path | None = None, *, model: str | None = None, dtype: str = "float32", device: str | None = None
    ) -> "Studio":
        """Lock the folder, load the base, and take up the jobs that were left.

        folder None: `workspace.default_folder()`. model, dtype, device: as `load_pipeline` takes them; model None is the embedded base.
        Raises TinyEngramError: another Studio has the folder, it cannot be written, no such model or device.
        """
        from tiny_engram.pipelines.loaders import load_pipeline

        workspace = Workspace.open(folder)  # first: a folder in use is told at once, not after the model has been loaded
        with ExitStack() as opened:
            opened.callback(workspace.close)
            pipe = load_pipeline(model, dtype=dtype, device=device)
            studio = cls(workspace, pipe, model=model, dtype=dtype, device=device)
            opened.pop_all()
        return studio

    def close(self) -> None:
        """Stop the running job at a checkpoint and what is drawn at its next step, and give the folder back; once is enough."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._opened.close()

    def __enter__(self) -> "Studio":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
