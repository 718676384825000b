"""The named endpoints, as `gradio_client` calls them."""

import json
import shutil
import time

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image, ImageChops

from tiny_engram.studio.ui.api import ENDPOINTS


@pytest.fixture(scope="module")
def client(page_url, tmp_path_factory):
    made = Client(page_url, verbose=False, download_files=str(tmp_path_factory.mktemp("client")))
    yield made
    made.close()


def test_the_page_of_the_api_describes_each(client):
    told = client.view_api(return_format="dict")["named_endpoints"]
    assert set(told) == {f"/{name}" for name in ENDPOINTS}
    names = [each["parameter_name"] for each in told["/train"]["parameters"]]
    assert names == ["pictures", "trigger", "captions", "aliases", "class_word", "preset", "options"]


def test_register_and_suggest(client):
    word = client.predict(api_name="/suggest")
    told = client.predict(word, api_name="/register")
    assert told["ready"] and told["problem"] is None and told["roles"][0]["spellings"][0][0] == word
    told = client.predict("dog", ["hound"], api_name="/register")
    assert told["warnings"]
    with pytest.raises(AppError, match="expected a list of texts"):
        client.predict(word, "hound", api_name="/register")


def test_explain(client):
    [told] = client.predict("a lion", api_name="/explain")
    assert told["role"] == "clip_l" and told["rows"] == [] and told["fired_tokens"] == []


def test_a_picture_is_the_same_again_and_holds_its_settings(client, opened_studio):
    settings = {"prompt": "a lion", "seed": 7, "steps": 2}
    first, base, difference, told = client.predict(**settings, compare=True, api_name="/generate")
    second, nothing, _, _ = client.predict(**settings, api_name="/generate")
    assert ImageChops.difference(Image.open(first).convert("RGB"), Image.open(second).convert("RGB")).getbbox() is None
    assert ImageChops.difference(Image.open(first).convert("RGB"), Image.open(base).convert("RGB")).getbbox() is None
    assert Image.open(difference).size == Image.open(first).size and nothing is None
    assert json.loads(Image.open(first).info["tiny_engram"])["seed"] == 7 and told["changed"] == 0
    assert opened_studio.gallery.get(told["picture"]).settings["prompt"] == "a lion"


def test_values_out_of_bounds_are_told_in_one_line(client):
    for value, line in (({"steps": 0}, "steps is 0"), ({"seed": 0.5}, "seed is 0.5"), ({"concepts": {"nope": 1}}, "no concept 'nope'")):
        with pytest.raises(AppError, match=line):
            client.predict(prompt="a lion", **value, api_name="/generate")
    with pytest.raises(AppError, match="no job"):
        client.predict("../../../etc/passwd", api_name="/train_status")
    with pytest.raises(AppError, match="0 pictures"):
        client.predict([], "zorp-quib", api_name="/train")


def test_files_of_the_server_are_no_pictures(page_url, taught, opened_studio):
    """gradio_client would upload a file of that name from its own machine, so this is asked without it."""
    import httpx2

    for path in ("/etc/passwd", str(taught[0].path), str(opened_studio.workspace.root / "lock")):
        files = [{"path": path, "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}]
        asked = httpx2.post(f"{page_url}/gradio_api/call/train", json={"data": [files, "zorp-quib", None, None, "", "quick", None]})
        told = httpx2.get(f"{page_url}/gradio_api/call/train/{asked.json()['event_id']}").text
        assert "event: error" in told and path not in told
    assert not opened_studio.jobs.states()


def test_teach_and_draw(client, opened_studio, taught, few_steps, tmp_path):
    bad = tmp_path / "not-a-picture.png"
    bad.write_text("hello")
    pictures = [handle_file(str(each.path)) for each in taught]
    said = [each.caption for each in taught]
    told = client.predict(
        [*pictures, handle_file(str(bad))], "zorp-quib", [*said, ""], preset="quick", options=few_steps(), api_name="/train"
    )
    assert told["state"] in ("queued", "running") and [each["file"] for each in told["refused"]] == [bad.name]
    job = told["job"]
    until = time.monotonic() + 120
    while told["state"] in ("queued", "running") and time.monotonic() < until:
        time.sleep(0.3)
        told = client.predict(job, api_name="/train_status")
    assert told["state"] == "done" and told["step"] == 4, told
    [card] = client.predict("zorp", api_name="/concepts")
    assert card["id"] == told["concept"] and card["trigger"] == "zorp-quib" and not card["loaded"]
    drawn = client.predict("a zorp-quib", steps=2, concepts={"Zorp-Quib": 1}, compare=True, api_name="/generate")
    assert drawn[3]["concepts"][0]["id"] == card["id"]
    [explained] = client.predict("a zorp-quib", concepts={"zorp-quib": 0.5}, api_name="/explain")
    assert explained["rows"][0]["fired"] and explained["rows"][0]["strength"] == 0.5
    with pytest.raises(AppError, match="is taken"):
        client.predict(pictures, "zorp-quib", api_name="/train")
    for verb in ("pause", "resume", "cancel"):
        with pytest.raises(AppError, match="the job is done"):
            client.predict(job, api_name=f"/train_{verb}")
    opened_studio.library.delete(card["id"])
    opened_studio.runner.delete(job)
    shutil.rmtree(tmp_path, ignore_errors=True)
