"""The whole app, killed in the middle of a save and of teaching, and started again: nothing that was finished is lost, the job goes on."""

import contextlib
import signal
import socket
import time
from pathlib import Path

import pytest
from gradio_client import Client, handle_file

from tiny_engram.concept import Concept
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.studio.engine import Engine
from tiny_engram.studio.gallery import Gallery
from tiny_engram.studio.job_folder import read_state
from tiny_engram.studio.jobs import JobStore
from tiny_engram.studio.library import Library
from tiny_engram.studio.worker import process_started
from tiny_engram.studio.workspace import Workspace, read_json


@pytest.fixture
def app(tmp_path, saved_pipe, forked):
    """app() starts the app on tmp_path/home at one port and returns it once it answers; none outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    home = tmp_path / "home"

    def start():
        options = ["--data_dir", str(home), "--model", str(saved_pipe), "--device", "cpu"]
        started.append(forked.app(*options, port=port, log=tmp_path / f"log-{len(started)}", dies=home))
        started[-1].wait()
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextlib.contextmanager
def client_of(url: str, folder: Path):
    client = Client(url, verbose=False, download_files=str(folder))
    try:
        yield client
    finally:
        with contextlib.suppress(Exception):  # the server may be gone
            client.close()


def until(client: Client, folder: Path, name: str, step: int = 0) -> dict:
    """What the app says of the job once its folder, which costs less to look at, says that it is so far."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        state = read_state(folder)
        if state.state == name and state.step >= step:
            told = client.predict(folder.name, api_name="/train_status")
            assert told["state"] == name and told["step"] >= step, told
            return told
        assert state.state != "failed", state
        time.sleep(0.05)
    raise AssertionError(f"{read_state(folder)}, expected {name} at step {step}")


def ended(pid: int) -> bool:
    end = time.monotonic() + 10
    while process_started(pid) is not None and time.monotonic() < end:
        time.sleep(0.02)
    return process_started(pid) is None


def test_killed_in_the_middle_of_a_save_and_of_teaching(app, tmp_path, tiny, saved_pipe, taught, few_steps):
    home = tmp_path / "home"
    pipe = load_pipeline(str(saved_pipe), device="cpu")  # as the app does: what is in use is kept by the base's name
    with Workspace.open(home) as workspace, Engine(pipe, Library(workspace)) as engine:
        finished = engine.library.add(engine.run(lambda adapter: tiny.concept(adapter, "zed-quack", size=0.3)))
        engine.load(finished)
    before = (home / "concepts" / f"{finished}.safetensors").read_bytes()
    drawing = {"prompt": "a zed-quack", "steps": 1, "api_name": "/generate"}

    process = app()
    with client_of(process.url, tmp_path / "client") as client:
        *_, kept = client.predict(**drawing)
        job = client.predict(
            [handle_file(str(each.path)) for each in taught],
            "zorp-quib",
            preset="quick",
            options=few_steps(max_train_steps=20_000, checkpointing_steps=5, checkpoints_total_limit=2),
            api_name="/train",
        )["job"]
        until(client, home / "jobs" / job, "running", step=12)
        worker = read_json(home / "jobs" / job / "process.json")["pid"]
        (home / "KILL").touch()
        client.submit(**drawing)  # nobody waits for it
        assert process.ended(30) == -signal.SIGKILL
        assert list((home / "gallery").glob(".*.tmp")), "it was in the middle of it"
        assert ended(worker), "teaching ends with the app"
        (home / "KILL").unlink()

    process = app()  # at the same port
    with client_of(process.url, tmp_path / "client") as client:
        [card] = client.predict(api_name="/concepts")
        assert (card["id"], card["trigger"], card["loaded"], card["error"]) == (finished, "zed-quack", True, None)
        assert [path.stem for path in (home / "gallery").iterdir()] == [kept["picture"]], "the whole picture, and no half of one"
        told = client.predict(job, api_name="/train_status")
        assert told["state"] == "interrupted" and told["step"] >= 10, told
        assert told["message"] == f"the Studio ended; goes on from step {told['step']} of 20000"
        client.predict(job, api_name="/train_resume")
        further = until(client, home / "jobs" / job, "running", step=told["step"] + 7)
        *_, drawn = client.predict(**drawing)
        assert drawn["concepts"][0]["id"] == finished
        process.send(signal.SIGKILL)
        assert process.ended(10) == -signal.SIGKILL
        assert ended(read_json(home / "jobs" / job / "process.json")["pid"])

    with Workspace.open(home) as workspace, Engine(pipe, Library(workspace)) as engine:
        assert [card.id for card in engine.library.cards()] == [finished] and [each.id for each in engine.loaded()] == [finished]
        assert Concept.load(home / "concepts" / f"{finished}.safetensors").trigger == "zed-quack"
        assert (home / "concepts" / f"{finished}.safetensors").read_bytes() == before
        assert {entry.id for entry in Gallery(workspace).entries()} == {kept["picture"], drawn["picture"]}
        store = JobStore(workspace)
        state = store.state(job)
        assert len(store.progress(job)) >= further["step"] and (state.can_resume or state.busy), "a worker that had the time says so itself"
        assert len(store.pictures(job)) == 2
