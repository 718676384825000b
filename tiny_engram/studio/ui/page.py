"""The page: header, four tabs, and what leads from one to another. May import the tabs, which do not import each other, and api.

What a tab module gives, `build_X(studio) -> XTab`, called inside its gr.Tab:

- every XTab has `refresh() -> (fn, outputs)`, or `(fn, outputs, inputs)`: fn reads all from the server (and the inputs, where it has
  some); it runs when the page is loaded, whenever the tab is opened, and when the library has changed. One may have
  `follow() -> (fn, outputs, inputs)`, which runs after it: what follows from texts that are being typed.
- RegisterTab: `trigger`, `aliases`, `class_word` (text boxes) and `teach` (a button).
- TeachTab: `trigger`, `aliases`, `class_word` (text boxes that are filled from elsewhere), `used` and `seen` (gr.States: change when a
  concept was put on the shelf, which opens Create, and when one is to be shown, which opens Library).
- CreateTab: it shows the shelf, `engine.loaded()`.
- LibraryTab: `used` (gr.State: changes when a concept was put on the shelf, which opens Create) and `taught` (gr.State: a draft's id,
  changes when a draft is to be taught, which fills Teach and opens it).
"""

import html
from collections.abc import Callable
from typing import Any

import gradio as gr

from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.api import build_api
from tiny_engram.studio.ui.create_tab import build_create
from tiny_engram.studio.ui.handling import aliases_of, handled, private, queued, quick
from tiny_engram.studio.ui.library_tab import build_library
from tiny_engram.studio.ui.register_tab import build_register
from tiny_engram.studio.ui.teach_tab import build_teach

__all__ = ["TABS", "build_page"]

TABS: dict[str, tuple[str, Callable[[Studio], Any]]] = {
    "register": ("Register", build_register),
    "teach": ("Teach", build_teach),
    "create": ("Create", build_create),
    "library": ("Library", build_library),
}
POLL_SECONDS = 2.0

# The page listens from here on; tests wait for it.
READY = """() => {
  document.getElementById(`tab-${location.hash.slice(1).replace(/\\W/g, '')}-button`)?.click();
  document.body.dataset.ready = 'true';
}"""
# A reload comes back to the tab that was open; no entry of the history, which "back" would have to pass.
KEPT = "() => { history.replaceState(history.state, '', '#%s'); }"


def _header(studio: Studio) -> str:
    base = html.escape(studio.base)
    return (
        '<header class="te-header"><h1 class="te-brand">Tiny-Engram Studio</h1>'
        f'<p class="te-base"><span class="te-base-label">Base</span> <span class="te-base-name" title="{base}">{base}</span></p></header>'
    )


def build_page(studio: Studio) -> gr.Blocks:
    """The whole page on a studio that is open; `server.serve` shows it."""
    with gr.Blocks(title="Tiny-Engram Studio", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True) as page:
        build_api(studio)  # first: an event of the page with the same name would take it
        gr.HTML(_header(studio), elem_id="header")
        # Outside of the tabs: what is in a tab that was never opened neither ticks nor changes.
        # A page begins with the version of now: what it is loaded with needs no second look when the timer first ticks, which would fall
        # into what is typed by then.
        version = gr.Textbox(str(studio.library.version), label="state of the library", visible="hidden", elem_id="library-version")
        timer = gr.Timer(POLL_SECONDS)
        timer.tick(lambda: str(studio.library.version), None, version, **{**quick, "trigger_mode": "once"})
        built: dict[str, Any] = {}
        opened: dict[str, gr.Tab] = {}
        with gr.Tabs(selected="register", elem_id="tabs") as tabs:
            for name, (title, build) in TABS.items():
                with gr.Tab(title, id=name, elem_id=f"tab-{name}") as opened[name]:
                    built[name] = build(studio)
        for name, tab in built.items():
            fn, outputs, *inputs = tab.refresh()
            # the last: a job has finished, or another window has changed something
            occasions = page.load, opened[name].select, version.change
            for occasion in occasions:
                occasion(handled(fn), inputs[0] if inputs else None, outputs, **queued)
            if hasattr(tab, "follow"):
                # One event for all that it follows from: answers of two overtake each other, and a late one takes back what was typed.
                follow, following, texts = tab.follow()
                typing = [text.change for text in texts if isinstance(text, gr.Textbox)]
                gr.on([*typing, *occasions], handled(follow), texts, following, **quick)
            opened[name].select(None, None, None, js=KEPT % name, **private)
        # Boxes of a tab that was never opened do not tell that they were filled.
        opened["teach"].select(handled(built["teach"].filled), list(built["teach"].texts), None, **quick)
        _wire(studio, tabs, built["register"], built["teach"], built["library"])
        page.load(None, None, None, js=READY, **private)
    return page


def _wire(studio: Studio, tabs: gr.Tabs, register: Any, teach: Any, library: Any) -> None:
    """What leads from one tab to another."""
    at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", **private}
    filled = [teach.trigger, teach.aliases, teach.class_word, tabs]

    def teach_trigger(trigger: str, aliases: str, word: str) -> tuple[Any, ...]:
        return trigger, ", ".join(aliases_of(aliases)), word, gr.Tabs(selected="teach")

    def teach_draft(id: str | None) -> tuple[Any, ...]:
        draft = next((each for each in studio.library.drafts() if each.id == id), None)
        if draft is None:
            return gr.skip(), gr.skip(), gr.skip(), gr.skip()
        return draft.trigger, ", ".join(draft.aliases), draft.class_word or "", gr.Tabs(selected="teach")

    def opens(name: str) -> Callable[..., Any]:
        return handled(lambda told: gr.Tabs(selected=name) if told else gr.skip())

    register.teach.click(handled(teach_trigger), [register.trigger, register.aliases, register.class_word], filled, **at_once)
    library.taught.change(handled(teach_draft), library.taught, filled, **at_once)
    for tab in (teach, library):
        tab.used.change(opens("create"), tab.used, tabs, **at_once)
    teach.seen.change(opens("library"), teach.seen, tabs, **at_once)
