"""Buttons that the server writes into a gr.HTML: the script that listens to them, what it sends, what is said where a turn must come.

Imports gradio and handling.
"""

from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from tiny_engram.studio.engine import Engine
from tiny_engram.studio.ui.handling import notice

__all__ = ["PICK", "picked", "script", "tell_turn"]


def script(name: str) -> str:
    """A script beside this file, for `js_on_load`."""
    return (Path(__file__).resolve().parent / name).read_text(encoding="utf-8")


PICK = script("pick.js")


def picked(event: gr.EventData) -> tuple[str, str]:
    """(act, id) of the button that was chosen; a browser may send anything, so both are text of bounded length and no more."""
    told = event._data if isinstance(event._data, Mapping) else {}
    return str(told.get("act", ""))[:40], str(told.get("id", ""))[:80]


def tell_turn(engine: Engine) -> None:
    """Say that what was asked for comes after the picture that is being drawn, where one is."""
    if engine.waiting:
        notice("this comes after the picture that is being drawn", title="In turn")
