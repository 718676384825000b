"""What every event of the page goes through: errors become one line for the user. Imports gradio and errors."""

import functools
import html
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import gradio as gr

from tiny_engram.errors import TinyEngramError

__all__ = ["aliases_of", "handled", "notice", "private", "queued", "quick", "warn"]

logger = logging.getLogger(__name__)

MOST_SHOWN = 600

# For events that only the page has: no name in the API.
private: dict[str, Any] = {"api_visibility": "private"}
# For what brings the page up to date: of several asked for in a row the last one, without the veil of "loading".
queued: dict[str, Any] = {**private, "show_progress": "hidden", "trigger_mode": "always_last", "concurrency_limit": None}
# For answers within milliseconds, such as those while the user types: past the queue. Notices and errors come to a page through the queue
# alone, so what is quick says what is wrong in its own place.
quick: dict[str, Any] = {"api_visibility": "private", "queue": False, "show_progress": "hidden", "trigger_mode": "always_last"}


def _shown(text: object) -> str:
    """One bounded line, as HTML: toasts render what they get."""
    line = " ".join(str(text).split())[:MOST_SHOWN]
    return html.escape(line.encode(errors="replace").decode(), quote=False)  # halves of characters cannot be sent


def _titled(title: str, text: str) -> str:
    """With its title as the first line: gradio's toasts show their kind in the title's place."""
    return f"<strong>{_shown(title)}</strong><br>{_shown(text)}"


def _told(error: Exception) -> gr.Error:
    if isinstance(error, gr.Error):
        return error
    if isinstance(error, TinyEngramError):
        return gr.Error(_shown(error), title="That did not work", print_exception=False)
    logger.error("an event of the page failed", exc_info=error)
    kind = re.sub(r"\W", "", type(error).__name__)[:60]
    told = f"Something unexpected happened ({kind}); try again, the Studio's log has more"
    return gr.Error(told, title="That did not work", print_exception=False)


def handled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An event handler (a function or a generator) whose errors are gr.Errors of one escaped line.

    Errors of the project are shown as they are; others are logged with their traceback, and the page learns their kind alone.
    """
    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def steps(*args: Any, **kwargs: Any) -> Any:
            try:
                yield from fn(*args, **kwargs)
            except Exception as error:
                raise _told(error) from None

        return steps

    @functools.wraps(fn)
    def once(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise _told(error) from None

    return once


def notice(text: str, title: str = "Done") -> None:
    """A line in the corner of the page, escaped."""
    gr.Info(_titled(title, text), title=title)


def warn(text: str, title: str = "Please note") -> None:
    """The same for what went well in part."""
    gr.Warning(_titled(title, text), title=title)


def aliases_of(text: str | None) -> tuple[str, ...]:
    """The spellings in a text box, with commas or new lines between them."""
    return tuple(dict.fromkeys(filter(None, (" ".join(part.split()) for part in re.split(r"[,\n]", text or "")))))
