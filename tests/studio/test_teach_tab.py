"""The Teach tab with a studio: its form, what it says before a start, and a real job that is started, paused, resumed and used from it."""

import re
import time

import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from tiny_engram.studio.errors import StudioError  # noqa: E402
from tiny_engram.studio.presets import PRESETS  # noqa: E402
from tiny_engram.studio.studio import Studio  # noqa: E402
from tiny_engram.studio.ui import teach_jobs, teach_tab  # noqa: E402
from tiny_engram.studio.ui.teach_form import FIELDS, estimated, preset_choices, values_of  # noqa: E402
from tiny_engram.studio.workspace import Workspace  # noqa: E402


@pytest.fixture
def opened(embedded, tmp_path):
    with Studio(Workspace.open(tmp_path / "home"), embedded) as studio:
        yield studio


@pytest.fixture
def small(own_pipe, saved_pipe, tmp_path):
    """The same on the small pipeline, which a job has loaded and drawn with sooner."""
    with Studio(Workspace.open(tmp_path / "home"), own_pipe, model=str(saved_pipe), device="cpu") as studio:
        yield studio


def _event(**told):
    return gr.EventData(None, told)


def _until(check, seconds=90.0):
    until = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < until, "nothing came of it"
        time.sleep(0.1)
    return found


def test_the_page_is_built_of_private_events(opened):
    with gr.Blocks() as page:
        tab = teach_tab.build_teach(opened)
        fn, outputs = tab.refresh()
        follow, following, texts = tab.follow()
    assert len(fn()) == len(outputs) and texts[:3] == [tab.trigger, tab.aliases, tab.class_word]
    assert len(follow("zed-quack", "", "mug", None)) == len(following)
    assert teach_tab._Teach(opened).restored()[:3] == ("", "", "")  # what is only shown is not written
    assert {each.api_visibility for each in page.fns.values()} == {"private"}
    targets = {
        (type(page.blocks[id]).__name__.lower(), event) for each in page.fns.values() for id, event in each.targets if id in page.blocks
    }
    assert {("timer", "tick"), ("html", "act"), ("html", "typed"), ("file", "upload"), ("button", "click")} <= targets
    assert any(event == "load" for each in page.fns.values() for _, event in each.targets)
    for label in ("Trigger", "Aliases", "Class word", "Preset", "Steps", "Seed", "Sample prompts"):
        assert any(getattr(block, "label", None) == label for block in page.blocks.values())


def test_the_form_is_kept_box_by_box(opened, picture_bytes):
    teach = teach_tab._Teach(opened)
    teach.typed("class_word", "mug")
    teach.typed("aliases", "zq, quack")
    teach.filled("zed-quack", "", "")
    report, tray, seen = teach.follow("zed-quack", "zq, quack", "mug", None)
    assert teach.restored()[:4] == ("zed-quack", "zq, quack", "mug", "balanced")
    assert "te-token" in report and "Nothing is in its way" in report
    teach.dropped([])
    teach.tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2)])
    first, second = teach.tray.pictures
    assert "2 pictures<" in (tray := teach.follow("zed-quack", "", "mug", seen))[1]["html"] and "2 pictures<" not in str(tray[2])
    assert "html" not in teach.follow("zed-quack", "", "cup", tray[2])[1]  # the page shows it already
    # a caption that was typed just before goes with the click
    _, tray, *_ = teach.act(_event(action="remove", id=first.id, captions={second.id: "the zed-quack"}, trigger="zed-quack"))
    assert tray["spellings"] == ["zed-quack", "zq", "quack"] and "1 picture<" in tray["html"] and "the {trigger}" in tray["html"]
    assert "No pictures yet" in teach.act(_event(action="clear", id=""))[1]["html"]
    draft = opened.library.save_draft("zed-quack", ["zq"], "mug")
    assert teach.chosen(draft) == ("zed-quack", "zq", "mug") and "Nothing is in its way" in teach.report(teach.tray.form)
    opened.library.save_draft("zed-quack-two")
    assert "zed-quack-two" in teach.report(teach.tray.form)
    *values, _ = teach.preset("best")
    teach.setting("best", *[9 if name == "max_train_steps" else value for name, value in zip(FIELDS, values, strict=True)])
    assert teach_tab._Teach(opened).tray.form.options == {"max_train_steps": 9}
    assert "expected a whole number" in estimated(opened.runner, "quick", 2, {"max_train_steps": 0})
    assert [key for _, key in preset_choices(opened.runner, 2)] == list(PRESETS)


def test_start_says_what_is_missing(opened, picture_bytes, tmp_path):
    teach = teach_tab._Teach(opened)
    values = values_of("quick", {})
    with pytest.raises(StudioError, match="no trigger"):
        teach.start("  ", "", "", "quick", *values)
    with pytest.raises(StudioError, match="no pictures"):
        teach.start("zed-quack", "", "", "quick", *values)
    teach.tray.add([("a.png", picture_bytes(1))])
    teach.keep_captions({"captions": {teach.tray.pictures[0].id: "a mug"}, "trigger": "zed-quack"})
    with pytest.raises(StudioError, match="'a mug', does not hold the trigger"):
        teach.start("zed-quack", "", "", "quick", *values)
    with pytest.raises(StudioError, match="^Steps is -1, expected a whole number from 1"):
        teach.start("zed-quack", "", "", "quick", *[-1 if name == "max_train_steps" else v for name, v in zip(FIELDS, values, strict=True)])
    assert opened.runner.states() == [] and teach.tray.form.trigger == "zed-quack"
    for told in (
        None,
        {},
        {"action": "x"},
        {"action": "use", "id": "../.."},
        {"action": "pause", "id": None},
        {"action": "see", "id": "0" * 16},
    ):
        with pytest.raises(StudioError):
            teach_jobs._act(opened, told)


def test_a_job_from_start_to_use(small, picture_bytes):
    """Started, seen, paused, seen by a page that is new, resumed, done, used and deleted; the tray keeps its pictures."""
    teach = teach_tab._Teach(small)
    teach.tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2)])
    live, samples, others, timer, known, finished = teach_jobs._look(small, None)
    assert live == samples == "" and "No job yet" in others and finished == "done:" and timer.value == teach_jobs.LATER
    changed = {"max_train_steps": 40, "train_batch_size": 1, "validation_steps": 0}
    values = [changed.get(name, value) for name, value in zip(FIELDS, values_of("quick", {}), strict=True)]
    teach.start("zed-quack", "", "mug", "quick", *values)
    with pytest.raises(StudioError, match="is being taught already"):
        teach.start("Zed-Quack", "", "", "quick", *values)
    teach.start("nib-lorp", "", "", "quick", *values)
    teach.start("fup-zoru", "", "", "quick", *values)
    _, _, others, *_ = teach_jobs._look(small, None)
    places = [others.index(name) for name in ("next in the queue", "number 2 in the queue")]
    assert places == sorted(places) and others.index("nib-lorp") < others.index("fup-zoru")  # in the order in which they will run
    id, *waiting = [state.id for state in reversed(small.runner.states())]
    for each in waiting:
        teach_jobs._act(small, {"action": "delete", "id": each})
    _until(lambda: small.jobs.state(id).step >= 2)
    live, _, _, timer, known, _ = teach_jobs._look(small, known)
    assert "zed-quack" in live and "step" in live and timer.value == teach_jobs.SOON
    teach_jobs._act(small, {"action": "pause", "id": id})
    _until(lambda: small.jobs.state(id).state == "paused")
    Image.new("RGB", (32, 32), "red").save(small.jobs.folder(id) / "samples" / "step_000002.png")
    new = teach_jobs._look(small, None)
    assert new[0] == "" and 'data-action="resume"' in new[2] and "data:image/webp" in new[2] and "te-plot" in new[2]
    assert all(isinstance(each, dict) and "value" not in each for each in teach_jobs._look(small, new[4])[:4])  # nothing new, nothing sent
    teach_jobs._act(small, {"action": "resume", "id": id})
    _until(lambda: small.jobs.state(id).state == "done")
    _, _, others, _, known, finished = teach_jobs._look(small, known)
    assert finished == f"done: {id}" and 'data-action="use"' in others
    (used, _), _ = teach_jobs._act(small, {"action": "use", "id": id})
    assert [each.id for each in small.engine.loaded()] == [used]
    _, (seen, _) = teach_jobs._act(small, {"action": "see", "id": id})
    assert seen == used and "has the tokens of" in teach.follow("zed-quack", "", "", None)[0]
    small.library.delete(used)
    assert "no longer in the library" in teach_jobs._look(small, known)[2]
    teach_jobs._act(small, {"action": "delete", "id": id})
    assert "No job yet" in teach_jobs._look(small, known)[2] and len(teach.tray.pictures) == 2


def test_settings_are_told_by_the_names_of_the_page(opened, picture_bytes):
    teach = teach_tab._Teach(opened)
    teach.tray.add([("a.png", picture_bytes(1))])
    for name, value, line in (
        ("max_train_steps", 1.5, "Steps is 1.5, expected a whole number from 1"),
        ("max_train_steps", None, "Steps is empty; type a number, or choose the preset again"),
        ("seed", 0.5, "Seed is 0.5, expected a whole number"),
        ("gate_learning_rate", -1, "Learning rate of gates is -1, expected a number above 0"),
        ("validation_prompts", " ", "Sample prompts is empty; write one with {trigger} in it, or set Sample every to 0"),
    ):
        values = [value if field == name else each for field, each in zip(FIELDS, values_of("quick", {}), strict=True)]
        assert line in teach.setting("quick", *values)
        with pytest.raises(StudioError, match="^" + re.escape(line)):
            teach.start("zed-quack", "", "", "quick", *values)
    assert opened.runner.states() == []


def test_a_class_word_and_a_taken_trigger_are_told_before_start(opened, concept_of):
    teach = teach_tab._Teach(opened)
    opened.library.add(concept_of("zed-quack", name="Quack"))
    report, *_ = teach.follow("zed-quack", "", "", None)
    assert "the concept &#x27;Quack&#x27; has the tokens of" in report and "only one of the two can be in use" in report
    assert "does not know &#x27;zzzzqq&#x27; as one word" in teach.follow("zed-quack", "", "zzzzqq", None)[0]
