"""The Create tab: draw with the concepts on the shelf, beside the base, and keep what was drawn. Imports gradio.

What the page sees of the shelf is `engine.loaded()`; how strongly each concept acts is the page's own, and goes along with each request.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.requests import GUIDANCE, MOST_TEXT, SEED, STEPS, GenerateRequest
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui import create_html as shown
from tiny_engram.studio.ui.create_drawing import Drawings
from tiny_engram.studio.ui.create_values import highlighted, history_value, reused, shelf_value, size_of, strengths_in
from tiny_engram.studio.ui.explain_panel import build_explain
from tiny_engram.studio.ui.handling import handled, notice, private, queued, quick, warn
from tiny_engram.studio.ui.picking import PICK, picked, script, tell_turn
from tiny_engram.studio.workspace import write_bytes

__all__ = ["CreateTab", "build_create"]

PAGE = 24  # pictures of the history at a time
POLL_SECONDS = 0.25
# Once, when the browser's copy has been read: later changes of it are what the fields say already.
RESTORE = """(typed, ...now) => {
  const values = typed && typed.values;
  if (window.tinyEngramRestored || !Array.isArray(values) || values.length !== now.length) return now;
  window.tinyEngramRestored = true;
  return values;
}"""
SETTINGS = GenerateRequest(prompt="")  # what a request is when nothing is chosen


@dataclass(frozen=True)
class CreateTab:
    """What other tabs may use. `prompt`, `negative`: text boxes; `shelf`: {html, keep, strengths: {concept id: strength}}."""

    prompt: gr.Textbox
    negative: gr.Textbox
    shelf: gr.HTML
    _refresh: tuple[Callable[..., Any], list[Any], list[Any]] = field(repr=False)

    def refresh(self) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """(a function, its outputs, its inputs): shelf and history as the server has them."""
        return self._refresh


def build_create(studio: Studio) -> CreateTab:
    """Build the tab inside the gr.Tab that is open."""
    drawings = Drawings(studio)
    native = studio.engine.native_size
    with gr.Row(elem_classes="tc-columns"):
        with gr.Column(scale=5, min_width=300):
            prompt = gr.Textbox(
                label="Prompt",
                lines=3,
                max_lines=10,
                max_length=MOST_TEXT,
                placeholder="What to draw; a concept’s trigger stands for its thing",
                elem_id="create-prompt",
                autofocus=False,
            )
            highlighting = gr.HTML(highlighted(studio, "", None), js_on_load=None, elem_id="create-highlight")
            shelf = gr.HTML(
                shelf_value(studio),  # type: ignore[arg-type]  (a component's value may be any JSON)
                html_template="${value.html}",
                js_on_load=script("create_shelf.js"),
                elem_id="create-shelf",
            )
            with gr.Row(elem_classes="tc-buttons"):
                generate = gr.Button("Generate", variant="primary", elem_id="create-generate", scale=3, min_width=120)
                cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="create-cancel", scale=1, min_width=90)
            progress = gr.HTML("", js_on_load=None, elem_id="create-progress", visible=False)
            compare = gr.Checkbox(True, label="Draw the base beside it, from the same seed", elem_id="create-compare", container=False)
            with gr.Row(elem_classes="tc-seed"):
                seed = gr.Number(0, label="Seed", elem_id="create-seed", min_width=130)
                random_seed = gr.Checkbox(True, label="New seed for each picture", elem_id="create-random", min_width=130)
            with gr.Accordion("More settings", open=False, elem_id="create-more"):
                steps = gr.Slider(*STEPS, SETTINGS.steps, step=1, label="Steps", elem_id="create-steps", buttons=[])
                guidance = gr.Slider(*GUIDANCE, SETTINGS.guidance, step=0.1, label="Guidance", elem_id="create-guidance", buttons=[])
                negative = gr.Textbox(
                    label="Negative prompt", lines=2, max_length=MOST_TEXT, placeholder="What to keep out", elem_id="create-negative"
                )
                with gr.Row():
                    told = None if native is None else "empty: as the base was made for"
                    width = gr.Number(
                        native[0] if native else None, label="Width (pixels)", info=told, elem_id="create-width", min_width=120
                    )
                    height = gr.Number(
                        native[1] if native else None,
                        label="Height (pixels)",
                        info=told,
                        elem_id="create-height",
                        min_width=120,
                    )
        with gr.Column(scale=7, min_width=300):
            stage = gr.HTML(shown.stage_html(None), js_on_load=script("create_stage.js"), elem_id="create-stage")
            with gr.Row(visible=False, elem_classes="tc-buttons") as actions:
                reuse = gr.Button("Reuse settings", size="sm", elem_id="create-reuse", min_width=90)
                download = gr.DownloadButton("Download", size="sm", elem_id="create-download", min_width=90)
                delete = gr.Button("Delete", size="sm", elem_id="create-delete", min_width=90)
            with gr.Row(visible=False, elem_classes="tc-buttons") as asking:
                sure = gr.Button("Delete for good", size="sm", variant="stop", elem_id="create-delete-sure", min_width=110)
                keep = gr.Button("Keep it", size="sm", elem_id="create-delete-keep", min_width=110)
    with gr.Accordion("Why each trigger fires or not", open=False, elem_id="create-explain"):
        explain, explained, [explanation] = build_explain(studio, "create", prompt, negative, follows=False)
    with gr.Row(elem_classes="tc-heading"):
        gr.HTML('<h3 class="tc-label">History</h3>', js_on_load=None)
        upload = gr.UploadButton("Settings from a picture …", size="sm", type="filepath", elem_id="create-upload", scale=0, min_width=210)
    history = gr.HTML(history_value(studio, None, PAGE), js_on_load=PICK, elem_id="create-history")
    chosen, count = gr.State(None), gr.State(PAGE)
    # What was typed outlives a reload, in the browser; it is no secret to it, so the key is none either.
    typed = gr.BrowserState({}, storage_key="tiny-engram-create", secret="tiny-engram-create")

    # -- while typing

    def on_typing(prompt: str, negative: str, shelf: Any) -> tuple[str, str]:
        """Both answers at once: two requests for a letter take twice as long."""
        return highlighted(studio, prompt, shelf), explain(prompt, negative)

    gr.on([prompt.change, shelf.change], handled(on_typing), [prompt, negative, shelf], [highlighting, explanation], **quick)
    negative.change(handled(explain), explained, explanation, **quick)

    # -- the shelf

    def on_shelf(event: gr.EventData) -> dict[str, Any]:
        act, id = picked(event)
        if act == "use":
            tell_turn(studio.engine)
            studio.engine.load(id)
        elif act == "away":
            studio.engine.unload(id)
        return shelf_value(studio)

    shelf.pick(handled(on_shelf), None, shelf, show_progress="hidden", **private)

    # -- drawing

    running = [generate, cancel, progress]
    kept = [stage, actions, asking, download, history, chosen]

    def present(picture: str | None, count: int) -> tuple[Any, ...]:
        """Values for `kept`: one picture of the gallery large, or none."""
        entry = None if picture is None else studio.gallery.get(picture)
        told = shown.stage_html(entry, drawings.shown(entry.id) if entry is not None else None)
        file = None
        if entry is not None:
            file = studio.workspace.temporary() / f"tiny-engram-{entry.settings.get('seed', 'picture')}-{entry.id[8:16]}.png"
            write_bytes(file, entry.file.read_bytes())
        there = gr.Row(visible=entry is not None)
        return told, there, gr.Row(visible=False), gr.DownloadButton(value=file), history_value(studio, picture, count), picture

    def on_generate(
        prompt: str,
        negative: str,
        shelf: Any,
        compare: bool,
        seed: float | None,
        random_seed: bool,
        steps: float,
        guidance: float,
        width: float | None,
        height: float | None,
        count: int,
        request: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:
        if not (prompt or "").strip():
            raise StudioError("the prompt is empty; write what to draw")
        wide, high = size_of(width, height, native)
        if seed is None and not random_seed:
            raise StudioError("the seed is empty; type a whole number, or tick “New seed for each picture”")
        number = secrets.randbelow(SEED[1] + 1) if random_seed else seed
        wanted = GenerateRequest(
            prompt=prompt,
            negative_prompt=negative or "",
            seed=number,  # type: ignore[arg-type]  (checked there)
            steps=steps,  # type: ignore[arg-type]
            guidance=guidance,
            strengths={id: strength for id, strength in strengths_in(shelf).items() if strength != 0},
            compare=compare,
            width=wide,
            height=high,
        )
        drawing = drawings.start(request.session_hash or "", wanted)
        waits = tuple(gr.skip() for _ in kept)
        idle = (gr.Button("Generate", interactive=True), gr.Button("Cancel", interactive=False), gr.HTML("", visible=False))
        buttons = (gr.Button("Drawing …", interactive=False), gr.Button("Cancel", interactive=True))
        yield *buttons, gr.HTML(shown.progress_html(drawing), visible=True), wanted.seed, *waits
        while not drawing.finished.wait(POLL_SECONDS):
            told = shown.progress_html(drawing, studio.engine.waiting - 1)
            yield gr.skip(), gr.skip(), told, gr.skip(), *waits
        if drawing.error is None:
            yield *idle, wanted.seed, *present(drawing.picture, count)
            return
        yield *idle, gr.skip(), *waits
        if not drawing.cancel.is_set():
            raise drawing.error
        notice(f"{drawing.error}; nothing was kept", title="Cancelled")

    asked = [prompt, negative, shelf, compare, seed, random_seed, steps, guidance, width, height, count]
    drawn = gr.on(
        [generate.click, prompt.submit],
        handled(on_generate),
        asked,
        [*running, seed, *kept],
        concurrency_limit=32,
        concurrency_id="create",
        trigger_mode="once",
        show_progress="hidden",
        **private,
    )

    # on a narrow page the picture stands below the form
    drawn.success(
        None, None, None, js="() => { if (window.innerWidth < 760) document.querySelector('#create-stage').scrollIntoView(); }", **private
    )

    def on_cancel(request: gr.Request) -> Any:
        drawings.cancel(request.session_hash or "")
        return gr.Button("Cancelling …", interactive=False)

    cancel.click(handled(on_cancel), None, cancel, queue=False, show_progress="hidden", **private)

    # -- the history

    def on_history(chosen: str | None, count: int, event: gr.EventData) -> tuple[Any, ...]:
        act, id = picked(event)
        if act == "more":
            return *(gr.skip() for _ in range(4)), history_value(studio, chosen, count + PAGE), chosen, count + PAGE
        return *present(id, count), count

    history.pick(handled(on_history), [chosen, count], [*kept, count], **queued)
    plain = {"queue": False, "show_progress": "hidden", **private}
    delete.click(lambda: (gr.Row(visible=False), gr.Row(visible=True)), None, [actions, asking], **plain)
    keep.click(lambda: (gr.Row(visible=True), gr.Row(visible=False)), None, [actions, asking], **plain)

    def on_delete(chosen: str | None, count: int) -> tuple[Any, ...]:
        if chosen is not None:
            studio.gallery.delete(chosen)
        return present(None, count)

    sure.click(handled(on_delete), [chosen, count], kept, **queued)

    # -- settings of a picture

    form = [prompt, negative, shelf, seed, random_seed, steps, guidance, width, height]

    def fill(settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """Values for `form`; the concepts are put on the shelf, and others stay there with strength 0."""
        strengths, missing = reused(studio, settings)
        there = {each.id for each in studio.engine.loaded()}
        for id in strengths.keys() - there:
            tell_turn(studio.engine)
            studio.engine.load(id)
        value = shelf_value(studio, {**dict.fromkeys(there, 0.0), **strengths})
        if missing:
            warn(f"not in the library, so left out: {', '.join(missing)}; import it, then reuse the settings again")
        base = settings.get("base")
        if base and base != studio.engine.base:
            warn(f"drawn with the base {base}, this is {studio.engine.base}; the picture will be another one")

        def told(name: str) -> Any:
            return settings[name] if settings.get(name) is not None else gr.skip()

        sides = [side if isinstance(side := settings.get(name), int) else gr.skip() for name in ("width", "height")]
        negative = settings.get("negative_prompt") or ""
        return told("prompt"), negative, value, told("seed"), False, told("steps"), told("guidance"), *sides

    def on_reuse(chosen: str | None) -> tuple[Any, ...]:
        if chosen is None:
            raise StudioError("no picture is chosen; choose one of the history")
        made = fill(studio.gallery.settings_of(chosen))
        notice("the settings are filled in; Generate draws the same picture again")
        return made

    filled = [reuse.click(handled(on_reuse), chosen, form, show_progress="hidden", **private)]

    def on_upload(path: str | None) -> tuple[Any, ...]:
        if not path:
            return tuple(gr.skip() for _ in form)
        made = fill(studio.gallery.settings_of(Path(path)))
        notice("the picture's settings are filled in")
        return made

    filled.append(upload.upload(handled(on_upload), upload, form, show_progress="hidden", **private))
    for each in filled:
        each.success(handled(explain), explained, explanation, **quick)

    # -- over a reload

    kept_fields = [prompt, negative, compare, seed, random_seed, steps, guidance, width, height]
    save: dict[str, Any] = {"fn": None, "inputs": kept_fields, "outputs": typed, "js": "(...values) => [{values}]", **private}
    for each in kept_fields:
        each.input(**save)
    for done in (drawn, *filled):
        done.success(**save)

    typed.change(None, [typed, *kept_fields], kept_fields, js=RESTORE, **private)

    def refresh(chosen: str | None, count: int) -> tuple[Any, ...]:
        return shelf_value(studio), history_value(studio, chosen, count)

    return CreateTab(prompt, negative, shelf, (refresh, [shelf, history], [chosen, count]))
