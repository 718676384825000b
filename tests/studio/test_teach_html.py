"""The Teach tab's HTML: nothing typed becomes markup, and each state offers what can be done."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

gr = pytest.importorskip("gradio")

from tiny_engram.studio.job_folder import STATES, Job, JobState, Progress  # noqa: E402
from tiny_engram.studio.presets import fields_of  # noqa: E402
from tiny_engram.studio.registering import Chip, Collision, Report, RoleTokens  # noqa: E402
from tiny_engram.studio.ui import teach_html  # noqa: E402

NASTY = "<img src=x onerror=\"alert('1')\">&${value}{{value}}"


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
