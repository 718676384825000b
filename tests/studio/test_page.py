"""The page as it is built: what it has, what is named, and how errors come out of its events."""

import logging

import gradio as gr
import pytest

from tiny_engram.errors import TinyEngramError
from tiny_engram.studio.ui.api import ENDPOINTS
from tiny_engram.studio.ui.handling import aliases_of, handled
from tiny_engram.studio.ui.page import TABS, build_page


def test_it_has_four_tabs(page):
    tabs = [block for block in page.blocks.values() if isinstance(block, gr.Tab)]
    assert [tab.id for tab in tabs][:4] == list(TABS) == ["register", "teach", "create", "library"]


def test_the_api_has_the_named_endpoints_and_no_others(page):
    public = {fn.api_name for fn in page.fns.values() if fn.api_visibility == "public" and fn.api_name}
    assert public == set(ENDPOINTS)
    assert all(fn.api_visibility in ("public", "private") for fn in page.fns.values())


def test_every_control_of_the_page_has_a_label(page):
    kinds = (gr.Textbox, gr.Number, gr.Slider, gr.Checkbox, gr.Radio, gr.Dropdown, gr.File)
    bare = [block for block in page.blocks.values() if isinstance(block, kinds) and not (block.label and block.label.strip())]
    assert not bare
    unnamed = [
        b for b in page.blocks.values() if isinstance(b, gr.Button | gr.DownloadButton | gr.UploadButton) and not b.value and not b.label
    ]
    assert not unnamed


def test_every_event_handles_its_errors(page):
    """An event whose function is not `handled` would show what it raises; one that ticks each second keeps silent by itself."""
    bare = [fn.fn.__qualname__ for fn in page.fns.values() if fn.fn is not None and not hasattr(fn.fn, "__wrapped__")]
    assert not [name for name in bare if not name.endswith((".<lambda>", ".tick"))]


def test_what_can_fail_goes_through_the_queue(page):
    """An error or a notice of an event outside of it would be seen by nobody: these answer in their place, or cannot fail."""
    quick = {"on_class_word", "answer", "on_typing", "on_search", "typed", "filled", "follow", "chosen", "restored", "tick", "on_cancel"}
    quick |= {"opens", "teach_trigger", "teach_draft", "register", "suggest", "concepts", "explain", "train_status", "<lambda>"}
    handlers = [getattr(fn.fn, "__wrapped__", fn.fn) for fn in page.fns.values() if fn.fn is not None and not fn.queue]
    outside = {getattr(each, "func", each).__name__ for each in handlers}
    assert outside <= quick, outside - quick


def test_all_tabs_are_read_when_the_page_is_loaded(page):
    loads = [fn for fn in page.fns.values() if any(event == "load" for _, event in fn.targets)]
    assert len(loads) >= 4


def test_a_page_is_not_read_again_when_its_timer_first_ticks(page, opened_studio):
    """The answers of a second reading would fall into what is typed by then, and take its report away."""
    [version] = [block for block in page.blocks.values() if getattr(block, "elem_id", None) == "library-version"]
    [tick] = [fn for fn in page.fns.values() if [output._id for output in fn.outputs] == [version._id]]
    built = build_page(opened_studio)
    [told] = [getattr(block, "value", None) for block in built.blocks.values() if getattr(block, "elem_id", None) == "library-version"]
    assert told == tick.fn()


def test_errors_of_the_project_are_shown_as_they_are_and_escaped():
    @handled
    def fails(text: str) -> str:
        raise TinyEngramError(f"trigger {text}\nis taken")

    with pytest.raises(gr.Error) as raised:
        fails("<img src=x onerror=alert(1)>")
    assert raised.value.message == "trigger &lt;img src=x onerror=alert(1)&gt; is taken"
    assert not raised.value.print_exception


def test_errors_that_nobody_expected_are_logged_and_say_no_path(caplog):
    @handled
    def fails() -> None:
        raise FileNotFoundError("/srv/secret/place")

    with caplog.at_level(logging.ERROR), pytest.raises(gr.Error) as raised:
        fails()
    assert "secret" not in raised.value.message and "FileNotFoundError" in raised.value.message
    assert "/srv/secret/place" in caplog.text and raised.value.__cause__ is None and raised.value.__suppress_context__


def test_generators_are_handled_too():
    @handled
    def steps(count: int):
        yield from range(count)
        raise TinyEngramError("no more")

    going = steps(2)
    assert [next(going), next(going)] == [0, 1]
    with pytest.raises(gr.Error, match="no more"):
        next(going)


def test_aliases_are_split_at_commas_and_lines():
    assert aliases_of(" zed  quack, zedquack\nzed quack,, ") == ("zed quack", "zedquack")
    assert aliases_of(None) == () == aliases_of("")
