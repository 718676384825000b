"""The panel Explain: for a prompt, at each encoder, why each trigger fires or not, while it is typed. May import handling."""

from collections.abc import Callable
from typing import Any

import gradio as gr

from tiny_engram.studio import html
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.highlighting import explain_rows, highlight
from tiny_engram.studio.html_parts import notice, wrap
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.handling import handled, quick

__all__ = ["build_explain", "explained"]


def explained(studio: Studio, prompt: str | None, negative_prompt: str | None) -> str:
    """The panel's HTML; concepts that are loaded count at strength 1. What cannot be a prompt is told in its place."""
    try:
        return html.explained(explain_rows(prompt or "", negative_prompt or "", studio.engine))
    except StudioError as error:  # while typing, a message in the corner at each letter would be no help
        return wrap(notice("error", str(error)))


def marks(studio: Studio, prompt: str | None) -> str:
    """The prompt with its triggers marked; empty for an empty prompt, and for what cannot be one."""
    if not (prompt or "").strip():
        return ""
    names = {id: each.name for id, each in studio.engine.book.known().items()}
    try:
        return html.highlighted(highlight(prompt or "", studio.engine), names)
    except StudioError:
        return ""


def build_explain(
    studio: Studio, place: str, prompt: gr.Textbox | None = None, negative: gr.Textbox | None = None, *, follows: bool = True
) -> tuple[Callable[..., Any], list[Any], gr.HTML]:
    """The panel, for the tab called `place`.

    prompt, negative: text boxes of the tab that it follows; without them it has its own. follows: False where the tab does that itself, in
    a request that each letter needs anyway. Returns (fn, its inputs, its output), to bring it up to date when something else has changed.
    """
    marked: list[Any] = []
    if prompt is None:
        prompt = gr.Textbox(
            label="Prompt", placeholder="a photo of zed-quack on a beach", lines=2, max_lines=6, elem_id=f"{place}-explain-prompt"
        )
        if negative is None:
            negative = gr.Textbox(label="Negative prompt (optional)", lines=1, max_lines=4, elem_id=f"{place}-explain-negative")
        marked = [gr.HTML("", elem_id=f"{place}-explain-marked")]
    shown = gr.HTML(explained(studio, "", ""), elem_id=f"{place}-explain-rows")
    inputs = [prompt] if negative is None else [prompt, negative]

    def answer(text: str, negative_text: str = "") -> Any:
        rows = explained(studio, text, negative_text)
        return (rows, marks(studio, text)) if marked else rows

    if follows:
        gr.on([box.change for box in inputs], handled(answer), inputs, [shown, *marked], **quick)
    return answer, inputs, shown
