"""Markup and odd characters wherever a user or a stranger can put text: the page shows them as text, and every call gets an answer."""

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.jobs import Taught

HERE = Path(__file__).resolve().parents[2]
MARKUP = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"


@pytest.fixture
def hostile(served, tiny, tmp_path, picture_bytes):
    """Markup wherever a user or a stranger can put text: drafts, a concept's name, aliases, a job, the tray, a picture's settings."""
    studio, _ = served
    studio.library.save_draft(f"zorp {MARKUP}", [f"quib {MARKUP}"], MARKUP)
    made = studio.engine.run(lambda adapter: tiny.concept(adapter, f"zed {MARKUP}", aliases=(f"zed2 {MARKUP}",), name=MARKUP))
    file = made.with_details(recipe={MARKUP: MARKUP}).save(tmp_path / "x.safetensors")
    concept = studio.library.import_file(file, MARKUP)
    studio.engine.load(concept)
    settings = {"prompt": MARKUP, "negative_prompt": MARKUP, "seed": 1, "base": MARKUP}
    settings["concepts"] = [{"id": MARKUP, "name": MARKUP, "trigger": MARKUP, "strength": 1.0}]
    picture = studio.gallery.add(Image.open(io.BytesIO(picture_bytes())), settings)
    path = tmp_path / "a.png"
    path.write_bytes(picture_bytes())
    said = Taught(path=path, caption=f"a {{trigger}} {MARKUP}")
    job = studio.jobs.create([said], f"zed {MARKUP}", aliases=[MARKUP], name=MARKUP, class_word=MARKUP, model="another/model").id
    yield studio, concept, picture
    studio.gallery.delete(picture)
    studio.library.delete(concept)
    studio.engine.unload(concept)
    for draft in studio.library.drafts():
        studio.library.delete(draft.id)
    studio.jobs.delete(job)


def texts_in(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for each in inner for text in texts_in(each)]


def is_html(text: str) -> bool:
    return bool(re.search(r"</(div|p|ul|section|article|li)>", text))


def test_markup_stays_text_in_all_that_the_page_is_sent(hostile, http_):
    studio, concept, picture = hostile
    config = http_.get("/config").json()
    seen = texts_in(config["components"])
    loads = [d for d in config["dependencies"] if any(target[1] == "load" for target in d["targets"]) and d["backend_fn"]]
    assert len(loads) >= 4
    for d in loads:
        data = [None] * len(d["inputs"])
        answer = http_.post("/gradio_api/run/predict", json={"data": data, "fn_index": d["id"], "session_hash": "secure"})
        assert answer.status_code == 200, (d["api_name"], answer.text[:300])
        seen += texts_in(answer.json()["data"])
    shown = [text for text in seen if is_html(text)]
    assert sum("onerror=alert(1)" in text for text in shown) >= 4, "cards, shelf, history and drafts have it"
    for text in shown:
        assert "<script>alert" not in text and "<img src=x" not in text, text[:500]
        for attribute in re.findall(r'="([^"]*)"', text):
            assert "<script" not in attribute
    assert not any(re.search(r"<img src=x|<script>alert", text) for text in shown)


def test_markup_in_messages_is_escaped(hostile, http_, called):
    for name, data in (
        ("explain", [MARKUP, "", {f"no {MARKUP}": 1}]),
        ("generate", [MARKUP, "", 0, 1, 4, {f"no {MARKUP}": 1}, False]),
        ("train_status", [MARKUP]),
    ):
        told = called(http_, name, data)
        assert "event: error" in told and "<img" not in told and "&lt;img" in told, told
    told = called(http_, "train", [None, MARKUP, ["x"], None, "", MARKUP, None])
    assert "event: error" in told and "<img" not in told


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202ecba", "\uffff" * 50, "a" * 10**6, "\U0001f986" * 1_000])
def test_odd_texts_get_an_answer(http_, text):
    for name, data in (("register", [text, [text]]), ("explain", [text, text, None]), ("concepts", [text])):
        asked = http_.post(f"/gradio_api/call/{name}", content=json.dumps({"data": data}), headers={"Content-Type": "application/json"})
        if asked.status_code == 200:
            told = http_.get(f"/gradio_api/call/{name}/{asked.json()['event_id']}").text
            assert ("event: complete" in told or "event: error" in told) and "Traceback" not in told and str(HERE) not in told
            assert "Something unexpected" not in told, (name, told[:300])


def test_settings_in_a_strangers_picture_are_checked(served, tmp_path):
    studio, _ = served
    for told in (
        '{"seed": 1e999}',
        '{"prompt": ["x"]}',
        "[" * 10_000,
        '{"steps": 10000000000}',
        '{"concepts": {"a": 1}}',
        "x" * 10**6,
        "null",
    ):
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text("tiny_engram", told, zip=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "x.png", pnginfo=chunks)
        with pytest.raises(StudioError) as raised:
            studio.gallery.settings_of(tmp_path / "x.png")
        assert "\n" not in str(raised.value) and str(tmp_path) not in str(raised.value)
