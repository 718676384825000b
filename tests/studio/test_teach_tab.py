"""The Teach tab: its tray on disk, its form, its HTML, and a real job that is started, seen, paused, resumed and used from it."""

import dataclasses
import io
import re
import time
from html.parser import HTMLParser

import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from tiny_engram.studio.errors import StudioError  # noqa: E402
from tiny_engram.studio.job_folder import STATES, Job, JobState, Progress  # noqa: E402
from tiny_engram.studio.presets import PRESETS, fields_of  # noqa: E402
from tiny_engram.studio.registering import Chip, Collision, Report, RoleTokens  # noqa: E402
from tiny_engram.studio.studio import Studio  # noqa: E402
from tiny_engram.studio.ui import teach_html, teach_jobs, teach_tab  # noqa: E402
from tiny_engram.studio.ui.teach_form import FIELDS, estimated, options_of, preset_choices, values_of  # noqa: E402
from tiny_engram.studio.ui.teach_pictures import crop_box, crop_uri, sample_uri, whole_uri  # noqa: E402
from tiny_engram.studio.ui.teach_tray import Tray, filled, unfilled  # noqa: E402
from tiny_engram.studio.uploads import Limits  # noqa: E402
from tiny_engram.studio.workspace import Workspace  # noqa: E402

NASTY = "<img src=x onerror=\"alert('1')\">&${value}{{value}}"


@pytest.fixture
def tray(workspace):
    return Tray(workspace)


@pytest.fixture
def two(picture_bytes):
    return [("a.png", picture_bytes(1)), ("b.jpg", picture_bytes(2, format="JPEG"))]


# -- the tray


def test_the_tray_is_there_again_after_a_restart(workspace, tray, two):
    assert tray.add(two) == (2, ())
    first, second = tray.pictures
    tray.caption({first.id: "a zed-quack on a table"}, "zed-quack")
    tray.keep(trigger="zed-quack", aliases="zq", class_word="mug", preset="quick", options={"max_train_steps": 7})
    again = Tray(workspace)
    assert again.pictures == tray.pictures and again.form == tray.form
    assert [p.name for p in again.pictures] == ["a.png", "b.jpg"]
    assert [t.caption for t in again.taught()] == ["a {trigger} on a table", ""]
    assert again.path(second.id).is_file()


def test_bad_files_are_named_and_the_others_taken(tray, picture_bytes, two):
    turned = Image.new("RGB", (30, 10), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif)
    clear = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(clear, "PNG")
    files = [("notes.txt", b"not a picture"), ("turned.jpg", buffer.getvalue()), ("empty.png", b""), ("clear.png", clear.getvalue())]
    count, refused = tray.add([*files, ("cut.png", picture_bytes(3)[:200])])
    assert count == 2 and [name for name, _ in refused] == ["notes.txt", "empty.png", "cut.png"]
    upright, white = tray.pictures
    assert (upright.width, upright.height) == (10, 30)
    with Image.open(tray.path(white.id)) as opened:
        assert opened.convert("RGB").getpixel((5, 5)) == (255, 255, 255)


def test_the_tray_has_one_bound_for_all_uploads(workspace, picture_bytes):
    tray = Tray(workspace, Limits(files=3))
    tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2)])
    count, refused = tray.add([(f"{k}.png", picture_bytes(k)) for k in range(2, 5)])
    assert count == 1 and len(refused) == 2 and all("more than 3 pictures" in why for _, why in refused)
    count, refused = tray.add([("more.png", picture_bytes(9))])
    assert count == 0 and "more than 3 pictures" in refused[0][1]


def test_a_kill_loses_no_picture_and_brings_none_back(workspace, tray, two, picture_bytes):
    tray.add(two)
    first, second = tray.pictures
    lost = tray.folder / f"{'ab' * 8}.png"
    lost.write_bytes(picture_bytes(5))  # taken, and not written down yet
    (tray.folder / ".x.sent.tmp").write_bytes(b"half")
    (tray.folder / f"{first.id}.png").unlink()  # removed, and still written down
    again = Tray(workspace)
    assert [p.id for p in again.pictures] == [second.id, "ab" * 8]
    assert not list(tray.folder.glob(".*.tmp"))


def test_a_damaged_tray_keeps_its_pictures(workspace, tray, two):
    tray.add(two)
    for damage in ("{", '{"pictures": 3, "form": []}', '{"pictures": [{"id": "../../x"}, 4, null], "form": {"trigger": 3, "preset": "x"}}'):
        (tray.folder / "tray.json").write_text(damage)
        again = Tray(workspace)
        assert {p.id for p in again.pictures} == {p.id for p in tray.pictures} and again.form.preset == "balanced"


def test_pictures_are_taken_out(workspace, tray, two):
    tray.add(two)
    first, second = tray.pictures
    tray.remove(first.id)
    tray.remove(first.id)  # from another page
    assert [p.id for p in Tray(workspace).pictures] == [second.id]
    with pytest.raises(StudioError, match="no picture"):
        tray.path(first.id)
    for id in ("../../etc", "", "x" * 16):
        with pytest.raises(StudioError):
            tray.remove(id)
    tray.keep(trigger="kept")
    tray.clear()
    assert not list(tray.folder.glob("*.png")) and Tray(workspace).form.trigger == "kept"


def test_captions_follow_the_trigger(tray, two):
    assert unfilled("A Zed-Quack by the zed-quacks", "zed-quack") == "A {trigger} by the zed-quacks"
    assert unfilled("a (c++) thing", "(c++)") == "a {trigger} thing" and unfilled("a mug", " ") == "a mug"
    assert filled("a {trigger}", "mug") == "a mug" and filled("a {trigger}", "") == "a {trigger}"
    tray.add(two)
    id = tray.pictures[0].id
    tray.caption({id: "  a   zed-quack\n here ", "0" * 16: "gone", tray.pictures[1].id: 3}, "zed-quack")
    assert tray.pictures[0].caption == "a {trigger} here" and tray.pictures[1].caption == ""
    with pytest.raises(StudioError, match="expected at most 1,000"):
        tray.caption({id: "x" * 1001})
    with pytest.raises(StudioError, match="class word"):
        tray.keep(class_word="x" * 5000)


# -- pictures


def test_the_crop_preview_is_what_teaching_sees(tmp_path):
    from tiny_engram.training.data import Example, fitted_picture

    picture = Image.new("RGB", (90, 30), "white")
    picture.paste("red", (30, 0, 60, 30))
    path = tmp_path / "wide.png"
    picture.save(path)
    assert fitted_picture(Example(path, ()), 64).getpixel((2, 32)) == (255, 0, 0)
    assert crop_box(90, 30) == pytest.approx((100 / 3, 0, 100 / 3, 100)) and crop_box(20, 40) == pytest.approx((0, 25, 100, 50))
    seen = _decoded(crop_uri(path, 64))
    assert seen.size == (64, 64) and all(abs(a - b) < 12 for a, b in zip(seen.getpixel((4, 32)), (255, 0, 0), strict=True))
    assert _decoded(whole_uri(path)).size == (90, 30)
    path.write_bytes(b"damaged")
    assert whole_uri(path) == crop_uri(path, 64) == sample_uri(path) == ""
    assert sample_uri(tmp_path / "none.png") == ""


def _decoded(uri: str) -> Image.Image:
    import base64

    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


# -- HTML


def _attributes(page: str) -> list[tuple[str, str]]:
    """All attributes of all elements, as a browser reads them."""
    found: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag != "script"
            found.extend((name, value or "") for name, value in attrs)

    Reader().feed(page)
    return found


def _job(**changes) -> Job:
    given = dict(id="1" * 16, trigger="zed", aliases=(), name="zed", class_word=None, preset="quick", model=None, threads=1, created="")
    return Job(**(given | {"pictures": 2, "fields": fields_of("quick")} | changes))


def test_nothing_that_a_user_types_becomes_markup(tray, picture_bytes):
    tray.add([(NASTY, picture_bytes(1))])
    tray.caption({tray.pictures[0].id: NASTY}, "")
    named = dataclasses.replace(tray.pictures[0], name=NASTY)
    shown = teach_html.Shown(picture=named, whole='x" onerror="1', crop="javascript:1")
    report = Report(NASTY, (NASTY,), None, (RoleTokens(NASTY, ((NASTY, (Chip(NASTY, 1),)),), 77),), (), (), (), (NASTY,))
    report = dataclasses.replace(report, collisions=(Collision("1", NASTY, NASTY, True, True, NASTY),))
    job = _job(name=NASTY, trigger=NASTY, preset=NASTY)
    pages = [teach_html.tray_html([shown], NASTY, 64), teach_html.report_html(report), teach_html.report_html(Report(NASTY, (), NASTY))]
    for name in STATES:
        state = JobState(id=NASTY, state=name, step=1, steps=2, message=NASTY, loss=0.5)
        pages += [teach_html.live_html(job, state, []), teach_html.job_html(job, state, [Progress(1, 0.5, 1.0)], in_library=True)]
    pages.append(teach_html.samples_html([(1, "data:image/webp;base64,AAAA"), (2, NASTY)], NASTY, waiting=NASTY))
    pages.append(teach_html.samples_html([], NASTY, waiting=NASTY))
    for page in pages:
        assert NASTY not in page
        for name, value in _attributes(page):
            assert not name.startswith("on") and (name != "src" or value.startswith("data:image/"))


def test_each_state_offers_what_can_be_done():
    def offered(name, **more):
        return re.findall(
            r'data-action="(\w+)"', teach_html.job_html(_job(), JobState(id="1" * 16, state=name, steps=9, **more), [], **kept)
        )

    kept = {"in_library": True}
    assert offered("done", concept_id="2") == ["use", "see", "delete"]
    assert offered("queued", place=2) == ["pause", "cancel", "delete"]
    assert offered("running") == ["pause", "cancel"] and offered("pausing") == ["cancel"] and offered("cancelling") == []
    assert offered("paused") == offered("interrupted") == offered("failed") == ["resume", "cancel", "delete"]
    assert offered("cancelled") == ["resume", "delete"]
    kept = {"in_library": False}
    assert offered("done", concept_id="2") == ["delete"]
    page = teach_html.job_html(None, JobState(id="1" * 16, state="failed", message="job.json: damaged"), [])
    assert "damaged job" in page and "job.json: damaged" in page
    for action in ("cancel", "delete"):  # asked first
        assert re.search(
            rf'data-action="{action}"[^>]* data-ask="[^"]+\?', teach_html.job_html(_job(), JobState(id="1", state="paused"), [])
        )


def test_empty_states_say_what_to_do_next():
    assert "Drop five to ten pictures" in teach_html.tray_html([], "", 64)
    assert "made-up" in teach_html.report_html(Report("", ()))
    assert teach_html.live_html(None, None, []) == "" and teach_html.jobs_html([]) == ""
    assert "3 older jobs" in teach_html.jobs_html(["x"], 3)


# -- the form


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_as_it_is_has_no_options(preset):
    values = values_of(preset, {})
    assert len(values) == len(FIELDS) and options_of(preset, values) == {}
    assert options_of(preset, [None] * len(FIELDS)) == {}
    # a browser sends whole numbers as floats
    assert options_of(preset, [float(v) if isinstance(v, int) else v for v in values]) == {}


def test_what_is_changed_comes_back(workspace, tray):
    values = dict(zip(FIELDS, values_of("quick", {}), strict=True))
    values |= {"max_train_steps": 12, "validation_steps": 0, "seed": 3, "validation_prompts": "a ZED here\n\n the {trigger} "}
    options = options_of("quick", list(values.values()), "zed")
    prompts = ["a {trigger} here", "the {trigger}"]
    assert options == {"max_train_steps": 12, "validation_steps": 0, "seed": 3, "validation_prompts": prompts}
    tray.keep(preset="quick", options=options)
    assert options_of("quick", values_of("quick", Tray(workspace).form.options)) == options


# -- with a studio


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
