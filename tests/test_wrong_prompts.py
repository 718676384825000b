"""Prompts that are no text, schedules that say nothing, and calls of an adapter that was detached: one line, never a picture without."""

import pytest

import tiny_engram
from tiny_engram.errors import TinyEngramError


@pytest.mark.parametrize("wrong", [5, ["a cat", 5], None])
def test_prompts_are_text(adapter, wrong):
    for call in (adapter.explain, adapter.embeds):
        with pytest.raises(TinyEngramError, match=r"^prompt is .*, expected text or a list of texts$"):
            call(wrong)
    if wrong is not None:
        with pytest.raises(TinyEngramError, match=r"^negative_prompt is .*, expected text"):
            adapter.embeds("a cat", wrong)


def test_nothing_to_encode_is_told(adapter):
    with pytest.raises(TinyEngramError, match="prompt is an empty list"):
        adapter.embeds([])
    with pytest.raises(TinyEngramError, match="num_images_per_prompt is 0, expected at least 1"):
        adapter.embeds("a cat", "", 0)


def test_a_detached_adapter_encodes_and_explains_nothing(own_pipe):
    adapter = tiny_engram.attach(own_pipe)
    adapter.detach()
    for call in (adapter.embeds, adapter.explain, adapter.scheduled, adapter.step_callback):
        with pytest.raises(TinyEngramError, match="this adapter was detached"):
            call("a cat")


@pytest.mark.parametrize("what", [{}, {"end": 0.5}])
def test_a_slope_needs_points(tiny, adapter, what):
    adapter.load_concept(tiny.concept(adapter, "zqx"))
    adapter.set_schedule("zqx", end=0.4)
    before = adapter.get_schedule("zqx")
    with pytest.raises(TinyEngramError, match="interpolation is 'linear' without points"):
        adapter.set_schedule("zqx", interpolation="linear", **what)
    assert adapter.get_schedule("zqx") == before
