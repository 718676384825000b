"""The Teach tab's own pieces of the page as HTML: the tray, a short report, what each job shows. Pure functions, everything escaped.

What may be clicked is a button with data-action (and data-ask, where the page asks first); teach.js sends it. May import the view models
and the shared pieces of `studio.html`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiny_engram.studio.html import token_chips
from tiny_engram.studio.html_parts import badge, clock, empty, encoder, escape, last_loss, loss_plot, notice, picture, plural, wrap
from tiny_engram.studio.job_folder import Job, JobState, Progress
from tiny_engram.studio.presets import time_in_words
from tiny_engram.studio.registering import Collision, Report
from tiny_engram.studio.ui.teach_pictures import crop_box
from tiny_engram.studio.ui.teach_tray import TrayPicture, filled
from tiny_engram.training.data import DEFAULT_TEMPLATES

__all__ = ["Shown", "job_html", "jobs_html", "live_html", "report_html", "samples_html", "tray_html", "twin_words"]

# A job's state in a word, and its mood.
STATES = {
    "queued": ("waiting", "quiet"),
    "running": ("teaching", "busy"),
    "pausing": ("pausing", "busy"),
    "paused": ("paused", "warning"),
    "cancelling": ("cancelling", "busy"),
    "cancelled": ("cancelled", "quiet"),
    "done": ("done", "good"),
    "failed": ("failed", "bad"),
    "interrupted": ("interrupted", "warning"),
}
DOT = " \u00b7 "
MOST_SPELLINGS, MOST_LINES = 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One picture of the tray as it is shown: the whole of it and what teaching sees, as data URIs ("": it cannot be read)."""

    picture: TrayPicture
    whole: str
    crop: str


def _button(action: str, id: str, text: str, about: str = "", *, ask: str = "", yes: str = "", kind: str = "") -> str:
    asks = f' data-ask="{escape(ask)}" data-yes="{escape(yes)}"' if ask else ""
    name = escape(f"{text} {about}".strip())
    return (
        f'<button type="button" class="te-button {kind}" data-action="{escape(action)}" data-id="{escape(id)}"{asks} '
        f'aria-label="{name}">{escape(text)}</button>'
    )


# -- the tray ---------------------------------------------------------------------------------------------------------------------


def tray_html(shown: Sequence[Shown], trigger: str, side: int) -> str:
    """The pictures with their captions; trigger: stands in hints of captions; side: pixels of what teaching sees."""
    if not shown:
        words = "Drop five to ten pictures of one thing above, from different sides. They wait here until you take them out."
        return wrap(empty("No pictures yet", words))
    count = plural(len(shown), "picture")
    ask = f"Take {count} out of the tray? Their captions go too."
    clear = _button("clear", "", "Take all out", ask=ask, yes="Take all out", kind="te-delete")
    cards = "".join(_picture(each, number, trigger, side) for number, each in enumerate(shown, 1))
    told = f'<span class="te-soft">The framed square is what teaching sees, at {side} x {side} pixels.</span>'
    return wrap(
        f'<div class="tt-bar"><span><strong>{count}</strong> {told}</span>{clear}</div><ul class="tt-grid" role="list">{cards}</ul>'
    )


def _picture(shown: Shown, number: int, trigger: str, side: int) -> str:
    p = shown.picture
    left, top, width, height = crop_box(p.width, p.height)
    frame = f"left:{left:.2f}%;top:{top:.2f}%;width:{width:.2f}%;height:{height:.2f}%"
    hint = DOT.join(filled(text, trigger or "...") for text in DEFAULT_TEMPLATES[:3])
    notes = []
    lost = 1 - min(p.size) / max(p.size)
    notes += [f"{'more than 99' if lost > 0.99 else f'{100 * lost:.0f}'}% of it is cut off"] if lost > 0.3 else []
    notes += [f"smaller than {side} pixels, so it is enlarged"] if min(p.width, p.height) < side else []
    notes += [] if shown.whole else ["it can no longer be read; take it out"]
    note = f'<p class="te-soft tt-note">{escape("; ".join(notes))}</p>' if notes else ""
    ask = f"Take picture {number} out of the tray? Its caption goes too."
    out = _button("remove", p.id, "Take out", f"picture {number}", ask=ask, yes="Take it out", kind="te-delete")
    cut = "" if p.width == p.height else f'<span class="tt-crop" style="{frame}"></span>'
    return (
        '<li class="tt-card"><div class="tt-pair"><div class="tt-whole">'
        f'<div class="tt-frame">{picture(shown.whole, p.name)}{cut}</div></div>'
        f'<figure class="tt-seen">{picture(shown.crop, f"{p.name} as teaching sees it")}<figcaption>as seen</figcaption></figure></div>'
        f'<div class="tt-name"><span title="{escape(p.name)}">{escape(p.name)}</span>'
        f'<span class="te-soft">{p.size[0]} x {p.size[1]}</span></div>{note}'
        f'<label class="te-soft" for="caption-{p.id}">Caption of picture {number}</label>'
        f'<textarea id="caption-{p.id}" rows="2" maxlength="1000" data-id="{p.id}" data-caption="{escape(p.caption)}" '
        f'placeholder="{escape(hint)}" spellcheck="false"></textarea>'
        '<p class="tt-warn" role="status" hidden>The trigger is not in it, so it would teach nothing. Name the thing by its trigger.</p>'
        f'<div class="te-tools">{out}</div></li>'
    )


# -- the trigger ------------------------------------------------------------------------------------------------------------------


def report_html(report: Report, draft_id: str | None = None, hint: str = "") -> str:
    """What Register says, in short: tokens at each encoder, and what is in the way. The draft `draft_id` is the trigger's own; `hint` is
    on the class word."""
    more = notice("warning", hint) if hint else ""
    if report.problem:
        return wrap(notice("error", report.problem), more)
    if not report.roles:
        return wrap(more, '<p class="te-soft">The word that calls the thing. A made-up one works best; Register suggests some.</p>')
    rows = []
    for role in report.roles:
        for text, chips in role.spellings[:MOST_SPELLINGS]:
            tokens = token_chips([(chip.text, chip.id) for chip in chips], label=f"tokens of {text} at {role.role}")
            said = escape(f"{encoder(role.role)}{DOT}{text}")
            rows.append(f'<div class="te-spelling"><span class="te-soft">{said}</span>{tokens}</div>')
    twins = [c for c in report.collisions if c.blocks and not c.draft]
    words = [twin_words(c) for c in twins]
    words += [f"{'draft' if c.draft else 'concept'} {c.name} {c.reason}" for c in report.collisions if c not in twins and c.id != draft_id]
    words += report.warnings
    lines = more + "".join(notice("warning", text) for text in words[:MOST_LINES])
    return wrap(f'<div class="tt-report">{"".join(rows)}{lines or notice("good", "Nothing is in its way.")}</div>')


def twin_words(twin: Collision) -> str:
    """What it means that a concept of the library has the trigger already."""
    return f"the concept {twin.name!r} {twin.reason}; a second one can be taught, but only one of the two can be in use"


# -- jobs -------------------------------------------------------------------------------------------------------------------------


def live_html(job: Job | None, state: JobState | None, progress: Sequence[Progress]) -> str:
    """The job that is taught now; state None: there is none."""
    if state is None:
        return ""
    losses = [(entry.step, entry.loss) for entry in progress if entry.loss is not None]
    name = _name(job)
    about = _about(job)
    return wrap(
        f'<article class="tt-job tt-live" aria-label="{escape(name)}">{_head(name, state)}{about}{_bar(name, state)}{_facts(state, losses)}'
        f'<div class="te-tools">{_actions(name, state, False)}</div>{loss_plot(losses, state.steps)}</article>'
    )


def jobs_html(jobs: Sequence[str], more: int = 0) -> str:
    """All other jobs, as `job_html` gives them; more: how many are not shown."""
    rest = f'<p class="te-soft">{plural(more, "older job")} not shown; delete some to see them.</p>' if more else ""
    return wrap(f'<div class="tt-jobs">{"".join(jobs)}</div>{rest}') if jobs else ""


def job_html(job: Job | None, state: JobState, progress: Sequence[Progress], samples: str = "", *, in_library: bool = False) -> str:
    """A job that nobody works on now. samples: HTML that stands below its loss."""
    name = _name(job)
    losses = [(entry.step, entry.loss) for entry in progress if entry.loss is not None]
    plot = f"{loss_plot(losses, state.steps)}{samples}" if losses else ""
    more = f'<details id="job-{escape(state.id)}"><summary>Loss and samples</summary>{plot}</details>' if plot else ""
    bar = _bar(name, state) if state.step and state.state != "done" else ""
    return (
        f'<article class="tt-job" aria-label="{escape(name)}">{_head(name, state)}{_about(job)}{bar}{_facts(state, losses)}'
        f'<div class="te-tools">{_actions(name, state, in_library)}</div>{more}</article>'
    )


def samples_html(samples: Iterable[tuple[int, str]], prompt: str, *, waiting: str = "") -> str:
    """Sample pictures as (step, data URI), which can be enlarged; waiting: what is said where there is none."""
    cells = "".join(
        f'<li><button type="button" class="tt-zoom" data-zoom="{escape(f"{prompt}, step {step}")}" '
        f'aria-label="Enlarge the sample of step {step}">{image}</button><span>step {step:,}</span></li>'
        for step, uri in samples
        if (image := picture(uri, f"sample at step {step}"))
    )
    if not cells:
        return f'<p class="te-soft">{escape(waiting)}</p>' if waiting else ""
    return f'<div class="tt-samples"><p class="te-soft">Samples of <q>{escape(prompt)}</q></p><ul role="list">{cells}</ul></div>'


def _name(job: Job | None) -> str:
    return job.name if job is not None else "damaged job"


def _head(name: str, state: JobState) -> str:
    words, mood = STATES[state.state]
    return f'<h4><span class="te-word tt-title" title="{escape(name)}">{escape(name)}</span>{badge(words, mood)}</h4>'


def _about(job: Job | None) -> str:
    if job is None:
        return ""
    trigger = f"{job.trigger}{DOT}" if job.name != job.trigger else ""
    return f'<p class="te-soft">{escape(trigger)}{escape(job.preset)}{DOT}{plural(job.pictures, "picture")}</p>'


def _bar(name: str, state: JobState) -> str:
    most = max(state.steps, 1)
    label = escape(f"progress of {name}")
    if state.busy and state.step == 0:  # a model loads, companions are drawn: nobody knows how far that is
        return f'<div class="tt-starting" role="progressbar" aria-label="{label}"><span></span></div>'
    return f'<progress max="{most}" value="{min(max(state.step, 0), most)}" aria-label="{label}"></progress>'


def _facts(state: JobState, losses: Sequence[tuple[int, float]]) -> str:
    told = [] if state.state == "queued" and not state.step else [f"step {state.step:,} of {state.steps:,}"]
    if state.state == "queued":
        told.append("next in the queue" if state.place == 1 else f"number {state.place} in the queue")
    if state.busy and state.seconds_left is not None:
        told.append(f"about {clock(state.seconds_left)} left")
    if (loss := last_loss(losses)) is not None:
        told.append(f"loss {loss:.4g}")
    if state.seconds >= 1 and not state.busy:
        told.append(f"{time_in_words(state.seconds)} of teaching")
    line = f'<p class="te-soft tt-facts">{escape(DOT.join(told))}</p>' if told else ""
    if state.state == "failed":
        return line + notice("error", state.message or "it failed, and did not say why")
    quiet = state.message in ("", "teaching", "in the library")
    return line + ("" if quiet else f'<p class="te-soft">{escape(state.message)}</p>')


def _actions(name: str, state: JobState, in_library: bool) -> str:
    id, made = state.id, []
    if state.state == "done" and in_library:
        made += [_button("use", id, "Use it", name, kind="tt-main"), _button("see", id, "See it", name)]
    elif state.state == "done":
        made += ['<span class="te-soft">no longer in the library</span>']
    if state.can_resume:
        made += [_button("resume", id, "Resume", name, kind="" if state.state == "cancelled" else "tt-main")]
    if state.can_pause:
        made += [_button("pause", id, "Pause", name)]
    if state.can_cancel:
        ask = f"Cancel the teaching of {name}? It can be resumed from its last checkpoint until the job is deleted."
        made += [_button("cancel", id, "Cancel", name, ask=ask, yes="Cancel it", kind="te-delete")]
    if state.can_delete:
        rest = "The concept stays in the library." if state.state == "done" and in_library else "What it has learnt is lost."
        ask = f"Delete the job {name} with its pictures, samples and checkpoints? {rest}"
        made += [_button("delete", id, "Delete", f"the job {name}", ask=ask, yes="Delete it", kind="te-delete")]
    return "".join(made)
