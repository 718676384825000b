"""The panel Explain: for a prompt, at each encoder, why each trigger fires or not, while it is typed. May import handling."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from tiny_engram.studio import html
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.highlighting import explain_rows, highlight
from tiny_engram.studio.html_parts import notice, wrap
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.trigger_book import Known
from tiny_engram.studio.ui.handling import aliases_of, handled, quick

__all__ = ["build_explain", "explained"]


def explained(studio: Studio, prompt: str | None, negative_prompt: str | None, typed: Known | None = None) -> str:
    """The panel's HTML; concepts that are loaded count at strength 1. What cannot be a prompt is told in its place."""
    try:
        return html.explained(explain_rows(prompt or "", negative_prompt or "", studio.engine, typed=typed))
    except StudioError as error:  # while typing, a message in the corner at each letter would be no help
        return wrap(notice("error", str(error)))


def marks(studio: Studio, prompt: str | None, typed: Known | None = None) -> str:
    """The prompt with its triggers marked; empty for an empty prompt, and for what cannot be one."""
    if not (prompt or "").strip():
        return ""
    names = {id: each.name for id, each in studio.engine.book.known().items()} | ({} if typed is None else {typed.id: typed.name})
    try:
        return html.highlighted(highlight(prompt or "", studio.engine, typed=typed), names)
    except StudioError:
        return ""


def build_explain(
    studio: Studio,
    place: str,
    prompt: gr.Textbox | None = None,
    negative: gr.Textbox | None = None,
    *,
    typed: Sequence[gr.Textbox] = (),
    follows: bool = True,
) -> tuple[Callable[..., Any], list[Any], list[gr.HTML]]:
    """The panel, for the tab called `place`.

    prompt, negative: text boxes of the tab that it follows; without them it has its own. typed: those in which a trigger and its aliases
    are being typed, which count as not taught yet; the tab follows these itself. follows: False where the tab follows all of them, in a
    request that each letter needs anyway. Returns (fn, its inputs, its outputs), to bring it up to date when something else has changed.
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
    inputs = [*([prompt] if negative is None else [prompt, negative]), *typed]

    def answer(text: str, negative_text: str = "", trigger: str = "", aliases: str = "") -> Any:
        mine = studio.engine.book.typed(trigger, aliases_of(aliases)) if (trigger or "").strip() else None
        rows = explained(studio, text, negative_text, mine)
        return (rows, marks(studio, text, mine)) if marked else rows

    outputs = [shown, *marked]

    if follows:
        gr.on([box.change for box in inputs if box not in typed], handled(answer), inputs, outputs, **quick)
    return answer, inputs, outputs
