"""Highlighted pieces are the prompt, at the right characters, with reasons; rows of the Explain panel by encoder."""

import time

import pytest

from tiny_engram.studio.engine import GenerateRequest
from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.highlighting import explain_rows, highlight, rows_of
from tiny_engram.studio.trigger_book import DRAFT, IDLE, SWITCHED_OFF


@pytest.fixture
def shelf(studio, concept_of):
    """trigger -> id; "zed-quack" and "zed-quack hat" are loaded, "tako" is not."""
    ids = {trigger: studio.library.add(concept_of(trigger, plain=True)) for trigger in ("zed-quack", "zed-quack hat", "tako")}
    studio.load(ids["zed-quack"])
    studio.load(ids["zed-quack hat"])
    return ids


def marked(pieces):
    return [(text, fired, reason) for text, id, fired, reason in pieces if id is not None]


def test_pieces_are_the_prompt(studio, shelf):
    prompt = '  A ZED-quack, "zed-quack" and\n a zed-quack  hat beside Tako; zed-quacks!  '
    pieces = highlight(prompt, studio)
    assert "".join(text for text, *_ in pieces) == prompt and all(text for text, *_ in pieces)
    fires = "fires, strength 1"
    assert marked(pieces) == [
        ("ZED-quack", True, fires),
        ("zed-quack", True, fires),
        ("zed-quack  hat", True, fires),
        ("Tako", False, IDLE),
        ("zed-quacks", False, "cut by a word boundary"),
    ]
    assert [id for _, id, fired, _ in pieces if fired] == [shelf["zed-quack"], shelf["zed-quack"], shelf["zed-quack hat"]]
    assert all(not fired and not reason for _, id, fired, reason in pieces if id is None)


@pytest.mark.parametrize(
    "prompt", ["", " ", "a duck", "caf\u00e9 \U0001f986\u200d\U0001f469 \u4e2d\u6587", "<b>&amp;\"'", "x" * 2_000, "\n\t"]
)
def test_prompts_without_a_trigger_are_one_piece(studio, shelf, prompt):
    assert highlight(prompt, studio) == ([(prompt, None, False, "")] if prompt else [])


@pytest.mark.parametrize("before", ["caf\u00e9 ", "\U0001f986 ", "\u4e2d\u6587 ", "e\u0301 ", "\u00a0", "\ufb01ne ", "I\u0307 ", "\u1e9e "])
def test_characters_are_counted_right_after_any_script(studio, shelf, before):
    pieces = highlight(f"{before}zed-quack, a duck", studio)
    assert marked(pieces) == [("zed-quack", True, "fires, strength 1")]
    assert "".join(text for text, *_ in pieces) == f"{before}zed-quack, a duck"


def test_strengths_of_the_request_count(studio, shelf):
    prompt = "a zed-quack and a tako"
    pieces = highlight(prompt, studio, {shelf["tako"]: 0.5, shelf["zed-quack"]: 0})
    assert marked(pieces) == [("zed-quack", False, SWITCHED_OFF), ("tako", True, "fires, strength 0.5")]
    assert marked(highlight(prompt, studio, {})) == [("zed-quack", False, SWITCHED_OFF), ("tako", False, IDLE)]


def test_beyond_the_text_window(studio, shelf):
    pieces = highlight("zed-quack " + "duck " * 80 + "zed-quack", studio)
    found = marked(pieces)
    assert found[0] == ("zed-quack", True, "fires, strength 1")
    assert found[-1] == ("zed-quack", False, "truncated: beyond the encoder's 77 tokens")


def test_drafts_and_twins(studio, shelf, concept_of):
    studio.library.save_draft("mivo-tark")
    twin = studio.library.add(concept_of("tako", name="twin", plain=True))
    assert marked(highlight("a mivo-tark with a tako", studio)) == [("mivo-tark", False, DRAFT), ("tako", False, IDLE)]
    assert marked(highlight("a tako", studio, {twin: 1.0})) == [("tako", True, "fires, strength 1")]
    assert [row.id for row in explain_rows("a tako", "", studio, {twin: 1.0})[0].rows if row.tokens] == [twin]


def test_a_long_prompt_is_refused(studio):
    with pytest.raises(StudioError, match="prompt has 2,001 characters"):
        highlight("x" * 2_001, studio)
    with pytest.raises(StudioError, match="negative prompt has 2,001"):
        explain_rows("a duck", "x" * 2_001, studio)


def test_rows_of_the_panel(studio, shelf):
    prompt, negative = explain_rows("zed-quacks on a zed-quack hat", "a zed-quack", studio)
    assert (prompt.role, prompt.negative, negative.negative) == ("clip_l", False, True)
    assert prompt.tokens[0] == "<|startoftext|>" and prompt.tokens[-1] == "<|endoftext|>"
    told = [(row.name, row.text, row.fired, row.reason.partition(";")[0]) for row in prompt.rows]
    assert told == [
        ("zed-quack", "zed-quacks", False, "cut by a word boundary"),
        ("zed-quack", "zed-quack", False, "covered by the longer or earlier trigger of 'zed-quack hat'"),
        ("zed-quack hat", "zed-quack hat", True, "its tokens stand there as a word of their own"),
    ] or told == [told[0], told[2], told[1]]
    fired = next(row for row in prompt.rows if row.fired)
    assert fired.tokens is not None and prompt.fired_tokens == set(range(*fired.tokens)) and fired.strength == 1.0
    assert [row.fired for row in negative.rows] == [True]
    assert len(explain_rows("a duck", "", studio)) == 1
    assert [(row.name, row.tokens, row.reason) for row in explain_rows("a duck", "", studio)[0].rows] == [
        ("zed-quack", None, "not in the prompt"),
        ("zed-quack hat", None, "not in the prompt"),
    ]


def test_many_absent_concepts_are_counted(studio, concept_of):
    ids = [studio.library.add(concept_of(f"mivo{a}{b}-tark", plain=True)) for a in "bdfg" for b in "klmn"]
    (found,) = explain_rows("a duck", "", studio, dict.fromkeys(ids, 1.0))
    assert len(found.rows) == 12 and found.left_out == 4


def test_rows_of_a_picture(studio, concept_of):
    id = studio.library.add(concept_of("zed-quack", name="my duck"))
    result = studio.generate(GenerateRequest(prompt="a zed-quack", strengths={id: 1.0}, steps=1))
    ((row,),) = (each.rows for each in rows_of(result.explanation, studio))
    assert (row.id, row.name, row.fired) == (id, "my duck", True) and "; acts at " in row.reason


def test_fast_with_a_thousand_concepts(thousand):
    """At most 150 ms an answer; asked is the median of seven, with a thousand triggers in the library and a hundred concepts acting."""
    engine, triggers = thousand
    known = engine.book.known()
    assert len(known) == 1_000
    strengths = dict.fromkeys([id for id, each in known.items() if not each.draft][:100], 1.0)
    prompt = ", ".join(f"a {trigger} on a {trigger}s" for trigger in triggers[:12]) + " duck" * 60
    for ask in (lambda text: highlight(text, engine, strengths), lambda text: explain_rows(text, text, engine, strengths)):
        seconds = []
        for k in range(7):
            begin = time.perf_counter()
            ask(f"{prompt} {k}")
            seconds.append(time.perf_counter() - begin)
        assert sorted(seconds)[3] <= 0.15, seconds


def test_rows_name_the_concept_that_has_the_spelling(studio, shelf, concept_of):
    twin = studio.library.add(concept_of("zed-quack", name="twin", plain=True))
    (found,) = explain_rows("a zed-quack", "", studio, {shelf["zed-quack"]: 1.0, twin: 1.0})
    (row,) = [row for row in found.rows if not row.fired and row.tokens]
    assert "its spelling is taken by '" in row.reason and {row.name, row.reason.split("'")[1]} == {"zed-quack", "twin"}
