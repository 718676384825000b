"""The Teach tab: what is taught, from which pictures, how, and the jobs that do it. May import handling and teach_*.

All that is typed or dropped is in the tray on disk (`teach_tray`), all that runs in jobs/ (`teach_jobs`): a page that is loaded shows it.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr
from gradio.context import Context

from tiny_engram.studio.class_words import class_word_hint
from tiny_engram.studio.errors import MOST_FILE, StudioError
from tiny_engram.studio.html import pictures_refused
from tiny_engram.studio.html_parts import escape, wrap
from tiny_engram.studio.job_folder import BUSY
from tiny_engram.studio.library import Draft
from tiny_engram.studio.presets import check_fields, fields_of
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.handling import aliases_of, handled, notice, queued, quick
from tiny_engram.studio.ui.teach_form import build_fields, emptied, estimated, in_words, options_of, preset_choices, values_of
from tiny_engram.studio.ui.teach_html import Shown, report_html, tray_html, twin_words
from tiny_engram.studio.ui.teach_jobs import JobsPanel, build_jobs, script
from tiny_engram.studio.ui.teach_pictures import crop_uri, whole_uri
from tiny_engram.studio.ui.teach_tray import Form, Tray

__all__ = ["TeachTab", "build_teach"]

_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
# What `teach.js` shows of the captions, in place of the second input.
_LAST_TYPED = """(known, last, ...told) =>
  [known, document.querySelector('#teach-tray[data-typed], #teach-tray [data-typed]')?.dataset.typed ?? '', ...told]"""
SIDE = 512  # where a base does not say for which pictures it was made


@dataclass(frozen=True, slots=True)
class TeachTab:
    """What others use of this tab.

    trigger, aliases, class_word: text boxes; whoever fills them needs to do no more. jobs: its panel, with `finished` (changes when a
    concept came into the library), `used` and `seen` ((concept id, when): one was put on the shelf, one is to be shown in the Library).
    filled: keeps what another tab typed into the boxes.
    """

    trigger: gr.Textbox
    aliases: gr.Textbox
    class_word: gr.Textbox
    jobs: JobsPanel
    filled: Callable[..., None]
    shown: tuple[Callable[..., tuple[Any, ...]], list[Any]]
    typed: tuple[Callable[..., tuple[Any, ...]], list[Any], list[Any]]

    @property
    def finished(self) -> gr.Textbox:
        return self.jobs.finished

    @property
    def used(self) -> gr.State:
        return self.jobs.used

    @property
    def seen(self) -> gr.State:
        return self.jobs.seen

    def refresh(self) -> tuple[Callable[..., tuple[Any, ...]], list[Any]]:
        """(fn, outputs): all but the text boxes, and what follows from them, as the server has it."""
        return self.shown

    @property
    def texts(self) -> tuple[gr.Textbox, gr.Textbox, gr.Textbox]:
        return self.trigger, self.aliases, self.class_word

    def follow(self) -> tuple[Callable[..., tuple[Any, ...]], list[Any], list[Any]]:
        """(fn, outputs, inputs): what follows from the text boxes, which are the first of the inputs."""
        return self.typed


class _Teach:
    """What the tab's events do; each verb reads the tray and the store anew."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.tray = Tray(studio.workspace)
        size = studio.engine.native_size
        self.side = min(size) if size else SIDE

    # -- what is shown -------------------------------------------------------------------------------------------------------

    def draft(self, trigger: str) -> Draft | None:
        """The draft of this trigger, which it does not collide with."""
        wanted = " ".join(trigger.split()).casefold()
        return next((draft for draft in self.studio.library.drafts() if draft.trigger.casefold() == wanted), None)

    def report(self, form: Form) -> str:
        draft = self.draft(form.trigger)
        own = None if draft is None else draft.id
        hint = class_word_hint(form.class_word, self.studio.engine.book)
        return report_html(self.studio.registrar.report(form.trigger, aliases_of(form.aliases), own=own), own, hint)

    def pictures(self, form: Form | None = None) -> dict[str, Any]:
        """The tray's value, with these texts or those that were kept; teach.js fills the trigger in."""
        form = form or self.tray.form
        trigger = " ".join(form.trigger.split())
        shown = []
        for each in self.tray.pictures:
            path = self.tray.folder / f"{each.id}.png"
            shown.append(Shown(picture=each, whole=whole_uri(path), crop=crop_uri(path, self.side)))
        spellings = [spelling for spelling in (trigger, *aliases_of(form.aliases)) if spelling]
        return {"html": tray_html(shown, trigger, self.side), "trigger": trigger, "spellings": spellings}

    def time(self) -> str:
        form = self.tray.form
        return wrap(f'<p class="te-soft">{escape(estimated(self.studio.runner, form.preset, len(self.tray.pictures), form.options))}</p>')

    def presets(self) -> Any:
        return gr.Radio(choices=preset_choices(self.studio.runner, len(self.tray.pictures)))

    def drafts(self) -> Any:
        found = [(draft.trigger, draft.id) for draft in self.studio.library.drafts()]
        return gr.Dropdown(choices=found, value=None, visible=bool(found))

    # -- what is done --------------------------------------------------------------------------------------------------------

    def typed(self, field: str, text: str | None) -> None:
        """One text box alone: a page that is loaded fills the boxes one by one, and must not write down those that are still empty."""
        with contextlib.suppress(StudioError):  # what is too long is told by the report
            self.tray.keep(**{field: text or ""})

    def filled(self, trigger: str, aliases: str, class_word: str) -> None:
        """All boxes of a tab that opens: another tab may have filled them. Empty ones are of a page that was not filled yet."""
        for field, text in (("trigger", trigger), ("aliases", aliases), ("class_word", class_word)):
            if text:
                self.typed(field, text)

    def follow(self, trigger: str, aliases: str, class_word: str, seen: Any) -> tuple[Any, Any, Any]:
        """What the texts of the page mean, and the tray with them, where the page has `seen` another; what it has seen then."""
        texts = Form(trigger=trigger or "", aliases=aliases or "", class_word=class_word or "")
        now = (texts.trigger, texts.aliases, self.tray.pictures)
        return self.report(texts), gr.skip() if now == seen else self.pictures(texts), now

    def chosen(self, id: str | None) -> tuple[Any, Any, Any]:
        """A draft fills the text boxes, whose change does the rest."""
        draft = next((draft for draft in self.studio.library.drafts() if draft.id == id), None)
        if draft is None:
            return gr.skip(), gr.skip(), gr.skip()
        return draft.trigger, ", ".join(draft.aliases), draft.class_word or ""

    def dropped(self, files: Any) -> tuple[Any, ...]:
        paths = files if isinstance(files, list) else [files] if files else []
        _, refused = self.tray.add(str(path) for path in paths)
        return None, pictures_refused(refused), self.pictures(), self.presets(), self.time()

    def captioned(self, event: gr.EventData) -> None:
        self.keep_captions(event._data)

    def keep_captions(self, told: Any) -> None:
        told = told if isinstance(told, dict) else {}
        captions, trigger = told.get("captions"), told.get("trigger")
        if isinstance(captions, dict) and captions:
            self.tray.caption(captions, trigger if isinstance(trigger, str) else "")

    def act(self, event: gr.EventData) -> tuple[Any, ...]:
        told = event._data if isinstance(event._data, dict) else {}
        self.keep_captions(told)
        if told.get("action") == "remove":
            self.tray.remove(str(told.get("id")))
        elif told.get("action") == "clear":
            self.tray.clear()
        return "", self.pictures(), self.presets(), self.time()

    def preset(self, preset: str) -> tuple[Any, ...]:
        """Another preset brings its own settings."""
        self.tray.keep(preset=preset, options={})
        return *values_of(preset, {}), self.time()

    def setting(self, preset: str, *values: Any) -> str:
        self.tray.keep(preset=preset, options=options_of(preset, values, self.tray.form.trigger))
        said = emptied(values)
        return wrap(f'<p class="te-soft">{escape(said)}</p>') if said else self.time()

    def restored(self) -> tuple[Any, ...]:
        form = self.tray.form
        return form.trigger, form.aliases, form.class_word, form.preset, *values_of(form.preset, form.options)

    def start(self, trigger: str, aliases: str, class_word: str, preset: str, *values: Any) -> None:
        """Queue a job of what is in the tray. Raises StudioError."""
        trigger = " ".join((trigger or "").split())
        if not trigger:
            raise StudioError("there is no trigger; type the word that shall call the thing")
        if not self.tray.pictures:
            raise StudioError("there are no pictures; drop at least one")
        if said := emptied(values):
            raise StudioError(said)
        options = options_of(preset, values, trigger)
        self.tray.keep(trigger=trigger, aliases=aliases or "", class_word=class_word or "", preset=preset, options=options)
        report = self.studio.registrar.report(trigger, aliases_of(aliases))
        if report.problem:
            raise StudioError(report.problem)
        for state in self.studio.runner.states():
            if state.state in ("queued", *BUSY) and self.studio.jobs.job(state.id).trigger.casefold() == trigger.casefold():
                raise StudioError(f"{trigger!r} is being taught already; cancel that job first, or choose another trigger")
        try:
            check_fields(fields_of(preset) | options)
        except StudioError as error:
            raise StudioError(in_words(error)) from error
        self.studio.runner.submit(
            self.tray.taught(), trigger, aliases=aliases_of(aliases), class_word=class_word, preset=preset, options=options
        )
        twin = next((each for each in report.collisions if each.blocks and not each.draft), None)
        told = "" if twin is None else f" Note that {twin_words(twin)}."
        notice(f"{trigger} is in the queue. You may close this page.{told}", title="Started")


def build_teach(studio: Studio) -> TeachTab:
    """Inside a gr.Tab of the page."""
    teach = _Teach(studio)
    form = teach.tray.form
    with gr.Row(elem_id="teach"):
        with gr.Column(scale=3, min_width=320):
            gr.HTML(wrap("<h3>What it is called</h3>"))
            draft = gr.Dropdown([], label="Draft", info="One that you saved in Register.", visible=False, elem_id="teach-draft")
            trigger = gr.Textbox(label="Trigger", placeholder="zed-quack", max_lines=1, max_length=200, elem_id="teach-trigger")
            with gr.Row():
                aliases = gr.Textbox(
                    label="Aliases",
                    info="Other spellings, with commas.",
                    max_lines=1,
                    max_length=2000,
                    min_width=200,
                    elem_id="teach-aliases",
                )
                class_word = gr.Textbox(
                    label="Class word",
                    info="What it is nearest to, such as mug.",
                    max_lines=1,
                    max_length=200,
                    min_width=200,
                    elem_id="teach-class-word",
                )
            report = gr.HTML(report_html(studio.registrar.report("")), elem_id="teach-report", apply_default_css=False)
            gr.HTML(wrap("<h3>Pictures of it</h3>"))
            most = f"at most {MOST_FILE // 2**20} MiB each, {teach.tray.limits.files} in all"
            gr.HTML(wrap(f'<p class="te-soft">PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or PPM; {most}.</p>'))
            files = gr.File(label="Pictures", show_label=False, file_count="multiple", height=150, elem_id="teach-files")
            refused = gr.HTML("", elem_id="teach-refused", apply_default_css=False)
            tray = gr.HTML(
                {"html": "", "trigger": "", "spellings": []},
                html_template="${value.html}",
                js_on_load=script(),
                apply_default_css=False,
                elem_id="teach-tray",
            )
            gr.HTML(wrap("<h3>How it is taught</h3>"))
            preset = gr.Radio(preset_choices(studio.runner, 1), value=form.preset, label="Preset", elem_id="teach-presets")
            with gr.Accordion("Advanced", open=False, elem_id="teach-advanced"):
                fields = build_fields()
            time = gr.HTML("", elem_id="teach-time", apply_default_css=False)
            start = gr.Button("Start", variant="primary", elem_id="teach-start")
        with gr.Column(scale=2, min_width=320, elem_id="teach-side"):
            jobs = build_jobs(studio)
    told = gr.State(None)  # ids of the finished jobs that this page has told of
    seen = gr.State(None)  # texts and pictures that the tray of this page shows

    texts = [trigger, aliases, class_word]
    for field, box in (("trigger", trigger), ("aliases", aliases), ("class_word", class_word)):
        box.change(handled(partial(teach.typed, field)), box, None, **quick)
    draft.input(handled(teach.chosen), draft, texts, **quick)
    files.upload(handled(teach.dropped), files, [files, refused, tray, preset, time], show_progress_on=files, **_PRIVATE)
    tray.typed(handled(teach.captioned), None, None, **queued)
    tray.act(handled(teach.act), None, [refused, tray, preset, time], show_progress="hidden", trigger_mode="multiple", **_PRIVATE)
    preset.input(handled(teach.preset), preset, [*fields, time], **queued)
    # not change: a page that is loaded fills them one after another
    gr.on([field.input for field in fields], handled(teach.setting), [preset, *fields], time, **queued)

    # captions that were typed a moment ago, straight from the page
    last = gr.Textbox(label="Captions", visible=False)

    def begin(known: Any, last: str | None, *told: Any) -> tuple[Any, ...]:
        try:
            typed = json.loads(last or "null")
        except ValueError as error:
            raise StudioError("the captions did not arrive whole; press Start again") from error
        teach.keep_captions(typed)
        teach.start(*told)
        return jobs.look(known)

    start.click(
        handled(begin), [jobs.known, last, *texts, preset, *fields], jobs.outputs, js=_LAST_TYPED, show_progress="hidden", **_PRIVATE
    )

    def taught(finished: str, before: list[str] | None) -> tuple[Any, ...]:
        """A concept more in the library: it is in the way of its own trigger now, and the machine has been measured."""
        done = (finished or "").split()[1:]
        for id in set(done) - set(done if before is None else before):
            notice(f"{studio.jobs.job(id).name} is taught, and in the library.", title="Taught")
        return done, teach.presets(), teach.time()

    # through the queue, since only there notices reach the page
    jobs.finished.change(handled(taught), [jobs.finished, told], [told, preset, time], show_progress="hidden", **_PRIVATE)

    # Only when a page is loaded: elsewhere what is being typed is newer than what is on disk.
    page = Context.root_block
    if page is not None:
        page.load(handled(teach.restored), None, [*texts, preset, *fields], **quick)

    def shown() -> tuple[Any, ...]:
        return teach.drafts(), teach.presets(), teach.time(), *jobs.look(None)

    return TeachTab(
        trigger,
        aliases,
        class_word,
        jobs,
        teach.filled,
        (shown, [draft, preset, time, *jobs.outputs]),
        (teach.follow, [report, tray, seen], [*texts, seen]),
    )
