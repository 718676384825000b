"""The Create tab: what it shows of shelf and prompt, drawing with progress and cancel, the history, settings that are used again."""

import threading
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.requests import GenerateRequest
from tiny_engram.studio.ui import create_html
from tiny_engram.studio.ui.create_drawing import Drawings
from tiny_engram.studio.ui.create_tab import build_create
from tiny_engram.studio.ui.create_values import highlighted, history_value, reused, shelf_value, size_of, strengths_in

NASTY = "<img src=x onerror=alert(1)>\"'&${alert(2)}{{3}}"
PROMPT = "a 3d zed-quack on a red background"


def event(act: str, id: str = "") -> gr.EventData:
    return gr.EventData(None, {"act": act, "id": id})


def who(name: str = "page") -> SimpleNamespace:
    return SimpleNamespace(session_hash=name)


@pytest.fixture
def duck(whole, concept_of):
    """A concept in the library and on the shelf."""
    id = whole.library.add(concept_of("zed-quack", aliases=("zedquack",), seed=1))
    whole.engine.load(id)
    return id


def asked(prompt=PROMPT, *, strengths=None, compare=True, seed=5, random=False, steps=2, width=None, height=None):
    """The form, as the page sends it."""
    return prompt, "", {"strengths": strengths or {}}, compare, seed, random, steps, 4.0, width, height, 24, who()


def drawn(handlers, *form):
    return list(handlers["on_generate"](*form))


# -- what it shows


def test_an_empty_studio_says_what_to_do(whole):
    value = shelf_value(whole)
    assert "There is no concept yet" in value["html"] and value["strengths"] == {}
    assert "As you type" in highlighted(whole, "", value) and "Every picture you draw" in history_value(whole, None, 24)
    assert "Your picture appears here" in create_html.stage_html(None)


def test_shelf_has_a_chip_and_a_slider_for_each_concept(whole, duck, concept_of):
    other = whole.library.add(concept_of("tako-belu", seed=2))
    value = shelf_value(whole)
    assert value["keep"] and value["strengths"] == {duck: 1.0}
    assert 'data-text="zed-quack"' in value["html"] and f'data-id="{duck}" data-strength="1"' in value["html"]
    assert f'data-act="use" data-id="{other}"' in value["html"]
    told = shelf_value(whole, {duck: 3.5})
    assert not told["keep"] and 'max="3.5"' in told["html"]  # a slider that reaches what another program chose


def test_highlight_follows_the_shelf_and_its_strengths(whole, duck):
    shelf = shelf_value(whole)
    assert 'class="tc-fires tc-c0"' in highlighted(whole, PROMPT, shelf) and "Will fire: <b>zed-quack</b>" in highlighted(
        whole, PROMPT, shelf
    )
    assert "strength 0.5" in highlighted(whole, PROMPT, {"strengths": {duck: 0.5}})
    assert "tc-silent" in highlighted(whole, "zed-quacks", shelf) and "will not fire" in highlighted(whole, "zed-quacks", shelf)
    assert "No trigger fires here" in highlighted(whole, "a duck", shelf)
    assert "expected at most 2,000" in highlighted(whole, "x" * 2001, shelf)


def test_texts_of_users_are_escaped(whole, concept_of):
    id = whole.library.add(concept_of("zed-quack", name=NASTY))
    whole.library.rename(id, NASTY)
    whole.engine.load(id)
    gallery = whole.gallery.add(
        Image.new("RGB", (8, 8)), {"prompt": NASTY, "concepts": [{"id": "x", "name": NASTY, "trigger": NASTY, "strength": 1}]}
    )
    made = [
        shelf_value(whole)["html"],
        highlighted(whole, f"zed-quack {NASTY}", shelf_value(whole)),
        history_value(whole, gallery, 24),
        create_html.stage_html(whole.gallery.get(gallery)),
    ]
    assert all("<img src=x" not in html for html in made) and all("&lt;img src=x" in html for html in made)


@pytest.mark.parametrize("sent", [None, 3, [], {"strengths": 4}, {"other": {}}])
def test_a_browser_may_send_anything_as_the_shelf(whole, sent):
    assert strengths_in(sent) == {} and highlighted(whole, "a duck", sent)


def test_sizes_of_the_base_need_no_saying():
    assert size_of(128, 128, (128, 128)) == (None, None) and size_of(None, 0, (128, 128)) == (None, None)
    assert size_of(192, None, (128, 128)) == (192, None)


# -- drawing


def test_a_drawing_is_in_the_gallery_before_it_is_finished(whole, duck):
    drawings = Drawings(whole)
    drawing = drawings.start("page", GenerateRequest(prompt=PROMPT, steps=2, strengths={duck: 1.0}, compare=True))
    with pytest.raises(StudioError, match="drawn for this page already"):
        drawings.start("page", drawing.request)
    assert drawing.finished.wait(60) and drawing.error is None and drawing.picture is not None
    assert (drawing.step, drawing.total) == (4, 4) and whole.gallery.get(drawing.picture).settings["prompt"] == PROMPT
    shown = drawings.shown(drawing.picture)
    assert shown is not None and shown.plain is not None and [f.name for f in shown.fired] == ["zed-quack"] and shown.fired[0].fired
    assert not drawings.cancel("page")


def test_a_cancelled_drawing_leaves_no_picture(whole):
    drawings = Drawings(whole)
    drawing = drawings.start("page", GenerateRequest(prompt="a duck", steps=150))  # cancelled before it begins, or at its first step
    assert drawings.cancel("page") and not drawings.cancel("another page")
    assert drawing.finished.wait(60) and drawing.error is not None and drawing.picture is None and whole.gallery.entries() == []


def test_generate_shows_progress_then_the_picture_beside_the_bases(whole, duck, built):
    _, handlers = built(build_create, whole)
    first, *_, last = drawn(handlers, *asked(strengths={duck: 0.5}))
    assert "Drawing" in first[0].value and not first[0].interactive and first[1].interactive and "<progress" in first[2].value
    assert last[0].interactive and not last[1].interactive and last[3] == 5
    stage, actions, download, picture = last[4], last[5], last[7], last[9]
    assert "Base, same seed" in stage and "% of the pixels differ" in stage and "<b>zed-quack</b> fired" in stage
    assert actions.visible and whole.gallery.get(picture).settings["concepts"][0]["strength"] == 0.5
    assert whole.gallery.settings_of(Path(download.value["path"] if isinstance(download.value, dict) else download.value))["seed"] == 5


def test_generate_takes_a_new_seed_where_it_is_told_to(whole, built):
    _, handlers = built(build_create, whole)
    seeds = {drawn(handlers, *asked("a duck", random=True, compare=False))[-1][3] for _ in range(2)}
    assert len(seeds) == 2 and 5 not in seeds


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"steps": 0}, "steps is 0, expected"),
        ({"seed": -1}, "seed is -1, expected"),
        ({"width": 100}, "width is 100, expected a multiple of"),
        ({"strengths": {"feedfacefeedface": 1.0}}, "no concept"),
        ({"strengths": {"feedfacefeedface": "much"}}, "strength is much, expected"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_the_button_comes_back(whole, built, form, says):
    _, handlers = built(build_create, whole)
    seen = []
    with pytest.raises(gr.Error, match=says) as caught:
        for value in handlers["on_generate"](*asked(**form)):
            seen.append(value)
    assert "\n" not in str(caught.value) and str(whole.workspace.root) not in str(caught.value)
    assert not seen or (seen[-1][0].interactive and not seen[-1][1].interactive)
    assert whole.gallery.entries() == []


def test_cancel_stops_the_pages_own_drawing(whole, built):
    _, handlers = built(build_create, whole)
    seen = []
    for value in handlers["on_generate"](*asked("a duck", steps=150)):
        if not seen:
            handlers["on_cancel"](who("another page"))
            threading.Timer(0.3, handlers["on_cancel"], [who()]).start()
        seen.append(value)
    assert seen[-1][0].interactive and whole.gallery.entries() == []  # and no error: it was asked for


# -- history


@pytest.fixture
def pictures(whole):
    made = [whole.gallery.add(Image.new("RGB", (16, 16), (k, 90, 90)), {"prompt": f"picture {k}", "seed": k, "steps": 3}) for k in range(3)]
    return made[::-1]


def test_history_is_newest_first_and_damaged_files_are_passed_over(whole, pictures):
    shown = history_value(whole, pictures[1], 24)
    assert [shown.index(id) for id in pictures] == sorted(shown.index(id) for id in pictures)
    assert f'data-id="{pictures[1]}" aria-pressed="true"' in shown and 'data-act="more"' not in shown
    assert 'data-act="more"' in history_value(whole, None, 2) and pictures[2] not in history_value(whole, None, 2)
    (whole.workspace.gallery / f"{pictures[0]}.png").write_bytes(b"no picture")
    assert pictures[0] not in history_value(whole, None, 24) and pictures[1] in history_value(whole, None, 24)


def test_choosing_a_picture_shows_it_with_its_settings_and_its_file(whole, pictures, built):
    _, handlers = built(build_create, whole)
    stage, actions, _, download, history, chosen, count = handlers["on_history"](None, 24, event("choose", pictures[0]))
    assert "picture 2" in stage and actions.visible and chosen == pictures[0] and count == 24
    more = handlers["on_history"](pictures[0], 24, event("more"))
    assert more[-1] == 48 and more[-2] == pictures[0]
    with pytest.raises(gr.Error, match="no picture"):
        handlers["on_history"](None, 24, event("choose", "../../etc/passwd"))


def test_deleting_a_picture_empties_the_stage(whole, pictures, built):
    _, handlers = built(build_create, whole)
    stage, actions, *_, chosen = handlers["on_delete"](pictures[0], 24)
    assert "Your picture appears here" in stage and not actions.visible and chosen is None
    assert [entry.id for entry in whole.gallery.entries()] == pictures[1:]


# -- settings that are used again


def test_reused_settings_draw_the_same_picture(whole, duck, built, tmp_path):
    _, handlers = built(build_create, whole)
    picture = drawn(handlers, *asked(strengths={duck: 0.5}, compare=False))[-1][9]
    before = np.asarray(Image.open(whole.gallery.get(picture).file))
    sent = tmp_path / "sent.png"
    sent.write_bytes(whole.gallery.get(picture).file.read_bytes())
    whole.engine.unload(duck)
    for form in (handlers["on_reuse"](picture), handlers["on_upload"](str(sent))):
        prompt, negative, shelf, seed, random, steps, guidance, width, height = form
        assert (prompt, negative, seed, random, steps, shelf["strengths"]) == (PROMPT, "", 5, False, 2, {duck: 0.5})
    again = handlers["on_generate"](prompt, negative, shelf, False, seed, random, steps, guidance, width, height, 24, who())
    picture = list(again)[-1][9]
    assert np.array_equal(np.asarray(Image.open(whole.gallery.get(picture).file)), before)


def test_concepts_are_found_by_trigger_and_missing_ones_named(whole, duck):
    foreign = [
        {"id": "0" * 16, "trigger": "Zed-Quack", "strength": 0.7},
        {"trigger": "not-here", "strength": 1},
        "nonsense",
        {"strength": "x"},
    ]
    strengths, missing = reused(whole, {"concepts": foreign})
    assert strengths == {duck: 0.7} and missing == ["not-here", "?"]
    assert reused(whole, {"concepts": "zed-quack"}) == ({}, []) and reused(whole, {}) == ({}, [])


def test_a_picture_without_settings_is_refused(whole, built, tmp_path, picture_bytes):
    _, handlers = built(build_create, whole)
    other = tmp_path / "other.png"
    other.write_bytes(picture_bytes())
    with pytest.raises(gr.Error, match="carries no settings"):
        handlers["on_upload"](str(other))
    assert handlers["on_upload"](None)[0] == gr.skip()


# -- the shelf from here


def test_concepts_are_used_and_put_away(whole, concept_of, built):
    tab, handlers = built(build_create, whole)
    id = whole.library.add(concept_of("zed-quack", seed=1))
    assert id in handlers["on_shelf"](event("use", id))["strengths"] and [each.id for each in whole.engine.loaded()] == [id]
    assert handlers["on_shelf"](event("away", id))["strengths"] == {} and whole.engine.loaded() == ()
    with pytest.raises(gr.Error, match="reload the page"):
        handlers["on_shelf"](event("use", "../x"))
    fn, outputs, inputs = tab.refresh()
    assert len(outputs) == 2 and len(inputs) == 2 and id in fn(None, 24)[0]["html"]


@pytest.mark.parametrize(("seed", "line"), [(1.5, "seed is 1.5, expected a whole number"), (None, "the seed is empty; type a")])
def test_a_seed_is_taken_as_it_was_typed_or_refused(whole, built, seed, line):
    _, handlers = built(build_create, whole)
    with pytest.raises(gr.Error, match=line):
        drawn(handlers, *asked(seed=seed))


def test_a_cancelled_picture_is_told(whole, built, monkeypatch):
    _, handlers = built(build_create, whole)
    said = []
    monkeypatch.setattr(gr, "Info", lambda text, title="": said.append((title, text)))
    for _ in handlers["on_generate"](*asked("a duck", steps=150)):
        handlers["on_cancel"](who())
    assert len(said) == 1 and said[0][0] == "Cancelled" and "cancelled" in said[0][1] and "nothing was kept" in said[0][1]
