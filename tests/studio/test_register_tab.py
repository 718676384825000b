"""Register, by its events: what a trigger is worth, suggestions, drafts and the way back from deleting one; and the Explain panel."""

import gradio as gr
import pytest

from tiny_engram.studio.ui.register_tab import build_register, draft_list


@pytest.fixture
def judge(event_of):
    change = event_of("register-trigger", "change")
    return lambda trigger, aliases: change(trigger, aliases, "", "")[:3]


@pytest.fixture
def drafts(opened_studio):
    yield opened_studio.library
    for draft in opened_studio.library.drafts():
        opened_studio.library.delete(draft.id)


def test_a_good_trigger_can_be_taught_and_saved(judge, event_of):
    word = event_of("register-suggest")()
    report, teach, save = judge(word, "")
    assert "A good trigger" in report and word in report and teach.interactive and save.interactive


def test_an_empty_box_says_what_to_do(judge):
    for typed in ("", "   ", None):
        report, teach, save = judge(typed, None)
        assert "Type a trigger" in report and not teach.interactive and not save.interactive


def test_what_cannot_be_a_trigger_is_told_and_cannot_be_taught(judge):
    report, teach, _ = judge("x" * 5_000, "")
    assert "5000 characters" in report and not teach.interactive


def test_markup_is_text(judge):
    report, *_ = judge('<img src=x onerror="alert(1)">', "<script>alert(2)</script>")
    assert "<img" not in report and "<script" not in report and "&lt;img" in report


def test_a_draft_is_saved_opened_and_does_not_stand_in_its_own_way(judge, event_of, drafts):
    shown = event_of("register-save")("zorp-quib", "zorpquib, zorp quib", "mug")
    assert "zorp-quib" in shown and "mug" in shown
    [draft] = drafts.drafts()
    assert draft.aliases == ("zorpquib", "zorp quib") and draft.class_word == "mug"
    report, teach, save = judge("Zorp-Quib", "")
    assert teach.interactive and save.interactive and "Taken" not in report
    picked = event_of("register-drafts", "pick")(gr.EventData(None, {"action": "open", "id": draft.id}))
    assert picked[:3] == ("zorp-quib", "zorpquib, zorp quib", "mug")


def test_another_draft_with_the_same_tokens_stands_in_the_way(judge, event_of, drafts):
    event_of("register-save")("zorp-quib", "", "")
    report, teach, _ = judge("vand-omix", "zorp-quib")
    assert "Taken" in report and not teach.interactive


def test_deleting_a_draft_has_a_way_back(event_of, drafts):
    event_of("register-save")("zorp-quib", "", "")
    [draft] = drafts.drafts()
    *_, shown, token, undo = event_of("register-drafts", "pick")(gr.EventData(None, {"action": "delete", "id": draft.id}))
    assert not drafts.drafts() and "No drafts" in shown and undo.visible and "zorp-quib" in undo.value
    shown, token, undo = event_of("register-undo")(token)
    assert drafts.drafts() == [draft] and "zorp-quib" in shown and token is None and not undo.visible


def test_picking_a_draft_that_is_gone_is_an_error_of_one_line(event_of):
    with pytest.raises(gr.Error, match="not there any more"):
        event_of("register-drafts", "pick")(gr.EventData(None, {"action": "open", "id": "../../etc/passwd"}))


def test_what_cannot_be_saved_is_told(event_of, drafts):
    with pytest.raises(gr.Error):
        event_of("register-save")("", "", "")
    with pytest.raises(gr.Error, match="characters"):
        event_of("register-save")("x" * 5_000, "", "")
    assert not drafts.drafts()


def test_texts_of_drafts_are_escaped(opened_studio, drafts):
    drafts.save_draft("zorp-<b>quib</b>", ["<i>zorp</i>"], "<u>mug</u>")
    shown = draft_list(opened_studio)
    assert "<b>" not in shown and "<i>" not in shown and "<u>" not in shown and "&lt;b&gt;" in shown


def test_explain_says_why_a_draft_does_not_fire(event_of, drafts):
    drafts.save_draft("zorp-quib")
    rows, marked = event_of("register-explain-prompt", "change")("a photo of zorp-quib", "")
    assert "a draft" in rows and "zorp-quib" in rows and "te-dead" in marked
    rows, marked = event_of("register-explain-prompt", "change")("", "")
    assert "Nothing to explain" in rows and marked == ""
    rows, marked = event_of("register-explain-prompt", "change")("x" * 2_001, "")
    assert "2,001 characters" in rows and marked == ""


def test_a_prompt_tries_the_trigger_that_is_typed(event_of):
    answer = event_of("register-explain-prompt", "change")
    rows, marked = answer("a photo of zorp-quib and zorpquib", "no zorp-quib", "zorp-quib", "zorpquib")
    assert rows.count("not taught yet; once it is, it fires here") == 3 and marked.count("te-dead") == 2
    rows, _ = answer("a duck", "", "zorp-quib", "")
    assert "zorp-quib" in rows and "not in the prompt" in rows


def test_a_class_word_is_judged_and_a_draft_is_saved_once(event_of, drafts, monkeypatch):
    hint = event_of("register-class-word", "change")
    assert hint("mug") == hint("") == "" and "does not know" in hint("zzzzqq")
    told = []
    monkeypatch.setattr(gr, "Info", lambda text, title="": told.append(text))
    save = event_of("register-save")
    assert save("zorp-quib", "zorpquib", "mug") == save("zorp-quib", "zorpquib", " mug ") and len(told) == 1
    save("zorp-quib", "zorpquib", "cup")
    assert len(told) == 2 and drafts.drafts()[0].class_word == "cup"


def test_a_late_look_at_an_empty_box_takes_no_report_away(opened_studio, built):
    tab, _ = built(build_register, opened_studio)
    fn, outputs, inputs = tab.refresh()
    assert len(inputs) == 2 and len(fn("", "")) == len(outputs) and all(each == gr.skip() for each in fn("", "")[1:])
    assert "A good trigger" in fn("zorp-quib", "")[1]
