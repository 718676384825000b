"""Eight clients draw while a job teaches: each picture is what it would be alone, to the bit."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gradio_client import Client
from PIL import Image

from tiny_engram.studio.requests import GenerateRequest
from tiny_engram.studio.server import serve
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.workspace import Workspace

CLIENTS, PICTURES, STEPS = 8, 2, 2
WORDS = ("zed-quack", "blorp", "vand-omix", "quib")


@pytest.fixture
def served(tmp_path, tiny, saved_pipe):
    """A studio on the small pipeline with four concepts of random rows, strong enough to be seen, and where its page answers."""
    with Studio(Workspace.open(tmp_path / "studio"), tiny.build(), model=str(saved_pipe), device="cpu") as studio:
        for seed, word in enumerate(WORDS):
            made = studio.engine.run(lambda adapter, w=word, s=seed: tiny.concept(adapter, w, seed=s, size=0.3))
            studio.library.add(made)
        with serve(studio) as page:
            yield studio, page.url


def asked_by(client: int, number: int) -> dict:
    """The number-th picture of a client: all with one prompt in which every trigger stands, so that only strengths tell them apart."""
    strengths = {WORDS[client % 4]: 1.0}
    if client >= 4:
        strengths[WORDS[(client + 1 + number) % 4]] = 0.25 * (1 + number)
    strengths = {} if client == 7 and number == 1 else strengths
    return {"prompt": " and ".join(f"a {word}" for word in WORDS), "seed": 3, "steps": STEPS, "concepts": strengths}


def pixels(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def test_eight_clients_and_a_job(served, taught, few_steps, tmp_path):
    studio, url = served
    # first, so that its process starts while the others are drawn
    job = studio.runner.submit(taught, "zorp-quib", preset="quick", options=few_steps(max_train_steps=20_000))
    ids = {card.trigger: card.id for card in studio.library.cards()}
    asked = {(c, k): asked_by(c, k) for c in range(CLIENTS) for k in range(PICTURES)}
    solo = {}
    for key, request in asked.items():
        strengths = {ids[word]: value for word, value in request["concepts"].items()}
        alone = studio.engine.generate(GenerateRequest(prompt=request["prompt"], seed=3, steps=STEPS, strengths=strengths))
        solo[key] = np.asarray(alone.picture)
    different = {picture.tobytes() for picture in solo.values()}
    assert len(different) == len({json.dumps(request["concepts"]) for request in asked.values()}), "they can be told apart"

    # nobody else touches the pipeline while one is served
    inside, most = 0, 0
    real, lock = studio.engine._generate, threading.Lock()

    def counted(*args):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            return real(*args)
        finally:
            with lock:
                inside -= 1

    drawn: dict[tuple[int, int], tuple[np.ndarray, dict]] = {}
    ready = threading.Barrier(CLIENTS)

    def client(number: int) -> None:
        made = Client(url, verbose=False, download_files=str(tmp_path / f"client-{number}"))
        try:
            ready.wait(60)
            for k in range(PICTURES):
                picture, _, _, told = made.predict(**asked[number, k], api_name="/generate")
                drawn[number, k] = pixels(picture), told
                made.predict(asked[number, k]["prompt"], api_name="/explain")
        finally:
            made.close()

    studio.engine._generate = counted
    try:
        until = time.monotonic() + 60
        while studio.jobs.state(job).step < 2 and time.monotonic() < until:
            time.sleep(0.1)
        before = studio.jobs.state(job)
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        after = studio.jobs.state(job)
    finally:
        del studio.engine._generate
    assert most == 1, "one by one"
    assert before.state == after.state == "running" and after.step > before.step, "it was taught all the while"
    for key, (picture, told) in drawn.items():
        assert np.array_equal(picture, solo[key]), key
        assert {each["trigger"]: each["strength"] for each in told["concepts"]} == asked[key]["concepts"]
    assert len({told["picture"] for _, told in drawn.values()}) == CLIENTS * PICTURES
    for picture, told in drawn.values():
        entry = studio.gallery.get(told["picture"])
        assert np.array_equal(pixels(entry.file), picture) and entry.settings["concepts"] == told["concepts"]
    assert studio.engine.waiting == 0
