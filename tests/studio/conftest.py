"""What the Studio's tests share: a workspace per test and the embedded pipeline once per session."""

import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tiny_engram.studio.library import Library
from tiny_engram.studio.workspace import Workspace


@pytest.fixture(scope="session")
def embedded():
    """The embedded base, loaded once; tests leave it without hooks."""
    from tiny_engram.pipelines.loaders import load_pipeline

    pipe = load_pipeline(device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def workspace(tmp_path):
    with Workspace.open(tmp_path / "studio") as opened:
        yield opened


@pytest.fixture
def library(workspace):
    return Library(workspace)


@pytest.fixture
def tray(workspace):
    """The Teach tab's, empty."""
    from tiny_engram.studio.ui.teach_tray import Tray

    return Tray(workspace)


@pytest.fixture(scope="session")
def picture_bytes():
    """picture_bytes(seed=0, side=64, format="PNG", **options) -> an encoded picture of noise."""

    def make(seed: int = 0, side: int = 64, format: str = "PNG", **options) -> bytes:
        buffer = io.BytesIO()
        noise = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(noise).save(buffer, format, **options)
        return buffer.getvalue()

    return make


@pytest.fixture(scope="module")
def made(attached, tiny, picture_bytes):
    """A concept of random rows with an alias that has rows of its own, a thumbnail and a recipe, for the small pipeline of a file's own."""
    _, adapter = attached
    thumbnail = "data:image/png;base64," + base64.b64encode(picture_bytes()).decode()
    concept = tiny.concept(adapter, "zorblax", aliases=("quib",), name="Zorb")
    return concept.with_details(thumbnail=thumbnail, recipe={"step": 300, "pictures": 4})


@pytest.fixture
def saved(made, tmp_path):
    """The file of `made`, as a user would send it."""
    return made.save(tmp_path / "given.safetensors")


# -- a page that is served, for a file of tests


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny):
    """(a studio on the small pipeline, where its page answers)"""
    from tiny_engram.studio.server import serve
    from tiny_engram.studio.studio import Studio

    with Studio(Workspace.open(tmp_path_factory.mktemp("secure") / "studio"), tiny.build(), device="cpu") as studio, serve(studio) as page:
        yield studio, page.url


@pytest.fixture(scope="module")
def http_(served):
    """A client of that page."""
    import httpx2

    with httpx2.Client(base_url=served[1], timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def called():
    """called(client, name, data): what comes back of a named endpoint, the events as text."""

    def call(client, name: str, data: list) -> str:
        asked = client.post(f"/gradio_api/call/{name}", json={"data": data})
        assert asked.status_code == 200, asked.text
        return client.get(f"/gradio_api/call/{name}/{asked.json()['event_id']}").text

    return call


# -- processes


class Forked:
    """The process of forked.py, which answers one request after another."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("forked.py"))]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"forked.py ended with {self.process.wait(10)}"
        return json.loads(answer)

    def app(self, *arguments: str, port: int, log: Path, dies: Path | None = None) -> "ForkedApp":
        """`tiny-engram app` with these arguments, which is starting."""
        command = ["app", *arguments, "--port", str(port)]
        pid = self.ask(app=command, log=str(log), dies=None if dies is None else str(dies))["pid"]
        return ForkedApp(self, pid, f"http://127.0.0.1:{port}", log)

    def close(self) -> None:
        self.process.communicate()  # the end of its standard input ends it


class ForkedApp:
    """An app that `Forked` started: `pid`, its `url`, and what it `said`, in the file `log`."""

    def __init__(self, forked: Forked, pid: int, url: str, log: Path) -> None:
        self.forked, self.pid, self.url, self.log = forked, pid, url, log
        self._code: int | None = None

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ended(self, seconds: float = 0.0) -> int | None:
        """The code it ended with within these seconds, negative for a signal; None if it goes on."""
        if self._code is None:
            self._code = self.forked.ask(wait=self.pid, seconds=seconds)["code"]
        return self._code

    def wait(self) -> None:
        """Until it has said where it answers."""
        end = time.monotonic() + 120
        while self.url not in self.said:
            assert self.ended() is None and time.monotonic() < end, self.said
            time.sleep(0.02)

    def send(self, number: int) -> None:
        if self._code is None:  # nobody else has its number before its end was asked for
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """It is gone afterwards."""
        self.send(signal.SIGKILL)
        self.ended(30)


@pytest.fixture(scope="session")
def forked():
    """A process that has imported everything, to fork apps and teaching processes from."""
    process = Forked()
    yield process
    process.close()


# -- jobs


@pytest.fixture
def taught(tmp_path):
    """Two pictures to teach from, one with a caption."""
    from tiny_engram.studio.jobs import Taught

    made = []
    for k in range(2):
        y, x = np.mgrid[:64, :64]
        inside = (x - 32) ** 2 + (y - 32) ** 2 < 400
        path = tmp_path / f"taught-{k}.png"
        Image.fromarray(np.where(inside[..., None], [200, 90 + 60 * k, 120], 20).astype(np.uint8)).save(path)
        made.append(Taught(path=path, caption="" if k else "a {trigger} on a dark background"))
    return made


@pytest.fixture
def few_steps():
    """few_steps(**changes) -> options of a job that takes a moment: small batches, no collages, a checkpoint every three steps."""

    def make(**changes):
        options = {"max_train_steps": 4, "train_batch_size": 1, "collages": 0, "checkpointing_steps": 3, "validation_steps": 0}
        return options | {"validation_inference_steps": 2} | changes

    return make


@pytest.fixture
def store(workspace):
    from tiny_engram.studio.jobs import JobStore

    return JobStore(workspace)


@pytest.fixture(scope="session")
def engine_pipe():
    """The embedded base with an adapter, for engines; `embedded` is there to draw on beside them."""
    import tiny_engram
    from tiny_engram.pipelines.loaders import load_pipeline

    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    yield pipe
    adapter.detach()


@pytest.fixture
def studio(engine_pipe, library):
    """An engine on the embedded base and an empty library."""
    import tiny_engram
    from tiny_engram.studio.engine import Engine

    with Engine(engine_pipe, library) as engine:
        yield engine
    assert not tiny_engram.get_adapter(engine_pipe).get_list_concepts()


@pytest.fixture(scope="session")
def concept_of(tiny, engine_pipe):
    """concept_of(trigger, name=None, aliases=(), seed=0, plain=False): a concept of random rows at every kind of mount; plain: an
    untrained one. Not while an engine draws."""
    import tiny_engram
    from tiny_engram import ConceptConfig

    adapter = tiny_engram.get_adapter(engine_pipe)
    config = ConceptConfig(mounts=("input", "span", "value"), share="block", bands=2, attention_rank=1, feedforward_rank=1)

    def make(trigger: str, *, name: str | None = None, aliases=(), seed: int = 0, plain: bool = False):
        if plain:
            return adapter.new_concept(trigger, aliases, name)
        return tiny.concept(adapter, trigger, aliases=aliases, name=name, seed=seed, size=0.3, config=config)

    return make


@pytest.fixture(scope="session")
def thousand(tiny, tmp_path_factory):
    """(an engine with a thousand triggers in its library, of 200 untrained concepts and 800 drafts, which take a tenth of the time to make;
    the triggers, those of concepts first); tests leave the library alone."""
    import random

    from tiny_engram.studio.engine import Engine
    from tiny_engram.studio.workspace import new_id

    rng = random.Random(0)
    parts = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    made: dict[str, None] = {}
    while len(made) < 1_000:
        made["".join(rng.choices(parts, k=2)) + "-" + "".join(rng.choices(parts, k=2))] = None
    with Workspace.open(tmp_path_factory.mktemp("thousand")) as opened, Engine(tiny.build(), Library(opened)) as engine:
        for number, trigger in enumerate(made):  # beside the library, which would look for a free name among all of them each time
            if number < 200:
                engine.new_concept(trigger).save(opened.concepts / f"{new_id()}.safetensors")
            else:
                told = {"trigger": trigger, "aliases": [], "class_word": None}
                (opened.drafts / f"{new_id()}.json").write_text(json.dumps(told))
        engine.library.version += 1
        yield engine, list(made)


# -- pages


@pytest.fixture
def whole(engine_pipe, workspace):
    """A Studio on the embedded base, with nothing in it."""
    from tiny_engram.studio.studio import Studio

    with Studio(workspace, engine_pipe) as opened:
        yield opened


@pytest.fixture
def built():
    """built(build, studio) -> (the tab, its handlers by name), on a page of its own."""
    import gradio as gr

    def make(build, studio):
        with gr.Blocks(analytics_enabled=False) as page, gr.Tab("tab"):
            tab = build(studio)
        # what `handled` wraps keeps its name
        return tab, {block.fn.__name__: block.fn for block in page.fns.values() if block.fn is not None}

    return make


# -- the page


@pytest.fixture(scope="session")
def opened_studio(tmp_path_factory):
    """A whole Studio on a pipeline of its own, for the tests of the page; they take away what they put into it."""
    from tiny_engram.pipelines.loaders import load_pipeline
    from tiny_engram.studio.studio import Studio

    with Studio(Workspace.open(tmp_path_factory.mktemp("page") / "studio"), load_pipeline(device="cpu"), device="cpu") as opened:
        yield opened


@pytest.fixture(scope="session")
def page(opened_studio):
    """The page as it is built, not served."""
    from tiny_engram.studio.ui.page import build_page

    return build_page(opened_studio)


@pytest.fixture(scope="session")
def page_url(opened_studio):
    """Where the page answers."""
    from tiny_engram.studio.server import serve

    with serve(opened_studio) as served:
        yield served.url


@pytest.fixture(scope="session")
def event_of(page):
    """event_of(elem_id, event="click") -> the handler of that component's event, to be called as gradio does."""

    def find(elem_id: str, event: str = "click"):
        id = next(id for id, block in page.blocks.items() if getattr(block, "elem_id", None) == elem_id)
        found = [fn.fn for fn in page.fns.values() if (id, event) in fn.targets]
        assert found, f"{elem_id} has no event {event}"
        return found[0]

    return find
