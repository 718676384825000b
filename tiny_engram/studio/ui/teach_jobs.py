"""The jobs of the Teach tab: what is taught now, its samples, and all other jobs. Read from disk alone, whenever a timer ticks.

So a reloaded page, a second page and a restarted Studio show the same. May import handling, teach_html and teach_pictures.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.html_parts import empty, wrap
from tiny_engram.studio.job_folder import Job, JobState
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.handling import handled
from tiny_engram.studio.ui.teach_html import job_html, jobs_html, live_html, samples_html
from tiny_engram.studio.ui.teach_pictures import sample_uri

__all__ = ["JobsPanel", "build_jobs", "script"]

logger = logging.getLogger(__name__)

SOON, LATER = 1.0, 4.0  # seconds between looks: while something runs or waits, and otherwise
MOST_JOBS, MOST_SAMPLES, MOST_OLD_SAMPLES = 30, 12, 4
# Errors, notices and the changes of a gr.State reach the page through gradio's queue alone; what needs none of them is quicker without.
_QUEUED: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "trigger_mode": "multiple"}


def script() -> str:
    """What listens in the tab's elements."""
    return (Path(__file__).parent / "teach.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class JobsPanel:
    """The panel's components, in the order of what `look` returns, and what other tabs listen to.

    finished: "done:" and the ids of the jobs that are done, with spaces between; it is never seen, and changes when one more is done.
    used, seen: (concept id, when) of the concept that was put on the shelf, and of the one that is to be shown in the Library.
    """

    live: gr.HTML
    samples: gr.HTML
    others: gr.HTML
    timer: gr.Timer
    known: gr.State
    finished: gr.Textbox
    used: gr.State
    seen: gr.State
    look: Callable[[Mapping[str, Any] | None], tuple[Any, ...]]

    @property
    def outputs(self) -> list[Any]:
        """What `look` fills."""
        return [self.live, self.samples, self.others, self.timer, self.known, self.finished]


def build_jobs(studio: Studio) -> JobsPanel:
    """Inside a gr.Blocks. The timer is the only thing that keeps it up to date."""
    gr.HTML(wrap("<h3>Jobs</h3>"))
    listens = {"js_on_load": script(), "apply_default_css": False}
    live = gr.HTML("", elem_id="teach-live", **listens)
    samples = gr.HTML("", elem_id="teach-samples", **listens)
    others = gr.HTML("", elem_id="teach-jobs", **listens)

    def look(known: Mapping[str, Any] | None) -> tuple[Any, ...]:
        return _look(studio, known)

    # no gr.State: its changes are not noticed outside of the queue
    finished = gr.Textbox(visible="hidden", container=False, label="finished jobs")
    panel = JobsPanel(live, samples, others, gr.Timer(SOON), gr.State(None), finished, gr.State(None), gr.State(None), look)

    def tick(known: Mapping[str, Any] | None) -> tuple[Any, ...]:
        try:
            return look(known)
        except Exception:  # the next tick may find it better, and an error each second would bury the page
            logger.exception("the jobs cannot be read")
            return (gr.skip(),) * len(panel.outputs)

    def act(known: Mapping[str, Any] | None, event: gr.EventData) -> tuple[Any, ...]:
        used, seen = _act(studio, event._data)
        return *look(known), used, seen

    panel.timer.tick(tick, panel.known, panel.outputs, trigger_mode="once", queue=False, api_visibility="private", show_progress="hidden")
    for element in (live, others):
        element.act(handled(act), panel.known, [*panel.outputs, panel.used, panel.seen], **_QUEUED)
    return panel


def _act(studio: Studio, told: Any) -> tuple[Any, Any]:
    """Do what a button says; what goes to `used` and `seen`."""
    told = told if isinstance(told, dict) else {}
    action, id = told.get("action"), told.get("id")
    asked = {"pause": studio.runner.pause, "resume": studio.runner.resume, "cancel": studio.runner.cancel, "delete": studio.runner.delete}
    if action in asked:
        asked[action](str(id))
        return gr.skip(), gr.skip()
    if action not in ("use", "see"):
        raise StudioError(f"no action {str(action)[:40]!r} on a job; reload the page")
    concept = studio.jobs.state(str(id)).concept_id
    if concept is None:
        raise StudioError("this job has no concept in the library; resume it to try again")
    found = (concept, time.time())
    if action == "see":
        studio.library.get(concept)
        return gr.skip(), found
    studio.engine.load(concept)
    return found, gr.skip()


def _look(studio: Studio, known: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Values of JobsPanel.outputs; what the page has already is skipped. known: what it has, None for nothing."""
    before = known or {}
    states = studio.runner.states()
    current = next((state for state in states if state.busy), None)
    # those that wait in the order in which they will run, then all others, the last ones first
    waiting = sorted((state for state in states if state.place), key=lambda state: state.place)
    rest = [*waiting, *(state for state in states if state is not current and not state.place)]
    job = None if current is None else _job(studio, current.id)
    drawn = [] if current is None else studio.jobs.samples(current.id)[-MOST_SAMPLES:]
    done = sorted(state.id for state in states if state.state == "done")
    every = SOON if any(state.busy or state.state == "queued" for state in states) else LATER
    now = {
        "live": None if current is None else repr(current),
        "samples": None if current is None else (current.id, [step for step, _ in drawn]),
        "others": (studio.library.version, current is None, [repr(state) for state in rest]),
        "every": every,
        "done": done,
    }

    def fresh(part: str, make: Callable[[], Any]) -> Any:
        return gr.skip() if part in before and before[part] == now[part] else make()

    return (
        fresh("live", lambda: live_html(job, current, [] if current is None else studio.jobs.progress(current.id))),
        fresh("samples", lambda: "" if current is None else _samples(job, drawn, live=True)),
        fresh("others", lambda: _others(studio, rest, empty_too=current is None)),
        fresh("every", lambda: gr.Timer(every)),
        now,
        # never empty, so that a page that is loaded notes what was done before, and tells of the first job that is done later
        fresh("done", lambda: " ".join(["done:", *done])),
    )


def _job(studio: Studio, id: str) -> Job | None:
    try:
        return studio.jobs.job(id)
    except StudioError:  # damaged, or deleted in this moment
        return None


def _samples(job: Job | None, drawn: list[tuple[int, Path]], *, live: bool = False) -> str:
    if job is None:
        return ""
    prompt = " / ".join(text.replace("{trigger}", job.trigger) for text in job.fields["validation_prompts"])
    every = job.fields["validation_steps"]
    waiting = f"The first sample picture comes at step {every}." if live and every and every <= job.steps else ""
    html = samples_html([(step, sample_uri(path)) for step, path in drawn], prompt, waiting=waiting)
    return wrap(html) if live and html else html


def _others(studio: Studio, rest: list[JobState], *, empty_too: bool) -> str:
    if not rest:
        words = "Choose a trigger, drop pictures and press Start. Jobs go on when you close this page, and after a restart of the Studio."
        return wrap(empty("No job yet", words)) if empty_too else ""
    known = {card.id for card in studio.library.cards() if not card.draft}
    shown = []
    for state in rest[:MOST_JOBS]:
        try:
            progress, drawn = studio.jobs.progress(state.id), studio.jobs.samples(state.id)[-MOST_OLD_SAMPLES:]
        except StudioError:  # deleted in this moment
            continue
        job = _job(studio, state.id)
        shown.append(job_html(job, state, progress, _samples(job, drawn), in_library=state.concept_id in known))
    return jobs_html(shown, len(rest) - len(rest[:MOST_JOBS]))
