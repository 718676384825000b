"""The tab Register: a trigger is typed, and what it is worth is seen at once. May import explain_panel and handling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from tiny_engram.studio import html
from tiny_engram.studio.class_words import class_word_hint
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.html_parts import button, empty, escape, wrap
from tiny_engram.studio.html_parts import notice as notice_html
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.explain_panel import build_explain
from tiny_engram.studio.ui.handling import aliases_of, handled, notice, private, quick

__all__ = ["RegisterTab", "build_register", "draft_list"]

MOST_LISTED = 50
# Buttons that the server wrote into the element: what was chosen goes out as the event "pick".
PICK = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-action]');
  if (button) trigger('pick', {action: button.dataset.action, id: button.dataset.id || ''});
});
"""


@dataclass(frozen=True)
class RegisterTab:
    """What other tabs need: the text boxes, the button that goes on to Teach, and what brings the tab up to date."""

    trigger: gr.Textbox
    aliases: gr.Textbox
    class_word: gr.Textbox
    teach: gr.Button
    refresh: Callable[[], tuple[Callable[..., Any], list[Any], list[Any]]]


def draft_list(studio: Studio) -> str:
    """The drafts as HTML, each with buttons to open and to delete it."""
    drafts = studio.library.drafts()
    if not drafts:
        return wrap(empty("No drafts", "A trigger that you save waits here until you teach it.", small=True))
    lines = []
    for draft in drafts[:MOST_LISTED]:
        said = " \u00b7 ".join(filter(None, (", ".join(draft.aliases), draft.class_word)))
        soft = f'<span class="te-soft">{escape(said)}</span>' if said else ""
        tools = button("open", "Open", draft.id, about=draft.trigger) + button("delete", "Delete", draft.id, about=draft.trigger)
        lines.append(f'<li><span class="te-word">{escape(draft.trigger)}</span>{soft}<span class="te-tools">{tools}</span></li>')
    more = len(drafts) - MOST_LISTED
    rest = f'<p class="te-soft">and {more} more; search for them in the Library</p>' if more > 0 else ""
    return wrap(f'<ul class="te-lines te-jobs" aria-label="drafts">{"".join(lines)}</ul>{rest}')


def build_register(studio: Studio) -> RegisterTab:
    """The tab's content, inside its gr.Tab."""
    gr.HTML(
        '<p class="te-lead">Choose the word that will call your concept. You see at once how the base reads it, where it fires and what '
        "is in its way. Nothing is taught yet.</p>"
    )
    # three boxes in the order of a narrow page; a wide one has the report on the right
    with gr.Row(equal_height=False, elem_classes="te-register"):
        with gr.Column(min_width=280):
            trigger = gr.Textbox(label="Trigger", placeholder="a made-up word, such as zed-quack", elem_id="register-trigger", max_lines=3)
            suggest = gr.Button("Suggest a trigger", size="md", elem_id="register-suggest")
            aliases = gr.Textbox(
                label="Aliases (optional)",
                info="Other spellings that call it too, with commas between them.",
                placeholder="zedquack, zed quack",
                elem_id="register-aliases",
                max_lines=3,
            )
            class_word = gr.Textbox(
                label="Class word (optional)",
                info="The nearest thing that the base knows; teaching starts from it.",
                placeholder="duck",
                elem_id="register-class-word",
                max_lines=1,
            )
            hint = gr.HTML("", elem_id="register-class-hint")
            with gr.Row(elem_classes="te-actions"):
                teach = gr.Button("Teach it", variant="primary", elem_id="register-teach", interactive=False)
                save = gr.Button("Save as draft", elem_id="register-save", interactive=False)
        with gr.Column(min_width=280):
            shown = gr.HTML(html.report(studio.registrar.report("")), elem_id="register-report")
        with gr.Column(min_width=280):
            gr.HTML('<h3 class="te-heading">Drafts</h3>')
            drafts = gr.HTML(draft_list(studio), js_on_load=PICK, elem_id="register-drafts")
            deleted = gr.State(None)
            undo = gr.Button("Undo delete", size="sm", visible=False, elem_id="register-undo")
    with gr.Accordion("Try it in a prompt", open=False, elem_id="register-explain"):
        explain, explained, explanation = build_explain(studio, "register", typed=[trigger, aliases])

    fields = [trigger, aliases, class_word]
    judged = [shown, teach, save]

    def judge(typed: str, spellings: str) -> tuple[Any, ...]:
        typed = typed or ""
        own = next((d.id for d in studio.library.drafts() if d.trigger.casefold() == " ".join(typed.split()).casefold()), None)
        report = studio.registrar.report(typed, aliases_of(spellings), own=own)
        return html.report(report), gr.Button(interactive=report.ready), gr.Button(interactive=report.ready)

    def on_typing(typed: str, spellings: str, *tried: str) -> tuple[Any, ...]:
        """All that a letter changes in one answer; `tried` are the prompts of the panel below."""
        # an empty panel has nothing to change, and a late answer must not empty it again
        told = explain(*tried, typed, spellings) if any((text or "").strip() for text in tried) else [gr.skip() for _ in explanation]
        return *judge(typed, spellings), *told

    def on_class_word(word: str) -> str:
        said = class_word_hint(word, studio.engine.book)
        return wrap(notice_html("warning", said)) if said else ""

    def saved(typed: str, spellings: str, word: str) -> str:
        report = studio.registrar.report(typed or "", aliases_of(spellings))
        if report.problem is not None:
            raise StudioError(report.problem)
        kept = (report.trigger, report.aliases, " ".join((word or "").split()) or None)
        if any((draft.trigger, draft.aliases, draft.class_word) == kept for draft in studio.library.drafts()):
            return draft_list(studio)  # pressed twice
        studio.library.save_draft(typed or "", aliases_of(spellings), word)
        notice(f"{report.trigger} is a draft now; teach it when you have pictures", title="Saved")
        return draft_list(studio)

    def picked(event: gr.EventData) -> tuple[Any, ...]:
        action, id = str(event.action), str(event.id)
        draft = next((each for each in studio.library.drafts() if each.id == id), None)
        if draft is None:
            raise StudioError("this draft is not there any more; reload the page")
        if action == "delete":
            token = studio.library.delete(id)
            label = draft.trigger if len(draft.trigger) <= 30 else draft.trigger[:29] + "\u2026"
            return *[gr.skip()] * 3, draft_list(studio), token, gr.Button(f"Undo: bring {label} back", visible=True)
        return draft.trigger, ", ".join(draft.aliases), draft.class_word or "", *[gr.skip()] * 3

    def undone(token: str | None) -> tuple[Any, ...]:
        if token:
            studio.library.undo(token)
        return draft_list(studio), None, gr.Button(visible=False)

    # One answer is on its way at a time, and the last text typed is always answered: that is the debouncing.
    tried = [box for box in explained if box not in (trigger, aliases)]
    gr.on([trigger.change, aliases.change], handled(on_typing), [trigger, aliases, *tried], [*judged, *explanation], **quick)
    class_word.change(handled(on_class_word), class_word, hint, **quick)
    # Through the queue, since notices come to the page by it alone.
    quiet: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None, **private}
    suggest.click(handled(studio.registrar.suggest), None, trigger, **quiet)
    save.click(handled(saved), fields, drafts, trigger_mode="once", **quiet)
    drafts.pick(handled(picked), None, [*fields, drafts, deleted, undo], **quiet)
    undo.click(handled(undone), deleted, [drafts, deleted, undo], **quiet)

    def refreshed(typed: str, spellings: str) -> tuple[Any, ...]:
        # also what was typed before the page was ready to ask, or before something else was saved; of an empty box there is nothing to
        # say, and it may be the box as it was before somebody typed
        return draft_list(studio), *(judge(typed, spellings) if (typed or "").strip() else [gr.skip() for _ in judged])

    return RegisterTab(trigger, aliases, class_word, teach, lambda: (refreshed, [drafts, *judged], [trigger, aliases]))
